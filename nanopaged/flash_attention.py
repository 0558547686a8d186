"""Chunks of prompts through flash attention: all of a batch in one call, without padding.

"Varlen" attention takes the sequences of a batch laid end to end, and where each begins:

    queries of 3 and 2 tokens      cu_seqlens_q  0 3 5        q  [5, num_heads, head_dim]
    contexts of 3 and 6 keys       cu_seqlens_k  0 3 9        k  [9, num_kv_heads, head_dim]

and each query sees the keys up to its own, counted from the end. Contexts that were cached lie in blocks;
they are gathered first, so blocks may have any size (flash-attn reads pages of 256 and nothing smaller).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache as cached
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import PagedBatch, send, slots_of
from nanopaged.kv_cache import KVCache

Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], Tensor]
"""varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest query, longest context, scale) → out."""


class ChunkPlan:
    """Where the batch's chunks begin and end, and where their contexts lie."""

    def __init__(self, batch: PagedBatch, cache: KVCache, scale: float) -> None:
        device = cache.data.device
        query_lens = batch.query_lens[batch.num_decodes :]
        context_lens = batch.context_lens[batch.num_decodes :]
        self.cache = cache
        self.scale = scale
        self.cu_query_lens = send(_cumulative(query_lens), device)
        self.cu_context_lens = send(_cumulative(context_lens), device)
        self.longest = int(query_lens.max()), int(context_lens.max())
        self.slots: Tensor | None = None  # of all keys, if some of them were in the cache already
        if (context_lens > query_lens).any():
            tables = batch.block_tables[batch.num_decodes :]
            slots = [
                slots_of(table, np.arange(n), cache.block_size)
                for table, n in zip(tables, context_lens, strict=True)
            ]
            self.slots = send(np.concatenate(slots), device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] and the new k, v → what each query attends to."""
        if self.slots is not None:
            k, v = (self._gather(part) for part in self.cache.layer(layer))
        return varlen()(q, k, v, self.cu_query_lens, self.cu_context_lens, *self.longest, self.scale)

    def _gather(self, part: Tensor) -> Tensor:
        """K or V of a layer at `slots`, as [num_keys, num_kv_heads, head_dim]."""
        size = self.cache.block_size
        return part[self.slots // size, :, self.slots % size]


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
