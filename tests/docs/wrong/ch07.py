"""Wrong solutions of the exercises of chapter 7."""

MISCOUNT = "block.ref_count != entries[block.block_id]"
BLOCKS = "num_tokens // block_size + n"
FILTER = "manager.blocks if"
ENTRIES = "Counter(block_id for seq in sequences for block_id in seq.block_table)"

WRONG_1 = [
    ("each sample copies", "(n - 1) * has_partial", "n * has_partial"),
    ("full blocks are copied, too", "(n - 1) * has_partial", "n - 1"),
    ("nothing is copied", "(n - 1) * has_partial", "0"),
    ("one copy for all", "(n - 1) * has_partial", "int(has_partial and n > 1)"),
    ("the original stays beside the copies", BLOCKS, "-(-num_tokens // block_size) + n"),
    ("one new block for all samples", BLOCKS, "num_tokens // block_size + 1"),
]
WRONG_2 = [
    ("only counts that are too large", MISCOUNT, "block.ref_count > entries[block.block_id]"),
    ("only counts that are too small", MISCOUNT, "block.ref_count < entries[block.block_id]"),
    ("each block once", ENTRIES, "Counter({block_id for seq in sequences for block_id in seq.block_table})"),
    ("only blocks in a table", FILTER, f"{FILTER} block.block_id in entries and"),
    ("only blocks in no table", "manager.blocks if", "manager.blocks if block.block_id not in entries and"),
    ("blocks that are in use", MISCOUNT, "block.ref_count > 0"),
]
