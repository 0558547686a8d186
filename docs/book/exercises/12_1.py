"""Exercise 12.1, another victim: see docs/book/12-forks.md."""

from collections.abc import Callable
from random import Random
from typing import Any

from lib.no_model import NoModel, make_request, make_scheduler, rank_again

from nanopaged import SamplingParams
from nanopaged.sequence import Request, Sample


def longest_output_first(request: Request) -> Any:
    """A number or a tuple: the last request in this order, smallest first, is the victim.

    `request.live[0]` is its sequence, which has `num_tokens` and `num_output_tokens`.
    """
    raise NotImplementedError


def fewest_tokens_first(request: Request) -> Any:
    """The same: the victim is the request with the most tokens."""
    raise NotImplementedError


times: list[float] = []  # three numbers, to two decimals: `times_computed(None)`, and with the two ranks


def times_computed(rank: Callable[[Request], Any] | None) -> float:
    """How often each token is computed when 60 requests arrive together, in 250 blocks of 16."""
    draw = Random(0).expovariate
    scheduler, runner = make_scheduler(250, 16, enable_prefix_caching=False), NoModel()
    scheduler.rank = rank or scheduler.rank
    needed = computed = 0
    for i in range(60):
        num_prompt, num_output = 1 + int(draw(1 / 161)), 1 + int(draw(1 / 338))
        request = make_request(str(i), [7] * num_prompt, SamplingParams(max_tokens=num_output))
        request.arrival_time = i / 1000
        scheduler.add(request)
        needed += num_prompt + num_output - 1
    while scheduler.waiting or scheduler.running:
        rank_again(scheduler)
        batch = scheduler.schedule()
        computed += sum(seq.num_scheduled_tokens for seq in batch.sequences)
        scheduler.update(batch, runner.execute(batch))
    return computed / needed


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def request_of(num_prompt: int, num_output: int, arrival: float) -> Request:
    request = make_request(f"{num_prompt}+{num_output}", [7] * num_prompt, SamplingParams(max_tokens=999))
    request.arrival_time = arrival
    for _ in range(num_output):
        request.live[0].append(Sample(9, -1.0))
    return request


def check_order(rank: Callable[[Request], Any], right: Callable[[int, int], Any]) -> None:
    """Twelve requests, of which no two are equal for the rank; the last ones are compared in every pair."""
    random, sizes = Random(3), set()
    while len(sizes) < 12:
        size = random.randint(1, 40), random.randint(0, 9)
        if right(*size) not in {right(*other) for other in sizes}:
            sizes.add(size)
    requests = [request_of(*size, random.random()) for size in sorted(sizes)]
    for one in requests:
        for other in requests:
            if one is not other:
                victim = max(one, other, key=rank)
                wanted = max(
                    one, other, key=lambda r: right(r.num_prompt_tokens, r.live[0].num_output_tokens)
                )
                assert victim is wanted, (
                    f"Of the requests {one.request_id} and {other.request_id} (prompt and generated tokens) "
                    f"the victim is {victim.request_id}, but it should be {wanted.request_id}."
                )


def test_longest_output_first() -> None:
    check_order(longest_output_first, lambda num_prompt, num_output: (-num_output, num_prompt))


def test_fewest_tokens_first() -> None:
    check_order(fewest_tokens_first, lambda num_prompt, num_output: num_prompt + num_output)


def test_times() -> None:
    if not times:
        raise NotImplementedError("assign three numbers to `times`")
    assert len(times) == 3, f"`times` has {len(times)} numbers instead of three."
    for name, rank, told in zip(
        ("the order of arrival", "longest_output_first", "fewest_tokens_first"),
        (None, longest_output_first, fewest_tokens_first),
        times,
        strict=True,
    ):
        found = times_computed(rank)
        assert abs(found - told) < 0.006, f"With {name} each token is not computed {told} times."
