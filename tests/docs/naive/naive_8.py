"""Stage 8, written naively: one key after another, one split after another; arguments as in the source."""
# ruff: noqa: ANN001, ANN002, ANN201, F821


def decode_kernel(*arguments):
    split = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    seq = tl.load(splits_ptr + 3 * split)
    first = tl.load(splits_ptr + 3 * split + 1)
    end = tl.load(splits_ptr + 3 * split + 2)
    group = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + group
    dims = tl.arange(0, DIM_PAD)
    real = (group[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    q_rows = q_ptr + seq * q_seq + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_rows, mask=real, other=0.0).to(tl.float32)
    top = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    weighted = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    table = tables_ptr + tl.load(rows_ptr + seq) * table_row
    real_dims = dims < HEAD_DIM
    for position in range(first, end):
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        slot = block * cache_block + kv_head * cache_head + position % BLOCK_SIZE * HEAD_DIM + dims
        k = tl.load(k_cache_ptr + slot, mask=real_dims, other=0.0).to(tl.float32)
        v = tl.load(v_cache_ptr + slot, mask=real_dims, other=0.0).to(tl.float32)
        score = tl.sum(q * k[None, :], 1) * scale_log2
        now = tl.maximum(top, score)
        old = tl.exp2(top - now)
        new = tl.exp2(score - now)
        total = total * old + new
        weighted = weighted * old[:, None] + new[:, None] * v[None, :]
        top = now
    total = tl.where(first < end, total, 1.0)
    row = split * tl.num_programs(1) * GROUP + heads
    partial = partial_ptr + row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(partial, weighted / total[:, None], mask=real)
    tl.store(lse_ptr + row, top + tl.log2(total), mask=group < GROUP)


def reduce_kernel(*arguments):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(firsts_ptr + seq)
    end = tl.load(firsts_ptr + seq + 1)
    dims = tl.arange(0, DIM_PAD)
    top = -1e30
    for split in range(first, end):
        top = tl.maximum(top, tl.load(lse_ptr + split * heads + head))
    total = 0.0
    weighted = tl.zeros([DIM_PAD], tl.float32)
    for split in range(first, end):
        row = split * heads + head
        weight = tl.exp2(tl.load(lse_ptr + row) - top)
        total += weight
        weighted += weight * tl.load(partial_ptr + row * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    total = tl.where(first < end, total, 1.0)
    out = out_ptr + (seq * heads + head) * HEAD_DIM + dims
    tl.store(out, (weighted / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
