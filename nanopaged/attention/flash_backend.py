"""Chunks of prompts through flash attention: all of a batch in one call, without padding.

"Varlen" attention takes the sequences of a batch laid end to end, and where each begins:

    queries of 3 and 2 tokens      cu_seqlens_q  0 3 5        q  [5, num_heads, head_dim]
    contexts of 3 and 6 keys       cu_seqlens_k  0 3 9        k  [9, num_kv_heads, head_dim]

and each query sees the keys up to its own, counted from the end. Contexts that were cached lie in blocks;
they are gathered first, so blocks may have any size (flash-attn reads pages of 256 and nothing smaller).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache as cached
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import PagedBatch, slots_of
from nanopaged.device import send
from nanopaged.kv_cache import KVCache

GATHER_KEYS = 1 << 16  # keys of cached contexts that are gathered at once

Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], Tensor]
"""varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest query, longest context, scale) → out."""


@dataclass
class Group:
    """Some of a batch's chunks, whose contexts are gathered and attended together."""

    rows: slice  # of the chunks' queries
    slots: Tensor | None  # [2, keys], block and offset of each; None if nothing was cached: K/V are all new
    cu_query_lens: Tensor
    cu_context_lens: Tensor
    longest: tuple[int, int]  # query, context


class ChunkPlan:
    """Where the batch's chunks begin and end, and where their contexts lie.

    A step has few new tokens, but their contexts together may be longer than the whole pool, where many
    share a prefix: so they are gathered by GATHER_KEYS or so.
    """

    def __init__(self, batch: PagedBatch, cache: KVCache, scale: float) -> None:
        self.cache = cache
        self.scale = scale
        n, row, self.groups = batch.num_decodes, 0, []
        query_lens, context_lens = batch.query_lens[n:], batch.context_lens[n:]
        for lo, hi in _group(context_lens):
            chunks = slice(lo, hi)
            tables = batch.block_tables[n:][chunks]
            self.groups.append(self._plan(row, query_lens[chunks], context_lens[chunks], tables))
            row = self.groups[-1].rows.stop

    def _plan(
        self, row: int, query_lens: np.ndarray, context_lens: np.ndarray, tables: list[list[int]]
    ) -> Group:
        device, slots = self.cache.data.device, None
        if (context_lens > query_lens).any():
            size = self.cache.block_size
            parts = [slots_of(t, np.arange(n), size) for t, n in zip(tables, context_lens, strict=True)]
            slots = send(np.array(np.divmod(np.concatenate(parts), size)), device)
        return Group(
            rows=slice(row, row + int(query_lens.sum())),
            slots=slots,
            cu_query_lens=send(_cumulative(query_lens), device),
            cu_context_lens=send(_cumulative(context_lens), device),
            longest=(int(query_lens.max()), int(context_lens.max())),
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] and the new k, v → what each query attends to."""
        outs = []
        for group in self.groups:
            keys, values = k[group.rows], v[group.rows]
            if group.slots is not None:
                blocks, offsets = group.slots
                keys, values = (part[blocks, :, offsets] for part in self.cache.layer(layer))
            lens = group.cu_query_lens, group.cu_context_lens
            outs.append(varlen()(q[group.rows], keys, values, *lens, *group.longest, self.scale))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def _group(context_lens: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of chunks whose contexts have GATHER_KEYS keys at most, or of a single chunk.

    GATHER_KEYS = 10    context_lens 4 5 3 20 1    → (0, 2), (2, 3), (3, 4), (4, 5)
    """
    lo = total = 0
    for i, n in enumerate(context_lens.tolist()):
        if total + n > GATHER_KEYS and i > lo:
            yield lo, i
            lo, total = i, 0
        total += n
    yield lo, len(context_lens)


def _cumulative(lens: np.ndarray) -> np.ndarray:
    """3 2 4 → 0 3 5 9."""
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)


@cached
def varlen() -> Varlen:
    """flash-attn's varlen attention where it is installed, else PyTorch's own.

    Raises:
        ImportError: neither is there, or PyTorch's is too old to be causal.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # flash-attn 4 alone has the package but not this
    except ImportError:
        return _torch_varlen()

    return lambda q, k, v, cu_q, cu_k, longest_q, longest_k, scale: flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale=scale, causal=True
    )


def _torch_varlen() -> Varlen:
    """`torch.nn.attention.varlen`; some versions want K and V repeated for each query head."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        raise ImportError(f"varlen attention of torch {torch.__version__} lacks window_size or scale")

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        *lengths, scale = rest
        options = {"scale": scale, "window_size": (-1, 0)}  # all keys before, none after: causal
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return varlen_attn(q, k, v, *lengths, **options)

    return attend


def why_no_flash(cache: KVCache) -> str | None:
    """What keeps flash attention from working on this cache; None if nothing does."""
    if not cache.data.is_cuda:
        return f"flash attention needs a GPU, not {cache.data.device}"
    if torch.cuda.get_device_capability(cache.data.device) < (8, 0):
        return "flash attention needs a GPU of compute capability 8.0 or more"
    if cache.shape.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention computes in float16 or bfloat16, not {cache.shape.dtype}"
    if cache.shape.head_dim > 256 or cache.shape.head_dim % 8:
        return f"flash attention wants a head_dim that 8 divides, up to 256, not {cache.shape.head_dim}"
    try:
        varlen()
    except ImportError as error:
        return f"neither flash-attn nor PyTorch's varlen attention is there ({error})"
    return None
