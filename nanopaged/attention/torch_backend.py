"""Paged attention in large PyTorch operations: the backend for CPUs, and the base class of the GPU backends.

It computes the same as `ReferenceAttention`. Prefills run one sequence after another, because each is enough
work for large operations. Decodes have one query each, so all decodes of a batch are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.key_rows import KeyRows, share_blocks
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.reference_backend import ScoreMod
from nanopaged.kv_cache import KVCache, to_device

LOG2_E = math.log2(math.e)
ROW_KEYS = 64  # keys in a row, see `begin_decodes`: smaller matrix products take nearly as long
# Bytes of K and V in a layer whose reading must be saved for a matrix product of their own (docs/cpu.md)
MIN_SAVED = 2 << 20
QUERY_TILE = 96  # queries of a prefill computed at once: their scores fit in the CPU's cache


class TorchAttention:
    """Paged attention over one KV cache. `nanopaged.attention` describes the order of calls and the shapes.

    The work has three parts, and each is a pair of methods: one that prepares a step, one that computes a
    layer. A subclass overrides pairs: `TritonAttention` and `CppAttention` the first two, `FlashAttention`
    the third.

        begin_store      store      the new K/V go to their slots
        begin_decodes    decode     one query a sequence
        begin_prefills   prefill    many queries a sequence

    The attributes that are not set in `__init__` belong to the present step, and are described in the
    method that sets them.
    """

    supports_cuda_graphs = False
    fused: dict[str, Callable[..., Tensor]] = {}  # small operations of a layer, see `Operations`

    def __init__(self, cache: KVCache, scale: float, score_mod: ScoreMod | None = None) -> None:
        self.cache = cache
        self.scale = scale
        self.score_mod = score_mod
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
        k, v = self.cache.pack(k), self.cache.pack(v)
        self.store(layer, k, v)
        if n == len(q):
            return self.decode(layer, q)
        if n == 0:
            return self.prefill(layer, q, k, v)
        return torch.cat((self.decode(layer, q[:n]), self.prefill(layer, q[n:], k[n:], v[n:])))

    # ── storing ───────────────────────────────────────────────────────────────────────────────────

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Slots as (block, offset): block_size = 4, slot 9 is block 2, offset 1."""
        blocks, offsets = np.divmod(metadata.slot_mapping, self.cache.block_size)
        self.clear(blocks[offsets == 0])
        self.blocks, self.offsets = to_device(np.array((blocks, offsets)), self.device)

    def clear(self, blocks: np.ndarray) -> None:
        """Fill blocks with zeros, in all layers, when their first slot is about to be written.

        `decode` also reads the slots of a block that no token has reached yet. They have weight 0, but a
        former owner, or memory that was never written, may have left NaN there, and 0 · NaN = NaN.
        """
        self.cache.data.index_fill_(0, to_device(blocks, self.device), 0)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the encoded k, v [num_tokens, num_kv_heads, head_dim] of the whole batch to their slots."""
        k_cache, v_cache = self.cache.layer(layer)
        k_cache[self.blocks, :, self.offsets] = k
        v_cache[self.blocks, :, self.offsets] = v

    # ── decodes ───────────────────────────────────────────────────────────────────────────────────

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Lay out the blocks of all decodes as rows of keys.

        Each table is cut into rows of about ROW_KEYS keys: four blocks of 16, or one block of 64 or more. So
        the work is proportional to the blocks that exist, without padding to the longest context. The last
        row of a sequence is filled up with copies of its last block; slots without a key are masked.

            tables  0: [5, 2, 7]   1: [0]   2: [3, 8, 1]      block_size = 32, context_lens 70, 20, 96

                     ─ full rows ─   ─────── last rows ──────
            blocks    5,2     3,8     7,7      0,0      1,1
            row_seq    0       2       0        1        2
            keys       64      64      6        20       32

        The blocks with which several tables begin are one long row, read once for all of these sequences, if
        that is worth it (`share_blocks`).
        """
        size, num_seqs = self.cache.block_size, self.num_decodes
        context_lens, tables = metadata.context_lens[:num_seqs], metadata.block_tables[:num_seqs]
        min_saved = MIN_SAVED // (2 * self.cache.head_blocks(0)[: self.cache.shape.num_kv_heads].nbytes)
        shared, num_shared = share_blocks(metadata, size, min_saved)

        width = max(1, ROW_KEYS // size)  # blocks in a row
        row_keys = width * size
        num_keys = context_lens - num_shared * size
        num_rows = -(-num_keys // row_keys)  # of each sequence
        num_blocks = -(-context_lens // size)  # a table may have blocks for later tokens too
        full_rows, last_rows, row_seq = [], [], []
        for seq, table in enumerate(tables):
            own, full = table[num_shared[seq] : num_blocks[seq]], int(num_rows[seq] - 1) * width
            full_rows += own[:full]
            row_seq += [seq] * (full // width)
            last_rows += own[full:] + own[-1:] * (full + width - len(own))
        row_seq += range(num_seqs)
        last_lens = num_keys - (num_rows - 1) * row_keys  # keys in the last row of each sequence
        no_key = np.arange(row_keys) >= last_lens[:, None]
        self.no_key = to_device(no_key[:, None], self.device)  # [num_seqs, 1, row_keys]
        self.rows = [KeyRows(self.cache, tables[seqs[0]][first:end], [seqs]) for seqs, first, end in shared]
        self.rows.append(KeyRows(self.cache, full_rows + last_rows, [[seq] for seq in row_seq]))

        if self.score_mod is not None:
            first_keys = [[first * size] for _, first, _ in shared] + [[]]  # 0 0 64 0 64 in the example
            seen = num_shared * size
            for seq in row_seq:
                first_keys[-1].append(seen[seq])
                seen[seq] += row_keys
            for rows, first in zip(self.rows, first_keys, strict=True):
                rows.set_positions(context_lens - 1, first)

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """Attention of one query of each sequence: q → out, both [num_seqs, num_heads, head_dim].

        The scores of all rows come first, then their softmax over the rows of each sequence, then the values:

            p_i = 2^(s_i - M) / Σ 2^(s_j - M)       out = Σ p_i · v_i       with M = max s_j

        The sums go over all keys of a sequence. Scores are multiplied by log2(e), since
        2^(x · log2(e)) = e^x and exp2 takes a third of exp's time.
        """
        num_seqs, num_heads, _ = q.shape
        pool = self.cache.head_blocks(layer)
        scaled_q = q * (self.scale * LOG2_E)
        scores = []
        for rows in self.rows:
            s = rows.times_keys(pool, rows.spread(scaled_q)).float()
            if self.score_mod is not None:
                s = rows.modify(s / LOG2_E, partial(self.score_mod, layer)) * LOG2_E
            scores.append(s)
        own = scores[-1].view(-1, num_heads, self.no_key.shape[-1])  # each of these rows has one reader
        own[-num_seqs:].masked_fill_(self.no_key, -math.inf)

        top = q.new_full((num_seqs, num_heads, 1), -math.inf, dtype=torch.float32)
        for rows, s in zip(self.rows, scores, strict=True):
            row_top = rows.collect(s.amax(-1, keepdim=True))
            top.scatter_reduce_(0, rows.seqs[:, None, None].expand_as(row_top), row_top, "amax")
        total = torch.zeros_like(top)
        for rows, s in zip(self.rows, scores, strict=True):
            p = s.sub_(rows.spread(top)).exp2_()
            total.index_add_(0, rows.seqs, rows.collect(p.sum(-1, keepdim=True)))
        share = total.reciprocal_()  # a division takes several times as long as a multiplication
        out = torch.zeros_like(q, dtype=torch.float32)
        for rows, p in zip(self.rows, scores, strict=True):
            p = p.mul_(rows.spread(share)).to(q.dtype)
            out.index_add_(0, rows.seqs, rows.collect(rows.times_values(pool, p)).float())
        return out.to(q.dtype)

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
        score_mod = partial(self.score_mod, layer) if self.score_mod is not None else None
        q = q * self.scale
        out = torch.empty_like(q)
        for tokens, table, context_len in self.prefills:
            if table is None:
                # [num_kv_heads, tokens, head_dim], contiguous because every tile of queries reads them
                keys, values = (torch.stack(x[tokens].unbind(1)) for x in (k, v))
            else:
                keys = gather_context(k_cache, table, context_len)
                values = gather_context(v_cache, table, context_len)
            keys, values = self.cache.unpack(keys), self.cache.unpack(values)
            out[tokens] = causal_attention(q[tokens], keys, values, score_mod)
        return out


def gather_context(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """Copy a sequence's keys (or values) out of its blocks: → [num_kv_heads, context_len, slot width].

    Args:
        cache: K or V of one layer, [num_blocks, num_kv_heads, block_size, slot width].
        block_table: int64 [at least the blocks of the context].
    """
    num_blocks = -(-context_len // cache.shape[2])
    blocks = cache.index_select(0, block_table[:num_blocks])  # [blocks, num_kv_heads, block_size, slot width]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """The last `query_len` tokens of a context attend to it, each up to and including itself.

    The causal mask is aligned to the end: with 3 cached keys, query 0 attends to keys 0 to 3. Queries are
    computed in tiles, so that the scores stay small and no tile reads keys after its last query. On a CPU
    this is faster than `scaled_dot_product_attention` with a mask matrix [query_len, context_len].

    Args:
        q: [query_len, num_heads, head_dim], scaled already.
        k, v: [num_kv_heads, context_len, head_dim].
        score_mod: of this layer, see `nanopaged.attention`.

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
        scores = (queries @ k[:, :visible].mT).view(num_kv_heads, -1, hi - lo, visible)
        if score_mod is not None:
            positions = torch.arange(visible, device=q.device)
            scores = score_mod(scores, positions[lo - hi :, None], positions)
        future = torch.ones(hi - lo, hi - lo, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., visible - (hi - lo) :].masked_fill_(future, -math.inf)
        p = torch.softmax(scores, -1).view(num_kv_heads, -1, visible)  # in float32 within, for any dtype
        tile = (p @ v[:, :visible]).view(num_kv_heads, -1, hi - lo, head_dim)
        out[lo:hi] = tile.permute(2, 0, 1, 3).reshape(hi - lo, num_heads, head_dim)
    return out
