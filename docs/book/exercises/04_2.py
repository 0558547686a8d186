"""Exercise 4.2, short prompts first, without starvation: see docs/book/04-scheduling.md."""

from lib.no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.sequence import Request

arrived: dict[str, int] = {}  # request id → the step before which it arrives; the check fills it


def rank(request: Request) -> float:
    """The place of a request in the order of service, smallest first.

    `request.num_prompt_tokens` and `arrived[request.request_id]` are all that it needs.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def overtaken(arrives: int, num_prompt: int = 40) -> int:
    """How many steps a long request waits that arrives before this step. A short one comes in each step."""
    scheduler, runner, step = (
        make_scheduler(1000, 16, max_num_seqs=1, enable_prefix_caching=False),
        NoModel(),
        0,
    )
    scheduler.rank = rank
    params = SamplingParams(max_tokens=1)
    long = make_request("long", [0] * num_prompt, params)
    while not long.finished:
        step += 1
        if step < 150:
            arrived[f"short {step}"] = step
            scheduler.add(make_request(f"short {step}", [0] * 4, params))
        if step == arrives:
            arrived["long"] = step
            scheduler.add(long)
        batch = scheduler.schedule()
        scheduler.update(batch, runner.execute(batch))
    return step - arrives


def test_a_long_prompt_does_not_starve() -> None:
    for arrives in (1, 20, 60):
        waits = overtaken(arrives)
        assert waits < 45, (
            f"A long request that arrives before step {arrives} waits for {waits} steps, not about 40."
        )


def test_short_prompts_come_first() -> None:
    for arrives in (1, 20, 60):
        waits = overtaken(arrives)
        assert waits > 30, (
            f"A long request that arrives before step {arrives} waits for {waits} steps only, although a "
            "short one comes in each of the next steps, and is to be preferred for about 40 of them."
        )
