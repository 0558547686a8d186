"""Sparse pages: a generated token attends to few pages of its context (Quest, arXiv 2406.10774).

A page is a block. Its bounds are the minimum and the maximum of its keys, number by number. A query q times
the maximum where q is positive, else the minimum, is at least its product with any key of the page (README.md
has an example). The bounds lie in the KV cache, in planes behind the layers': a block is copied, swapped and
found with them.
"""

import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nanopaged
from nanopaged import EngineConfig
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.block_manager import BlockManager
from nanopaged.engine import LLMEngine
from nanopaged.kv_cache import KVCache, KVShape, to_device
from nanopaged.model_runner import ModelRunner
from nanopaged.sequence import ScheduledBatch, Sequence, StepResult


@dataclass(frozen=True, kw_only=True)
class QuestConfig(EngineConfig):
    """With `num_pages_read`: blocks that a generated token attends to, in each layer and KV head."""

    num_pages_read: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("num_pages_read", minimum=1)
        self.check_choice("attention_backend", ("auto", "torch"))
        # The memory is measured with this backend, too, because prefills are those of TorchAttention.
        self.keep("attention_backend", "torch")
        size = self.tensor_parallel_size
        if size != 1:  # other ranks do not know where prompts end
            raise ValueError(f"tensor_parallel_size is {size}, but num_pages_read needs 1: lower it")


@dataclass
class Query:
    """A token that chooses its pages."""

    row: int  # in the flat batch
    table: Tensor  # int64, the blocks up to its own
    position: int
    num_pages: int  # to read


class QuestAttention(TorchAttention):
    """`TorchAttention`, in which a generated token reads the `num_pages_read` best pages of each KV head.

    Where the prompt ends decides this, not what is computed together: a token of a prompt that is computed
    alone reads all pages, and generated tokens that a preempted request computes again choose theirs.
    """

    def __init__(self, cache: KVCache, scale: float, num_layers: int, num_pages_read: int) -> None:
        super().__init__(cache, scale)
        self.num_layers, self.num_pages_read = num_layers, num_pages_read
        self.prompt_lens: list[int] = []  # of each sequence of the batch, set before `begin_step`

    def bounds(self, layer: int) -> Tensor:
        """[num_blocks, 2 (minimum, maximum), num_kv_heads, head_dim]: blocks that are not full have none.

        28 layers, blocks of 16: the bounds of layer 20 lie in plane 28 + 1, where slot 20 - 16 = 4 would be.
        """
        plane, offset = divmod(layer, self.cache.block_size)
        return self.cache.data[:, self.num_layers + plane, :, :, offset]

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Note also which blocks become full: their last slot is written. A partial block is always read."""
        super().begin_store(metadata)
        blocks, offsets = np.divmod(metadata.slot_mapping, self.cache.block_size)
        self.full = to_device(blocks[offsets == self.cache.block_size - 1], self.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K/V, then the bounds of the blocks that are full now."""
        super().store(layer, k, v)
        keys = self.layers[layer][0][self.full]
        self.bounds(layer)[self.full] = torch.stack(keys.aminmax(dim=2), dim=1)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Find the tokens that choose pages: all decodes, and the generated tokens in prefills."""
        self.num_decodes = metadata.num_decodes
        self.begin_store(metadata)
        self.begin_prefills(metadata)
        self.queries: list[Query] = []
        first_row = 0
        lens = zip(metadata.query_lens.tolist(), metadata.context_lens.tolist(), strict=True)
        for i, (query_len, end) in enumerate(lens):
            start = end - query_len
            prompt_len = self.prompt_lens[i]
            for position in range(start if i < self.num_decodes else max(start, prompt_len), end):
                row = first_row + position - start
                blocks = metadata.block_tables[i][: position // self.cache.block_size + 1]
                num_pages = self.num_pages_read if position >= prompt_len else len(blocks)
                table = to_device(blocks, self.device)
                self.queries.append(Query(row=row, table=table, position=position, num_pages=num_pages))
            first_row += query_len

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: store, prefill as always, then compute the tokens that choose their pages."""
        self.store(layer, k, v)
        out = torch.empty_like(q)
        n = self.num_decodes
        if n < len(q):
            out[n:] = self.prefill(layer, q[n:], k[n:], v[n:])
        for query in self.queries:
            out[query.row] = self.read(layer, self.by_kv_head(q[query.row, None])[0], query)
        return out

    def read(self, layer: int, q: Tensor, query: Query) -> Tensor:
        """Attention to the chosen pages: q [num_kv_heads, group, head_dim] → [num_heads, head_dim]."""
        chosen = self.choose(layer, q, query)
        heads = torch.arange(len(q), device=self.device)[:, None]
        keys, values = (x[query.table[chosen], heads].flatten(1, 2) for x in self.layers[layer])
        offsets = torch.arange(self.cache.block_size, device=self.device)
        positions = (chosen[..., None] * self.cache.block_size + offsets).flatten(1)
        scores = (q * self.scale) @ keys.mT  # [num_kv_heads, group, keys]
        scores.masked_fill_(positions[:, None] > query.position, -math.inf)
        return (scores.softmax(-1) @ values).flatten(0, 1)

    def choose(self, layer: int, q: Tensor, query: Query) -> Tensor:
        """The pages to read, int64 [num_kv_heads, pages]: the last page, then those with the best bounds."""
        q = q.float()
        low, high = self.bounds(layer)[query.table].float().permute(1, 2, 0, 3)  # each [heads, pages, dim]
        bounds = (q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT).amax(1)  # [num_kv_heads, pages]
        bounds[:, -1] = math.inf
        return bounds.sort(descending=True, stable=True).indices[:, : query.num_pages]


class QuestRunner(ModelRunner):
    """A `ModelRunner` with `QuestAttention`, over a KV cache with bounds."""

    def __init__(self, config: QuestConfig, **options: Any) -> None:
        self.num_pages_read = config.num_pages_read
        super().__init__(config, **options)

    def make_shape(self, num_layers: int, **sizes: Any) -> KVShape:
        """With planes for the bounds, each for those of `block_size` layers: 28 layers and 2 planes."""
        self.num_layers = num_layers
        return KVShape(num_layers=num_layers + -(-num_layers // self.block_size), **sizes)

    def make_attention(self, _: str, kv_cache: KVCache, scale: float) -> QuestAttention:
        return QuestAttention(kv_cache, scale, self.num_layers, self.num_pages_read)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.attention.prompt_lens = [seq.request.num_prompt_tokens for seq in batch.sequences]
        return super().execute(batch)


class QuestBlockManager(BlockManager):
    """A `BlockManager` whose keys tell where the prompt ends, since a generated token has other K/V."""

    def keys_of(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """As before; the first block with a generated token has the prompt's length in its key.

        block_size = 2    a prompt a b c, then d e    keys  (a b)    SHA-256(a b)·(c d)·3
        """
        prompt_len = seq.request.num_prompt_tokens
        end = prompt_len // self.block_size
        if len(seq.block_keys) <= end < num_blocks:
            super().keys_of(seq, end + 1)
            seq.block_keys[end] += array("q", [prompt_len]).tobytes()
        return super().keys_of(seq, num_blocks)


class QuestEngine(LLMEngine):
    make_config, make_runner, make_block_manager = QuestConfig, QuestRunner, QuestBlockManager


class LLM(nanopaged.LLM):
    engine_class = QuestEngine
