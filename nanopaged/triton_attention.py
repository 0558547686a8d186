"""Storing K/V and decoding with the kernels of `kernels.py`: what a batch looks like to them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanopaged import kernels
from nanopaged.attention import PagedBatch
from nanopaged.kv_cache import KVCache


class Store:
    """Writes the new K/V of a batch to their slots, in one launch a layer."""

    def __init__(self, batch: PagedBatch, cache: KVCache) -> None:
        self.cache = cache
        self.slots = torch.from_numpy(batch.slot_mapping).to(cache.data.device, non_blocking=True)

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim] of the whole batch."""
        kernels.store_kv(k, v, *self.cache.layer(layer), self.slots)


class DecodePlan:
    """The batch's decodes: their block tables as a rectangle, their lengths, and how often to split."""

    def __init__(self, batch: PagedBatch, cache: KVCache, scale: float) -> None:
        device, n = cache.data.device, batch.num_decodes
        self.cache = cache
        self.scale = scale
        context_lens = batch.context_lens[:n].astype(np.int32)
        self.tables = torch.from_numpy(pad_tables(batch.block_tables[:n])).to(device, non_blocking=True)
        self.context_lens = torch.from_numpy(context_lens).to(device, non_blocking=True)
        num_processors = num_multiprocessors(device)
        most = int(context_lens.max())
        self.num_splits = kernels.choose_num_splits(n, cache.shape.num_kv_heads, most, num_processors)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [num_seqs, num_heads, head_dim] → their outputs, of the same shape."""
        k_cache, v_cache = self.cache.layer(layer)
        return kernels.paged_decode(
            q, k_cache, v_cache, self.tables, self.context_lens, self.scale, self.num_splits
        )


def pad_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables as int32 [num_seqs, longest], filled up with zeros that nobody looks at."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def num_multiprocessors(device: torch.device) -> int:
    """What runs programs side by side on a GPU; 1 where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
