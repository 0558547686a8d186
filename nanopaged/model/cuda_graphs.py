"""Decode steps as CUDA graphs: a few hundred kernel launches recorded once, then replayed with one call.

A small decode step takes the GPU less time than it takes Python to launch its kernels one by one. A graph has
no such cost, but it is rigid: the same kernels, on the same addresses, of the same sizes. So

    - it reads its inputs from buffers of its own, which are filled before each replay;
    - there is one for each of some batch sizes, and a batch takes the next larger one. The rest of
      the batch is padding: slot -1, so that nothing is stored, and context length 0, so that nothing is read;
    - the number of splits is fixed with the size, for the longest context there may be;
    - the block tables stay where they are (`triton_attention.BlockTables`).

All graphs share one pool of memory, for no two of them run at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import PagedBatch
from nanopaged.attention.triton_backend import BlockTables, DecodePlan, Store, num_processors
from nanopaged.block_manager import blocks_needed
from nanopaged.device import pinned, send
from nanopaged.kernels import paged_attention as kernels
from nanopaged.kv_cache import KVCache
from nanopaged.model.decoder import Model

PADDING = np.array([[0], [0], [-1], [0], [0]])  # token id, position, slot, row of the tables, context length


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1 2 4 8 16 24 32 ..., up to `max_num_seqs` itself, whatever it is."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


@dataclass
class Graph:
    """One captured size."""

    inputs: Tensor  # int64 [5, size]: the rows of PADDING, which it reads
    hidden: Tensor  # [size, hidden_size], which it writes
    replay: Callable[[], None]


class DecodeGraphs:
    """The graphs of a model; `run` takes a batch that consists of decodes alone.

    Args:
        max_num_seqs: the largest batch.
        max_context_len: the longest context, in tokens.
        capture: records a function's kernels; replaced in tests, where there are no graphs.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        scale: float,
        tables: BlockTables,
        max_num_seqs: int,
        max_context_len: int,
        capture: Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]] | None = None,
    ) -> None:
        self.model, self.cache, self.scale, self.tables = model, cache, scale, tables
        self.max_context_len = max_context_len
        self.capture = capture or Capture()
        tables.reserve(max_num_seqs, blocks_needed(max_context_len, cache.block_size))
        self.captured_tables = tables.data
        self.sizes = graph_sizes(max_num_seqs)
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()  # what the collector might free of another engine must not be freed in a capture
        try:
            # The largest first: the others then find the memory they need in the pool.
            self.graphs = {size: self._graph(size) for size in reversed(self.sizes)}
        finally:
            if was_enabled:
                gc.enable()

    @torch.inference_mode()
    def _graph(self, size: int) -> Graph:
        device, num_kv_heads = self.cache.data.device, self.cache.shape.num_kv_heads
        inputs = send(np.repeat(PADDING, size, axis=1), device)
        input_ids, positions, slots, rows, context_lens = inputs
        most = self.max_context_len
        num_splits = kernels.choose_num_splits(size, num_kv_heads, most, num_processors(device))
        store = Store(self.cache, slots)
        decode = DecodePlan(self.cache, self.scale, self.tables.data, rows, context_lens, num_splits)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store(layer, k, v)
            return decode(layer, q, k, v)

        return Graph(inputs, *self.capture(lambda: self.model(input_ids, positions, attend)))

    def run(self, input_ids: np.ndarray, positions: np.ndarray, batch: PagedBatch) -> Tensor:
        """Hidden states [num_seqs, hidden_size], valid until the next run."""
        n = len(input_ids)
        size = next(size for size in self.sizes if size >= n)
        graph = self.graphs[size]
        inputs = np.repeat(PADDING, size, axis=1)
        rows = self.tables.update(batch.owners, batch.block_tables)
        assert self.tables.data is self.captured_tables, "they have moved, and the graphs read the old ones"
        inputs[:, :n] = input_ids, positions, batch.slot_mapping, rows, batch.context_lens
        graph.inputs.copy_(pinned(inputs, graph.inputs.device), non_blocking=True)
        graph.replay()
        return graph.hidden[:n]


class Capture:
    """Records what a function launches; all recordings use one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # one for all: libraries keep a workspace for each stream

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """(what `work` returned, how to do it again)."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()  # once as usual: kernels are compiled, libraries set up
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            out = work()
        return out, graph.replay
