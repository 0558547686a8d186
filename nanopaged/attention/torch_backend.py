"""Paged attention in few large PyTorch operations: what runs on a CPU, and anywhere else.

It computes what `reference_attention.py` computes. A chunk of a prompt attends one sequence at a time, since
there is enough work in it. Decodes have one query each, so all of a batch go together, over a flat list
of (blocks, owner) rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import PagedBatch
from nanopaged.device import send
from nanopaged.kv_cache import KVCache

QUERY_TILE = 128  # queries of a prefill that attend at once: their scores stay in the CPU's cache
LOG2_E = math.log2(math.e)
ROW_KEYS = 64  # keys in a row of decodes: smaller matrix products cost nearly as much
KV_TILE = 8 << 20  # bytes of K/V that decodes read at once; see `DecodePlan`


@dataclass
class Tile:
    """Some rows of a `DecodePlan`, as many as are read at once."""

    rows: slice
    runs: Tensor  # [2 · rows · num_kv_heads · blocks a row]: where their K, then V are, see `KVCache.runs`
    owners: Tensor  # [rows]
    last: slice  # those of the rows that are their owner's last: some of their slots are no key of it
    bits: Tensor  # [those, 1, keys a row, 1]: all bits for a key, none for another slot
    bias: Tensor  # [those, 1, 1, keys a row]: 0 for a key, -inf for another slot


class DecodePlan:
    """The blocks that a batch of decodes reads, as rows of (a few blocks, the sequence that reads them).

    The work follows the blocks that exist, not the rectangle of the longest sequence, and a block shared by
    two sequences simply stands in two rows. Blocks of 16 go four to a row, those of 64 and more alone; the
    last row of a sequence is filled up with whatever block, and masked.

        tables  0: [5, 2, 7]   1: [0]   2: [3, 8, 1]      block_size = 32, context_lens 70, 20, 96

                 ─ full rows ─   ────── last ones ──────
        blocks    5,2     3,8     7,7      0,0      1,1
        owners     0       2       0        1        2
        keys       64      64      6        20       32

    Rows are read in tiles of about KV_TILE bytes: few, because each costs a dozen calls, but small
    enough for a CPU's cache, since what is copied out of the pool is read again at once.
    """

    def __init__(self, batch: PagedBatch, cache: KVCache, scale: float) -> None:
        """Lay out the rows of the batch's decodes, the full ones first, and cut them into tiles."""
        device = cache.data.device
        width = max(1, ROW_KEYS // cache.block_size)  # blocks a row
        keys = width * cache.block_size
        full, owners, last = [], [], []
        context_lens = batch.context_lens[: batch.num_decodes]
        num_rows = -(-context_lens // keys)
        for owner, (table, n) in enumerate(zip(batch.block_tables, num_rows.tolist(), strict=False)):
            full += table[: (n - 1) * width]
            owners += [owner] * (n - 1)
            rest = table[(n - 1) * width : n * width]
            last += rest + rest[-1:] * (width - len(rest))
        last_lens = context_lens - (num_rows - 1) * keys
        is_key = send(np.arange(keys) < last_lens[:, None], device)
        blocks = send(np.array(full + last), device).view(-1, width)
        runs = cache.run_ids(blocks).transpose(2, 3)  # [2, num_rows, num_kv_heads, width]
        self.cache = cache
        self.scale = scale
        self.owners = send(np.array(owners + list(range(batch.num_decodes))), device)  # [num_rows]
        self.tiles = list(_tiles(runs, self.owners, is_key, cache))
        # A tile's K, then its V: [the longest list of runs, block_size · head_dim]
        self.buffer = cache.data.new_empty(len(self.tiles[0].runs), cache.block_size * cache.shape.head_dim)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [num_seqs, num_heads, head_dim] → their outputs, of the same shape.

        Each row gives a partial result (its maximum m, its sum l, its output o); those of one owner are then
        combined as in the reference, only all at once:

            out = Σ w_i · o_i / Σ w_i       with w_i = 2^(m_i - M) · l_i and M = max m_i

        Scores are multiplied by log2(e), for 2^(x · log2(e)) = e^x and exp2 takes a third of exp's time.
        """
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads, num_rows = self.cache.shape.num_kv_heads, len(self.owners)
        # [num_seqs, num_kv_heads, group, head_dim]: the query heads that share a KV head lie together
        q = (q * self.scale).view(num_seqs, num_kv_heads, -1, head_dim)
        o = q.new_empty((num_rows, *q.shape[1:]))
        m = q.new_empty((num_rows, *q.shape[1:3], 1), dtype=torch.float32)
        l = torch.empty_like(m)
        pool = self.cache.runs(layer)
        for tile in self.tiles:
            kv = torch.index_select(pool, 0, tile.runs, out=self.buffer[: len(tile.runs)])
            kv = kv.view(2, len(tile.owners), num_kv_heads, -1, head_dim)
            # What is no key may be anything, even NaN, which neither -inf nor a weight of 0 makes good.
            kv[:, tile.last].view(tile.bits.dtype).bitwise_and_(tile.bits)
            keys, values = kv
            scores = torch.matmul(q.index_select(0, tile.owners), keys.mT).float().mul_(LOG2_E)
            scores[tile.last] += tile.bias
            torch.amax(scores, -1, keepdim=True, out=m[tile.rows])
            p = scores.sub_(m[tile.rows]).exp2_()
            torch.sum(p, -1, keepdim=True, out=l[tile.rows])
            torch.matmul(p.div_(l[tile.rows]).to(q.dtype), values, out=o[tile.rows])
        return self._combine(m, l, o, num_seqs).view(num_seqs, num_heads, head_dim).to(q.dtype)

    def _combine(self, m: Tensor, l: Tensor, o: Tensor, num_seqs: int) -> Tensor:
        """The partial results of each owner, weighted by 2^(m - M) · l."""
        owners = self.owners
        index = owners[:, None, None, None].expand_as(m)
        top = m.new_full((num_seqs, *m.shape[1:]), -math.inf).scatter_reduce_(0, index, m, "amax")
        weight = m.sub_(top.index_select(0, owners)).exp2_().mul_(l)
        total = torch.zeros_like(top).index_add_(0, owners, weight)
        out = m.new_zeros((num_seqs, *o.shape[1:]))
        return out.index_add_(0, owners, o * weight).div_(total)


def _tiles(runs: Tensor, owners: Tensor, is_key: Tensor, cache: KVCache) -> Iterator[Tile]:
    """Cut rows into tiles of about one size, each of at most KV_TILE bytes (or a row).

    Args:
        runs: [2, num_rows, num_kv_heads, blocks a row].
        is_key: [num_seqs, keys a row], for the last row of each sequence.
    """
    num_rows, num_full = len(owners), len(owners) - len(is_key)
    is_key = is_key[:, None, None]
    integer = {2: torch.int16, 4: torch.int32}[cache.data.element_size()]
    bits = -is_key.to(integer).mT  # the integer -1 has all bits set
    bias = torch.where(is_key, 0.0, -math.inf)
    row_bytes = runs.shape[3] * cache.shape.block_bytes(cache.block_size) // cache.shape.num_layers
    num_tiles = min(num_rows, -(-num_rows * row_bytes // KV_TILE))
    size = -(-num_rows // num_tiles)
    for lo in range(0, num_rows, size):
        hi = min(lo + size, num_rows)
        first = min(max(lo, num_full), hi)  # of the last rows
        masks = slice(max(lo - num_full, 0), max(hi - num_full, 0))
        last = slice(first - lo, hi - lo)
        yield Tile(slice(lo, hi), runs[:, lo:hi].flatten(), owners[lo:hi], last, bits[masks], bias[masks])


class ChunkPlan:
    """Chunks of prompts, one after another."""

    def __init__(self, batch: PagedBatch, cache: KVCache, scale: float) -> None:
        self.cache = cache
        self.scale = scale
        self.chunks: list[tuple[slice, Tensor | None, int]] = []
        """(rows among the chunks' queries, block table or None if nothing was cached, context length)"""
        row = 0
        for i in range(batch.num_decodes, len(batch.block_tables)):
            query_len, context_len = int(batch.query_lens[i]), int(batch.context_lens[i])
            table = None
            if context_len > query_len:
                table = send(np.array(batch.block_tables[i]), cache.data.device)
            self.chunks.append((slice(row, row + query_len), table, context_len))
            row += query_len

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] and the new k, v → what each query attends to."""
        k_cache, v_cache = self.cache.layer(layer)
        q = q * self.scale
        out = torch.empty_like(q)
        for rows, table, context_len in self.chunks:
            if table is None:  # nothing came before the chunk: its own K/V is all there is
                keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            else:
                keys = gather_context(k_cache, table, context_len)
                values = gather_context(v_cache, table, context_len)
            out[rows] = causal_attention(q[rows], keys, values)
        return out


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
