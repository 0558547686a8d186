"""Exercise 11.2, an open load: see docs/book/11-measuring.md."""

import time
from functools import cache
from unittest import mock

from nanopaged import LLM, LLMEngine, SamplingParams


def serve(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, arrivals: list[float]
) -> tuple[list[float], list[float]]:
    """Add prompt i when `arrivals[i]` seconds have passed (ascending), and step until all are finished.

    Read the clock with `time.monotonic()`, as the engine does.

    Returns:
        Two lists of seconds to the first token, in the order of the prompts: since `metrics.arrival_time`
        of the request's output, and since its planned arrival.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

STEP = 0.004  # seconds of each step, by a clock that the check turns
ARRIVALS = [0.0, 0.001, 0.0022, 0.0035, 0.0301, 0.0302, 0.0303, 0.0467]
PROMPTS = [[5 + i, 7, 9] for i in range(len(ARRIVALS))]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Clock:
    now = 1000.0

    def read(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


class Watched:
    """The engine of the tiny model, which notes when requests are added, and when steps begin and end."""

    def __init__(self, engine: LLMEngine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self.added: dict[str, float] = {}
        self.prompts: list[object] = []
        self.params: list[object] = []
        self.steps: list[tuple[float, float]] = []
        self.idle = 0.0  # the longest time between two steps while a request was unfinished
        self.metrics: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def add_request(self, request_id: str, prompt: object, params: object = None) -> None:
        self.added[request_id] = self.clock.now
        self.prompts.append(prompt)
        self.params.append(params)
        self.engine.add_request(request_id, prompt, params)

    def step(self, *args: object, **options: object) -> list:
        began = self.clock.now
        if not self.engine.has_unfinished_requests():
            self.clock.sleep(1e-4)
            return self.engine.step(*args, **options)
        since = max([self.steps[-1][1] if self.steps else 0.0, min(self.waiting(), default=began)])
        self.idle = max(self.idle, began - since)
        self.clock.sleep(STEP)
        outputs = self.engine.step(*args, **options)
        self.steps.append((began, self.clock.now))
        self.metrics |= {output.request_id: output.metrics for output in outputs if output.finished}
        return outputs

    def waiting(self) -> list[float]:
        return [added for request_id, added in self.added.items() if request_id not in self.metrics]


def engine() -> LLMEngine:
    return LLM(dtype="float32", num_blocks=64, block_size=16, enable_prefix_caching=False).engine


@cache
def run() -> tuple[Watched, float, list[float], list[float]]:
    """What `serve` did, the time at which it was called, and what it returned."""
    clock = Clock()
    watched = Watched(engine(), clock)
    before = clock.now
    read, sleep = clock.read, clock.sleep
    with mock.patch.multiple(time, monotonic=read, perf_counter=read, time=read, sleep=sleep):
        seen, planned = serve(watched, PROMPTS, PARAMS, ARRIVALS)
    given = watched.prompts
    num = len(PROMPTS)
    assert given == PROMPTS, (
        f"Each of the {num} prompts is to be added once, in order, but {given} are added."
    )
    assert watched.params == [PARAMS] * num, "A request is added with other params than those of serve."
    finished = len(watched.metrics)
    assert finished == num, f"serve returns when {finished} of {num} requests are finished."
    lengths = len(seen), len(planned)
    assert lengths == (num, num), f"{num} requests have {lengths[0]} and {lengths[1]} times."
    return watched, before, list(seen), list(planned)


def test_requests_are_added_when_they_arrive() -> None:
    watched, before, _, _ = run()
    for i, (added, arrival) in enumerate(zip(watched.added.values(), ARRIVALS, strict=True)):
        early = 1e3 * (before + arrival - added)
        assert early <= 0, f"Request {i} is added {early:.1f} ms before it arrives."
        missed = sum(before + arrival + 0.001 < began < added for began, _ in watched.steps)
        assert missed == 0, (
            f"Request {i} has arrived, but is not added before the next step ({missed} too late)."
        )
    idle = 1e3 * watched.idle
    assert idle < 1, f"The engine has requests to compute, but serve calls step only {idle:.1f} ms later."


def test_the_times_are_those_of_the_engine_and_of_the_plan() -> None:
    watched, before, seen, planned = run()
    for i, request_id in enumerate(watched.added):
        metrics = watched.metrics[request_id]
        first = metrics.first_token_time
        right = 1e3 * (first - metrics.arrival_time)
        assert abs(1e3 * seen[i] - right) < 0.01, (
            f"Request {i}: arrival_time to first_token_time are {right:.2f} ms, not {1e3 * seen[i]:.2f}."
        )
        right = 1e3 * (first - before - ARRIVALS[i])
        assert abs(1e3 * planned[i] - right) < 0.2, (
            f"Request {i}: planned arrival to first token are {right:.1f} ms, not {1e3 * planned[i]:.1f}."
        )
