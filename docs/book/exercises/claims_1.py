"""Exercise 1, do ten requests need a tenth of the memory? See docs/reference/wrong-claims.md."""

from lib.no_model import NoModel, make_request, make_scheduler, num_used_blocks

from nanopaged import SamplingParams


def blocks_in_use(num_requests: int, prompt: int, output: int, block_size: int) -> int:
    """The most blocks in use at a time, of equal prompts; each request generates `output` tokens."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def most_in_use(num_requests: int, prompt: int, output: int, block_size: int) -> int:
    """The requests arrive together in a scheduler with the prefix cache, and run to their ends."""
    scheduler, runner, most = make_scheduler(2000, block_size), NoModel(), 0
    for i in range(num_requests):
        scheduler.add(make_request(str(i), [7] * prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        most = max(most, num_used_blocks(scheduler))
        scheduler.update(batch, runner.execute(batch))
    return most


def test_the_scheduler_takes_as_many_blocks() -> None:
    jobs = [(10, 100, 28, 16), (1, 100, 28, 16), (10, 96, 28, 16), (3, 17, 16, 16), (3, 16, 16, 16)]
    jobs += [(4, 5, 1, 4), (4, 8, 1, 4), (2, 8, 9, 4), (6, 30, 11, 1), (5, 3, 20, 8)]
    for job in jobs:
        found, most = blocks_in_use(*job), most_in_use(*job)
        assert found == most, f"blocks_in_use{job} is {found}, but the scheduler takes {most} blocks."
