"""Paged attention in few large PyTorch operations: what runs on a CPU, and anywhere else.

It computes what `reference_attention.py` computes. A chunk of a prompt attends one sequence
at a time, since there is enough work in it. Decodes have one query each, so all of a batch go together,
over a flat list of (block, owner) pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanopaged.attention import Attend, PagedBatch, slots_of, store_kv
from nanopaged.kv_cache import KVCache

QUERY_TILE = 64  # queries of a prefill that attend at once: their scores stay in the CPU's cache
KEY_TILE = 2048  # keys that decodes read at once; see `DecodePlan.attend`


class TorchAttention:
    """Decodes over a flat list of (block, owner) pairs, prefill chunks one sequence at a time."""

    def __init__(self, cache: KVCache, scale: float) -> None:
        self.cache = cache
        self.scale = scale

    def plan(self, batch: PagedBatch) -> Attend:
        cache, scale, num_decodes = self.cache, self.scale, batch.num_decodes
        device = cache.data.device
        blocks, offsets = slots_of(batch, cache)
        decodes = DecodePlan.of(batch, cache.block_size, device) if num_decodes else None
        chunks = _chunks(batch, device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(cache, layer, k, v, blocks, offsets)
            k_cache, v_cache = cache.layer(layer)
            q = q * scale
            out = torch.empty_like(q)
            if decodes is not None:
                out[:num_decodes] = decodes.attend(q[:num_decodes], k_cache, v_cache)
            for rows, table, context_len in chunks:
                if table is None:  # nothing came before the chunk: its own K/V is all there is
                    keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
                else:
                    keys = gather_context(k_cache, table, context_len)
                    values = gather_context(v_cache, table, context_len)
                out[rows] = causal_attention(q[rows], keys, values)
            return out

        return attend


@dataclass
class DecodePlan:
    """Every (physical block, sequence that reads it) pair of a batch of decodes.

    One row a pair, whatever the lengths: the work follows the blocks that exist, not the rectangle
    of the longest sequence, and a block shared by two sequences simply has two rows.

        tables  0: [5, 2]   1: [0]   2: [3, 8, 1]      block_size = 4, context_lens 6, 4, 9

                 ── full blocks ──   ─ last ones ─
        blocks     5     3     8      2   0   1
        owners     0     2     2      0   1   2        (a last block may be full, too)
        last_lens                     2   4   1
    """

    blocks: Tensor  # [num_pairs]
    owners: Tensor  # [num_pairs]
    num_full: int
    dead: Tensor  # [num_seqs, block_size]: slots of the last blocks that hold nothing

    @classmethod
    def of(cls, batch: PagedBatch, block_size: int, device: torch.device) -> DecodePlan:
        full, owners, last = [], [], []
        context_lens = batch.context_lens[: batch.num_decodes]
        num_blocks = -(-context_lens // block_size)
        for owner, (table, n) in enumerate(zip(batch.block_tables, num_blocks.tolist(), strict=False)):
            full += table[: n - 1]
            owners += [owner] * (n - 1)
            last.append(table[n - 1])
        last_lens = torch.from_numpy(context_lens - (num_blocks - 1) * block_size)
        return cls(
            blocks=torch.tensor(full + last, device=device),
            owners=torch.tensor(owners + list(range(len(last))), device=device),
            num_full=len(full),
            dead=(torch.arange(block_size) >= last_lens[:, None]).to(device),
        )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [num_seqs, num_heads, head_dim], scaled already → the same shape.

        Each pair gives a partial result (its maximum m, its sum l, its unnormalised output o); those
        of one owner are then combined as in the reference, only all at once:

            out = Σ exp(m_i - M) · o_i / Σ exp(m_i - M) · l_i       with M = max m_i

        Pairs go through in tiles of about KEY_TILE keys, whose K and V are copied out of the pool
        into a buffer small enough to stay in the CPU's cache from one tile to the next.
        """
        num_seqs, num_heads, head_dim = q.shape
        _, num_kv_heads, block_size, _ = k_cache.shape
        num_pairs = len(self.blocks)
        q = q.view(num_seqs, num_kv_heads, -1, head_dim)  # [num_seqs, num_kv_heads, group, head_dim]
        shape = (num_pairs, *q.shape[1:])
        o = q.new_empty(shape)
        m = q.new_empty((*shape[:-1], 1), dtype=torch.float32)
        l = torch.empty_like(m)
        tile = min(num_pairs, max(1, KEY_TILE // block_size))
        k_tile, v_tile = q.new_empty((2, tile, *k_cache.shape[1:]))
        for lo, hi, is_last in self._tiles(tile):
            # [pairs, num_kv_heads, block_size, head_dim]
            keys = torch.index_select(k_cache, 0, self.blocks[lo:hi], out=k_tile[: hi - lo])
            values = torch.index_select(v_cache, 0, self.blocks[lo:hi], out=v_tile[: hi - lo])
            queries = q.index_select(0, self.owners[lo:hi])
            scores = torch.matmul(queries, keys.transpose(2, 3)).float()
            if is_last:  # what lies beyond the context may be anything, even NaN, and 0 · NaN is NaN
                dead = self.dead[lo - self.num_full : hi - self.num_full, None]
                scores.masked_fill_(dead[:, :, None], -math.inf)
                values.masked_fill_(dead[..., None], 0)
            torch.amax(scores, -1, keepdim=True, out=m[lo:hi])
            p = scores.sub_(m[lo:hi]).exp_()
            torch.sum(p, -1, keepdim=True, out=l[lo:hi])
            torch.matmul(p.to(q.dtype), values, out=o[lo:hi])
        return self._combine(m, l, o, num_seqs).view(num_seqs, num_heads, head_dim).to(q.dtype)

    def _tiles(self, size: int) -> list[tuple[int, int, bool]]:
        """(from, to, are they last blocks) for runs of at most `size` pairs."""
        full = [(lo, min(lo + size, self.num_full), False) for lo in range(0, self.num_full, size)]
        num_pairs = len(self.blocks)
        return full + [(lo, min(lo + size, num_pairs), True) for lo in range(self.num_full, num_pairs, size)]

    def _combine(self, m: Tensor, l: Tensor, o: Tensor, num_seqs: int) -> Tensor:
        """The partial results of each owner, weighted by exp(m - M) and normalised by their sum."""
        owners = self.owners
        index = owners[:, None, None, None].expand_as(m)
        top = m.new_full((num_seqs, *m.shape[1:]), -math.inf).scatter_reduce_(0, index, m, "amax")
        weight = torch.exp(m - top[owners])
        total = torch.zeros_like(top).index_add_(0, owners, weight * l)
        weight /= total[owners]
        out = m.new_zeros((num_seqs, *o.shape[1:]))
        return out.index_add_(0, owners, o * weight)


def _chunks(batch: PagedBatch, device: torch.device) -> list[tuple[slice, Tensor | None, int]]:
    """(rows of the flat batch, block table or None if nothing was cached, context length) of each chunk."""
    chunks, row = [], batch.num_decodes
    for i in range(batch.num_decodes, len(batch.block_tables)):
        query_len, context_len = int(batch.query_lens[i]), int(batch.context_lens[i])
        table = None
        if context_len > query_len:
            table = torch.tensor(batch.block_tables[i], device=device)
        chunks.append((slice(row, row + query_len), table, context_len))
        row += query_len
    return chunks


def gather_context(cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """A sequence's keys (or values) out of its blocks, as one [num_kv_heads, context_len, head_dim]."""
    num_blocks = -(-context_len // cache.shape[2])
    blocks = cache.index_select(0, table[:num_blocks])  # [num_blocks, num_kv_heads, block_size, head_dim]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last `len(q)` tokens of a context attend to it, each up to itself.

    q [query_len, num_heads, head_dim], scaled already; k, v [num_kv_heads, context_len, head_dim].
    The mask is aligned to the end: with 3 cached keys, query 0 sees keys 0 to 3.

    In tiles of queries, so that the scores stay small and no tile looks at keys beyond its last query:
    on a CPU this beats `scaled_dot_product_attention`, which has no mask of this shape without a
    matrix of query_len x context_len.
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = k.shape
    out = torch.empty_like(q)
    for lo in range(0, query_len, QUERY_TILE):
        hi = min(lo + QUERY_TILE, query_len)
        visible = context_len - query_len + hi  # keys up to the tile's last query
        rows = q[lo:hi].view(hi - lo, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        queries = rows.reshape(num_kv_heads, -1, head_dim)  # [num_kv_heads, group · tile, head_dim]
        scores = (queries @ k[:, :visible].transpose(1, 2)).float()
        scores = scores.view(num_kv_heads, -1, hi - lo, visible)
        future = torch.ones(hi - lo, hi - lo, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., visible - (hi - lo) :].masked_fill_(future, -math.inf)
        p = torch.softmax(scores, -1).to(q.dtype).view(num_kv_heads, -1, visible)
        tile = (p @ v[:, :visible]).view(num_kv_heads, -1, hi - lo, head_dim)
        out[lo:hi] = tile.permute(2, 0, 1, 3).reshape(hi - lo, num_heads, head_dim)
    return out
