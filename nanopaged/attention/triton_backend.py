"""Paged attention on a GPU: our Triton kernels store K/V and decode; prefills stay in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kernels.paged_attention import paged_decode, split_contexts, store_kv
from nanopaged.kv_cache import KVCache, to_device


class TritonAttention(TorchAttention):
    """`kernels/paged_attention.py` has the kernels."""

    supports_cuda_graphs = True

    def __init__(self, cache: KVCache, scale: float) -> None:
        super().__init__(cache, scale)
        self.tables, num_processors = BlockTables(self.device), 1  # 1: interpreted
        if self.device.type == "cuda":
            num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        # Eight programs for each multiprocessor (SM) of the GPU, so that all end at about the same time.
        self.most_cuts = -(-8 * num_processors // cache.shape.num_kv_heads)  # ceil division

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Send the slot mapping to the device."""
        if (
            self.device.type == "cuda"
        ):  # Triton launches on the current device, which belongs to a thread
            torch.cuda.set_device(self.device)
        self.slot_mapping = to_device(metadata.slot_mapping, self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots."""
        store_kv(k, v, *self.layers[layer], self.slot_mapping)

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Bring the block tables on the device up to date, and divide the contexts into splits."""
        n = metadata.num_decodes
        rows = self.tables.update(metadata.seq_ids[:n], metadata.block_tables[:n])
        self.set_decodes(
            to_device(self.pack_decodes(rows, metadata.context_lens[:n]), self.device), n
        )

    def pack_decodes(
        self, table_rows: list[int] | np.ndarray, context_lens: np.ndarray
    ) -> np.ndarray:
        """What `decode` reads, end to end, int64: rows of the tables, firsts, splits."""
        splits, firsts = split_contexts(context_lens, self.most_cuts)
        return np.concatenate([table_rows, firsts, splits.ravel()])

    def set_decodes(self, numbers: Tensor, num_decodes: int) -> None:
        """Set what `decode` reads; zeros behind it are empty splits."""
        self.table_rows, self.firsts = (
            numbers[:num_decodes],
            numbers[num_decodes : 2 * num_decodes + 1],
        )
        self.splits = numbers[2 * num_decodes + 1 :].view(-1, 3)

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """As `TorchAttention.decode`."""
        where = self.tables.data, self.table_rows, self.splits, self.firsts
        return paged_decode(q, *self.layers[layer], *where, self.scale)


class BlockTables:
    """The block tables of running sequences, kept on the device: a step sends only the entries that changed.

        on the device   row 0: 5 2     row 1: 0     row 2: 3 8 1
        now                    5 2 7          0            3 4 1
        sent            (0, 2, 7), (2, 0, 3), (2, 1, 4), (2, 2, 1)      as (row, column, block)

    A table that is no new list has only grown (`Sequence.block_table`): what was sent is not read again.
    """

    def __init__(self, device: torch.device) -> None:
        self.data = torch.zeros((0, 0), dtype=torch.int32, device=device)  # [num_rows, most blocks]
        self.rows: dict[int, int] = {}  # sequence id → row
        self.free, self.sent = (
            [],
            [],
        )  # rows of no sequence; row → the table, and how much of it was sent

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Make the tables at least this large. Growing moves them, and all are sent again."""
        rows, columns = self.data.shape
        if num_rows > rows or num_columns > columns:
            self.data = self.data.new_zeros(max(num_rows, rows), max(num_columns, columns))
            self.rows, self.free = {}, list(range(len(self.data)))
            self.sent = [([], 0) for _ in self.free]

    def update(self, seq_ids: list[int], tables: list[list[int]]) -> list[int]:
        """Update the tables of these sequences on the device. Returns the row of each."""
        longest = max(map(len, tables))
        if len(seq_ids) > self.data.shape[0] or longest > self.data.shape[1]:
            self.reserve(2 * len(seq_ids), 2 * longest)  # so that it is rare
        for seq_id in self.rows.keys() - set(seq_ids):  # their rows are taken back
            self.free.append(self.rows.pop(seq_id))
        for seq_id in seq_ids:
            if seq_id not in self.rows:
                self.rows[seq_id] = self.free.pop()
        rows, changes, changed = [self.rows[seq_id] for seq_id in seq_ids], [], {}
        for row, table in zip(rows, tables, strict=True):
            sent, start = self.sent[row]
            if table is not sent or start < len(table):
                start = start if table is sent or table[:start] == sent[:start] else 0
                changes += [(row, column, table[column]) for column in range(start, len(table))]
                changed[row] = table, len(table)
        if changes:
            row, column, block = to_device(np.array(changes).T, self.data.device)
            self.data[row, column] = block.int()
        for row, sent in changed.items():  # if sending failed, the next step sends them again
            self.sent[row] = sent
        return rows
