"""Paged attention in plain PyTorch: it runs everywhere, and is the base class of the faster backends.

Contexts are gathered from their blocks, then come two matrix products and a softmax: prefills one after
another, decodes many at once, padded to the longest context.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata, gather_groups
from nanopaged.attention.reference_backend import LayerMod, ScoreMod
from nanopaged.kv_cache import KVCache, to_device

QUERY_TILE = 64  # queries computed at once: their scores fit in the CPU's cache


class TorchAttention:
    """Storing, decodes and prefills, each a pair of methods: one for a step, one for a layer."""

    supports_cuda_graphs = False

    def __init__(self, cache: KVCache, scale: float, score_mod: ScoreMod | None = None) -> None:
        self.cache, self.scale, self.score_mod = cache, scale, score_mod
        self.device = cache.data.device
        # K and V of each layer: making these views takes 2 % of a decode step of one sequence.
        layers = range(cache.shape.num_layers)
        self.layers = [cache.layer(layer) for layer in layers]
        self.score_mods = [
            partial(score_mod, layer) if score_mod is not None else None for layer in layers
        ]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share."""
        self.num_decodes = metadata.num_decodes
        self.begin_store(metadata)
        if metadata.num_decodes > 0:
            self.begin_decodes(metadata)
        if metadata.num_decodes < len(metadata.query_lens):
            self.begin_prefills(metadata)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: the first `num_decodes` tokens are decodes, the rest prefills."""
        n = self.num_decodes
        self.store(layer, k, v)
        if n == len(q):
            return self.decode(layer, q)
        out = self.prefill(layer, q[n:], k[n:], v[n:])
        return out if n == 0 else torch.cat((self.decode(layer, q[:n]), out))

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Slots as (block, offset): block_size = 4, slot 9 is block 2, offset 1.

        A new block is filled with zeros: `decode` also reads slots that no token has reached. They have
        weight 0, but a former owner may have left NaN, and 0 · NaN = NaN.
        """
        blocks, offsets = np.divmod(metadata.slot_mapping, self.cache.block_size)
        self.cache.data.index_fill_(0, to_device(blocks[offsets == 0], self.device), 0)
        self.blocks, self.offsets = to_device(np.array((blocks, offsets)), self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots."""
        k_cache, v_cache = self.layers[layer]
        k_cache[self.blocks, :, self.offsets] = k
        v_cache[self.blocks, :, self.offsets] = v

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Pad the block tables in groups, and note the position of each query.

        block_size = 4, context_lens 6, 3, tables [5, 2], [0, 7]: the tables become [5, 2], [0, 0]
        """
        self.decodes: list[tuple[slice, Tensor, Tensor]] = []
        lens = metadata.context_lens[: self.num_decodes]
        for seqs in gather_groups(lens):
            counts = -(-lens[seqs] // self.cache.block_size)  # a table may have more blocks
            pairs = zip(
                metadata.block_tables[: self.num_decodes][seqs], counts.tolist(), strict=True
            )
            tables = np.array([table[:n] + table[:1] * (counts.max() - n) for table, n in pairs])
            queries = to_device(lens[seqs] - 1, self.device)[:, None, None, None]
            self.decodes.append((seqs, to_device(tables, self.device), queries))

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """One query of each sequence: q → out, both [num_decodes, num_heads, head_dim]."""
        # [num_seqs, num_kv_heads, group, head_dim]: heads that share a KV head are rows
        q = (q * self.scale).unflatten(1, (self.cache.shape.num_kv_heads, -1))
        out = torch.empty_like(q)
        for seqs, tables, queries in self.decodes:
            num_keys = tables.shape[1] * self.cache.block_size
            keys, values = (gather_context(x, tables, num_keys) for x in self.layers[layer])
            out[seqs] = attend(q[seqs], keys, values, queries, 0, self.score_mods[layer])
        return out.flatten(1, 2)

    def begin_prefills(self, metadata: AttentionMetadata) -> None:
        """Note the block table, query and context length of each."""
        self.prefills: list[tuple[Tensor, int, int]] = []
        for i in range(metadata.num_decodes, len(metadata.query_lens)):
            table = to_device(np.array(metadata.block_tables[i]), self.device)
            self.prefills.append(
                (table, int(metadata.query_lens[i]), int(metadata.context_lens[i]))
            )

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All tokens of the prefills: q [num_tokens, num_heads, head_dim], new k, v → out.

        Tile by tile, each query up to its own position: with 3 cached keys, query 0 sees keys 0 to 3.
        """
        q, out, row = q * self.scale, torch.empty_like(q), 0  # row: of the tile's first token
        for table, query_len, context_len in self.prefills:
            keys, values = [gather_context(x, table, context_len) for x in self.layers[layer]]
            for first in range(context_len - query_len, context_len, QUERY_TILE):
                num = min(QUERY_TILE, context_len - first)
                end, mod = first + num, self.score_mods[layer]
                tile = q[row : row + num].unflatten(1, (len(keys), -1)).transpose(0, 1)
                queries = torch.arange(first, end, device=q.device).repeat_interleave(
                    tile.shape[2]
                )[:, None]
                # [num_kv_heads, tile · group, head_dim]
                rows = attend(
                    tile.flatten(1, 2), keys[:, :end], values[:, :end], queries, first, mod
                )
                out[row : row + num] = rows.unflatten(1, (num, -1)).transpose(0, 1).flatten(1, 2)
                row += num
        return out


def gather_context(cache: Tensor, block_tables: Tensor, num_keys: int) -> Tensor:
    """Copy keys (or values) out of their blocks: block_tables [..., blocks] of one sequence or of several,
    cache [num_blocks, num_kv_heads, block_size, head_dim] → [..., num_kv_heads, num_keys, head_dim].
    """
    tables = block_tables[..., : -(-num_keys // cache.shape[2])]
    blocks = cache.index_select(0, tables.flatten()).unflatten(0, tables.shape)
    return blocks.transpose(-4, -3).flatten(-3, -2)[..., :num_keys, :]


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, num_seen: int, score_mod: LayerMod | None
) -> Tensor:
    """softmax(q kᵀ) v over the keys up to each query's own position: → as q.

    Args:
        q: [..., num_kv_heads, rows, head_dim], scaled already.
        k, v: [..., num_kv_heads, num_keys, head_dim].
        queries: positions of the rows, broadcast to [..., rows, 1].
        num_seen: keys that every query sees.
    """
    keys = torch.arange(k.shape[-2], device=q.device)
    scores = q @ k.mT
    if score_mod is not None:
        scores = score_mod(scores, queries, keys)
    scores[..., num_seen:].masked_fill_(keys[num_seen:] > queries, -math.inf)
    return torch.softmax(scores, -1) @ v  # in float32 within, for any dtype
