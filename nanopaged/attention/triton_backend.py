"""Paged attention on a GPU: our Triton kernels store K/V and decode; prefills stay in PyTorch."""

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
        self.tables = BlockTables(self.device)
        self.num_sms = 1  # multiprocessors; one if the kernels are interpreted
        if self.device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def max_splits(self, num_seqs: int) -> int:
        """How finely contexts are cut, see `split_contexts`.

        Few contexts are cut until each multiprocessor (SM) runs four programs at the same time.
        Contexts that are enough for that without a cut differ in length: they are cut so finely
        that all SMs end at about the same time.
        """
        full = -(-4 * self.num_sms // self.cache.shape.num_kv_heads)  # ceil division
        return full if num_seqs < full else 4 * full

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Send the slot mapping to the device."""
        if self.device.type == "cuda":
            # Triton launches on the current device, which each thread has for itself.
            torch.cuda.set_device(self.device)
        self.slot_mapping = to_device(metadata.slot_mapping, self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots."""
        k_cache, v_cache = self.layers[layer]
        store_kv(k, v, k_cache, v_cache, self.slot_mapping)

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Bring the block tables on the device up to date, and divide the contexts into splits."""
        n = metadata.num_decodes
        rows = self.tables.update(metadata.seq_ids[:n], metadata.block_tables[:n])
        splits, firsts = split_contexts(metadata.context_lens[:n], self.max_splits(n))
        self.table_rows = to_device(rows, self.device)
        self.splits = to_device(splits, self.device)
        self.firsts = to_device(firsts, self.device)

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """As `TorchAttention.decode`."""
        k_cache, v_cache = self.layers[layer]
        return paged_decode(
            q,
            k_cache,
            v_cache,
            block_tables=self.tables.data,
            rows=self.table_rows,
            splits=self.splits,
            firsts=self.firsts,
            scale=self.scale,
        )


class BlockTables:
    """The block tables of running sequences, on the device. A step sends only changed entries.

        on the device   row 0: 5 2     row 1: 0     row 2: 3 8 1
        now                    5 2 7          0            3 4 1
        sent            (0, 2, 7), (2, 0, 3), (2, 1, 4), (2, 2, 1)      as (row, column, block)

    A table that has grown sends only its new entries, another one that has changed sends all.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reserve(num_rows=0, num_columns=0)

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Give the tables this size. They move, so all entries are sent again."""
        self.data = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=self.device)
        self.free = list(range(num_rows))  # rows of no sequence
        self.rows: dict[int, int] = {}  # sequence id → row
        self.sent: dict[int, list[int]] = {}  # row → its entries on the device

    def update(self, seq_ids: list[int], tables: list[list[int]]) -> list[int]:
        """Update the tables of these sequences on the device. Returns the row of each."""
        longest = max(map(len, tables))
        if len(seq_ids) > self.data.shape[0] or longest > self.data.shape[1]:
            self.reserve(2 * len(seq_ids), 2 * longest)  # twice as large, so that it happens rarely
        for seq_id in self.rows.keys() - set(seq_ids):
            self.free.append(self.rows.pop(seq_id))
        entries = []  # (row, column, block)
        changed = {}  # row → table
        for seq_id, table in zip(seq_ids, tables, strict=True):
            if seq_id not in self.rows:
                self.rows[seq_id] = self.free.pop()
            row = self.rows[seq_id]
            sent = self.sent.get(row, [])
            if table != sent:
                first = len(sent) if table[: len(sent)] == sent else 0
                entries += [(row, column, table[column]) for column in range(first, len(table))]
                changed[row] = table.copy()
        if entries:
            row, column, block = to_device(entries, self.device).T
            self.data[row, column] = block.int()
        self.sent.update(changed)  # only now: if sending fails, the next step sends these again
        return [self.rows[seq_id] for seq_id in seq_ids]
