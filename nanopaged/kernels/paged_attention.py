"""Paged attention in Triton: store new K/V in slots, decode over blocks.

A decode reads every key and value of its context, and multiplies it with a few queries. It is memory-bound:
its time is the time to read K/V. So the kernels read K/V exactly once, and keep enough reads in flight:

    decode_kernel   one program for each (sequence, KV head, split of the context), with all query heads that
                    share the KV head; it writes a partial softmax and its log-sum-exp (LSE)
    reduce_kernel   combines the splits of a query head, as `reference_backend.py` combines blocks

The kernels know block tables, lengths and strides, but no sequences or batches; the functions at the end
launch them. Arguments such as `q_head` and `table_row` are strides, in elements: the distance from one head
of q, or one row of the block tables, to the next. Arguments that end in `_ptr` are tensors.
`do_not_specialize_on_alignment` stops Triton from compiling a kernel again when the alignment of a small
input changes.

With TRITON_INTERPRET=1 (set before triton is first imported) they run on a CPU, slowly, with the same
results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_block,
    cache_head,
    cache_slot,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """One program writes the K/V of one token, all heads, to its slot. Slot -1 (padding) is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_PAD)[:, None]
        dims = tl.arange(0, DIM_PAD)[None, :]
        mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        # block_size = 4, slot 9: block 2, offset 1
        target = (
            (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_slot + heads * cache_head + dims
        )
        k = tl.load(k_ptr + token * k_token + heads * k_head + dims, mask=mask)
        v = tl.load(v_ptr + token * v_token + heads * v_head + dims, mask=mask)
        tl.store(k_cache_ptr + target, k, mask=mask)
        tl.store(v_cache_ptr + target, v, mask=mask)


@triton.jit
def tiles_per_split(context_len, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Tiles of keys in one split of a context.

    1000 keys, TILE = 64, 4 splits: 16 tiles, 4 in a split, keys 0-255, 256-511, ...
    If the context is too short for all splits, the last ones are empty: 3 tiles, 4 splits: 1 in a split.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(context_len, TILE), NUM_SPLITS), 1)


@triton.jit(do_not_specialize_on_alignment=["tables_ptr", "rows_ptr", "lens_ptr", "table_row"])
def decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    rows_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    q_seq,
    q_head,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    out_seq,
    out_head,
    out_split,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Partial attention of the query heads of one KV head over one split of one sequence's context.

    With S = scale · log2(e) · q Kᵀ over the split's keys: out = Σ 2^(S - m) V / l and lse = m + log2(l),
    where m = max S and l = Σ 2^(S - m). The loop over tiles of keys keeps m, l and Σ in float32.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(lens_ptr + seq).to(tl.int32)
    table = tables_ptr + tl.load(rows_ptr + seq) * table_row
    length = tiles_per_split(context_len, TILE, NUM_SPLITS) * TILE
    start = split * length
    end = tl.minimum(start + length, context_len)
    if (start < end) | (split == 0):  # split 0 of an empty context writes zeros
        group = tl.arange(0, GROUP_PAD)
        dims = tl.arange(0, DIM_PAD)[None, :]
        heads = (kv_head * GROUP + group)[:, None]
        q_mask = (group[:, None] < GROUP) & (dims < HEAD_DIM)
        q = tl.load(q_ptr + seq * q_seq + heads * q_head + dims, mask=q_mask, other=0.0).to(DOT)
        m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        l = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(start, end, TILE):
            position = first + tl.arange(0, TILE)
            live = position < end
            # A tile spans several blocks. block_size = 4, positions 6 7 8 9, table [7, 2, 5]:
            # blocks 2 2 5 5, offsets 2 3 0 1. In 64 bits: a cache has more than 2^31 elements.
            block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            row = block * cache_block + (position % BLOCK_SIZE) * cache_slot + kv_head * cache_head
            mask = live[:, None] & (dims < HEAD_DIM)
            # 0 beyond the context: an unwritten slot may hold NaN, and 0 · NaN is NaN.
            k = tl.load(k_cache_ptr + row[:, None] + dims, mask=mask, other=0.0).to(DOT)
            v = tl.load(v_cache_ptr + row[:, None] + dims, mask=mask, other=0.0).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [GROUP_PAD, TILE]
            scores = tl.where(live[None, :], scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            p = tl.exp2(scores - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            l = l * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None] + tl.dot(p.to(DOT), v, input_precision="ieee")
            m = m_new
        l = tl.where(context_len == 0, 1.0, l)
        m = tl.where(context_len == 0, 0.0, m)
        out = out_ptr + seq * out_seq + heads * out_head + split * out_split + dims
        tl.store(out, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
        lse_row = (seq * tl.num_programs(1) + kv_head) * GROUP + group  # of lse [num_seqs, num_heads, splits]
        tl.store(lse_ptr + lse_row * NUM_SPLITS + split, m + tl.log2(l), mask=group < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lens_ptr"])
def reduce_kernel(
    partial_ptr,
    lse_ptr,
    lens_ptr,
    out_ptr,
    partial_seq,
    partial_head,
    partial_split,
    out_seq,
    out_head,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """One program combines the splits of one query head: Σ w_s · out_s / Σ w_s with w_s = 2^(lse_s - max).

    Empty splits are skipped, because their memory was not written. context_len tells which ones are empty.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context_len = tl.load(lens_ptr + seq).to(tl.int32)
    used = tl.cdiv(tl.cdiv(context_len, TILE), tiles_per_split(context_len, TILE, NUM_SPLITS))
    used = tl.maximum(used, 1)  # the zeros of an empty context
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM_PAD)
    lse_row = lse_ptr + (seq * tl.num_programs(1) + head) * NUM_SPLITS
    lse = tl.load(lse_row + splits, mask=splits < used, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    rows = partial_ptr + seq * partial_seq + head * partial_head + splits[:, None] * partial_split
    mask = (splits[:, None] < used) & (dims[None, :] < HEAD_DIM)
    partial = tl.load(rows + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    out_row = out_ptr + seq * out_seq + head * out_head
    tl.store(out_row + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# ── launching the kernels ──────────────────────────────────────────────────────────────────────────

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)
MIN_SPLIT = 256  # fewest keys in a split
MAX_SPLITS = 64  # partial results that fit in the registers of one program of `reduce_kernel`


def decode_settings(
    capability: tuple[int, int],
    group: int,
    head_dim: int,
    block_size: int,
    num_splits: int,
    dtype: torch.dtype,
) -> tuple[dict[str, object], dict[str, int]]:
    """The constants of a compiled `decode_kernel`, and its launch options: one rule for all GPUs.

        capability  dtype    rows                tile        warps                      stages
        from 8.0    16 bits  group, at least 16  16 KB of K  4, 8 if head_dim > 128     3
        from 8.0    float32  group, at least 16  16 KB of K  8                          3, 2 from 12.0
        7.5         all      group               16 keys     4, 8 if rows · dims ≥ 4096

    - Rows are the query heads of a KV head, as a power of two. A tensor core multiplies 16 rows at once, so
      a smaller group is padded. That costs registers, and arithmetic, which is not the bottleneck. Below 8.0
      Triton does not use tensor cores, so padding would be in vain.
    - A tile is 16 KB of K and 16 KB of V: 64 keys of 128 in bfloat16, at most 128 keys, and fewer for more
      than 32 rows. Then most streaming multiprocessors have room for two to five programs. Below 8.0, where
      products need more registers, it is the fewest keys that `tl.dot` takes.
    - 8 warps have the registers for the sums of a wide head, and for products in float32, which do not use
      tensor cores.
    - Stages are the loads in flight. From 12.0 on, float32 with three of them spills registers to memory.
      (Below 8.0 there are no asynchronous loads.)

    `tests/compile_kernels.py` compiles them for seven architectures, and nothing spills.

    Args:
        capability: of the GPU: (9, 0) for an H100. The interpreter takes any, with the same results.
        group: query heads that share a KV head.
        dtype: of the KV cache.
    """
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    group_pad = triton.next_power_of_2(group)
    is_float32 = dtype == torch.float32
    if capability >= (8, 0):
        group_pad = max(16, group_pad)
        tile = min(128, max(16, 16384 // (dim_pad * dtype.itemsize) // triton.cdiv(group_pad, 32)))
        many = is_float32 or dim_pad >= 256
    else:
        tile = 16
        many = group_pad * dim_pad >= 4096
    # Triton's interpreter computes bfloat16 products wrongly, without an error.
    dot = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "NUM_SPLITS": num_splits,
        "TILE": tile,
        "GROUP_PAD": group_pad,
        "DIM_PAD": dim_pad,
        "DOT": {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dot],
    }
    num_stages = 2 if is_float32 and capability >= (12, 0) else 3
    return constants, {"num_warps": 8 if many else 4, "num_stages": num_stages}


def choose_num_splits(num_seqs: int, num_kv_heads: int, max_context_len: int, num_processors: int) -> int:
    """The number of splits of each context. It is a power of two, because each number is compiled separately.

    Two programs for each streaming multiprocessor (SM) keep enough bytes in flight (Little's law: an H200
    needs some 27 KB for each of its 132 SMs). A split also costs time, because its partial result is written
    and read again, so it has at least MIN_SPLIT keys. By arithmetic, not measured, on an H200, 8 KV heads:

        64 sequences of 4096    512 programs: 1 split        1 of 16384    8 programs: 64 splits of 256

    Args:
        num_processors: SMs of the GPU.
    """
    wanted = triton.cdiv(2 * num_processors, num_seqs * num_kv_heads)
    most = max(1, min(MAX_SPLITS, max_context_len // MIN_SPLIT))
    return min(triton.next_power_of_2(wanted), 1 << (most.bit_length() - 1))


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the new keys and values of a batch to their slots.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim]; any strides, but the last is 1.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        slot_mapping: int64 [num_tokens], block · block_size + offset; -1 writes nothing.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    store_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        HEADS_PAD=triton.next_power_of_2(num_heads),
        DIM_PAD=triton.next_power_of_2(head_dim),
    )


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    scale: float,
    num_splits: int,
) -> Tensor:
    """Paged decode: one query of each sequence attends to its context, which is stored in blocks.

    Args:
        q: [num_seqs, num_heads, head_dim]; any strides, but the last is 1.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        block_tables: int32 [num_rows, most blocks]; entries beyond a context are not read.
        rows: int64 [num_seqs], the row of `block_tables` of each sequence.
        context_lens: int64 [num_seqs], keys of each sequence, the new one included. 0 gives zeros.
        num_splits: splits of each context, see `choose_num_splits`.

    Returns:
        [num_seqs, num_heads, head_dim], in the dtype of q.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert q.stride(2) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    group = num_heads // num_kv_heads
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)  # (9, 0): interpreted
    constants, options = decode_settings(capability, group, head_dim, block_size, num_splits, k_cache.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    if num_splits == 1:  # the partial result is the result
        partial = out[:, :, None]
    else:
        partial = torch.empty((*lse.shape, head_dim), dtype=torch.float32, device=q.device)
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        rows,
        context_lens,
        partial,
        lse,
        scale * math.log2(math.e),  # 2^(x · log2(e)) = e^x
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_tables.stride(0),
        *partial.stride()[:3],
        **constants,
        **options,
    )
    if num_splits > 1:
        reduce_kernel[(num_seqs, num_heads)](
            partial,
            lse,
            context_lens,
            out,
            *partial.stride()[:3],
            *out.stride()[:2],
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            TILE=constants["TILE"],
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            DIM_PAD=constants["DIM_PAD"],
        )
    return out
