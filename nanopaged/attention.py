"""Attention over paged keys and values.

The model asks for attention once a layer: `attend(layer, q, k, v)`. A backend answers in two steps,
and in this order: it stores the new K/V of the whole batch in their slots, then every query reads the
blocks of its own sequence. (That order is what lets a sequence read a block which another one of the
same batch fills.)

What does not change from layer to layer (which blocks, which lengths, which masks) is worked out once
a step, by the backend's `plan`. The backends have files of their own:

    reference   a loop over sequences, queries and blocks: how paged attention works, in the open
    torch       the same sums, arranged into few large operations; runs on any device

Nothing here knows why a batch looks as it does; that is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanopaged.kv_cache import KVCache

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q, k, v) → out, with q, out [num_tokens, num_heads, head_dim] and k, v
[num_tokens, num_kv_heads, head_dim]."""


@dataclass
class PagedBatch:
    """Where the tokens of a flat batch live. Sequences with one new token come first.

    Two decodes and a chunk of three, block_size = 4:

        query_lens      1    1    3          flat batch   q₀ q₁ q₂ q₂ q₂
        context_lens    6    4    7          tokens in the cache, the new ones included
        block_tables  [5,2] [0] [3,8]        slots        2·4+1  0·4+3  8·4+0 8·4+1 8·4+2
    """

    query_lens: np.ndarray  # [num_seqs]
    context_lens: np.ndarray  # [num_seqs]
    block_tables: list[list[int]]  # of each sequence, physical block ids
    slot_mapping: np.ndarray  # [num_tokens]: block · block_size + offset
    num_decodes: int


def store_kv(cache: KVCache, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] to (block, offset) of each token."""
    k_cache, v_cache = cache.layer(layer)
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = v


def slots_of(batch: PagedBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
    """(block, offset) of each token of the flat batch."""
    slots = torch.from_numpy(batch.slot_mapping).to(cache.data.device)
    return slots // cache.block_size, slots % cache.block_size


class AttentionBackend(Protocol):
    """How attention is computed over one `KVCache`, with scores scaled by `scale`."""

    def __init__(self, cache: KVCache, scale: float) -> None: ...

    def plan(self, batch: PagedBatch) -> Attend:
        """Work out what all layers of a step have in common."""


def make_attention(backend: str, cache: KVCache, scale: float) -> AttentionBackend:
    """The backend of that name; "auto" is the fastest that runs here.

    Each is imported only when it is chosen, so that none can stand in the way of the others.
    """
    if backend == "reference":
        from nanopaged.reference_attention import ReferenceAttention

        return ReferenceAttention(cache, scale)
    from nanopaged.torch_attention import TorchAttention

    return TorchAttention(cache, scale)
