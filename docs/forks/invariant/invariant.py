"""The same bits in any batch: tokens and log-probabilities of a request are those that it gets alone.

    llm = LLM(num_blocks=200)  # of this file, with the options of nanopaged's; on a CPU only

A sum of floating-point numbers depends on the order of its terms, and in the engine the batch decides about
some orders: a library chooses a kernel by the number of rows, chunks cut a prompt, decodes and prefills are
computed in two ways. Here every product has one shape for all that is computed together:

    linear layers    16 rows at a time, the last ones filled up with rows of zeros
    attention        16 tiles at a time, each of 4 queries of a sequence and 64 keys
    the sampler      each sequence alone, since the largest top-k of a batch decides between equal tokens

The bits are those of one machine, one version of PyTorch, one number of threads and one block size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
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

ROWS = 16  # of a linear layer, or tiles of attention, computed at once
QUERIES = 4  # in a tile: 16 tiles have a multiple of 64 queries, so no vector of the CPU is cut
KEYS = 64  # that a tile reads at once


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of rows, x [num_rows, width] → [num_rows, other width], computed for ROWS rows at a time.

    20 rows are two tiles, the second with 12 rows of zeros. A row has the same bits at any place in a tile.
    """
    padded = torch.cat((x, x.new_zeros(-len(x) % ROWS, x.shape[1])))
    return torch.cat([function(tile) for tile in padded.split(ROWS)])[: len(x)]


@dataclass
class Part:
    """A product: ROWS tiles, and KEYS of the keys that each may see."""

    tiles: slice
    tables: Tensor  # [ROWS, blocks]
    unseen: Tensor  # bool [ROWS, 1, QUERIES, 1, keys]: those after a query's own token


class InvariantAttention(TorchAttention):
    """Every token is a query that reads its keys from the first on, KEYS at a time, with an online softmax.

    Consecutive tokens of a sequence make a tile, the last ones filled up with the query 0. Keys are cut at
    absolute positions. Keys after a query's own token have weight 0: adding them changes no bit.

    README.md draws the tiles of tokens 62 to 66: their rows are 0 1 2 3 and 4 5 5 5, where 5 is the query 0.
    """

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Lay out the tiles, those with the most keys first, and the products."""
        self.begin_store(metadata)
        size, first, tiles = self.cache.block_size, 0, list[tuple[int, int, int, list[int]]]()
        lens = zip(metadata.query_lens.tolist(), metadata.context_lens.tolist(), strict=True)
        for table, (query_len, end) in zip(metadata.block_tables, lens, strict=True):
            for lo in range(end - query_len, end, QUERIES):  # positions
                hi = min(lo + QUERIES, end)
                tiles.append((hi, lo, first + lo - (end - query_len), table[: -(-hi // size)]))
            first += query_len
        tiles.sort(key=lambda tile: -tile[0])
        tiles += [(1, 0, first, tiles[-1][3][:1])] * (-len(tiles) % ROWS)  # the query 0 alone
        his, los, rows = (np.array(column)[:, None] for column in list(zip(*tiles, strict=True))[:3])
        place = np.arange(QUERIES)
        self.rows = torch.from_numpy(np.where(los + place < his, rows + place, first))  # [tiles, QUERIES]
        positions = np.minimum(los + place, his - 1)
        width = max(1, KEYS // size)  # blocks that are read at once
        self.parts: list[Part] = []
        for start in range(0, len(tiles), ROWS):
            its = slice(start, start + ROWS)
            for block in range(0, -(-int(his[start, 0]) // size), width):
                tables = [table[block : block + width] for *_, table in tiles[its]]
                filled = [table + tiles[start][3][:1] * (width - len(table)) for table in tables]
                keys = np.arange(block * size, (block + width) * size)
                unseen = torch.from_numpy(keys > positions[its, :, None])[:, None, :, None]
                self.parts.append(Part(its, torch.tensor(filled), unseen))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: store all new K/V, then product by product, in float32."""
        self.store(layer, k, v)
        heads = self.cache.shape.num_kv_heads
        with_zero = torch.cat((q, torch.zeros_like(q[:1]))).float() * self.scale
        # [tiles, num_kv_heads, QUERIES · group, head_dim]
        tiles = with_zero[self.rows].unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        most = tiles.new_full((*tiles.shape[:3], 1), torch.finfo(torch.float32).min)
        total, out = torch.zeros_like(most), torch.zeros_like(tiles)
        for part in self.parts:
            its, num_keys = part.tiles, part.unseen.shape[-1]
            keys, values = (gather_context(x, part.tables, num_keys).float() for x in self.layers[layer])
            scores = (tiles[its] @ keys.mT).unflatten(2, (QUERIES, -1))
            scores = scores.masked_fill_(part.unseen, float("-inf")).flatten(2, 3)
            new_most = torch.maximum(most[its], scores.amax(-1, keepdim=True))
            weights, rescale = torch.exp(scores - new_most), torch.exp(most[its] - new_most)
            total[its] = total[its] * rescale + weights.sum(-1, keepdim=True)
            out[its] = out[its] * rescale + weights @ values
            most[its] = new_most
        by_query = (out / total).unflatten(2, (QUERIES, -1)).transpose(1, 2).flatten(2, 3).to(q.dtype)
        result = torch.empty_like(torch.cat((q, q[:1])))
        result[self.rows] = by_query
        return result[:-1]


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

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        if not isinstance(config, InvariantConfig):
            raise ValueError(f"the same bits need an InvariantConfig, got {config!r}")
        super().__init__(config, **options)
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
    def sample(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
        """As `sample_next_tokens`, sequence by sequence."""
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
