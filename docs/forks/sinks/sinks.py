"""Attention sinks and a sliding window: the memory of a long text is bounded.

A token attends to the first `num_sink_tokens` tokens, the sinks, and to the last `window` tokens including
itself (StreamingLLM, arXiv 2309.17453). A block that no later token sees is given back, and leaves a hole in
the block table. 2 sinks, window 6, blocks of 4, and 15 tokens computed:

    position       0 1 2 3 │ 4 5 6 7 │ 8 9 10 11 │ 12 13 14 15    15 is next; it sees 0, 1 and 10 to 15
    block table       7    │    _    │     5     │      2         7 has the sinks; 4 to 7 are a hole

Attention gets the table without holes, [7, 5, 2], and a context 4 tokens shorter: K has its rotary position
already, and only differences matter. A step makes room for the tokens that it may compute.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import Tensor

import nanopaged
from nanopaged.attention.metadata import StepInputs
from nanopaged.block_manager import Block, BlockManager, blocks_needed
from nanopaged.config import EngineConfig
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import EngineStats
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Move, Request, ScheduledBatch, Sequence, StepResult
from nanopaged.snapshot import check_blocks, check_host_blocks, engine_stats
from nanopaged.swap import Swapper

HOLE = -1  # in a block table: the block that stood here was given back


@dataclass(frozen=True, kw_only=True)
class SinkConfig(EngineConfig):
    """The options of an engine, and two more. Raises ValueError for those that do not go with them."""

    window: int = 252  # tokens that a token sees, itself included
    num_sink_tokens: int = 4  # at the beginning, which all tokens see

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("window", minimum=2)
        self.check_ints("num_sink_tokens", minimum=0)
        self.check_choice("attention_backend", ("auto", "torch", "reference"))  # kernels take no mask
        if self.attention_backend == "auto":
            self.keep("attention_backend", "torch")
        for name, only in (("tensor_parallel_size", 1), ("trace", None)):
            value = getattr(self, name)
            if value != only:
                raise ValueError(f"{name} is {value!r}, but with a window it must be {only}: leave it out")


class SinkBlocks(BlockManager):
    """Block tables with holes, which have no references. They reach as far as the next step can compute."""

    def __init__(self, config: SinkConfig, **pool: Any) -> None:
        super().__init__(**pool)
        self.window, self.chunk = config.window, config.max_num_batched_tokens
        self.num_sink_blocks = blocks_needed(config.num_sink_tokens, self.block_size)

    def unseen(self, num_computed_tokens: int) -> range:
        """The rows of a table that no later token sees: above, with 15 tokens computed, row 1."""
        first_seen = max(0, num_computed_tokens - self.window + 1) // self.block_size
        return range(self.num_sink_blocks, max(self.num_sink_blocks, first_seen))

    def slide(self, seq: Sequence) -> None:
        """Give back what no later token sees. The table is a new list: a runner may know the old one."""
        rows, table = self.unseen(seq.num_computed_tokens), seq.block_table
        if rows and table[rows[-1]] != HOLE:
            for row in rows:
                self.release(table[row])
            seq.block_table = [*table[: rows.start], *[HOLE] * len(rows), *table[rows.stop :]]

    def share(self, block_id: int) -> None:
        if block_id != HOLE:
            super().share(block_id)

    def release(self, block_id: int) -> None:
        if block_id != HOLE:
            super().release(block_id)

    def head(self, seq: Sequence) -> Sequence:
        """A copy as if the holes were not, which ends with the next step: above, 11 tokens in [7, 5, 2]."""
        head, num_gone = copy(seq), len(self.unseen(seq.num_computed_tokens)) * self.block_size
        head.block_table = [block_id for block_id in seq.block_table if block_id != HOLE]
        head.token_ids = seq.token_ids[num_gone : seq.num_computed_tokens + self.chunk]
        head.num_computed_tokens -= num_gone
        return head

    def on_heads(self, operation: Callable[[Any], Any], sequences: list[Sequence]) -> Any:
        """Let an operation of the engine change heads; the sequences get their tables, with the holes."""
        heads = [self.head(seq) for seq in sequences]
        result = operation(heads)
        for seq, head in zip(sequences, heads, strict=True):
            rows, table = self.unseen(seq.num_computed_tokens), head.block_table
            holes = [HOLE] * len(rows) if table else []
            seq.block_table = table[: rows.start] + holes + table[rows.start :]
            seq.host_table = head.host_table
            seq.num_computed_tokens = head.num_computed_tokens + len(rows) * self.block_size
        return result

    def append_slots(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        return self.on_heads(super().append_slots, sequences)

    def allocate(self, sequences: list[Sequence], num_reserved: int = 0) -> bool:
        if not self.on_heads(partial(super().allocate, num_reserved=num_reserved), sequences):
            return False
        for seq in sequences:  # what the prefix cache had counts as computed, so the step goes further
            self.slide(seq)
        if self.append_slots(sequences) is None:
            for seq in sequences:
                self.free(seq)
        return bool(sequences[0].block_table)


def request_of(heads: list[Sequence]) -> Any:
    """What a swapper, and the statistics, read of a request."""
    return SimpleNamespace(live=heads, sequences=heads)


class SinkSwapper(Swapper):
    """Host tables have no holes: the number of computed tokens says where they are."""

    block_manager: SinkBlocks

    def swap_out(self, request: Request) -> list[Move] | None:
        move: Any = super().swap_out
        return self.block_manager.on_heads(lambda heads: move(request_of(heads)), request.live)

    def swap_in(self, request: Request, num_reserved: int = 0) -> list[Move] | None:
        move: Any = partial(super().swap_in, num_reserved=num_reserved)
        return self.block_manager.on_heads(lambda heads: move(request_of(heads)), request.live)


class SinkScheduler(Scheduler):
    """A scheduler whose tables slide after each step, also those of siblings that wait."""

    block_manager: SinkBlocks

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[Request]:
        advanced = super().update(batch, result)
        for seq in [seq for request in self.running for seq in request.live]:
            self.block_manager.slide(seq)
        return advanced


class SinkRunner(ModelRunner):
    """A model whose attention sees sinks and window."""

    def __init__(self, config: SinkConfig, **options: Any) -> None:
        self.window, self.num_sink_tokens = config.window, config.num_sink_tokens
        self.score_mod = self.mask
        super().__init__(config, **options)

    def mask(self, layer: int, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The `score_mod`. Positions count without holes, which changes no difference within the window."""
        hidden = (keys >= self.num_sink_tokens) & (keys <= queries - self.window)
        return scores.masked_fill(hidden, float("-inf"))

    def forward(self, inputs: StepInputs) -> tuple[Tensor, ...]:
        """As `ModelRunner`. Slots and rotary positions are known; attention gets tables without holes."""
        metadata, tables = inputs.metadata, inputs.metadata.block_tables
        num_gone = [table.count(HOLE) * self.block_size for table in tables]
        tables = [[block_id for block_id in table if block_id != HOLE] for table in tables]
        metadata = replace(metadata, block_tables=tables, context_lens=metadata.context_lens - num_gone)
        return super().forward(replace(inputs, metadata=metadata))


class SinkEngine(nanopaged.LLMEngine):
    """An engine whose sequences hold blocks for sinks, window and one step."""

    make_config, make_scheduler, make_runner = SinkConfig, SinkScheduler, SinkRunner

    def make_block_manager(self, **pool: Any) -> SinkBlocks:
        return SinkBlocks(self.config, **pool)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scheduler.swapper = SinkSwapper(self.block_manager, self.runner.num_host_blocks)
        self.prompts.num_blocks = 1 << 60  # a text may be longer than the pool: `queue` knows what it holds

    def queue(self, request: Request) -> None:
        """As `LLMEngine`. Raises ValueError for a request that may hold more blocks than there are."""
        manager, length, pool = self.block_manager, request.stop_rules.max_length, self.runner.num_blocks
        in_window = 1 + blocks_needed(manager.window + manager.chunk - 2, manager.block_size)
        most = min(manager.num_sink_blocks + in_window, blocks_needed(length - 1, manager.block_size))
        needed = request.width * most
        if needed > pool:
            raise ValueError(
                f"{request.width} sequence(s) of up to {length} tokens may need {needed} blocks, but the "
                f"whole pool has {pool}: lower max_tokens, max_num_batched_tokens or window, or add blocks"
            )
        super().queue(request)

    def stats(self) -> EngineStats:
        """As `LLMEngine`, of tables without holes."""
        scheduler = copy(self.scheduler)
        scheduler.running = [self.heads_of(request) for request in scheduler.running]
        return engine_stats(self.num_steps, scheduler)

    def heads_of(self, request: Request) -> Any:
        """A request whose tables have no holes."""
        return request_of([self.block_manager.head(seq) for seq in request.live])

    def check_invariants(self) -> None:
        """As `LLMEngine`, with a block for each hole. Holes are the rows that no later token sees."""
        manager, ids = copy(self.block_manager), count(self.block_manager.num_blocks)
        running = [copy(seq) for seq in self.scheduler.running_sequences]
        for seq in running:
            holes = [row for row, block_id in enumerate(seq.block_table) if block_id == HOLE]
            assert holes == list(manager.unseen(seq.num_computed_tokens)), f"holes {holes} are wrong"
            seq.block_table = [next(ids) if block_id == HOLE else block_id for block_id in seq.block_table]
        manager.num_blocks = next(ids)
        extra = range(len(manager.blocks), manager.num_blocks)
        manager.blocks = manager.blocks + [Block(i, ref_count=1) for i in extra]
        check_blocks(manager, running)
        requests = [self.heads_of(request) for request in self.requests.values()]
        check_host_blocks(self.scheduler.swapper, requests)


class LLM(nanopaged.LLM):
    engine_class = SinkEngine
