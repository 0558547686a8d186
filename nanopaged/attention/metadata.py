"""Attention over paged keys and values.

The model asks for attention once a layer: `attend(layer, q, k, v)`. A backend answers in two steps,
and in this order: it stores the new K/V of the whole batch in their slots, then every query reads the
blocks of its own sequence. (That order is what lets a sequence read a block which another one of the
same batch fills.)

What does not change from layer to layer (which blocks, which lengths, which masks) is worked out once
a step, by the backend's `plan`. Decodes and chunks of prompts are different work, so each has a way of
its own, and a backend is a choice of three:

               storing K/V    one query a sequence             many queries a sequence
    torch      indexing       `torch_backend.DecodePlan`     `torch_backend.ChunkPlan`
    triton     a kernel       `triton_backend.DecodePlan`    `torch_backend.ChunkPlan`
    flash      a kernel       `triton_backend.DecodePlan`    `flash_backend.ChunkPlan`

`reference_attention.py` stands beside them: a loop over sequences, queries and blocks, in the open.

Nothing here knows why a batch looks as it does; that is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from nanopaged.config import ATTENTION_BACKENDS
from nanopaged.device import send
from nanopaged.kv_cache import KVCache

if TYPE_CHECKING:
    from nanopaged.attention.triton_backend import BlockTables

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
    owners: list[int]  # a number for each sequence, the same from step to step


def slots_of(table: list[int], positions: np.ndarray, block_size: int) -> np.ndarray:
    """Where the tokens at `positions` live: block_size = 4, table [7, 2], positions 2 3 4 5: 30 31 8 9."""
    return np.array(table)[positions // block_size] * block_size + positions % block_size


class Store:
    """Writes the new K/V of a batch to their slots by indexing; one object a step, called once a layer."""

    def __init__(self, batch: PagedBatch, cache: KVCache) -> None:
        slots = send(batch.slot_mapping, cache.data.device)
        self.cache = cache
        self.blocks, self.offsets = slots // cache.block_size, slots % cache.block_size

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim] of the whole batch."""
        k_cache, v_cache = self.cache.layer(layer)
        k_cache[self.blocks, :, self.offsets] = k
        v_cache[self.blocks, :, self.offsets] = v


class AttentionBackend(Protocol):
    """How attention is computed over one `KVCache`."""

    tables: BlockTables | None  # on the device, for backends whose decodes read them there

    def plan(self, batch: PagedBatch) -> Attend:
        """Work out what all layers of a step have in common."""


@dataclass
class PagedAttention:
    """A backend put together from three parts, each planned once a step: see the head of this file."""

    store: Callable[[PagedBatch], Callable[[int, Tensor, Tensor], None]]
    decodes: Callable[[PagedBatch], Attend]
    chunks: Callable[[PagedBatch], Attend]
    tables: BlockTables | None = None

    def plan(self, batch: PagedBatch) -> Attend:
        """The step's `attend`: store first, then the decodes, then the chunks."""
        n = batch.num_decodes
        store = self.store(batch)
        decodes = self.decodes(batch) if n > 0 else None
        chunks = self.chunks(batch) if n < len(batch.query_lens) else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store(layer, k, v)
            if chunks is None:
                return decodes(layer, q, k, v)
            if decodes is None:
                return chunks(layer, q, k, v)
            first = decodes(layer, q[:n], k[:n], v[:n])
            return torch.cat((first, chunks(layer, q[n:], k[n:], v[n:])))

        return attend


def make_attention(backend: str, cache: KVCache, scale: float) -> AttentionBackend:
    """The backend of that name; "auto" is the fastest that runs here.

    Each is imported only when it is chosen, so that none can stand in the way of the others.

    Raises:
        ValueError: it cannot run here; the message says why.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend is {backend!r}, but must be one of {ATTENTION_BACKENDS}")
    if backend == "auto":
        backend = next(name for name in ("flash", "triton", "torch") if is_fast_here(name, cache))
    reason = why_not(backend, cache)
    if reason:
        raise ValueError(f"attention_backend={backend!r} cannot run here: {reason}; 'auto' takes what can")
    if backend == "reference":
        from nanopaged.attention.reference_backend import ReferenceAttention

        return ReferenceAttention(cache, scale)
    from nanopaged.attention import torch_backend

    if backend == "torch":
        return PagedAttention(
            store=lambda batch: Store(batch, cache),
            decodes=lambda batch: torch_backend.DecodePlan(batch, cache, scale),
            chunks=lambda batch: torch_backend.ChunkPlan(batch, cache, scale),
        )
    from nanopaged.attention import flash_backend, triton_backend

    chunks = flash_backend if backend == "flash" else torch_backend
    tables = triton_backend.BlockTables(cache.data.device)
    return PagedAttention(
        store=lambda batch: triton_backend.Store.of(batch, cache),
        decodes=lambda batch: triton_backend.DecodePlan.of(batch, cache, scale, tables),
        chunks=lambda batch: chunks.ChunkPlan(batch, cache, scale),
        tables=tables,
    )


def is_fast_here(backend: str, cache: KVCache) -> bool:
    """Whether "auto" may take it. On a CPU the kernels can only be interpreted, which is for tests."""
    return backend == "torch" or (cache.data.is_cuda and why_not(backend, cache) is None)


def why_not(backend: str, cache: KVCache) -> str | None:
    """What keeps a backend from running on the cache's device; None if nothing does."""
    if backend in ("triton", "flash"):
        try:
            from nanopaged.kernels import paged_attention as kernels
        except ImportError as error:
            return f"Triton is not there ({error})"
        if not cache.data.is_cuda and not kernels.INTERPRETED:
            return f"its kernels need a GPU, not {cache.data.device}, or TRITON_INTERPRET=1 to be tried out"
    if backend == "flash":
        from nanopaged.attention.flash_backend import why_no_flash

        return why_no_flash(cache)
    return None
