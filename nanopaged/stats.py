"""The engine's accounts, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanopaged.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """The engine's accounts, now (blocks, queues) and since it was made (the rest).

    `num_free_blocks` includes the cached ones, which can be had at once. `num_shared_blocks` have several
    owners; `num_blocks_saved` is what sharing saves: all entries of the block tables, less the blocks in use.
    `slot_utilization` is the share of the slots in used blocks that hold K/V. `num_running`, `num_waiting`
    and `num_swapped` count requests, `prefix_cache_queries` and `_hits` prompt tokens, `num_blocks_copied`
    copies on write; `preemption` is the way in use, "swap" or "recompute".
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_shared_blocks: int
    num_blocks_saved: int
    num_host_blocks: int
    num_free_host_blocks: int
    slot_utilization: float
    num_running: int
    num_waiting: int
    num_swapped: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemption: str
    num_preemptions_swap: int
    num_preemptions_recompute: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_blocks_copied: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int

    @classmethod
    def of(cls, scheduler: Scheduler, num_steps: int) -> EngineStats:
        """Gather them from the scheduler and what it manages."""
        blocks, swapper, sequences = scheduler.block_manager, scheduler.swapper, scheduler.sequences
        num_swapped = sum(request.is_swapped for request in scheduler.waiting.values())
        return cls(
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=len(blocks.cached),
            num_used_blocks=blocks.num_blocks - blocks.num_free_blocks,
            num_shared_blocks=blocks.num_shared_blocks(sequences),
            num_blocks_saved=blocks.num_blocks_saved(sequences),
            num_host_blocks=swapper.num_host_blocks,
            num_free_host_blocks=len(swapper.free_ids),
            slot_utilization=blocks.slot_utilization(sequences),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) - num_swapped,
            num_swapped=num_swapped,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            preemption=scheduler.preemption,
            num_preemptions_swap=scheduler.num_preemptions_swap,
            num_preemptions_recompute=scheduler.num_preemptions_recompute,
            num_blocks_swapped_out=scheduler.num_blocks_swapped_out,
            num_blocks_swapped_in=scheduler.num_blocks_swapped_in,
            num_blocks_copied=scheduler.num_blocks_copied,
            num_steps=num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
        )
