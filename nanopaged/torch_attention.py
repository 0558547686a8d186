"""Paged attention in few large PyTorch operations: what runs on a CPU, and anywhere else.

It computes what `reference_attention.py` computes. A chunk of a prompt attends one sequence at a time, since
there is enough work in it. Decodes have one query each, so all of a batch go together, over a flat list
of (blocks, owner) rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanopaged.attention import Attend, PagedBatch, slots_of, store_kv
from nanopaged.kv_cache import KVCache

QUERY_TILE = 64  # queries of a prefill that attend at once: their scores stay in the CPU's cache
ROW_KEYS = 64  # keys in a row of decodes: smaller matrix products cost nearly as much
KEY_TILE = 4096  # keys that decodes read at once; see `DecodePlan.attend`


class TorchAttention:
    """Decodes over a flat list of (blocks, owner) rows, prefill chunks one sequence at a time."""

    def __init__(self, cache: KVCache, scale: float) -> None:
        self.cache = cache
        self.scale = scale

    def plan(self, batch: PagedBatch) -> Attend:
        """The step's `attend`: store first, then decodes and chunks."""
        cache, scale, num_decodes = self.cache, self.scale, batch.num_decodes
        device = cache.data.device
        blocks, offsets = slots_of(batch, cache)
        decodes = DecodePlan.of(batch, cache) if num_decodes else None
        chunks = _chunks(batch, device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(cache, layer, k, v, blocks, offsets)
            k_cache, v_cache = cache.layer(layer)
            q = q * scale
            out = torch.empty_like(q)
            if decodes is not None:
                out[:num_decodes] = decodes.attend(q[:num_decodes], cache, layer)
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
    """The blocks that a batch of decodes reads, as rows of (a few blocks, the sequence that reads them).

    The work follows the blocks that exist, not the rectangle of the longest sequence, and a block shared by
    two sequences simply stands in two rows. Blocks of 16 go four to a row, those of 64 and more alone; the
    last row of a sequence is filled up with whatever block, and masked.

        tables  0: [5, 2, 7]   1: [0]   2: [3, 8, 1]      block_size = 32, context_lens 70, 20, 96

                 ─ full rows ─   ────── last ones ──────
        blocks    5,2     3,8     7,7      0,0      1,1
        owners     0       2       0        1        2
        keys       64      64      6        20       32
    """

    runs: Tensor  # [2, num_rows, num_kv_heads, blocks a row]: where K and V are, see `KVCache.runs`
    owners: Tensor  # [num_rows]
    num_full: int
    dead: Tensor  # [num_seqs, keys a row]: what in the last rows is no key of theirs
    tile: int  # rows that are read at once
    buffer: Tensor  # [tile · 2 · num_kv_heads · blocks a row, block_size · head_dim]: a tile's K, then its V

    @classmethod
    def of(cls, batch: PagedBatch, cache: KVCache) -> DecodePlan:
        """Lay out the rows of the batch's decodes, the full ones first."""
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
        blocks = torch.tensor(full + last, device=device).view(-1, width)
        last_lens = torch.from_numpy(context_lens - (num_rows - 1) * keys)
        tile = min(len(blocks), max(1, KEY_TILE // keys))
        num_runs = tile * 2 * cache.shape.num_kv_heads * width
        return cls(
            runs=cache.run_ids(blocks).transpose(2, 3),
            owners=torch.tensor(owners + list(range(batch.num_decodes)), device=device),
            num_full=len(owners),
            dead=(torch.arange(keys) >= last_lens[:, None]).to(device),
            tile=tile,
            buffer=cache.data.new_empty(num_runs, cache.runs.shape[1]),
        )

    def attend(self, q: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Queries [num_seqs, num_heads, head_dim], scaled already → their outputs, of the same shape.

        Each row gives a partial result (its maximum m, its sum l, its unnormalised output o); those
        of one owner are then combined as in the reference, only all at once:

            out = Σ exp(m_i - M) · o_i / Σ exp(m_i - M) · l_i       with M = max m_i

        Rows go through in tiles of about KEY_TILE keys, whose K and V are copied out of the pool into one
        buffer, the same for all tiles and layers.
        """
        num_seqs, num_heads, head_dim = q.shape
        _, num_rows, num_kv_heads, _ = self.runs.shape
        q = q.view(num_seqs, num_kv_heads, -1, head_dim)  # [num_seqs, num_kv_heads, group, head_dim]
        o = q.new_empty((num_rows, *q.shape[1:]))
        m = q.new_empty((num_rows, *q.shape[1:3], 1), dtype=torch.float32)
        l = torch.empty_like(m)
        runs = self.runs + cache.run_offset(layer)
        for lo in range(0, num_rows, self.tile):
            hi = min(lo + self.tile, num_rows)
            wanted = runs[:, lo:hi].flatten()
            kv = torch.index_select(cache.runs, 0, wanted, out=self.buffer[: len(wanted)])
            keys, values = kv.view(2, hi - lo, num_kv_heads, -1, head_dim)  # each [rows, …, keys a row, …]
            scores = torch.matmul(q.index_select(0, self.owners[lo:hi]), keys.transpose(2, 3)).float()
            if hi > self.num_full:
                first = max(lo, self.num_full)
                dead = self.dead[first - self.num_full : hi - self.num_full, None]
                scores[first - lo :].masked_fill_(dead[:, :, None], -math.inf)
                _clear(values[first - lo :], dead[..., None])
            torch.amax(scores, -1, keepdim=True, out=m[lo:hi])
            p = scores.sub_(m[lo:hi]).exp_()
            torch.sum(p, -1, keepdim=True, out=l[lo:hi])
            torch.matmul(p.to(q.dtype), values, out=o[lo:hi])
        return self._combine(m, l, o, num_seqs).view(num_seqs, num_heads, head_dim).to(q.dtype)

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


def _clear(values: Tensor, dead: Tensor) -> None:
    """Zero `values` where `dead`. What is no key may be anything, even NaN, and 0 · NaN would be NaN.

    It is done to the bits: a bitwise product is vectorised, and `masked_fill_` took ten times as long.
    """
    bits = {2: torch.int16, 4: torch.int32}[values.element_size()]
    values.view(bits).bitwise_and_(dead.to(bits) - 1)  # dead: 1 - 1 = no bits; alive: 0 - 1 = all bits


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
