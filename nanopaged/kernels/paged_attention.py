"""Paged attention in Triton: store new K/V in slots, decode over blocks.

A decode takes as long as reading K/V takes, so the kernels read K/V exactly once:

    decode_kernel   a program for each split and KV head, with all query heads that share the KV
                    head. A split is a range of a context's keys. The program writes a partial
                    softmax and its log-sum-exp (LSE).
    reduce_kernel   combines the splits of a query head

Arguments such as `q_seq` and `table_row` are strides, in elements; the heads of a token are
contiguous. With TRITON_INTERPRET=1 (set before triton is imported) the kernels run on a CPU,
slowly.
"""

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.torch_version import TorchVersion


@triton.jit
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
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    """Write the K/V of one token to its slot. Slot -1 (padding) is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        i = tl.arange(0, SIZE_PAD)  # the numbers of all heads, end to end
        mask = i < SIZE
        # block_size = 4, slot 9: block 2, offset 1
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head = i // HEAD_DIM
        target = block * cache_block + head * cache_head + offset * HEAD_DIM + i % HEAD_DIM
        k = tl.load(k_ptr + token * k_token + i, mask=mask)
        v = tl.load(v_ptr + token * v_token + i, mask=mask)
        tl.store(k_cache_ptr + target, k, mask=mask)
        tl.store(v_cache_ptr + target, v, mask=mask)


# Triton would compile the kernel again for every combination of aligned and unaligned arguments.
# These three vary: in a CUDA graph, the rows and splits are parts of one buffer.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "splits_ptr", "table_row"])
def decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    rows_ptr,
    splits_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    q_seq,
    cache_block,
    cache_head,
    table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Partial attention of the query heads of one KV head over one split.

    With S = scale · log2(e) · q Kᵀ over the split's keys, m = max S and l = Σ 2^(S - m):

        partial = Σ 2^(S - m) V / l
        lse = m + log2(l)

    The loop keeps m, l and Σ in float32.
    """
    split = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    this_split = splits_ptr + split * 3
    seq = tl.load(this_split)
    start = tl.load(this_split + 1).to(tl.int32)
    end = tl.load(this_split + 2).to(tl.int32)
    if start < end:  # a split of padding is empty
        table = tables_ptr + tl.load(rows_ptr + seq) * table_row
        group = tl.arange(0, GROUP_PAD)
        dims = tl.arange(0, DIM_PAD)[None, :]
        heads = (kv_head * GROUP + group)[:, None]
        q_mask = (group[:, None] < GROUP) & (dims < HEAD_DIM)
        q = tl.load(q_ptr + seq * q_seq + heads * HEAD_DIM + dims, mask=q_mask, other=0.0).to(DOT)
        m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        l = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        # A tile spans several blocks. block_size = 4, positions 6 7 8 9, table [7, 2, 5]:
        # blocks 2 2 5 5, offsets 2 3 0 1. In 64 bits: a cache has more than 2^31 elements.
        position = start + tl.arange(0, TILE)
        block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
        block = block.to(tl.int64)
        for _ in range(start, end, TILE):
            live = position < end
            address = block * cache_block + position % BLOCK_SIZE * HEAD_DIM + kv_head * cache_head
            mask = live[:, None] & (dims < HEAD_DIM)
            # Beyond the context 0 is loaded, because an unwritten slot may hold NaN.
            k = tl.load(k_cache_ptr + address[:, None] + dims, mask=mask, other=0.0).to(DOT)
            v = tl.load(v_cache_ptr + address[:, None] + dims, mask=mask, other=0.0).to(DOT)
            # The next tile's blocks, so that its K and V are loaded while this tile is computed.
            position += TILE
            block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
            block = block.to(tl.int64)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [GROUP_PAD, TILE]
            scores = tl.where(live[None, :], scores * scale_log2, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            p = tl.exp2(scores - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            l = l * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None] + tl.dot(p.to(DOT), v, input_precision="ieee")
            m = m_new
        # Rows of partial [num_splits, num_heads, head_dim] and of lse [num_splits, num_heads]
        rows = (split * tl.num_programs(1) + kv_head) * GROUP + group
        tl.store(partial_ptr + rows[:, None] * HEAD_DIM + dims, acc / l[:, None], mask=q_mask)
        tl.store(lse_ptr + rows, m + tl.log2(l), mask=group < GROUP)


@triton.jit
def reduce_kernel(
    partial_ptr,
    lse_ptr,
    firsts_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Combine the splits of one query head: Σ w_s · partial_s / Σ w_s with w_s = 2^(lse_s - max).

    Sequence i has the splits firsts[i] to firsts[i + 1] - 1; without any, the output is 0.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    first = tl.load(firsts_ptr + seq).to(tl.int32)
    end = tl.load(firsts_ptr + seq + 1).to(tl.int32)
    dims = tl.arange(0, DIM_PAD)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    for start in range(first, end, CHUNK):
        split = start + tl.arange(0, CHUNK)
        partial_rows = split.to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + partial_rows, mask=split < end, other=float("-inf"))
        mask = (split[:, None] < end) & (dims[None, :] < HEAD_DIM)
        source = partial_rows[:, None] * HEAD_DIM + dims[None, :]
        partial = tl.load(partial_ptr + source, mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(partial * weight[:, None], 0)
        m = m_new
    out = (acc / tl.where(first < end, l, 1.0)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (seq * num_heads + head) * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


# ── launching the kernels ─────────────────────────────────────────────────────────────────────────

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)
MIN_SPLIT = 128  # keys: a longer context is not cut into shorter splits


def why_no_triton(device: torch.device) -> str | None:
    """Why the kernels cannot run on the device; None if they can."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"its kernels need a CUDA GPU, not {device}, or TRITON_INTERPRET=1 for a slow trial"
    # On 7.5 (T4), Triton 3.4 fails on fewer than 16 rows. CUDA 13 has no compiler for older GPUs.
    needed = (7, 5) if TorchVersion(triton.__version__) >= "3.5" else (8, 0)
    capability = torch.cuda.get_device_capability(device)
    if capability < needed:
        return (
            "its kernels need compute capability 8.0, or 7.5 with Triton 3.5, and "
            f"{device} has {capability[0]}.{capability[1]} with Triton {triton.__version__}"
        )
    return None


def decode_settings(
    capability: tuple[int, int], group: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The tile, the paddings and the launch options of `decode_kernel`.

        capability  rows                tile       warps                      stages
        from 8.0    group, at least 16  8 KB of K  4, 8 for 32 float32 rows   3
        7.5         group               16 keys    4, 8 if rows · dims ≥ 4096  3

    A tensor core multiplies 16 rows (query heads of a KV head) together; below 8.0 Triton uses
    none. With three stages the next tile is loaded while one is computed. Two tiles of K and V are
    32 KB (less for more than 32 rows), so an H100's SM has room for six programs.

    Args:
        capability: (9, 0) for an H100. The interpreter takes any.
        group: query heads that share a KV head.
    """
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    group_pad = triton.next_power_of_2(group)
    if capability >= (8, 0):
        group_pad = max(16, group_pad)
        num_keys = 8192 // (dim_pad * dtype.itemsize) // triton.cdiv(group_pad, 32)
        tile = min(MIN_SPLIT, max(16, num_keys))
        num_warps = 8 if group_pad >= 32 and dtype == torch.float32 else 4
    else:
        tile = 16
        num_warps = 8 if group_pad * dim_pad >= 4096 else 4
    dot = getattr(tl, str(dtype).removeprefix("torch."))
    if INTERPRETED and dtype == torch.bfloat16:
        dot = tl.float32  # Triton's interpreter computes bfloat16 products wrongly
    return {
        "TILE": tile,
        "GROUP_PAD": group_pad,
        "DIM_PAD": dim_pad,
        "DOT": dot,
        "num_warps": num_warps,
        "num_stages": 3,
    }


def split_contexts(context_lens: np.ndarray, max_splits: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut contexts into splits of equal length, so that a long one does not keep the GPU waiting.

    The length is all keys / `max_splits`, rounded up to a multiple of MIN_SPLIT. So one context has
    at most `max_splits` splits, and all contexts together have at most len(context_lens) +
    max_splits, which is the number that a CUDA graph has.

        contexts 300 40 0 500, max_splits 4: 840 / 4 = 210 keys, so 256
        splits of them  0: 0-256, 256-300    1: 0-40    3: 0-256, 256-500      firsts 0 2 3 3 5

    Returns:
        splits int64 [num_splits, 3] (sequence, first key, end)
        firsts int64 [num_seqs + 1], see `reduce_kernel`
    """
    length = max(1, math.ceil(context_lens.sum() / max_splits / MIN_SPLIT)) * MIN_SPLIT
    counts = -(-context_lens // length)  # ceil division
    firsts = np.append(0, counts.cumsum())
    seqs = np.repeat(np.arange(len(counts)), counts)
    starts = (np.arange(len(seqs)) - firsts[seqs]) * length
    ends = np.minimum(starts + length, context_lens[seqs])
    return np.stack([seqs, starts, ends], axis=1), firsts


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the new k, v [num_tokens, num_kv_heads, head_dim] of a batch to their slots.

    Args:
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        slot_mapping: int64 [num_tokens], block · block_size + offset; -1 writes nothing.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == k_cache.stride()[2:] == (head_dim, 1)
    store_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        SIZE=num_heads * head_dim,
        SIZE_PAD=triton.next_power_of_2(num_heads * head_dim),
    )


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    splits: Tensor,
    firsts: Tensor,
    scale: float,
) -> Tensor:
    """Paged decode: one query of each sequence attends to its context.

    Args:
        q: [num_seqs, num_heads, head_dim], as the output.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        block_tables: int32 [num_rows, num_columns].
        rows: int64 [num_seqs], of `block_tables`.
        splits, firsts: see `split_contexts`; a sequence without splits gives zeros.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert q.stride()[1:] == k_cache.stride()[2:] == (head_dim, 1)
    group = num_heads // num_kv_heads
    capability = (9, 0)  # if the kernels are interpreted
    if q.is_cuda:
        capability = torch.cuda.get_device_capability(q.device)
    settings = decode_settings(capability, group, head_dim, k_cache.dtype)
    out = q.new_empty(q.shape)
    lse = q.new_empty((len(splits), num_heads), dtype=torch.float32)
    partial = lse.new_empty((len(splits), num_heads, head_dim))
    decode_kernel[(len(splits), num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        rows,
        splits,
        partial,
        lse,
        scale * math.log2(math.e),  # 2^(x · log2(e)) = e^x
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        **settings,
    )
    # A warp is enough for a head: four would wait for each other longer than they compute.
    reduce_kernel[(num_seqs, num_heads)](
        partial,
        lse,
        firsts,
        out,
        head_dim,
        settings["DIM_PAD"],
        CHUNK=16,
        num_warps=1,  # ty: ignore
    )
    return out
