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
from typing import Any

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
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def split_inputs(inputs: Any, size: int) -> tuple[Any, Any, Any]:
    """The parts of a graph's inputs, which stand end to end in one array, as views of it.

    Args:
        inputs: int64, of NumPy on the host or of PyTorch on the device.

    Returns:
        rows [4, size]: token ids, positions, slots, and rows of the block tables
        firsts [size + 1] and splits [size + max_splits, 3], see `split_contexts`
    """
    rows = inputs[: 4 * size].reshape(4, size)
    firsts = inputs[4 * size : 5 * size + 1]
    splits = inputs[5 * size + 1 :].reshape(-1, 3)
    return rows, firsts, splits


class DecodeGraphs:
    """The graphs of a model, captured when this object is made. `run` computes some decodes."""

    def __init__(
        self, model: Model, attention: TritonAttention, max_num_seqs: int, max_context_len: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.pool = torch.cuda.graph_pool_handle()  # the graphs share their memory
        max_blocks = -(-max_context_len // attention.cache.block_size)  # ceil division
        attention.tables.reserve(max_num_seqs, max_blocks)
        # It is illegal to free CUDA memory during a capture, so collect what others have left now.
        gc.collect()
        sizes = reversed(graph_sizes(max_num_seqs))  # smaller ones reuse the memory of the largest
        self.graphs = {size: self._capture_size(size) for size in sizes}

    @torch.inference_mode()
    def _capture_size(self, size: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """The inputs of a graph, its output [size, hidden_size], and its replay."""
        length = 5 * size + 1 + 3 * (size + self.attention.max_splits(size))
        inputs = torch.zeros(length, dtype=torch.int64, device=self.attention.device)
        attention = copy.copy(self.attention)  # the same cache and tables, but this graph's inputs
        attention.num_decodes = size
        rows, attention.firsts, attention.splits = split_inputs(inputs, size)
        input_ids, positions, attention.slot_mapping, attention.table_rows = rows
        attention.slot_mapping.fill_(-1)  # nothing is stored now
        hidden, replay = self.capture(lambda: self.model(input_ids, positions, attention))
        return inputs, hidden, replay

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record `work`. Returns its output, and a function that computes this output again."""
        work()  # once without recording, to compile kernels and initialise libraries
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = work()
        return out, graph.replay

    def run(
        self, input_ids: np.ndarray, positions: np.ndarray, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute decodes [num_seqs] → hidden states [num_seqs, hidden_size].

        The hidden states are valid until the next run.
        """
        n = len(input_ids)
        size = min(size for size in self.graphs if size >= n)
        inputs, hidden, replay = self.graphs[size]
        table_rows = self.attention.tables.update(metadata.seq_ids, metadata.block_tables)
        splits, firsts = split_contexts(metadata.context_lens, self.attention.max_splits(size))
        padded = np.zeros(len(inputs), dtype=np.int64)
        padded_rows, padded_firsts, padded_splits = split_inputs(padded, size)
        padded_rows[2] = -1  # the slots of padding
        padded_rows[:, :n] = [input_ids, positions, metadata.slot_mapping, table_rows]
        padded_firsts[:n] = firsts[:n]
        padded_firsts[n:] = len(splits)
        padded_splits[: len(splits)] = splits
        inputs.copy_(to_device(padded, inputs.device))
        replay()
        return hidden[:n]
