"""Wrong solutions of the exercise of chapter 12."""

CACHED = "cached = self.blocks[block_id].ref_count == 0\n        "

WRONG_1 = [
    ("the most recently used of several", "min(self.cached,", "min(reversed(self.cached),"),
    ("hits of the block's former contents", "        self.num_hits[block_id] = 0\n", ""),
    (
        "hits in use",
        "super().share(block_id)\n",
        f"{CACHED}super().share(block_id)\n        if not cached:\n            return\n",
    ),
]
