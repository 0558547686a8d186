"""Solutions of stage 8 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: block ids of 32 bits
replace("decode_kernel", "row = block * cache_block", "row = block.to(tl.int32) * cache_block")
# wrong: the strides are computed
replace("decode_kernel", "kv_head * cache_head", "kv_head * HEAD_DIM * BLOCK_SIZE")
# wrong: at most 64 tiles
replace(
    "decode_kernel",
    "for _ in range(start, end, TILE):",
    "for _ in range(start, min(end, start + 64 * TILE), TILE):",
)
# wrong: a loop without an end
replace("decode_kernel", "for _ in range(start, end, TILE):", "while start < end:")
# right: the table is read where it is used
replace(
    "decode_kernel",
    "live = position < end",
    "live = position < end\n            block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)",
)
