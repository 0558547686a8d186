"""Paged attention with our Triton kernels for storing K/V and for decodes; prefills stay in PyTorch.

`kernels/paged_attention.py` has the kernels. This module knows sequences only by their ids.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kernels import devices
from nanopaged.kernels.paged_attention import choose_num_splits, paged_decode, store_kv
from nanopaged.kv_cache import KVCache, to_device


class TritonAttention(TorchAttention):
    """In each layer one kernel stores the new K/V of the batch, and one or two compute its decodes.

    Attributes:
        tables: the block tables on the device.
    """

    supports_cuda_graphs = True

    def __init__(self, cache: KVCache, scale: float) -> None:
        super().__init__(cache, scale)
        self.tables = BlockTables(self.device)
        self.num_processors = 1  # if the kernels are interpreted
        if self.device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        if devices.FUSED_KERNELS:
            from nanopaged.kernels.fused import fused_norm_rotate, fused_silu_mul

            self.fused = {"norm_rotate": fused_norm_rotate, "silu_mul": fused_silu_mul}

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Send the slot mapping to the device."""
        self.slot_mapping = to_device(metadata.slot_mapping, self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the encoded k, v [num_tokens, num_kv_heads, head_dim] of the whole batch to their slots."""
        store_kv(k, v, *self.cache.layer(layer), self.slot_mapping)

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Bring the block tables on the device up to date, and choose the number of splits."""
        n = metadata.num_decodes
        rows = self.tables.update(metadata.seq_ids[:n], metadata.block_tables[:n])
        context_lens = metadata.context_lens[:n]
        table_rows, lens = to_device(np.array([rows, context_lens]), self.device)
        self.set_decodes(table_rows, lens, int(context_lens.max()))

    def set_decodes(self, table_rows: Tensor, context_lens: Tensor, max_context_len: int) -> None:
        """Set the tensors that `decode` reads. A CUDA graph sets its fixed buffers, see `DecodeGraphs`.

        Args:
            table_rows: int64 [num_seqs], the row of `tables` that belongs to each sequence.
            context_lens: int64 [num_seqs], keys of each sequence, the new one included.
            max_context_len: the longest context, from which the number of splits follows.
        """
        self.table_rows, self.context_lens = table_rows, context_lens
        num_seqs, num_kv_heads = len(table_rows), self.cache.shape.num_kv_heads
        self.num_splits = choose_num_splits(num_seqs, num_kv_heads, max_context_len, self.num_processors)

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """Queries [num_decodes, num_heads, head_dim] → their attention outputs, of the same shape."""
        k_cache, v_cache = self.cache.layer(layer)
        where = self.tables.data, self.table_rows, self.context_lens
        return paged_decode(q, k_cache, v_cache, *where, self.scale, self.num_splits)


class BlockTables:
    """The block tables of running sequences, kept on the device: a step sends only the entries that changed.

    A sequence keeps its row from step to step. The host has a copy of each row as it was sent, and compares.
    So no other module has to report that a table has grown, or has changed by a fork, a copy-on-write or a
    swap.

        on the device   row 0: 5 2     row 1: 0     row 2: 3 8 1
        now                    5 2 7          0            3 4 1
        sent            (0, 2, 7), (2, 0, 3), (2, 1, 4), (2, 2, 1)      as (row, column, block)

    The key of a sequence is `id(seq)`. Python may give the id of a finished sequence to a new one. That is
    safe: the new sequence takes over the row, and the entries that differ are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.data = torch.zeros((0, 0), dtype=torch.int32, device=device)  # [num_rows, most blocks]
        self.rows: dict[int, int] = {}  # sequence id → row
        self.free: list[int] = []
        self.sent: list[list[int]] = []  # row → the table that was sent last

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Make the tables at least this large. Growing moves them to new memory, and all are sent again."""
        rows, columns = self.data.shape
        if num_rows > rows or num_columns > columns:
            self.data = self.data.new_zeros(max(num_rows, rows), max(num_columns, columns))
            self.rows.clear()
            self.free = list(range(len(self.data)))
            self.sent = [[] for _ in self.free]

    def update(self, seq_ids: list[int], tables: list[list[int]]) -> list[int]:
        """Update the tables of these sequences on the device. Returns the row of each sequence."""
        longest = max(map(len, tables))
        if len(seq_ids) > self.data.shape[0] or longest > self.data.shape[1]:
            self.reserve(2 * len(seq_ids), 2 * longest)  # twice as large as needed, so that it is rare
        missing = [seq_id for seq_id in seq_ids if seq_id not in self.rows]
        if len(missing) > len(self.free):  # take back the rows of sequences that are not in this batch
            for seq_id in self.rows.keys() - set(seq_ids):
                self.free.append(self.rows.pop(seq_id))
        for seq_id in missing:
            self.rows[seq_id] = self.free.pop()
        rows = [self.rows[seq_id] for seq_id in seq_ids]
        changes: list[tuple[int, int, int]] = []
        changed: dict[int, list[int]] = {}
        for row, table in zip(rows, tables, strict=True):
            sent = self.sent[row]
            if table != sent:
                start = len(sent) if table[: len(sent)] == sent else 0
                changes += [(row, column, table[column]) for column in range(start, len(table))]
                changed[row] = list(table)
        if changes:
            row, column, block = to_device(np.array(changes).T, self.data.device)
            self.data[row, column] = block.int()
        for row, table in changed.items():  # only now: if sending fails, the next step sends them again
            self.sent[row] = table
        return rows
