"""Decode steps as CUDA graphs: a few hundred kernel launches are recorded once, then replayed with one call.

A small decode step takes the GPU less time than Python needs to launch its kernels. But a graph is rigid: the
same kernels, sizes and addresses. So

    - a graph reads its inputs from its own buffers, which are filled before each replay;
    - there are graphs for some batch sizes, and a batch uses the next larger one. The other rows are padding:
      slot -1, so nothing is stored, and no splits, so nothing is read;
    - each graph has as many splits as a batch can need (`split_contexts`); unused ones are empty;
    - the block tables must not move (`triton_backend.BlockTables`).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.kv_cache import to_device
from nanopaged.model.decoder import Model

PADDING = np.array(
    [[0], [0], [-1], [0], [0]]
)  # token id, position, slot, block table row, context length


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1 2 4 8 16 24 32 ..., and `max_num_seqs` itself."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """The graphs of a model, captured when it is made. `run` computes a batch of decodes.

    Args:
        capture: records the kernels of a function; `Capture` by default, another one in tests.
    """

    def __init__(
        self,
        model: Model,
        attention: TritonAttention,
        max_num_seqs: int,
        max_context_len: int,
        capture: Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]] | None = None,
    ) -> None:
        self.model, self.attention, self.tables = model, attention, attention.tables
        self.capture = capture or Capture()
        self.tables.reserve(
            max_num_seqs, -(-max_context_len // attention.cache.block_size)
        )  # ceil division
        self.captured_tables, self.sizes = self.tables.data, graph_sizes(max_num_seqs)
        # Garbage collection could free the CUDA memory of another engine during a capture, which is illegal.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # The largest first: smaller ones reuse its memory.
            self.graphs = {size: self._capture_size(size) for size in reversed(self.sizes)}
        finally:
            if was_enabled:
                gc.enable()

    @torch.inference_mode()
    def _capture_size(self, size: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Inputs (int64, see `_layout`), output [size, hidden_size], and its computation."""
        inputs = to_device(self._layout(size, PADDING[:, :0]), self.captured_tables.device)
        input_ids, positions, slot_mapping = inputs[: 3 * size].view(3, size)
        attention = copy.copy(
            self.attention
        )  # the same cache and block tables, but this graph's buffers
        attention.num_decodes, attention.slot_mapping = size, slot_mapping
        attention.set_decodes(inputs[3 * size :], size)
        return inputs, *self.capture(lambda: self.model(input_ids, positions, attention))

    def _layout(self, size: int, rows: np.ndarray) -> np.ndarray:
        """The inputs of a graph, end to end: ids, positions, slots, `pack_decodes`, zeros."""
        inputs = np.repeat(PADDING, size, axis=1)
        inputs[:, : rows.shape[1]] = rows
        decodes = self.attention.pack_decodes(*inputs[3:])
        unused = np.zeros(
            2 * size + 1 + 3 * (size + self.attention.most_cuts) - len(decodes), dtype=np.int64
        )
        return np.concatenate([inputs[:3].ravel(), decodes, unused])

    def run(
        self, input_ids: np.ndarray, positions: np.ndarray, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute decodes [num_seqs] → hidden states [num_seqs, hidden_size], valid until the next run."""
        n = len(input_ids)
        size = next(size for size in self.sizes if size >= n)
        buffers, hidden, replay = self.graphs[size]
        table_rows = self.tables.update(metadata.seq_ids, metadata.block_tables)
        assert self.tables.data is self.captured_tables, (
            "block tables moved: graphs read the old ones"
        )
        rows = [input_ids, positions, metadata.slot_mapping, table_rows, metadata.context_lens]
        to_device(self._layout(size, np.array(rows)), buffers.device, out=buffers)
        replay()
        return hidden[:n]


class Capture:
    """Records what a function launches as a CUDA graph. All graphs use one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record `work`. Returns its output, and a function that computes it again in the same memory."""
        work()  # once without recording, to compile kernels and initialise libraries
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = work()
        return out, graph.replay
