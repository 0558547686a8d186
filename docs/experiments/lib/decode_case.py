"""A batch of decodes over scattered blocks, without an engine.

Of the experiments, only this file and those for a GPU use the inner parts of the attention backends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged.attention import make_backend
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.kv_cache import KVCache, KVShape


@dataclass(frozen=True)
class KVSizes:
    """The sizes of the K/V cache and of the queries."""

    num_layers: int
    num_kv_heads: int
    group: int  # query heads to a KV head
    head_dim: int
    dtype: torch.dtype

    def bytes_per_token(self) -> int:
        """Of K and V, in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class DecodeCase:
    """One layer's decode of sequences of `lens` tokens, the new one included."""

    def __init__(
        self, lens: list[int], block_size: int, sizes: KVSizes, device: torch.device, seed: int
    ) -> None:
        self.lens = lens
        self.block_size = block_size
        self.layer = sizes.num_layers - 1
        needed = [math.ceil(n / block_size) for n in lens]
        ids = random.Random(seed).sample(range(sum(needed) + 8), sum(needed))
        self.tables = [[ids.pop() for _ in range(n)] for n in needed]
        shape = KVShape(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
        )
        self.cache = KVCache(shape, num_blocks=sum(needed) + 8, block_size=block_size, device=device)
        self.cache.data.normal_()
        self.k, self.v = self.cache.layer(self.layer)  # [num_blocks, num_kv_heads, block_size, head_dim]
        num_heads = sizes.num_kv_heads * sizes.group
        self.q = torch.randn(len(lens), num_heads, sizes.head_dim).to(device, sizes.dtype)
        # The query heads of a KV head as so many queries: [num_seqs, num_kv_heads, group, head_dim]
        self.grouped_q = self.q.view(len(lens), sizes.num_kv_heads, sizes.group, sizes.head_dim)
        self.num_bytes = sum(lens) * sizes.bytes_per_token()

    def paged(self, backend: str, max_splits: int | None = None) -> Callable[[], Tensor]:
        """Our own decode, without storing the new K/V."""
        slots = []
        for table, length in zip(self.tables, self.lens, strict=True):
            slots.append(slots_of(table, np.array([length - 1]), self.block_size))
        attention = make_backend(backend, self.cache, self.q.shape[-1] ** -0.5)
        if max_splits is not None:  # of the Triton kernels
            attention.max_splits = lambda num_seqs: max_splits
        metadata = AttentionMetadata(
            query_lens=np.ones(len(self.lens), dtype=np.int64),
            context_lens=np.array(self.lens),
            block_tables=self.tables,
            slot_mapping=np.concatenate(slots),
            num_decodes=len(self.lens),
            seq_ids=list(range(len(self.lens))),
        )
        attention.begin_step(metadata)
        return lambda: attention.decode(self.layer, self.q)

    def context(self, cache: Tensor, i: int) -> Tensor:
        """K or V of sequence i without blocks: [num_kv_heads, num_tokens, head_dim]."""
        index = torch.tensor(self.tables[i], device=cache.device)
        return cache[index].transpose(0, 1).flatten(1, 2)[:, : self.lens[i]]

    def exact(self, i: int) -> Tensor:
        """The output of sequence i, [num_heads, head_dim], by a softmax in float64."""
        q = self.grouped_q[i].double()  # [num_kv_heads, group, head_dim]
        k = self.context(self.k, i).double()
        v = self.context(self.v, i).double()
        return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).flatten(0, 1)

    def dense(self) -> Callable[[], Tensor]:
        """PyTorch's attention over K/V without blocks, padded to the longest sequence."""
        longest = max(self.lens)
        caches = []
        for cache in (self.k, self.v):
            contexts = [self.context(cache, i) for i in range(len(self.lens))]
            caches.append(torch.stack([F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in contexts]))
        mask = None
        if min(self.lens) < longest:
            lens = torch.tensor(self.lens, device=self.q.device)
            mask = (torch.arange(longest, device=self.q.device) < lens[:, None])[:, None, None]
        return lambda: F.scaled_dot_product_attention(self.grouped_q, *caches, mask)
