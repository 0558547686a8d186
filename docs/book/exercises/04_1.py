"""Exercise 4.1, the scheduler in twenty lines: see docs/book/04-scheduling.md."""

import random

from lib.no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams


def plan(requests: dict[str, tuple[int, int]], budget: int, max_num_seqs: int) -> list[dict[str, int]]:
    """For each step, how many tokens of each request are computed. A request of which none are is left out.

    All requests arrive before step 1, and memory is ample. `requests` maps a name to (prompt tokens, output
    tokens), in order of arrival.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def serve(requests: dict[str, tuple[int, int]], budget: int, max_num_seqs: int) -> list[dict[str, int]]:
    """The same by the engine's scheduler."""
    scheduler = make_scheduler(1000, 16, max_num_seqs, budget, enable_prefix_caching=False)
    runner, steps = NoModel(), []
    for name, (num_prompt, num_output) in requests.items():
        scheduler.add(make_request(name, [0] * num_prompt, SamplingParams(max_tokens=num_output)))
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        steps.append({seq.request.request_id: seq.num_scheduled_tokens for seq in batch.sequences})
        scheduler.update(batch, runner.execute(batch))
    return steps


def test_the_scheduler_agrees() -> None:
    rng = random.Random(0)
    for _ in range(60):
        requests = {name: (rng.randint(1, 20), rng.randint(1, 6)) for name in "ABCDEF"[: rng.randint(1, 6)]}
        budget, max_num_seqs = rng.randint(1, 20), rng.randint(1, 5)
        planned, real = plan(requests, budget, max_num_seqs), serve(requests, budget, max_num_seqs)
        call = f"plan({requests}, {budget}, {max_num_seqs})"
        for number, (mine, its) in enumerate(zip(planned, real, strict=False), 1):
            assert mine == its, f"{call}: step {number} computes {mine}, but the scheduler computes {its}."
        assert len(planned) == len(real), (
            f"{call} has {len(planned)} steps, but the scheduler takes {len(real)}."
        )
