"""Exercise 2.1, predict the steps: see docs/book/02-one-request.md."""

import random

from lib.no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams


def steps(num_prompt: int, num_output: int, budget: int) -> list[int]:
    """The number of tokens computed in each step, for a request alone in the engine.

    Its prompt has `num_prompt` tokens, `num_output` tokens are generated, and `budget` is the token budget.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def counted(num_prompt: int, num_output: int, budget: int) -> list[int]:
    """The same by the engine's scheduler."""
    scheduler, runner, counts = make_scheduler(100, 16, max_num_batched_tokens=budget), NoModel(), []
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    scheduler.add(make_request("A", [7] * num_prompt, params))
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        counts.append(sum(seq.num_scheduled_tokens for seq in batch.sequences))
        scheduler.update(batch, runner.execute(batch))
    return counts


def test_the_scheduler_agrees() -> None:
    rng = random.Random(0)
    cases = [(rng.randint(1, 40), rng.randint(1, 6), rng.randint(1, 12)) for _ in range(40)]
    for case in [(10, 3, 5), (1, 1, 5), (6, 2, 5), (23, 9, 5), *cases]:
        predicted, real = list(steps(*case)), counted(*case)
        assert predicted == real, f"steps{case} is {predicted}, but the scheduler computes {real}."
