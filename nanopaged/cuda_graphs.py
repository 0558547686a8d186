"""Decode steps as CUDA graphs: kernel launches are recorded once, then replayed by one call.

A small decode step takes the GPU less time than Python needs to launch its hundreds of kernels. But
a CUDA graph replays exactly what was recorded: the same kernels, tensor sizes and addresses. So

    - a graph reads its inputs from its own buffer, which is filled before each replay;
    - there are graphs for some batch sizes, and a batch uses the next larger one. The other rows
      are padding: slot -1, so nothing is stored for them, and no splits, so nothing is read;
    - each graph has as many splits as a batch can need (`split_contexts`); unused ones are empty;
    - the block tables must not move (`triton_backend.BlockTables`).
"""

import copy
import gc
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.kernels.paged_attention import split_contexts
from nanopaged.kv_cache import to_device
from nanopaged.model.decoder import Model


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1 2 4 8 16 24 32 ..., and `max_num_seqs` itself."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted([size for size in sizes if size <= max_num_seqs])


class DecodeGraphs:
    """The graphs of a model, captured when this object is made. `run` computes a batch of decodes.

    Args:
        capture: records the kernels of a function. It is `Capture`, or another one in tests.
    """

    def __init__(
        self,
        model: Model,
        attention: TritonAttention,
        max_num_seqs: int,
        max_context_len: int,
        capture: Callable[..., tuple[Tensor, Callable[[], None]]] | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.capture = capture or Capture()
        max_blocks = -(-max_context_len // attention.cache.block_size)  # ceil division
        attention.tables.reserve(max_num_seqs, max_blocks)
        self.sizes = graph_sizes(max_num_seqs)
        # It is illegal to free CUDA memory during a capture, so collect what others have left now.
        gc.collect()
        # The largest first: smaller ones reuse its memory.
        self.graphs = {size: self._capture_size(size) for size in reversed(self.sizes)}

    @torch.inference_mode()
    def _capture_size(self, size: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """The packed inputs of a graph, its output [size, hidden_size], and its replay."""
        inputs = self._inputs(size, np.empty((5, 0)))
        packed = to_device(np.concatenate(inputs), self.attention.device)
        views = packed.split([len(array) for array in inputs])
        input_ids, positions, slot_mapping, table_rows, firsts, splits = views
        attention = copy.copy(self.attention)  # the same cache and tables, but this graph's inputs
        attention.num_decodes = size
        attention.slot_mapping = slot_mapping
        attention.table_rows = table_rows
        attention.firsts = firsts
        attention.splits = splits.view(-1, 3)
        hidden, replay = self.capture(lambda: self.model(input_ids, positions, attention))
        return packed, hidden, replay

    def _inputs(self, size: int, rows: np.ndarray) -> list[np.ndarray]:
        """The inputs of a graph, which are sent end to end.

        Args:
            rows: token ids, positions, slots, rows of the tables and context lengths [5, num_seqs].
        """
        padded = np.zeros((5, size), dtype=np.int64)
        padded[2] = -1  # the slot of padding
        padded[:, : rows.shape[1]] = rows
        input_ids, positions, slot_mapping, table_rows, context_lens = padded
        splits, firsts = split_contexts(context_lens, self.attention.max_splits)
        all_splits = np.zeros((size + self.attention.max_splits, 3), dtype=np.int64)
        all_splits[: len(splits)] = splits
        return [input_ids, positions, slot_mapping, table_rows, firsts, all_splits.ravel()]

    def run(
        self, input_ids: np.ndarray, positions: np.ndarray, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute decodes [num_seqs] → hidden states [num_seqs, hidden_size].

        The hidden states are valid until the next run.
        """
        n = len(input_ids)
        size = next(size for size in self.sizes if size >= n)
        packed, hidden, replay = self.graphs[size]
        table_rows = self.attention.tables.update(metadata.seq_ids, metadata.block_tables)
        rows = [input_ids, positions, metadata.slot_mapping, table_rows, metadata.context_lens]
        inputs = np.concatenate(self._inputs(size, np.array(rows)))
        to_device(inputs, packed.device, out=packed)
        replay()
        return hidden[:n]


class Capture:
    """Records what a function launches as a CUDA graph. All graphs use one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record `work`. Returns its output, and a function that computes this output again."""
        work()  # once without recording, to compile kernels and initialise libraries
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = work()
        return out, graph.replay
