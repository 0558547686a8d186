"""Random workloads in pools too small for all requests: sharing, eviction, preemption, aborts, faults.

Each finished request says what it says alone. The fake model checks every read of K/V; the tiny model has the
real sampler. The suite runs a hundred workloads of each kind, and goes on until all that they should meet has
happened; a long run is

    python -m pytest tests/engine/test_random_runs.py -s --random-runs 20000

and `--first-seed 1234 --random-runs 1` runs one of them again. `-k tiny --random-backend cpp` takes the C++
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
from conftest import KERNELS, RANDOM_RUNS
from fake_runner import fake_engine, fake_model
from harness import Asked, Run, Workload, random_runs
from random_workloads import forked, mixed, tiny

from nanopaged import LLMEngine, RequestOutput
from nanopaged.model.checkpoint import TINY_MODEL


class FakeRun(Run):
    """A run on the fake model, whose log-probabilities are exact."""

    tolerance = 0.0
    errors = (RuntimeError, MemoryError, KeyboardInterrupt)

    def make_engine(self, kind: type[LLMEngine], options: dict[str, Any]) -> LLMEngine:
        return fake_engine(**options, has_texts=True)

    def say_alone(self, asked: Asked) -> RequestOutput:
        output = super().say_alone(asked)
        for engine in harness.ALONE.values():
            engine.runner.forget()  # or its memory would grow from run to run
        return output

    def lose_kv(self) -> None:
        self.engine.runner.forget()

    def check(self) -> None:
        super().check()
        self.engine.runner.check_findable_blocks(self.engine.block_manager)
        assert self.engine.runner.most_tokens <= self.engine.scheduler.max_num_batched_tokens


EVENTS = [f"fault: {stage}" for stage in harness.STAGE_LINES]
EVENTS += [f"fault: {error.__name__}" for error in FakeRun.errors]
EVENTS += [f"abort while {state}" for state in ("waiting", "running", "swapped")]
EVENTS += ["recompute", "swap", "cache hit", "copy on write", "ended by str"]
MIXED_EVENTS = ["abort while ended", "ended by int", "ended by NoneType", "prompt scored"]


@pytest.mark.parametrize("draw", [mixed, forked, tiny])
def test_every_request_reads_its_own_kv_and_says_what_it_would_say_alone(
    draw: Callable[[int], Workload], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOPAGED_CACHE", str(KERNELS))  # for backend = "cpp"
    monkeypatch.setattr(Run, "options", {"attention_backend": pytestconfig.getoption("random_backend")})
    first, num = pytestconfig.getoption("first_seed"), pytestconfig.getoption("random_runs")
    events: list[str] = []  # that must happen
    if num >= RANDOM_RUNS and draw is not tiny:
        events = EVENTS + (MIXED_EVENTS if draw is mixed else [])
    if draw is tiny:
        happened = random_runs(Run, TINY_MODEL, -(-num // 20), events, draw, first)
    else:
        happened = random_runs(FakeRun, fake_model(), num, events, draw, first)
    print(f"{draw.__name__}: {dict(sorted(happened.items()))}")
