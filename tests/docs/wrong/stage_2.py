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
replace(
    "BlockManager.append_slots",
    "size, seq = self.block_size, sequences[0]",
    "size, seq = self.block_size, sequences.pop()",
)
replace("BlockManager.append_slots", "len(sequences) == 1 and", "")
replace(
    "BlockManager.append_slots",
    "blocks_to_grow(sequences, [seq.block_table for seq in sequences], size)",
    "1",
)
replace("BlockManager.append_slots", "for seq in sequences:", "for seq in [seq]:")
# wrong: a loop without an end
replace(
    "BlockManager.trim",
    "for block_id in",
    "while seq.block_table:\n            pass\n        for block_id in",
)
