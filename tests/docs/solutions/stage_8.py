"""Solutions of stage 8 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: block ids of 32 bits
replace("decode_kernel", "_block * cache_block", "_block.to(tl.int32) * cache_block")
# wrong: the strides are computed
replace("decode_kernel", "_kv_head * cache_head", "_kv_head * HEAD_DIM * BLOCK_SIZE")
# wrong: at most 64 tiles
replace("decode_kernel", "range(_start, _end, TILE)", "range(_start, min(_end, _start + 64 * TILE), TILE)")
# wrong: a loop without an end
replace("decode_kernel", "range(_start, _end, TILE)", "iter(int, 1)")
# right: scores are masked before they are scaled
replace(
    "decode_kernel",
    "tl.where(_live, _scores * scale_log2, _inf)",
    "tl.where(_live, _scores, _inf) * scale_log2",
)
