"""Wrong solutions of the exercises of chapter 12."""

OUTPUT, PROMPT = "request.live[0].num_output_tokens", "request.num_prompt_tokens"
TOKENS, ARRIVAL = "request.live[0].num_tokens", "request.arrival_time"

CACHED = "cached = self.blocks[block_id].ref_count == 0\n        "
AGAIN = "again = self.evicted & self.index.keys()"

WRONG_1 = [
    ("shortest output first", f"-{OUTPUT}", OUTPUT),
    ("the shortest prompt is the victim", f", {PROMPT}", f", -{PROMPT}"),
    ("ties by arrival", f", {PROMPT}", f", {ARRIVAL}"),
    ("outputs alone", f", {PROMPT}", ", 0"),
    ("prompt before output", f"-{OUTPUT}, {PROMPT}", f"{PROMPT}, -{OUTPUT}"),
    ("the prompt instead of all tokens", TOKENS, PROMPT),
]
WRONG_2 = [
    ("the most frequently used", "min(self.cached", "max(self.cached"),
    ("LRU", "if not self.free_ids:", "if False:"),
    ("the most recently used of several", "min(self.cached,", "min(reversed(self.cached),"),
    ("moved to the wrong end", "last=False", "last=True"),
    ("hits of the block's former contents", "        self.num_hits[block_id] = 0\n", ""),
    (
        "hits in use",
        "super().share(block_id)\n",
        f"{CACHED}super().share(block_id)\n        if not cached:\n            return\n",
    ),
]
WRONG_3 = [
    ("every block taken while some are cached", "if not self.free_ids:", "if self.cached:"),
    ("the key of the most recently used", "next(iter(", "next(reversed("),
    ("keys are counted each time they are published", "        self.evicted -= again\n", ""),
    ("all published blocks", AGAIN, "again = self.index.keys()"),
    ("all blocks that find no equal one", AGAIN, "again = set(seq.block_keys)"),
    ("several at a time count as one", "+= len(again)", "+= bool(again)"),
]
