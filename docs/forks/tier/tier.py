"""A second tier of the prefix cache: evicted blocks go to host memory, and are found there again.

An evicted block is stored under its key. An admitted request looks for the keys behind those in the pool:

    block_size = 2    prompt  a b │ c d │ e f │ g h │ i        keys  k0 k1 k2 k3
    the pool has k0 in block 7, the tier k1 and k2             table [7 0 1 2 3]
    blocks 0 and 1 are loaded, so 6 of 9 tokens are not computed; k1 and k2 can be found in the pool again
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

import nanopaged
from nanopaged.block_manager import Block, BlockManager
from nanopaged.config import EngineConfig
from nanopaged.model_runner import ModelRunner
from nanopaged.sequence import Moves, Sequence


@dataclass(frozen=True, kw_only=True)
class TierConfig(EngineConfig):
    """With a tier of at most `tier_bytes` of host memory. Raises as `EngineConfig`."""

    tier_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("tier_bytes", minimum=1)
        if not self.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False, but a tier needs it: set it to True")
        if self.tensor_parallel_size > 1:
            raise ValueError(f"tensor_parallel_size is {self.tensor_parallel_size}, but a tier needs 1 rank")


class Tier:
    """The K/V of evicted blocks.

    Attributes:
        pool: the K/V of the pool, [num_blocks, ...].
        kv: key → the K/V of a block, the least recently used first; `capacity` blocks at most.
        loads: (block, K/V) to write to the pool in this step.
    """

    def __init__(self, pool: torch.Tensor, tier_bytes: int) -> None:
        self.pool = pool
        self.capacity = tier_bytes // pool[0].nbytes
        if self.capacity == 0:
            raise ValueError(
                f"tier_bytes is {tier_bytes:,}, but a block has {pool[0].nbytes:,} bytes: raise it"
            )
        self.kv = OrderedDict[bytes, torch.Tensor]()
        self.loads: list[tuple[int, torch.Tensor]] = []

    def load(self, keys: list[bytes]) -> list[torch.Tensor]:
        """The K/V of the first of these blocks, up to one that is missing."""
        found = list(takewhile(self.kv.__contains__, keys))
        for key in reversed(found):  # the end of a prefix is to be forgotten first
            self.kv.move_to_end(key)
        return [self.kv[key] for key in found]

    def store(self, block: Block) -> None:
        """Store a cached block, unless its key is known. The least recently used make room."""
        assert block.key is not None
        if block.key not in self.kv:
            if len(self.kv) == self.capacity:
                self.kv.popitem(last=False)
            self.kv[block.key] = self.pool[block.block_id].cpu().clone()
        self.kv.move_to_end(block.key)


class TierBlockManager(BlockManager):
    """A block manager with a tier, once the engine has set it."""

    tier: Any = None

    def reset(self) -> None:
        """As `BlockManager.reset`. The tier stays, because it has copies."""
        super().reset()
        if self.tier is not None:
            self.tier.loads.clear()

    def take(self) -> int:
        """As `BlockManager.take`; an evicted block is stored."""
        if not self.free_ids:
            self.tier.store(next(iter(self.cached.values())))
        return super().take()

    def allocate(self, sequences: list[Sequence], num_reserved: int = 0) -> bool:
        """As `BlockManager.allocate`; then what follows in the tier is loaded into blocks just taken."""
        fits = super().allocate(sequences, num_reserved)
        is_scored = sequences[0].request.wants_prompt_logprobs  # then each token must be computed
        for seq in sequences if fits and not is_scored else ():
            first = seq.num_computed_tokens // self.block_size  # no sibling before `seq` has this block
            keys = self.keys_of(seq, (seq.num_tokens - 1) // self.block_size)[first:]
            for key, block_id, kv in zip(keys, seq.block_table[first:], self.tier.load(keys), strict=False):
                self.tier.loads.append((block_id, kv))
                seq.num_computed_tokens += self.block_size
                self.prefix_index.setdefault(key, self.blocks[block_id]).key = key  # as `publish`
        return fits

    def reset_prefix_cache(self) -> None:
        """As `BlockManager.reset_prefix_cache`; the tier is emptied, too."""
        super().reset_prefix_cache()
        self.tier.kv.clear()


class TierRunner(ModelRunner):
    """A model runner whose pool has a tier, once the engine has set it."""

    tier: Any = None

    def forward(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        """As `ModelRunner.forward`; blocks are loaded after the moves, which may swap them out."""
        self.kv_cache.move_blocks(inputs.moves)
        inputs.moves = Moves()
        for block_id, kv in self.tier.loads:
            self.kv_cache.data[block_id].copy_(kv)
        self.tier.loads.clear()
        return super().forward(inputs)


class TierEngine(nanopaged.LLMEngine):
    """An engine with a tier."""

    make_config = TierConfig
    make_block_manager = TierBlockManager
    make_runner = TierRunner

    def __init__(self, config: TierConfig, runner: Any = None) -> None:
        super().__init__(config, runner)
        tiered: Any = self.runner
        tiered.tier = self.block_manager.tier = Tier(tiered.kv_cache.data, config.tier_bytes)


class LLM(nanopaged.LLM):
    engine_class = TierEngine
