"""Priority scheduling with ageing: an urgent request is served first, and may preempt others when it arrives.

The place of a request in the order of service is computed once, when it begins to wait:

    rank = priority + arrival time / ageing          ageing in seconds; None: the priority alone

    ageing = 10    a: priority 2, arrived at  0 s    2 +  0 / 10 = 2.0    second
                   b: priority 0, arrived at 15 s    0 + 15 / 10 = 1.5    first
                   c: priority 0, arrived at 25 s    0 + 25 / 10 = 2.5    third

All requests age alike, so the order of two requests never changes.
"""

from dataclasses import dataclass
from typing import Any

import nanopaged
from nanopaged.block_manager import blocks_needed, blocks_to_grow
from nanopaged.config import RequestOptions
from nanopaged.engine import LLMEngine
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch

LIMIT = 1 << 31  # priorities lie in [-LIMIT, LIMIT], because they are added to times, as floats


@dataclass(frozen=True, kw_only=True)
class Prioritized(RequestOptions):
    """Params with a priority. A smaller one is served first. Requests with the engine's own params have 0."""

    priority: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("priority", minimum=-LIMIT)
        self.check_numbers("priority", low=-LIMIT, high=LIMIT)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Prioritized, nanopaged.SamplingParams):
    pass


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(Prioritized, nanopaged.BeamSearchParams):
    pass


@dataclass(frozen=True, kw_only=True)
class PriorityConfig(nanopaged.EngineConfig):
    """With `priority_ageing`: seconds of waiting that are worth one step of priority; None: no number is."""

    priority_ageing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.priority_ageing is not None:
            self.check_numbers("priority_ageing", low=1e-3, high=1e9)


class PriorityScheduler(Scheduler):
    """Serves smaller priorities first, and preempts running requests for waiting ones before them."""

    ageing: float | None = None  # `PriorityEngine` sets it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rank = self.by_priority

    def by_priority(self, request: Request) -> tuple[float, float]:
        """(priority, worsened by a late arrival; time of arrival), see the top of this file."""
        priority = getattr(request.params, "priority", 0)  # the engine's own params have none
        late = 0.0 if self.ageing is None else request.arrival_time / self.ageing
        return priority + late, request.arrival_time

    def schedule(self) -> ScheduledBatch:
        """As `Scheduler.schedule`, after urgent requests have been admitted."""
        urgent = ScheduledBatch()  # only what was preempted and admitted: no tokens are scheduled in it
        self._admit_urgent(urgent)
        batch = super().schedule()
        batch.admitted[:0] = urgent.admitted
        batch.preempted[:0] = urgent.preempted
        batch.moves.swap_out[:0] = urgent.moves.swap_out
        return batch

    def _admit_urgent(self, batch: ScheduledBatch) -> None:
        """Admit the first waiting requests that come before a running one, which may be preempted for them.

        They then stand among the running requests in order of rank, and get their tokens in that order.
        """
        while self.waiting:
            request = self.waiting[0]
            later = [other for other in self.running if other.rank > request.rank]
            if not later or request.is_swapped:  # no swap-in may come before the last swap-out of a step
                return
            ahead = self.running[: -len(later)]
            left = sum(seq.num_tokens - seq.num_computed_tokens for other in ahead for seq in other.live)
            budget = self.max_num_batched_tokens - left
            if budget <= 0 or not (self.enable_chunked_prefill or self._fits_whole(request, budget)):
                return  # it would get no tokens in this step, so it can wait
            if not self._fits_without(later, request):
                return  # nothing is preempted in vain
            victims: list[Request] = []
            while not self._fits_without(victims, request):
                victims.append(later.pop())
            for victim in victims:
                self.running.remove(victim)
                self._preempt(victim, batch)
            self.waiting.remove(request)
            admitted = self._admit(request, budget, batch)
            assert admitted, "requests were preempted for one that does not fit"

    def _fits_without(self, victims: list[Request], request: Request) -> bool:
        """Whether `request` could be admitted if the `victims` were preempted. Changes nothing.

        The others must have room for their next tokens, too, or `schedule` would preempt one of them, or
        `request` itself, in this very step.
        """
        others = [other for other in self.running if other not in victims]
        if sum(other.num_seqs for other in others) + request.num_seqs > self.max_num_seqs:
            return False
        in_use = set[int]()
        num_reserved = self.num_watermark_blocks if others else 0
        for other in others:
            in_use.update(*(seq.block_table for seq in other.live))
            num_reserved += blocks_to_grow(other.live, self.block_size)
        # As if it shared no block: it may need fewer.
        num_needed = sum(blocks_needed(seq.num_tokens, self.block_size) for seq in request.live)
        return num_needed + num_reserved <= self.block_manager.num_blocks - len(in_use)


class PriorityEngine(LLMEngine):
    """An `LLMEngine` that serves requests in order of priority."""

    make_config = PriorityConfig
    make_scheduler = PriorityScheduler

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scheduler.ageing = getattr(self.config, "priority_ageing", None)  # None of a plain EngineConfig


class LLM(nanopaged.LLM):
    engine_class = PriorityEngine
