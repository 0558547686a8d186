"""Batches of sequences with K/V in random blocks, and what attention has to give for them."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import make_backend
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.reference_backend import ScoreMod
from nanopaged.attention.torch_backend import QUERY_TILE, TorchAttention
from nanopaged.kv_cache import KVCache, KVShape

CPU = torch.device("cpu")
LAYERS, LAYER = 2, 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = {  # (cached, new) tokens of each sequence; those with one new token first
    "one token": [(0, 1)],
    "decodes": [(5, 1), (0, 1), (31, 1), (15, 1), (16, 1)],
    "prompts": [(0, 5), (0, 33), (0, 16)],
    "chunks after a cached context": [(16, 5), (3, 20), (40, 2)],
    "decodes and chunks": [(9, 1), (47, 1), (0, 12), (21, 7)],
    "more queries than a tile": [(70, 1), (0, QUERY_TILE + 9), (13, 2 * QUERY_TILE)],
}


class Case:
    """Sequences with some K/V in the cache and some new, in random blocks.

    Args:
        lengths: as in `LENGTHS`.
        unused: what the slots without a token hold, in blocks whose first token is cached. In the engine
            it is 0, or K/V of a former owner. All other blocks hold NaN as yet.

    Attributes:
        q, k, v: of the new tokens, [num_tokens, heads, head_dim]: parts of one projection, as in the model.
        cached: K and V of each sequence before these tokens.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        block_size: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        unused: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        torch.manual_seed(sum(cached + new for cached, new in lengths) + block_size + head_dim)
        num_heads, num_kv_heads = heads
        self.head_dim, self.dtype = head_dim, dtype
        # A table has a block for tokens to come, as in a chunk of a prompt.
        num_blocks = [-(-(cached + new) // block_size) + 1 for cached, new in lengths]
        ids = random.Random(0).sample(range(sum(num_blocks) + 3), sum(num_blocks))
        self.tables = [[ids.pop() for _ in range(n)] for n in num_blocks]
        shape = KVShape(LAYERS, num_kv_heads, head_dim, dtype)
        self.cache = KVCache(shape, sum(num_blocks) + 3, block_size, device)
        self.cache.data.fill_(math.nan)
        k_cache, v_cache = self.cache.layer(LAYER)
        self.cached = []
        slots: list[int] = []
        for table, (cached, new) in zip(self.tables, lengths, strict=True):
            positions = torch.arange(cached + new)
            blocks, offsets = torch.tensor(table)[positions // block_size], positions % block_size
            self.cache.data[blocks[:cached]] = unused
            k, v = torch.randn(2, cached, num_kv_heads, head_dim).to(device, dtype)
            k_cache[blocks[:cached], :, offsets[:cached]] = k
            v_cache[blocks[:cached], :, offsets[:cached]] = v
            self.cached.append((k, v))
            slots += (blocks * block_size + offsets)[cached:].tolist()
        qkv = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
        self.q, self.k, self.v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        self.query_lens = [new for _, new in lengths]
        self.metadata = AttentionMetadata(
            query_lens=np.array(self.query_lens),
            context_lens=np.array([cached + new for cached, new in lengths]),
            block_tables=self.tables,
            slot_mapping=np.array(slots),
            num_decodes=self.query_lens.count(1),
            seq_ids=list(range(len(lengths))),
        )

    def run(self, backend: str | TorchAttention, score_mod: ScoreMod | None = None) -> Tensor:
        if isinstance(backend, str):
            backend = make_backend(backend, self.cache, self.head_dim**-0.5, score_mod)
        backend.begin_step(self.metadata)
        return backend(LAYER, self.q, self.k, self.v)

    def dense(self, cap: float = math.inf, window: int = 1 << 60) -> Tensor:
        """softmax(q Kᵀ / √d) V with a causal mask, one sequence at a time, in float64.

        Args:
            cap: of the scores, as cap · tanh(score / cap).
            window: keys that a query attends to, its own included.
        """
        parts = [part.split(self.query_lens) for part in (self.q, self.k, self.v)]
        out = []
        for q, k, v, (cached_k, cached_v) in zip(*parts, self.cached, strict=True):
            group = q.shape[1] // k.shape[1]
            k = torch.cat((cached_k, k)).double().repeat_interleave(group, dim=1)
            v = torch.cat((cached_v, v)).double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(self.head_dim)
            if cap < math.inf:
                scores = cap * (scores / cap).tanh()
            keys = torch.arange(len(k), device=q.device)
            age = keys[len(cached_k) :, None] - keys
            p = scores.masked_fill((age < 0) | (age >= window), -math.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", p, v))
        return torch.cat(out).float()

    def check(self, backend: str | TorchAttention, mod: ScoreMod | None = None, **changes: float) -> None:
        """Compare with `dense`, to which the changes go."""
        atol = TOLERANCE[self.dtype]
        out = self.run(backend, mod)
        assert out.dtype == self.dtype
        torch.testing.assert_close(out.float(), self.dense(**changes), atol=atol, rtol=max(atol, 1e-4))
