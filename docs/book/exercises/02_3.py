"""Exercise 2.3, what a failure costs: see docs/book/02-one-request.md."""

from lib.no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams


def steps_with_failure(num_prompt: int, num_output: int, budget: int, fail_at: int) -> list[int]:
    """The number of tokens computed in each step, as in exercise 1, if step number `fail_at` fails once.

    The failed step is one of the list. Steps are numbered from 1.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def counted(num_prompt: int, num_output: int, budget: int, fail_at: int) -> list[int]:
    """The same by the engine's scheduler."""
    scheduler, runner = make_scheduler(100, 4, max_num_batched_tokens=budget), NoModel()
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    request = make_request("A", list(range(num_prompt)), params)
    scheduler.add(request)
    counts = []
    while not request.finished:
        batch = scheduler.schedule()
        counts.append(sum(seq.num_scheduled_tokens for seq in batch.sequences))
        if len(counts) == fail_at:
            scheduler.start_over([request])
        else:
            scheduler.update(batch, runner.execute(batch))
    return counts


def test_the_scheduler_agrees() -> None:
    for num_prompt, num_output, budget in ((10, 3, 5), (1, 4, 5), (12, 6, 4), (7, 5, 100), (30, 9, 8)):
        num_steps = -(-num_prompt // budget) + num_output - 1
        for fail_at in range(1, num_steps + 1):
            case = num_prompt, num_output, budget, fail_at
            predicted, real = list(steps_with_failure(*case)), counted(*case)
            assert predicted == real, (
                f"steps_with_failure{case} is {predicted}, but the scheduler computes {real}."
            )
