"""Paged attention in Triton: store new K/V in slots, decode over blocks.

A decode takes the time to read K/V. So the kernels read K/V exactly once, and keep enough reads in flight:

    decode_kernel   a program for each (sequence, KV head, split of the context), with all query heads that
                    share the KV head; it writes a partial softmax and its log-sum-exp (LSE)
    reduce_kernel   combines the splits of a query head, as `reference_backend.py` combines blocks

Arguments such as `q_seq` and `table_row` are strides, in elements; the heads of a token are contiguous.
`do_not_specialize_on_alignment` stops Triton from compiling a kernel for each alignment of a small input.
With TRITON_INTERPRET=1 (set before triton is imported) they run on a CPU, slowly.
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
    v_token,
    cache_block,
    cache_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Write the K/V of one token to its slot. Slot -1 (padding) is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_PAD)[:, None]
        dims = tl.arange(0, DIM_PAD)[None, :]
        mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        # block_size = 4, slot 9: block 2, offset 1
        target = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * HEAD_DIM + heads * cache_head + dims
        k = tl.load(k_ptr + token * k_token + heads * HEAD_DIM + dims, mask=mask)
        v = tl.load(v_ptr + token * v_token + heads * HEAD_DIM + dims, mask=mask)
        tl.store(k_cache_ptr + target, k, mask=mask)
        tl.store(v_cache_ptr + target, v, mask=mask)


@triton.jit
def tiles_per_split(context_len, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Tiles of keys in one split of a context.

    1000 keys, TILE = 64, 4 splits: 16 tiles, 4 in a split, keys 0-255, 256-511, ...
    If the context is too short, the last splits are empty: 3 tiles, 4 splits: 1 in a split.
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
    cache_block,
    cache_head,
    table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Partial attention of the query heads of one KV head over one split of a context.

    With S = scale · log2(e) · q Kᵀ over the split's keys: out = Σ 2^(S - m) V / l and lse = m + log2(l),
    where m = max S and l = Σ 2^(S - m). The loop keeps m, l and Σ in float32.
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
        q = tl.load(q_ptr + seq * q_seq + heads * HEAD_DIM + dims, mask=q_mask, other=0.0).to(DOT)
        m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        l = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(start, end, TILE):
            position = first + tl.arange(0, TILE)
            live = position < end
            # A tile spans several blocks. block_size = 4, positions 6 7 8 9, table [7, 2, 5]:
            # blocks 2 2 5 5, offsets 2 3 0 1. In 64 bits: a cache has more than 2^31 elements.
            block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            row = block * cache_block + (position % BLOCK_SIZE) * HEAD_DIM + kv_head * cache_head
            mask = live[:, None] & (dims < HEAD_DIM)
            # 0 beyond the context: an unwritten slot may hold NaN.
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
        # Rows of out [num_seqs, num_heads, splits, head_dim] and of lse [num_seqs, num_heads, splits]
        rows = ((seq * tl.num_programs(1) + kv_head) * GROUP + group) * NUM_SPLITS + split
        out = out_ptr + rows[:, None] * HEAD_DIM + dims
        tl.store(out, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
        tl.store(lse_ptr + rows, m + tl.log2(l), mask=group < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lens_ptr"])
def reduce_kernel(
    partial_ptr,
    lse_ptr,
    lens_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Combine the splits of one query head: Σ w_s · out_s / Σ w_s with w_s = 2^(lse_s - max).

    Empty splits are skipped: their memory was not written.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context_len = tl.load(lens_ptr + seq).to(tl.int32)
    used = tl.cdiv(tl.cdiv(context_len, TILE), tiles_per_split(context_len, TILE, NUM_SPLITS))
    used = tl.maximum(used, 1)  # the zeros of an empty context
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM_PAD)
    out_row = seq * tl.num_programs(1) + head
    rows = out_row * NUM_SPLITS + splits
    lse = tl.load(lse_ptr + rows, mask=splits < used, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    mask = (splits[:, None] < used) & (dims[None, :] < HEAD_DIM)
    partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + out_row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# ── launching the kernels ──────────────────────────────────────────────────────────────────────────

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)
MIN_SPLIT = 256  # fewest keys in a split
MAX_SPLITS = 64  # partial results that one program of `reduce_kernel` has registers for


def why_no_triton(device: torch.device) -> str | None:
    """Why the kernels cannot run on the device; None if they can."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"its kernels need a CUDA GPU, not {device}, or TRITON_INTERPRET=1 for a slow trial"
    capability, version = torch.cuda.get_device_capability(device), triton.__version__
    # For 7.5 (T4) Triton 3.4 fails on fewer than 16 rows; CUDA 13 has no compiler for older GPUs.
    has_triton = tuple(map(int, version.split(".")[:2])) >= (3, 5)
    if capability < ((7, 5) if has_triton else (8, 0)):
        has = "{}.{} with Triton {}".format(*capability, version)
        return f"its kernels need compute capability 8.0, or 7.5 with Triton 3.5, and {device} has {has}"
    return None


def decode_settings(
    capability: tuple[int, int], group: int, head_dim: int, dtype: torch.dtype
) -> tuple[dict[str, object], dict[str, int]]:
    """The tile, the paddings and the launch options of `decode_kernel`, by one rule for all GPUs.

        capability  dtype    rows                tile        warps                      stages
        from 8.0    16 bits  group, at least 16  16 KB of K  4, 8 if head_dim > 128     3
        from 8.0    float32  group, at least 16  16 KB of K  8                          3, 2 from 12.0
        7.5         all      group               16 keys     4, 8 if rows · dims ≥ 4096

    A tensor core multiplies 16 rows (query heads of a KV head) at once; below 8.0 Triton uses none. 16 KB (64
    keys of 128 in bfloat16, fewer for more than 32 rows) leave an SM room for two programs. 8 warps have the
    registers for a wide head. From 12.0 on, three loads in flight spill float32's registers.

    Args:
        capability: (9, 0) for an H100. The interpreter takes any.
        group: query heads that share a KV head.
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
    # Triton's interpreter computes bfloat16 products wrongly.
    dot = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    dot = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dot]
    constants = {"TILE": tile, "GROUP_PAD": group_pad, "DIM_PAD": dim_pad, "DOT": dot}
    num_stages = 2 if is_float32 and capability >= (12, 0) else 3
    return constants, {"num_warps": 8 if many else 4, "num_stages": num_stages}


def choose_num_splits(num_programs: int, max_context_len: int, num_processors: int) -> int:
    """The number of splits: a power of two, because each number is compiled separately.

    Two programs for each multiprocessor (SM) keep enough bytes in flight. A split has at least MIN_SPLIT
    keys. On an H200 (132 SMs), 8 KV heads, so 8 programs a sequence:

        64 sequences of 4096    512 programs: 1 split        1 of 16384    8 programs: 64 splits of 256
    """
    wanted = triton.cdiv(2 * num_processors, num_programs)
    most = max(1, min(MAX_SPLITS, max_context_len // MIN_SPLIT))
    return min(triton.next_power_of_2(wanted), 1 << (most.bit_length() - 1))


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the new k, v [num_tokens, num_kv_heads, head_dim] of a batch to their slots.

    Args:
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        slot_mapping: int64 [num_tokens], block · block_size + offset; -1 writes nothing.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == k_cache.stride()[2:] == (head_dim, 1)
    assert k_cache.stride() == v_cache.stride()
    strides = k.stride(0), v.stride(0), *k_cache.stride()[:2]
    store_kernel[(num_tokens,)](
        *(k, v, k_cache, v_cache, slot_mapping, *strides),
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
    """Paged decode: one query of each sequence attends to its context.

    Args:
        q: [num_seqs, num_heads, head_dim], as the output.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        block_tables: int32 [num_rows, most blocks].
        rows: int64 [num_seqs], of `block_tables`.
        context_lens: int64 [num_seqs], the new key included. 0 gives zeros.
        num_splits: of each context, see `choose_num_splits`.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert q.stride()[1:] == k_cache.stride()[2:] == (head_dim, 1)
    assert k_cache.stride() == v_cache.stride()
    group = num_heads // num_kv_heads
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)  # (9, 0): interpreted
    constants, options = decode_settings(capability, group, head_dim, k_cache.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    partial = out  # of one split, the partial result is the result
    if num_splits > 1:
        partial = torch.empty((*lse.shape, head_dim), dtype=torch.float32, device=q.device)
    strides = q.stride(0), *k_cache.stride()[:2], block_tables.stride(0)
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "NUM_SPLITS": num_splits}
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        *(q, k_cache, v_cache, block_tables, rows, context_lens, partial, lse),
        *(scale * math.log2(math.e), *strides),  # 2^(x · log2(e)) = e^x
        **(sizes | constants | options),
    )
    if num_splits > 1:
        reduce_kernel[(num_seqs, num_heads)](
            *(partial, lse, context_lens, out),
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            TILE=constants["TILE"],
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            DIM_PAD=constants["DIM_PAD"],
        )
    return out
