"""Paged attention in large PyTorch operations: the backend for CPUs, and the base class of the GPU backends.

It computes the same as `ReferenceAttention`. Prefills run one sequence after another, because each is enough
work for large operations. Decodes have one query each, so all decodes of a batch are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.kv_cache import KVCache, to_device

LOG2_E = math.log2(math.e)
ROW_KEYS = 64  # keys in a row, see `begin_decodes`: smaller matrix products take nearly as long
KV_TILE = 8 << 20  # bytes of K/V in a tile of rows, see `TorchAttention.begin_decodes`
QUERY_TILE = 128  # queries of a prefill computed at once: their scores fit in the CPU's cache


class TorchAttention:
    """Paged attention over one KV cache. `nanopaged.attention` describes the order of calls and the shapes.

    The work has three parts, and each is a pair of methods: one that prepares a step, one that computes a
    layer. A subclass overrides pairs: `TritonAttention` the first two, `FlashAttention` the third.

        begin_store      store      the new K/V go to their slots
        begin_decodes    decode     one query a sequence
        begin_prefills   prefill    many queries a sequence

    The attributes that are not set in `__init__` belong to the present step: `num_decodes`; `blocks` and
    `offsets` of the new tokens' slots; `row_seq`, `tiles` and `buffer` of the decodes; `prefills`.
    """

    supports_cuda_graphs = False

    def __init__(self, cache: KVCache, scale: float) -> None:
        self.cache = cache
        self.scale = scale
        self.device = cache.data.device

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share."""
        self.num_decodes = metadata.num_decodes
        self.begin_store(metadata)
        if metadata.num_decodes > 0:
            self.begin_decodes(metadata)
        if metadata.num_decodes < len(metadata.query_lens):
            self.begin_prefills(metadata)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: store all new K/V, then decode the first `num_decodes` tokens, and prefill the rest."""
        n = self.num_decodes
        k, v = self.cache.encode(k), self.cache.encode(v)
        self.store(layer, k, v)
        if n == len(q):
            return self.decode(layer, q)
        if n == 0:
            return self.prefill(layer, q, k, v)
        return torch.cat((self.decode(layer, q[:n]), self.prefill(layer, q[n:], k[n:], v[n:])))

    # ── storing ───────────────────────────────────────────────────────────────────────────────────

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Slots as (block, offset): block_size = 4, slot 9 is block 2, offset 1."""
        indices = np.array(np.divmod(metadata.slot_mapping, self.cache.block_size))
        self.blocks, self.offsets = to_device(indices, self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the encoded k, v [num_tokens, num_kv_heads, head_dim] of the whole batch to their slots."""
        k_cache, v_cache = self.cache.layer(layer)
        k_cache[self.blocks, :, self.offsets] = k
        v_cache[self.blocks, :, self.offsets] = v

    # ── decodes ───────────────────────────────────────────────────────────────────────────────────

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Lay out the blocks of all decodes as rows of about ROW_KEYS keys, each read by one sequence.

        So the work is proportional to the blocks that exist, without padding to the longest context. A row
        has four blocks of 16, or one block of 64 or more. A block shared by two sequences is in two rows. The
        last row of a sequence is filled up with copies of its last block; slots without a key are masked.

            tables  0: [5, 2, 7]   1: [0]   2: [3, 8, 1]      block_size = 32, context_lens 70, 20, 96

                     ─ full rows ─   ─────── last rows ──────
            blocks    5,2     3,8     7,7      0,0      1,1
            row_seq    0       2       0        1        2
            keys       64      64      6        20       32

        Rows are computed in tiles of about KV_TILE bytes of K/V. A tile costs a dozen PyTorch calls, so there
        should be few. But a tile should fit in the CPU's cache, because it is gathered and then read.
        """
        width = max(1, ROW_KEYS // self.cache.block_size)  # blocks in a row
        row_keys = width * self.cache.block_size
        context_lens = metadata.context_lens[: self.num_decodes]
        num_rows = -(-context_lens // row_keys)  # of each sequence
        full_blocks, row_seq, last_blocks = [], [], []
        for seq, (table, n) in enumerate(zip(metadata.block_tables, num_rows.tolist(), strict=False)):
            full_blocks += table[: (n - 1) * width]
            row_seq += [seq] * (n - 1)
            rest = table[(n - 1) * width : n * width]
            last_blocks += rest + rest[-1:] * (width - len(rest))
        last_lens = context_lens - (num_rows - 1) * row_keys  # keys in the last row of each sequence
        is_key = to_device(np.arange(row_keys) < last_lens[:, None], self.device)
        blocks = to_device(np.array(full_blocks + last_blocks), self.device).view(-1, width)
        row_seq += range(self.num_decodes)
        self.row_seq = to_device(np.array(row_seq), self.device)  # [num_rows]
        self.tiles = list(self._tiles(blocks, is_key))
        # For the gathered K and V of a tile: [most head blocks in a tile, block_size · head_dim]
        pool = self.cache.head_blocks(0)
        self.buffer = pool.new_empty(len(self.tiles[0].head_blocks), pool.shape[1])

    def _tiles(self, blocks: Tensor, is_key: Tensor) -> Iterator[DecodeTile]:
        """Cut the rows into tiles of nearly equal size: at most KV_TILE bytes, but at least one row.

        Args:
            blocks: [num_rows, blocks in a row], full rows first.
            is_key: [num_seqs, keys in a row], which slots of each sequence's last row hold its keys.
        """
        num_rows, num_full = len(blocks), len(blocks) - len(is_key)
        # [2, num_rows, num_kv_heads, blocks in a row], so that the keys of a row and head lie together
        head_blocks = self.cache.head_block_ids(blocks).transpose(2, 3)
        is_key = is_key[:, None, None]
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[self.cache.data.element_size()]
        bits = -is_key.to(integer).mT  # the integer -1 has all bits set
        bias = torch.where(is_key, 0.0, -math.inf)
        row_bytes = blocks.shape[1] * self.cache.data[0, 0].nbytes
        num_tiles = min(num_rows, -(-num_rows * row_bytes // KV_TILE))
        size = -(-num_rows // num_tiles)
        for lo in range(0, num_rows, size):
            hi = min(lo + size, num_rows)
            first_last = min(max(lo, num_full), hi)  # the tile's first row that needs a mask
            seqs = slice(first_last - num_full, hi - num_full)  # of the rows with a mask; may be empty
            last = slice(first_last - lo, hi - lo)
            ids, row_seq = head_blocks[:, lo:hi].flatten(), self.row_seq[lo:hi]
            yield DecodeTile(slice(lo, hi), ids, row_seq, last, bits[seqs], bias[seqs])

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """Attention of one query of each sequence: q → out, both [num_seqs, num_heads, head_dim].

        Each row gives a partial result: its maximum m, its sum l and its output o. The rows of a sequence are
        then combined as the reference combines blocks, but all at once:

            out = Σ w_i · o_i / Σ w_i       with w_i = 2^(m_i - M) · l_i and M = max m_i

        Scores are multiplied by log2(e), since 2^(x · log2(e)) = e^x and exp2 takes a third of exp's time.
        """
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads, row_seq = self.cache.shape.num_kv_heads, self.row_seq
        # [num_seqs, num_kv_heads, group, head_dim]: the query heads that share a KV head lie together
        q = (q * self.scale).view(num_seqs, num_kv_heads, -1, head_dim)
        o = q.new_empty((len(row_seq), *q.shape[1:]))
        m = q.new_empty((len(row_seq), *q.shape[1:3], 1), dtype=torch.float32)
        l = torch.empty_like(m)
        pool = self.cache.head_blocks(layer)
        for tile in self.tiles:
            ids = tile.head_blocks
            kv = torch.index_select(pool, 0, ids, out=self.buffer[: len(ids)])
            kv = kv.view(2, len(tile.row_seq), num_kv_heads, tile.bits.shape[2], -1)
            # Slots without a key may hold NaN, and NaN · 0 = NaN: K and V are zeroed there as well as masked.
            kv[:, tile.last].view(tile.bits.dtype).bitwise_and_(tile.bits)
            keys, values = self.cache.decode(kv)  # each [rows, num_kv_heads, keys in a row, head_dim]
            scores = torch.matmul(q.index_select(0, tile.row_seq), keys.mT).float().mul_(LOG2_E)
            scores[tile.last] += tile.bias
            torch.amax(scores, -1, keepdim=True, out=m[tile.rows])
            p = scores.sub_(m[tile.rows]).exp2_()
            torch.sum(p, -1, keepdim=True, out=l[tile.rows])
            torch.matmul(p.div_(l[tile.rows]).to(q.dtype), values, out=o[tile.rows])
        index = row_seq[:, None, None, None].expand_as(m)
        top = m.new_full((num_seqs, *m.shape[1:]), -math.inf).scatter_reduce_(0, index, m, "amax")
        weight = m.sub_(top.index_select(0, row_seq)).exp2_().mul_(l)
        total = torch.zeros_like(top).index_add_(0, row_seq, weight)
        out = m.new_zeros((num_seqs, *o.shape[1:])).index_add_(0, row_seq, o * weight).div_(total)
        return out.view(num_seqs, num_heads, head_dim).to(q.dtype)

    # ── prefills ──────────────────────────────────────────────────────────────────────────────────

    def begin_prefills(self, metadata: AttentionMetadata) -> None:
        """Note which tokens belong to each prefill, and send the block table if it has a cached context."""
        self.prefills: list[tuple[slice, Tensor | None, int]] = []  # (tokens, block table, context length)
        start = 0  # among the tokens of the prefills
        for i in range(metadata.num_decodes, len(metadata.block_tables)):
            query_len, context_len = int(metadata.query_lens[i]), int(metadata.context_lens[i])
            table = None
            if context_len > query_len:
                table = to_device(np.array(metadata.block_tables[i]), self.device)
            self.prefills.append((slice(start, start + query_len), table, context_len))
            start += query_len

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all tokens of the prefills: q [num_tokens, num_heads, head_dim], encoded k, v → out.

        A prefill without a cached context reads the new k, v directly; else its blocks are gathered first.
        """
        k_cache, v_cache = self.cache.layer(layer)
        q = q * self.scale
        out = torch.empty_like(q)
        for tokens, table, context_len in self.prefills:
            if table is None:
                keys, values = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1)
            else:
                keys = gather_context(k_cache, table, context_len)
                values = gather_context(v_cache, table, context_len)
            out[tokens] = causal_attention(q[tokens], self.cache.decode(keys), self.cache.decode(values))
        return out


@dataclass
class DecodeTile:
    """Rows of decodes that are computed together, see `TorchAttention.begin_decodes`."""

    rows: slice  # the tile, among all rows
    head_blocks: Tensor  # [2 (K, V) · rows · num_kv_heads · blocks in a row], rows of `KVCache.head_blocks`
    row_seq: Tensor  # [rows], the sequence that reads each row
    last: slice  # the rows of the tile that are the last of a sequence and need a mask
    bits: Tensor  # [last rows, 1, keys in a row, 1], all bits set for a key, none for an unused slot
    bias: Tensor  # [last rows, 1, 1, keys in a row], 0 for a key, -inf for an unused slot


def gather_context(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """Copy a sequence's keys (or values) out of its blocks: → [num_kv_heads, context_len, head_dim].

    Args:
        cache: K or V of one layer, [num_blocks, num_kv_heads, block_size, head_dim].
        block_table: int64 [at least the blocks of the context].
    """
    num_blocks = -(-context_len // cache.shape[2])
    blocks = cache.index_select(0, block_table[:num_blocks])  # [blocks, num_kv_heads, block_size, head_dim]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last `query_len` tokens of a context attend to it, each up to and including itself.

    The causal mask is aligned to the end: with 3 cached keys, query 0 attends to keys 0 to 3. Queries are
    computed in tiles, so that the scores stay small and no tile reads keys after its last query. On a CPU
    this is faster than `scaled_dot_product_attention` with a mask matrix [query_len, context_len].

    Args:
        q: [query_len, num_heads, head_dim], scaled already.
        k, v: [num_kv_heads, context_len, head_dim].

    Returns:
        [query_len, num_heads, head_dim]
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = k.shape
    out = torch.empty_like(q)
    for lo in range(0, query_len, QUERY_TILE):
        hi = min(lo + QUERY_TILE, query_len)
        visible = context_len - query_len + hi  # keys up to the tile's last query
        tile = q[lo:hi].view(hi - lo, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        queries = tile.reshape(num_kv_heads, -1, head_dim)  # [num_kv_heads, group · tile, head_dim]
        scores = (queries @ k[:, :visible].transpose(1, 2)).float()
        scores = scores.view(num_kv_heads, -1, hi - lo, visible)
        future = torch.ones(hi - lo, hi - lo, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., visible - (hi - lo) :].masked_fill_(future, -math.inf)
        p = torch.softmax(scores, -1).to(q.dtype).view(num_kv_heads, -1, visible)
        tile = (p @ v[:, :visible]).view(num_kv_heads, -1, hi - lo, head_dim)
        out[lo:hi] = tile.permute(2, 0, 1, 3).reshape(hi - lo, num_heads, head_dim)
    return out
