"""Storing K/V and decoding with the kernels of `kernels.py`: what a batch looks like to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import PagedBatch
from nanopaged.device import send
from nanopaged.kernels import paged_attention as kernels
from nanopaged.kv_cache import KVCache


@dataclass
class Store:
    """Writes the new K/V of a batch to their slots, in one launch a layer."""

    cache: KVCache
    slots: Tensor  # [num_tokens]; -1 is skipped

    @classmethod
    def of(cls, batch: PagedBatch, cache: KVCache) -> Store:
        """For one step's batch."""
        return cls(cache, send(batch.slot_mapping, cache.data.device))

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim] of the whole batch."""
        kernels.store_kv(k, v, *self.cache.layer(layer), self.slots)


@dataclass
class DecodePlan:
    """A batch's decodes: whose tables to read, how far, and in how many splits."""

    cache: KVCache
    scale: float
    tables: Tensor  # int32 [num_rows, most blocks]
    rows: Tensor  # [num_seqs], of `tables`
    context_lens: Tensor  # [num_seqs]
    num_splits: int

    @classmethod
    def of(cls, batch: PagedBatch, cache: KVCache, scale: float, tables: BlockTables) -> DecodePlan:
        """For the decodes of one step's batch, whose tables are brought up to date."""
        n, device = batch.num_decodes, cache.data.device
        rows = tables.update(batch.owners[:n], batch.block_tables[:n])
        rows, context_lens = send(np.array([rows, batch.context_lens[:n]]), device)
        most = int(batch.context_lens[:n].max())
        num_splits = kernels.choose_num_splits(n, cache.shape.num_kv_heads, most, num_processors(device))
        return cls(cache, scale, tables.data, rows, context_lens, num_splits)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [num_seqs, num_heads, head_dim] → their outputs, of the same shape."""
        k_cache, v_cache = self.cache.layer(layer)
        return kernels.paged_decode(
            q, k_cache, v_cache, self.tables, self.rows, self.context_lens, self.scale, self.num_splits
        )


class BlockTables:
    """The block tables of running sequences, kept on the device: a step sends only what is new in them.

    A sequence keeps its row from step to step. What a row holds on the device is remembered here, so a
    table that has changed in whatever way (grown, forked, copied on write, swapped in elsewhere) is
    noticed by comparing, and nobody needs to report it.

        on the device   row 0: 5 2     row 1: 0     row 2: 3 8 1
        to be                  5 2 7          0            3 4 1
        sent            (0, 2, 7), (2, 0, 3), (2, 1, 4), (2, 2, 1)      as (row, column, block)
    """

    def __init__(self, device: torch.device) -> None:
        self.data = torch.zeros((0, 0), dtype=torch.int32, device=device)  # [num_rows, most blocks]
        self.rows: dict[int, int] = {}  # owner → its row
        self.free: list[int] = []
        self.sent: list[list[int]] = []  # of each row, the table that was sent last

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Make the tables at least that large. If they have to move, everything is sent again."""
        rows, columns = self.data.shape
        if num_rows <= rows and num_columns <= columns:
            return
        self.data = self.data.new_zeros(max(num_rows, rows), max(num_columns, columns))
        self.rows.clear()
        self.free = list(range(len(self.data)))
        self.sent = [[] for _ in self.free]

    def update(self, owners: list[int], tables: list[list[int]]) -> list[int]:
        """Bring the tables of `owners` up to date; returns the row of each."""
        longest = max(map(len, tables))
        if len(owners) > self.data.shape[0] or longest > self.data.shape[1]:
            self.reserve(2 * len(owners), 2 * longest)  # doubling: it happens seldom
        rows = self._rows_of(owners)
        changes: list[tuple[int, int, int]] = []
        changed: dict[int, list[int]] = {}
        for row, table in zip(rows, tables, strict=True):
            sent = self.sent[row]
            if table != sent:
                start = len(sent) if table[: len(sent)] == sent else 0
                changes += [(row, column, table[column]) for column in range(start, len(table))]
                changed[row] = list(table)
        if changes:
            row, column, block = send(np.array(changes).T, self.data.device)
            self.data[row, column] = block.int()
        for row, table in changed.items():  # only now: if sending failed, it is still to be sent
            self.sent[row] = table
        return rows

    def _rows_of(self, owners: list[int]) -> list[int]:
        """Rows that the owners have, or get; if there are too few, those of others are taken back."""
        missing = [owner for owner in owners if owner not in self.rows]
        if len(missing) > len(self.free):
            for owner in self.rows.keys() - set(owners):
                self.free.append(self.rows.pop(owner))
        for owner in missing:
            self.rows[owner] = self.free.pop()
        return [self.rows[owner] for owner in owners]


def num_processors(device: torch.device) -> int:
    """What runs programs side by side on a GPU; 1 where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
