"""Solutions of stage 2 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: append_slots compares with the length of free_ids
replace("BlockManager.append_slots", "> self.num_free_blocks", "> len(self.free_ids)")
# wrong: share empties cached
replace("BlockManager.share", "del self.cached[block_id]", "self.cached.clear()")
# wrong: take copies the list
replace(
    "BlockManager.take", "if self.free_ids:", "self.free_ids = self.free_ids[:]\n        if self.free_ids:"
)
# wrong: append_slots pops its argument
replace("BlockManager.append_slots", "return copies", "sequences.pop()\n        return copies")
# wrong: a loop without an end
replace(
    "BlockManager.trim",
    "for block_id in",
    "while seq.block_table:\n            pass\n        for block_id in",
)
