"""Statistics: what the engine has counted since it was made, and what can be counted between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import ScheduledBatch, Sequence
from nanopaged.text.outputs import EngineStats


@dataclass(slots=True)
class Counters:
    """Counts of what the steps have done; the fields of `EngineStats` with the same names."""

    num_prompt_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens of admitted prompts …
    prefix_cache_hits: int = 0  # … and how many of them were found in the cache
    num_preemptions_swap: int = 0
    num_preemptions_recompute: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0

    def count(self, batch: ScheduledBatch, enable_prefix_caching: bool) -> None:
        """Count what a step did apart from generating tokens. Most steps do nothing else."""
        for request in batch.started:
            self.num_prompt_tokens += request.num_prompt_tokens
            if enable_prefix_caching and request.prompt_logprobs is None:  # or it was not looked up
                self.prefix_cache_queries += request.num_prompt_tokens
                self.prefix_cache_hits += request.num_cached_tokens or 0
        num_swapped = sum(way == "swap" for _, way in batch.preempted)
        self.num_preemptions_swap += num_swapped
        self.num_preemptions_recompute += len(batch.preempted) - num_swapped
        self.num_blocks_swapped_out += len(batch.swap_out)
        self.num_blocks_swapped_in += len(batch.swap_in)
        self.num_blocks_copied += len(batch.copies)


def engine_stats(num_steps: int, scheduler: Scheduler, counters: Counters) -> EngineStats:
    """The counters, and the state of blocks and queues now."""
    blocks, swapper, sequences = scheduler.block_manager, scheduler.swapper, scheduler.running_sequences
    num_swapped = sum(request.is_swapped for request in scheduler.waiting.values())
    return EngineStats(
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_cached_blocks=len(blocks.cached),
        num_used_blocks=blocks.num_blocks - blocks.num_free_blocks,
        num_shared_blocks=num_shared_blocks(blocks, sequences),
        num_blocks_saved=num_blocks_saved(blocks, sequences),
        num_host_blocks=swapper.num_host_blocks,
        num_free_host_blocks=len(swapper.free_ids),
        slot_utilization=slot_utilization(blocks, sequences),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) - num_swapped,
        num_swapped=num_swapped,
        preemption=scheduler.preemption,
        num_steps=num_steps,
        num_generated_tokens=scheduler.num_generated_tokens,
        **asdict(counters),
    )


def num_shared_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> int:
    """Blocks with more than one reference."""
    in_use = {block_id for seq in sequences for block_id in seq.block_table}
    return sum(manager.blocks[block_id].ref_count > 1 for block_id in in_use)


def num_blocks_saved(manager: BlockManager, sequences: Iterable[Sequence]) -> int:
    """Blocks that sharing saves: all entries of the block tables, less the blocks in use."""
    return sum(len(seq.block_table) for seq in sequences) - (manager.num_blocks - manager.num_free_blocks)


def filled_slots(manager: BlockManager, sequences: Iterable[Sequence]) -> dict[int, int]:
    """Each block of their tables → its slots that hold K/V; a shared block counts once."""
    filled: dict[int, int] = {}
    for seq in sequences:
        for i, block_id in enumerate(seq.block_table):
            here = filled_here(seq.num_computed_tokens, i, manager.block_size)
            filled[block_id] = max(filled.get(block_id, 0), here)
    return filled


def filled_here(num_computed_tokens: int, logical_block: int, block_size: int) -> int:
    """Slots that a sequence has filled in its i-th block."""
    return min(block_size, max(0, num_computed_tokens - logical_block * block_size))


def slot_utilization(manager: BlockManager, sequences: Iterable[Sequence]) -> float:
    """Share of the slots in allocated blocks that hold K/V.

    The other slots are internal fragmentation (the end of a last block), or belong to a prompt that is being
    computed.
    """
    filled = filled_slots(manager, sequences)
    return sum(filled.values()) / (len(filled) * manager.block_size) if filled else 0.0
