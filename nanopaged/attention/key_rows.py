"""What the decode of `TorchAttention` reads: rows of keys, and which blocks several sequences share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.kv_cache import KVCache, to_device

KV_TILE = 4 << 20  # bytes of K (or of V) that are gathered at once: what the CPU's cache holds


class SharedBlocks(NamedTuple):
    """The blocks `first` to `end` of the tables of these sequences are the same."""

    seqs: list[int]
    first: int
    end: int


def find_shared_blocks(tables: list[list[int]], limits: list[int], min_saved: int) -> list[SharedBlocks]:
    """Groups of sequences whose block tables begin alike, and groups within these groups.

    Samples, beams and prefix hits alike share blocks, so the tables tell all that is needed. Here four
    requests have a system prompt in common, and two of them are samples of one prompt:

        tables  0: [5, 2, 7, 4]   1: [5, 2, 7, 9]   2: [5, 2, 3]   3: [5, 2, 6]   4: [8, 1]

        SharedBlocks([0, 1, 2, 3], 0, 2)    blocks 5 and 2 are read once instead of four times: 6 reads saved
        SharedBlocks([0, 1], 2, 3)          block 7: 1 read saved

    The groups of a sequence follow each other from its first block on, so the rest of its table is its own. A
    group that saves less than `min_saved` is left out; a group within it then begins where it would have.

    Args:
        limits: how many blocks of each sequence may be shared.
        min_saved: reads of blocks.
    """
    found: list[SharedBlocks] = []
    groups = [(list(range(len(tables))), 0, 0)]  # (sequences, blocks that they share, those of them found)
    while groups:
        seqs, depth, first = groups.pop()
        alike: dict[int, list[int]] = defaultdict(list)  # the next block → sequences
        for seq in seqs:
            if depth < limits[seq]:
                alike[tables[seq][depth]].append(seq)
        for group in alike.values():
            if len(group) == 1:
                continue
            # What the smallest and the largest of the tables begin with, all between them begin with.
            low, high = min(tables[seq] for seq in group), max(tables[seq] for seq in group)
            end, most = depth + 1, min(limits[seq] for seq in group)
            while end < most and low[end] == high[end]:
                end += 1
            is_worth_it = (len(group) - 1) * (end - first) >= min_saved
            if is_worth_it:
                found.append(SharedBlocks(group, first, end))
            groups.append((group, end, end if is_worth_it else first))
    return found


def share_blocks(
    metadata: AttentionMetadata, block_size: int, min_saved: int
) -> tuple[list[SharedBlocks], np.ndarray]:
    """What the decodes of a batch share, and how many blocks of each are read with others, [num_decodes].

    The last block of a sequence is its own: its newest token is written there.
    """
    context_lens = metadata.context_lens[: metadata.num_decodes]
    tables = metadata.block_tables[: metadata.num_decodes]
    found = find_shared_blocks(tables, ((context_lens - 1) // block_size).tolist(), min_saved)
    num_shared = np.zeros(len(tables), dtype=np.int64)
    for seqs, _, end in found:
        num_shared[seqs] = np.maximum(num_shared[seqs], end)
    return found, num_shared


class KeyRows:
    """Rows of keys, all of them of the same number of blocks, and read by the same number of sequences.

    A row of one KV head is multiplied by all queries that need it: those of the `group` of query heads that
    share the KV head, of all its readers.

        a row of 1,024 keys that 32 sequences share, 12 heads, 4 KV heads of 64:

        4 products for the scores    [32 · 3, 64] · [64, 1024]      instead of 128 · 16    [3, 64] · [64, 64]

    Args:
        blocks: of all rows, one after the other.
        readers: for each row, the sequences that read it.
    """

    def __init__(self, cache: KVCache, blocks: list[int], readers: list[list[int]]) -> None:
        self.cache = cache
        self.num_rows, self.num_readers = len(readers), len(readers[0])
        self.num_kv_heads = cache.shape.num_kv_heads
        device = cache.data.device
        self.seqs = to_device(np.array(readers).reshape(-1), device)  # [num_rows · num_readers]
        # In the order [2 (K, V), row, KV head, block in the row] the keys of a row and head lie together.
        ids = cache.head_block_ids(to_device(np.array(blocks), device).view(self.num_rows, -1))
        ids = ids.transpose(2, 3).reshape(2, self.num_rows * self.num_kv_heads, -1)
        pool = cache.head_blocks(0)  # [head blocks, block_size · slot width]
        # Tiles of at most KV_TILE bytes fit in the CPU's cache: a tile is gathered, and then read.
        num_tiles = -(-ids[0].numel() * pool[0].nbytes // KV_TILE)
        self.k_ids, self.v_ids = (half.chunk(num_tiles) for half in ids)  # tiles [rows · KV heads, blocks]
        self.buffer = pool.new_empty(self.k_ids[0].numel(), pool.shape[1])  # of one tile

    def spread(self, x: Tensor) -> Tensor:
        """x [num_seqs, num_heads, size] → [rows · KV heads, readers · group, size], a copy for each row."""
        size = x.shape[-1]
        x = x.index_select(0, self.seqs).view(self.num_rows, self.num_readers, self.num_kv_heads, -1, size)
        return x.transpose(1, 2).reshape(self.num_rows * self.num_kv_heads, -1, size)

    def collect(self, x: Tensor) -> Tensor:
        """x [rows · KV heads, readers · group, size] → [rows · readers, num_heads, size], for `seqs`."""
        size = x.shape[-1]
        x = x.view(self.num_rows, self.num_kv_heads, self.num_readers, -1, size)
        return x.transpose(1, 2).reshape(len(self.seqs), -1, size)

    def times_keys(self, pool: Tensor, q: Tensor) -> Tensor:
        """Scores q · k: q [rows · KV heads, readers · group, head_dim] → [same, same, keys of a row]."""
        keys = self.k_ids[0].shape[1] * self.cache.block_size
        s = q.new_empty((*q.shape[:2], keys))
        for q_tile, ids, s_tile in self._tiles(q, self.k_ids, s):
            torch.bmm(q_tile, self._gather(pool, ids).mT, out=s_tile)
        return s

    def times_values(self, pool: Tensor, p: Tensor) -> Tensor:
        """Σ p · v: p [rows · KV heads, readers · group, keys of a row] → [same, same, head_dim]."""
        o = p.new_empty((*p.shape[:2], self.cache.shape.head_dim))
        for p_tile, ids, o_tile in self._tiles(p, self.v_ids, o):
            torch.bmm(p_tile, self._gather(pool, ids), out=o_tile)
        return o

    def _tiles(self, x: Tensor, ids: tuple[Tensor, ...], out: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The tiles of a matrix product x · (head blocks `ids`) → out."""
        size = len(ids[0])
        return zip(x.split(size), ids, out.split(size), strict=True)

    def _gather(self, pool: Tensor, ids: Tensor) -> Tensor:
        """Copy head blocks [n, blocks] out of the pool: K or V [n, keys in a row, head_dim]."""
        rows = torch.index_select(pool, 0, ids.flatten(), out=self.buffer[: ids.numel()])
        return self.cache.unpack(rows.view(len(ids), ids.shape[1] * self.cache.block_size, -1))

    def set_positions(self, queries: np.ndarray, first_keys: list[int]) -> None:
        """Note positions for `modify`: of each sequence's query, and of each row's first key."""
        keys = np.array(first_keys)[:, None] + np.arange(self.k_ids[0].shape[1] * self.cache.block_size)
        device = self.cache.data.device
        self.queries = to_device(queries, device)[self.seqs].view(self.num_rows, 1, self.num_readers, 1, 1)
        self.keys = to_device(keys, device).view(self.num_rows, 1, 1, 1, -1)

    def modify(self, s: Tensor, score_mod: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Scores as `times_keys` gives them, changed by the `score_mod` of a layer."""
        by_reader = s.view(self.num_rows, self.num_kv_heads, self.num_readers, -1, s.shape[-1])
        return score_mod(by_reader, self.queries, self.keys).view_as(s)
