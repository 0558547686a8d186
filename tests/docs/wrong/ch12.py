"""Wrong solutions of the exercises of chapter 12."""

OUTPUT, PROMPT = "request.live[0].num_output_tokens", "request.num_prompt_tokens"
TOKENS, ARRIVAL = "request.live[0].num_tokens", "request.arrival_time"

CACHED = "cached = self.blocks[block_id].ref_count == 0\n        "
AGAIN = "again = self.evicted & self.index.keys()"

WRONG_1 = [
    ("ties by arrival", f", {PROMPT}", f", {ARRIVAL}"),
    ("outputs alone", f", {PROMPT}", ", 0"),
    ("the prompt instead of all tokens", TOKENS, PROMPT),
]
WRONG_2 = [
    ("the most recently used of several", "min(self.cached,", "min(reversed(self.cached),"),
    ("hits of the block's former contents", "        self.num_hits[block_id] = 0\n", ""),
    (
        "hits in use",
        "super().share(block_id)\n",
        f"{CACHED}super().share(block_id)\n        if not cached:\n            return\n",
    ),
]
WRONG_3 = [
    ("keys are counted each time they are published", "        self.evicted -= again\n", ""),
    ("all published blocks", AGAIN, "again = self.index.keys()"),
    ("several at a time count as one", "+= len(again)", "+= bool(again)"),
]
