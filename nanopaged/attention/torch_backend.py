"""Paged attention in plain PyTorch. It runs everywhere; the faster backends are subclasses.

Contexts are gathered from their blocks; then follow two matrix products and a softmax. Prefills are
computed one after another. Decodes are computed many together, padded to the longest context.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata, gather_groups
from nanopaged.attention.reference_backend import ScoreMod
from nanopaged.kv_cache import KVCache, to_device

QUERY_TILE = 64  # tokens computed together, so that their scores fit in the CPU's cache


class TorchAttention:
    """Storing, decodes and prefills: each has one method for a step, and one for a layer."""

    supports_cuda_graphs = False

    def __init__(self, cache: KVCache, scale: float, score_mod: ScoreMod | None = None) -> None:
        self.cache = cache
        self.scale = scale
        self.score_mod = score_mod
        self.device = cache.data.device
        # K and V of each layer. Making these views takes 2 % of a decode step of one sequence.
        self.layers = [cache.layer(layer) for layer in range(cache.shape.num_layers)]
        # Of the matrix products. On a CPU those of 16 bits can take 13 times as long as in float32.
        self.dtype = cache.shape.dtype
        if self.device.type == "cpu" and not is_fast_on_cpu(self.dtype):
            self.dtype = torch.float32

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare the data that all layers of a step share."""
        self.num_decodes = metadata.num_decodes
        self.begin_store(metadata)
        if metadata.num_decodes > 0:
            self.begin_decodes(metadata)
        if metadata.num_decodes < len(metadata.query_lens):
            self.begin_prefills(metadata)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute one layer. The first `num_decodes` tokens are decodes, the rest are prefills."""
        n = self.num_decodes
        self.store(layer, k, v)
        if n == len(q):
            return self.decode(layer, q)
        out = self.prefill(layer, q[n:], k[n:], v[n:])
        return out if n == 0 else torch.cat((self.decode(layer, q[:n]), out))

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Send the slots as (block, offset): block_size = 4, slot 9 is block 2, offset 1.

        A new block is filled with zeros, because `decode` also reads slots that no token has
        reached. They have weight 0, but a former owner may have left NaN, and 0 · NaN = NaN.
        """
        blocks, offsets = np.divmod(metadata.slot_mapping, self.cache.block_size)
        self.cache.data.index_fill_(0, to_device(blocks[offsets == 0], self.device), 0)
        self.blocks, self.offsets = to_device((blocks, offsets), self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots."""
        k_cache, v_cache = self.layers[layer]
        k_cache[self.blocks, :, self.offsets] = k
        v_cache[self.blocks, :, self.offsets] = v

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Divide the decodes into groups, and pad the block tables of each group.

        block_size = 4, context_lens 6, 3, tables [5, 2], [0, 7]: the tables become [5, 2], [0, 0]
        """
        context_lens = metadata.context_lens[: metadata.num_decodes]
        # Sequences, their tables [num_seqs, num_blocks], query positions [num_seqs, 1, 1, 1]
        self.decodes = []
        for seqs in gather_groups(context_lens):
            lens = context_lens[seqs]
            counts = (-(-lens // self.cache.block_size)).tolist()  # a table may have more blocks
            longest = max(counts)
            padded = [
                table[:count] + table[:1] * (longest - count)
                for table, count in zip(metadata.block_tables[seqs], counts, strict=True)
            ]
            tables = to_device(padded, self.device)
            positions = to_device(lens - 1, self.device)[:, None, None, None]
            self.decodes.append((seqs, tables, positions))

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """One query of each sequence: q → out, both [num_decodes, num_heads, head_dim]."""
        out = self.by_kv_head(q.new_empty(q.shape))
        q = self.by_kv_head(q.to(self.dtype) * self.scale)
        for seqs, tables, positions in self.decodes:
            num_keys = tables.shape[1] * self.cache.block_size
            keys, values = self.gather(layer, tables, num_keys)
            out[seqs] = attend(
                q[seqs],
                keys,
                values,
                positions,
                num_seen=0,
                score_mod=self.score_mod,
                layer=layer,
            )
        return out.flatten(1, 2)

    def begin_prefills(self, metadata: AttentionMetadata) -> None:
        """Keep the tokens (among those of all prefills), block table and context length of each."""
        self.prefills = []
        start = 0
        for seq in range(metadata.num_decodes, len(metadata.query_lens)):
            end = start + int(metadata.query_lens[seq])
            table = to_device(metadata.block_tables[seq], self.device)
            self.prefills.append((slice(start, end), table, int(metadata.context_lens[seq])))
            start = end

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All tokens of the prefills: q [num_tokens, num_heads, head_dim], new k, v → out.

        A tile of tokens is computed together. Each token sees the keys up to its own position: with
        3 cached keys, token 0 is at position 3 and sees keys 0 to 3.

        The query heads of a KV head are rows of one matrix. Tokens at positions 3 and 4, a group of
        2 heads:

            rows  token 0, head 0    token 0, head 1    token 1, head 0    token 1, head 1
            see   keys 0 to 3        keys 0 to 3        keys 0 to 4        keys 0 to 4
        """
        q = self.by_kv_head(q.to(self.dtype) * self.scale)
        group = q.shape[2]
        outs = []
        for tokens, table, context_len in self.prefills:
            keys, values = self.gather(layer, table, context_len)
            # Keys after a token have weight 0, but 0 · NaN = NaN. If a value is NaN, one token is
            # computed at a time, because then its tile has no key after it. On a GPU this is not
            # checked, for which the host would have to wait, so a NaN also spoils the tokens before
            # it in its tile.
            is_finite = not values.is_cpu or values.isfinite().all()
            end = context_len - len(q[tokens])
            for tile in q[tokens].split(QUERY_TILE if is_finite else 1):
                first = end  # the position of the tile's first token
                end += len(tile)
                positions = torch.arange(first, end, device=self.device)
                # [num_tokens, num_kv_heads, group, head_dim] → [num_kv_heads, rows, head_dim]
                rows = tile.transpose(0, 1).flatten(1, 2)
                out = attend(
                    rows,
                    keys[:, :end],
                    values[:, :end],
                    positions.repeat_interleave(group)[:, None],
                    num_seen=first,
                    score_mod=self.score_mod,
                    layer=layer,
                )
                outs.append(out.unflatten(1, (-1, group)).transpose(0, 1))  # and back
        return torch.cat(outs).flatten(1, 2).to(k.dtype)

    def by_kv_head(self, q: Tensor) -> Tensor:
        """Group the query heads that share a KV head.

        [num_tokens, num_heads, head_dim] → [num_tokens, num_kv_heads, group, head_dim]
        """
        return q.unflatten(1, (self.cache.shape.num_kv_heads, -1))

    def gather(self, layer: int, tables: Tensor, num_keys: int) -> list[Tensor]:
        """The keys and the values of contexts, see `gather_context`."""
        return [
            gather_context(cache, tables, num_keys).to(self.dtype) for cache in self.layers[layer]
        ]


def is_fast_on_cpu(dtype: torch.dtype) -> bool:
    """Whether PyTorch has fast matrix products of this dtype on this processor."""
    if dtype == torch.bfloat16:
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    return dtype == torch.float32


def gather_context(cache: Tensor, block_tables: Tensor, num_keys: int) -> Tensor:
    """Copy the keys (or values) of one sequence or of several out of their blocks.

    cache [num_blocks, num_kv_heads, block_size, head_dim], block_tables [..., blocks]
    → [..., num_kv_heads, num_keys, head_dim]
    """
    tables = block_tables[..., : -(-num_keys // cache.shape[2])]
    blocks = cache.index_select(0, tables.flatten()).unflatten(0, tables.shape)
    return blocks.transpose(-4, -3).flatten(-3, -2)[..., :num_keys, :]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    num_seen: int,
    score_mod: ScoreMod | None,
    layer: int,
) -> Tensor:
    """softmax(q kᵀ) v over the keys up to each query's own position, in the shape of q.

    Args:
        q: [..., num_kv_heads, rows, head_dim], scaled already.
        k, v: [..., num_kv_heads, num_keys, head_dim].
        positions: of the queries, broadcast to [..., rows, 1].
        num_seen: keys that every query sees.
    """
    key_positions = torch.arange(k.shape[-2], device=q.device)
    scores = q @ k.mT
    if score_mod is not None:
        scores = score_mod(layer, scores, positions, key_positions)
    scores[..., num_seen:].masked_fill_(key_positions[num_seen:] > positions, -math.inf)
    return torch.softmax(scores, -1) @ v  # in float32 within, for any dtype
