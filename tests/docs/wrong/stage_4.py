"""Solutions of stage 4 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: siblings share only with the first
replace("BlockManager.allocate", "if key in taken:", "if taken.get(key) in sequences[0].block_table:")
# wrong: keys are cut after 64 blocks
replace(
    "BlockManager.find_prefix",
    "(seq.num_tokens - 1) // self.block_size",
    "min(64, (seq.num_tokens - 1) // self.block_size)",
)
# wrong: allocate empties its argument
replace("BlockManager.allocate", "return True", "sequences.clear()\n        return True")
# right: take evicts by iteration
replace(
    "BlockManager.take",
    "_, block = self.cached.popitem(last=False)",
    "block = self.cached.pop(next(iter(self.cached)))",
)
