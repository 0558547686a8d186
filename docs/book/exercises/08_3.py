"""Exercise 8.3, the victim that loses least: see docs/book/08-preemption.md."""

import random
from collections.abc import Callable

from lib.no_model import NoModel, make_request, make_scheduler, rank_again

from nanopaged import SamplingParams
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch


def rank(request: Request) -> float:
    """The place in the order of service, smallest first: the last one is the victim."""
    raise NotImplementedError


preempted: int | None = None  # in how many of `replay(0, rank)` to `replay(99, rank)` is request 0 preempted?


def replay(seed: int, rank: Callable[[Request], float] | None = None) -> tuple[int, int]:
    """Eight requests in twelve blocks: how often request 0 is preempted, and the wasted tokens."""
    scheduler, requests, lengths = make_workload(seed)
    scheduler.rank = rank or scheduler.rank
    for request in requests:
        scheduler.add(request)
    runner, computed = NoModel(), 0
    while scheduler.running or scheduler.waiting:
        rank_again(scheduler)
        batch = scheduler.schedule()
        computed += sum(seq.num_scheduled_tokens for seq in batch.sequences)
        scheduler.update(batch, runner.execute(batch))
    return requests[0].num_preemptions, computed - sum(n + m - 1 for n, m in lengths)


def make_workload(seed: int) -> tuple[Scheduler, list[Request], list[tuple[int, int]]]:
    """A scheduler, eight requests, and their tokens of prompt and output."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=12, block_size=4, enable_prefix_caching=False)
    lengths = [(rng.randint(1, 16), rng.randint(1, 30)) for _ in range(8)]
    requests = [
        make_request(str(i), [0] * n, SamplingParams(max_tokens=m)) for i, (n, m) in enumerate(lengths)
    ]
    return scheduler, requests, lengths


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def num_computed(request: Request) -> int:
    return request.live[0].num_computed_tokens


def test_the_victim_has_the_fewest_computed_tokens() -> None:
    for seed in range(20):
        scheduler, requests, _ = make_workload(seed)
        scheduler.rank, preempt, runner = rank, scheduler._preempt, NoModel(seed)

        def checked(
            victim: Request,
            batch: ScheduledBatch,
            scheduler: Scheduler = scheduler,
            preempt: Callable[[Request, ScheduledBatch], None] = preempt,
        ) -> None:
            got, others = num_computed(victim), sorted(map(num_computed, scheduler.running))
            assert got <= min(others, default=got), (
                f"Your rank preempts a request with {got} computed tokens while others have {others}."
            )
            preempt(victim, batch)

        scheduler._preempt = checked
        while requests or scheduler.running or scheduler.waiting:
            if requests and seed % 2 + len(scheduler.waiting) < 2:  # they come one after another
                scheduler.add(requests.pop(0))
            rank_again(scheduler)
            batch = scheduler.schedule()
            scheduler.update(batch, runner.execute(batch))


def test_how_often_the_first_request_is_preempted() -> None:
    if preempted is None:
        raise NotImplementedError("preempted is a number of workloads.")
    found = sum(replay(seed, rank)[0] > 0 for seed in range(100))
    assert preempted <= found, f"Request 0 is preempted in fewer than {preempted} of the 100 workloads."
    assert preempted >= found, f"Request 0 is preempted in more than {preempted} of the 100 workloads."
