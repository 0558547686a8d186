"""A batch of decodes over scattered blocks, without an engine, for `kernel.py`, `blocksize.py`,
`interpreted.py` and gpu/gpu_day.py.

Of the experiments, only this file uses the inner parts of the attention backends.
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

from nanopaged.attention import make_attention
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.sequence import Moves


@dataclass(frozen=True)
class KVSizes:
    """The sizes of the K/V cache and of the queries."""

    num_layers: int
    num_kv_heads: int
    group: int  # query heads to a KV head
    head_dim: int
    dtype: torch.dtype

    def make_cache(self, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        """A cache with something in it."""
        shape = KVShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )
        cache = KVCache(shape, num_blocks=num_blocks, block_size=block_size, device=device)
        cache.data.normal_()
        return cache

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
        self.cache = sizes.make_cache(sum(needed) + 8, block_size, device)
        self.k, self.v = self.cache.layer(self.layer)  # [num_blocks, num_kv_heads, block_size, head_dim]
        num_heads = sizes.num_kv_heads * sizes.group
        self.q = torch.randn(len(lens), num_heads, sizes.head_dim).to(device, sizes.dtype)
        # The query heads of a KV head as so many queries: [num_seqs, num_kv_heads, group, head_dim]
        self.grouped_q = self.q.view(len(lens), sizes.num_kv_heads, sizes.group, sizes.head_dim)
        self.num_bytes = sum(lens) * sizes.bytes_per_token()

    def paged(self, max_splits: int | None = None, backend: str = "auto") -> Callable[[], Tensor]:
        """Our own decode, without storing the new K/V."""
        n = len(self.lens)
        slots = []
        for table, length in zip(self.tables, self.lens, strict=True):
            slots.append(slots_of(table, np.array([length - 1]), self.block_size))
        attention = make_attention(backend, self.cache, self.q.shape[-1] ** -0.5)
        if max_splits is not None:  # of the Triton kernels
            attention.max_splits = max_splits
        metadata = AttentionMetadata(
            query_lens=np.ones(n, dtype=np.int64),
            context_lens=np.array(self.lens),
            block_tables=self.tables,
            slot_mapping=np.concatenate(slots),
            num_decodes=n,
            seq_ids=list(range(n)),
        )
        attention.begin_step(metadata)
        return lambda: attention.decode(self.layer, self.q)

    def exact(self, i: int) -> Tensor:
        """The output of sequence i, [num_heads, head_dim], by a softmax in float64."""
        index = torch.tensor(self.tables[i]).to(self.q.device)
        k, v = (x[index].transpose(0, 1).flatten(1, 2)[:, : self.lens[i]].double() for x in (self.k, self.v))
        q = self.grouped_q[i].double()  # [num_kv_heads, group, head_dim]
        return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).flatten(0, 1)

    def gather(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """K and V padded to [num_seqs, num_kv_heads, longest, head_dim], and a mask if lengths differ."""
        longest, num_blocks = max(self.lens), max(map(len, self.tables))
        padded = [table + [0] * (num_blocks - len(table)) for table in self.tables]
        index = torch.tensor(padded, device=self.q.device)
        k, v = (x[index].transpose(1, 2).flatten(2, 3)[:, :, :longest] for x in (self.k, self.v))
        if min(self.lens) == longest:
            return k, v, None
        is_key = torch.arange(longest) < torch.tensor(self.lens)[:, None]
        return k, v, is_key[:, None, None].to(self.q.device)

    def dense(self) -> Callable[[], Tensor]:
        """PyTorch's attention over K/V that was gathered before."""
        k, v, mask = self.gather()
        k, v = k.contiguous(), v.contiguous()
        return lambda: F.scaled_dot_product_attention(self.grouped_q, k, v, mask)

    def flash_attn(self) -> Callable[[], Tensor] | None:
        """flash-attn's decode over K/V that was gathered before; None where flash-attn is not installed."""
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            return None
        k, v = (x.transpose(1, 2).contiguous() for x in self.gather()[:2])
        lens = torch.tensor(self.lens, dtype=torch.int32, device=self.q.device)
        return lambda: flash_attn_with_kvcache(self.q[:, None], k, v, cache_seqlens=lens)

    def padded(self) -> Tensor:
        """Gather all sequences, then attend."""
        k, v, mask = self.gather()
        return F.scaled_dot_product_attention(self.grouped_q, k, v, mask)

    def one_by_one(self) -> Tensor:
        """Gather and attend sequence by sequence."""
        outs = []
        for q, table, n in zip(self.grouped_q, self.tables, self.lens, strict=True):
            index = torch.tensor(table)
            k, v = (x[index].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in (self.k, self.v))
            outs.append(F.scaled_dot_product_attention(q[None], k, v))
        return torch.cat(outs)


def store_call(
    cache: KVCache, slots: list[int], k: Tensor, v: Tensor, layer: int, backend: str = "auto"
) -> Callable[[], None]:
    """Our own write of new K/V [num_tokens, num_kv_heads, head_dim] into `slots` of a layer."""
    ones = np.ones(len(slots), dtype=np.int64)
    attention = make_attention(backend, cache, 1.0)
    metadata = AttentionMetadata(
        query_lens=ones,
        context_lens=ones,
        block_tables=[],
        slot_mapping=np.array(slots),
        num_decodes=len(slots),
        seq_ids=[],
    )
    attention.begin_store(metadata)
    return lambda: attention.store(layer, k, v)


def copy_call(cache: KVCache, pairs: list[tuple[int, int]]) -> Callable[[], None]:
    """The engine's copy of whole blocks, (source, destination)."""
    return lambda: cache.move_blocks(Moves(copies=pairs))
