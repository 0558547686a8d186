"""The same bits in any batch: tokens and log-probabilities of a request are those that it gets alone.

A sum of floating-point numbers depends on the order of its terms, and in the engine the batch decides about
some orders: a library chooses a kernel by the number of rows, chunks cut a prompt, decodes and prefills are
computed in two ways. Here every product has one shape for all that is computed together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import nanopaged
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention, gather_context
from nanopaged.config import EngineConfig
from nanopaged.engine import LLMEngine
from nanopaged.kv_cache import KVCache
from nanopaged.model.checkpoint import load_model
from nanopaged.model.decoder import Linear, Model, Operations
from nanopaged.model_runner import ModelRunner
from nanopaged.sampler import sample_next_tokens
from nanopaged.sequence import Sample, ScheduledBatch

ROWS = 16  # of a linear layer, computed at once
QUERIES = 64  # of attention, computed at once: so many that no vector of the CPU is cut
KEYS = 64  # that a query reads at once


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of rows, x [num_rows, width] → [num_rows, other width], computed for ROWS rows at a time."""
    return torch.cat([function(tile) for tile in tiles(x, ROWS)])[: len(x)]


def tiles(x: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    """Tiles of `num_rows` rows each, the last one filled up with rows of zeros."""
    return torch.cat((x, x.new_zeros(-len(x) % num_rows, *x.shape[1:]))).split(num_rows)


class InvariantAttention(TorchAttention):
    """Every token is a query that reads its keys from the first on, KEYS at a time, with an online softmax.

    Keys after the query's own token have weight 0: adding them changes no bit.
    """

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Lay out the queries' block tables, [QUERIES, blocks] for each tile, and positions."""
        self.begin_store(metadata)
        size = self.cache.block_size
        self.blocks_at_once = max(1, KEYS // size)
        tables: list[list[int]] = []
        positions: list[int] = []
        lens = zip(metadata.query_lens.tolist(), metadata.context_lens.tolist(), strict=True)
        for table, (query_len, end) in zip(metadata.block_tables, lens, strict=True):
            for position in range(end - query_len, end):
                tables.append(table[: position // size + 1])
                positions.append(position)
        num_missing = -len(positions) % QUERIES
        tables += tables[:1] * num_missing
        positions += [0] * num_missing
        self.tiles: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(positions), QUERIES):
            rows = slice(first, first + QUERIES)
            longest = max(map(len, tables[rows]))
            longest += -longest % self.blocks_at_once
            padded = [table + table[:1] * (longest - len(table)) for table in tables[rows]]
            self.tiles.append((torch.tensor(padded), torch.tensor(positions[rows])))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: store all new K/V, then tile by tile, in float32."""
        self.store(layer, k, v)
        queries = tiles(self.by_kv_head(q.float() * self.scale), QUERIES)
        out = []
        for tile, (tables, positions) in zip(queries, self.tiles, strict=True):
            out.append(self.attend(layer, tile, tables, positions))
        return torch.cat(out)[: len(q)].flatten(1, 2).to(q.dtype)

    def attend(self, layer: int, q: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
        """One tile: q [QUERIES, num_kv_heads, group, head_dim] → the same shape."""
        most = q.new_full((*q.shape[:-1], 1), torch.finfo(torch.float32).min)
        total = torch.zeros_like(most)
        out = torch.zeros_like(q)
        num_keys = self.blocks_at_once * self.cache.block_size
        for i, blocks in enumerate(tables.split(self.blocks_at_once, dim=1)):
            keys, values = (gather_context(x, blocks, num_keys).float() for x in self.layers[layer])
            unseen = torch.arange(i * num_keys, (i + 1) * num_keys) > positions[:, None, None, None]
            scores = (q @ keys.mT).masked_fill_(unseen, float("-inf"))
            new_most = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - new_most)
            rescale = torch.exp(most - new_most)
            total = total * rescale + weights.sum(-1, keepdim=True)
            out = out * rescale + weights @ values
            most = new_most
        return out / total


@dataclass(frozen=True, kw_only=True)
class InvariantConfig(EngineConfig):
    """The options of an engine. Raises ValueError for another backend than "torch", and for ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("attention_backend", ("auto", "torch"))
        self.keep("attention_backend", "torch")
        size = self.tensor_parallel_size
        if size != 1:
            raise ValueError(f"tensor_parallel_size is {size}, but ranks add up in another order: use 1")


class InvariantRunner(ModelRunner):
    """A `ModelRunner` whose operations do not depend on the batch. Raises ValueError for 3 threads."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        num_threads = torch.get_num_threads()
        if self.device.type != "cpu" or num_threads > 2:  # a third thread may begin inside a row
            raise ValueError(
                f"the same bits need a CPU and at most 2 threads, not {self.device} with {num_threads}: "
                "use device='cpu' and torch.set_num_threads(2)"
            )

    def make_model(self, operations: Operations, **options: Any) -> Model:
        """A model whose linear layers and activation are computed in tiles."""
        operations = replace(operations, silu_mul=partial(in_tiles, operations.silu_mul))
        model = load_model(operations=operations, **options)
        for linear in [part for part in model.modules() if isinstance(part, Linear)]:
            linear.forward = partial(in_tiles, linear.forward)
        return model

    def make_attention(self, _: str, cache: KVCache, scale: float) -> InvariantAttention:
        return InvariantAttention(cache, scale)

    @staticmethod
    def sample_next_tokens(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
        """Sequence by sequence, since the largest top-k of a batch decides between equal tokens."""
        rows = iter(logits.split(1))
        samples = []
        for seq in batch.sequences:
            alone = ScheduledBatch(sequences=[seq])
            samples += sample_next_tokens(alone, next(rows)) if seq.needs_sample else [[]]
        return samples


class InvariantEngine(LLMEngine):
    make_config, make_runner = InvariantConfig, InvariantRunner


class LLM(nanopaged.LLM):
    engine_class = InvariantEngine
