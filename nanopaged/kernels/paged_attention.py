"""Paged attention in Triton: store new keys and values, decode over blocks, copy blocks.

A decode reads all keys and values of its sequence once, and multiplies each with a handful of queries: its
time is the time to read them. So everything here serves to read K/V once and to keep enough reads under way:

    decode_kernel   one program for each (sequence, KV head, split of the context), with all query heads that
                    share the KV head; partial softmaxes with their log-sum-exps come out
    reduce_kernel   combines the splits of a query head, as `reference_attention.py` combines blocks

The kernels see block tables, lengths and strides, so any layout of the cache will do. They know nothing of
sequences or batches; the functions at the end launch them. Triton would compile them again for inputs that
are aligned otherwise; for small ones, which begin wherever there is room, it is told not to.

Under TRITON_INTERPRET=1 (set before the first import of triton) they run on a CPU, slowly, and to the same
result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """One program writes the keys and values of one token, all heads, to its slot; slot -1 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_PAD)[:, None]
        dims = tl.arange(0, DIM_PAD)[None, :]
        mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        # block_size = 4, slot 9: block 2, offset 1 in it
        target = (
            (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_slot + heads * cache_head + dims
        )
        k = tl.load(k_ptr + token * k_token + heads * k_head + dims, mask=mask)
        v = tl.load(v_ptr + token * v_token + heads * v_head + dims, mask=mask)
        tl.store(k_cache_ptr + target, k, mask=mask)
        tl.store(v_cache_ptr + target, v, mask=mask)


@triton.jit
def tiles_per_split(context_len, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """How a context is cut: 1000 keys, TILE = 64, 4 splits: 16 tiles, 4 a split, keys 0-255, 256-511, ...

    A context too short for all splits leaves the last ones empty: 3 tiles, 4 splits: 1 a split, 3 used.
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

    With S = scale · log2(e) · q Kᵀ over the split's keys, out = Σ 2^(S - m) V / l and lse = m + log2(l),
    where m = max S and l = Σ 2^(S - m), kept in float32 while tiles of keys pass by.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(lens_ptr + seq).to(tl.int32)
    table = tables_ptr + tl.load(rows_ptr + seq) * table_row
    length = tiles_per_split(context_len, TILE, NUM_SPLITS) * TILE
    start = split * length
    end = tl.minimum(start + length, context_len)
    if (start < end) | (split == 0):  # split 0 also answers for an empty context, with zeros
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
            # blocks 2 2 5 5, offsets 2 3 0 1. 64 bits, for a cache has more than 2^31 elements.
            block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            row = block * cache_block + (position % BLOCK_SIZE) * cache_slot + kv_head * cache_head
            mask = live[:, None] & (dims < HEAD_DIM)
            # Masked to 0 beyond the context: an unwritten slot may hold NaN, and 0 · NaN is NaN.
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

    Which splits are empty follows from the context's length; their memory was not written.
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


@triton.jit
def copy_kernel(data_ptr, pairs_ptr, block_stride, part_stride, part_len, CHUNK: tl.constexpr):
    """One program copies a chunk of one part (K or V of one layer) of one block to another block."""
    pair = tl.program_id(0)
    src = tl.load(pairs_ptr + 2 * pair)
    dst = tl.load(pairs_ptr + 2 * pair + 1)
    offsets = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    part = data_ptr + tl.program_id(1).to(tl.int64) * part_stride + offsets
    mask = offsets < part_len
    tl.store(part + dst * block_stride, tl.load(part + src * block_stride, mask=mask), mask=mask)


# ── launching them ────────────────────────────────────────────────────────────────────────────────

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)
COPY_CHUNK = 4096  # elements that one program copies
MIN_SPLIT = 256  # keys in a split, at least
MAX_SPLITS = 64  # partial results that one program of `reduce_kernel` has registers for


@dataclass(frozen=True)
class DecodeShape:
    """What a compiled `decode_kernel` is made for: the sizes that are constants in it."""

    constants: dict[str, object]
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls, group: int, head_dim: int, block_size: int, num_splits: int, dtype: torch.dtype
    ) -> DecodeShape:
        """Paddings to powers of two, and how many keys to take at once.

        A tensor core works on 16 rows, so a smaller group of query heads is padded; that costs arithmetic,
        of which there is plenty, and no reading. A tile is 16 KB of K and as much of V (64 keys of 128 in
        bfloat16): that leaves room for four or five programs on a processor, and spills no register.
        """
        dim_pad = max(16, triton.next_power_of_2(head_dim))
        group_pad = max(16, triton.next_power_of_2(group))
        tile = min(128, max(16, 16384 // (dim_pad * dtype.itemsize) // triton.cdiv(group_pad, 32)))
        # The interpreter computes wrongly in bfloat16, and without a word.
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
        # Without tensor cores (none multiply float32 exactly) the sums need the registers of more threads.
        return cls(constants, num_warps=8 if dtype == torch.float32 else 4, num_stages=3)


def choose_num_splits(num_seqs: int, num_kv_heads: int, max_context_len: int, num_processors: int) -> int:
    """Into how many splits to cut the contexts of a batch.

    A program reads at the speed of the processor it is on, so there should be two programs for each: that
    keeps enough bytes under way (Little's law; an H200 wants some 27 KB from each of its 132 processors). A
    split is also written and read again as a partial result, 2 · group rows for every
    MIN_SPLIT keys, so it does not get shorter than that. Powers of two, for each number is a kernel of its
    own. By arithmetic, on an H200 with 8 KV heads:

        64 sequences of 4096    512 programs: 1 split        1 of 16384    8 programs: 64 splits of 256
    """
    wanted = triton.cdiv(2 * num_processors, num_seqs * num_kv_heads)
    most = max(1, min(MAX_SPLITS, max_context_len // MIN_SPLIT))
    return min(triton.next_power_of_2(wanted), 1 << (most.bit_length() - 1))


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the new keys and values of a batch to their slots.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], any strides but the last.
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
    """One query of each sequence attends to its context, which lies in blocks.

    Args:
        q: [num_seqs, num_heads, head_dim], any strides but the last.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        block_tables: int32 [num_rows, most blocks]; what lies beyond a context is not looked at.
        rows: int64 [num_seqs], where in `block_tables` each sequence's table is.
        context_lens: int64 [num_seqs], keys of each, the new one included. 0 gives zeros.
        num_splits: programs that share a context, see `choose_num_splits`; fixed in a CUDA graph.

    Returns:
        [num_seqs, num_heads, head_dim], in the type of q.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert q.stride(2) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    shape = DecodeShape.of(num_heads // num_kv_heads, head_dim, block_size, num_splits, k_cache.dtype)
    constants = shape.constants
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    if num_splits == 1:  # the only partial result is the result
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
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
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


def copy_blocks(data: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within the cache, all layers, in one launch.

    Args:
        data: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in either layout: K or V of one
            layer of a block is one run of memory, and the runs of a block are evenly spaced.
        pairs: int64 [num_pairs, 2] of (src, dst). No block may be both a source and a destination.
    """
    num_layers, part_len = data.shape[1], data[0, 0, 0].numel()
    assert data.stride(1) == 2 * data.stride(2)
    assert data[0, 0, 0].is_contiguous()
    grid = (len(pairs), 2 * num_layers, triton.cdiv(part_len, COPY_CHUNK))
    copy_kernel[grid](data, pairs, data.stride(0), data.stride(2), part_len, CHUNK=COPY_CHUNK)
