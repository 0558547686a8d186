"""Priority scheduling: the order of service against a simulation, the bound of ageing, unchanged texts."""

import random
from collections import Counter, namedtuple
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Oracle, Run, Workload, check_refused, random_runs, tokens
from priority import LLM, BeamSearchParams, PriorityEngine, SamplingParams

import nanopaged
from nanopaged import LLMEngine, engine
from nanopaged.sequence import ScheduledBatch, StepResult

clock = SimpleNamespace(step=0)


@pytest.fixture(autouse=True)
def a_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the times of arrival, no two of which are the same."""
    calls = count()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: clock.step + next(calls) * 1e-6))


# One request; its arrival is a step.
Job = namedtuple("Job", "name priority arrival num_prompt_tokens max_tokens", defaults=(0, 0, 8, 8))


def make(oracle: Oracle, **options: Any) -> LLMEngine:
    """An engine with blocks of 4 slots."""
    defaults = {"block_size": 4, "num_blocks": 100, "num_host_blocks": 200, "watermark": 0.0}
    return LLM(oracle.folder, **defaults | {"preemption": "recompute"} | options).engine


def run(engine: LLMEngine, jobs: list[Job]) -> tuple[list[set[str]], dict[str, int]]:
    """Returns who got a token in each step, and how often some were preempted."""
    steps, times, clock.step, last = [], {}, 0, max(job.arrival for job in jobs)
    heard = Counter[str]()

    def hear(batch: ScheduledBatch) -> None:
        heard.update(request.request_id for request in batch.admitted)
        heard.subtract(request.request_id for request, _ in batch.preempted)

    engine.listeners.append(SimpleNamespace(batch_scheduled=hear, step_ended=id))
    while clock.step <= last or engine.has_unfinished_requests():
        for i, job in enumerate(jobs):
            if job.arrival == clock.step:
                params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True, priority=job.priority)
                engine.add_request(job.name, tokens(i % 90, job.num_prompt_tokens), params)
        outputs = {output.request_id: output.metrics.num_preemptions for output in engine.step()}
        steps.append(set(outputs))
        times |= {name: num for name, num in outputs.items() if num}
        engine.check_invariants()
        clock.step += 1
        assert clock.step < 3000, "no progress"
    assert heard == Counter(job.name for job in jobs), "admitted once more often than preempted"
    return steps, times


def simulate(jobs: list[Job], num_seats: int, ageing: float | None) -> list[set[str]]:
    """Who gets a token in each step: the most urgent of those that are there, by their age at this moment."""
    left, steps = {job.name: job.max_tokens for job in jobs}, []
    while any(left.values()):
        now = len(steps)
        ages = {job: now - job.arrival for job in jobs if left[job.name] and job.arrival <= now}
        urgency = {job: job.priority - (age / ageing if ageing else 0) for job, age in ages.items()}
        order = sorted(ages, key=lambda job: (round(urgency[job], 9), job.arrival))  # noqa: B023
        steps.append({job.name for job in order[:num_seats]})
        left = {name: num - (name in steps[-1]) for name, num in left.items()}
    return steps


@pytest.mark.parametrize("ageing", [None, 3.0, 16.0])
def test_the_most_urgent_get_the_tokens_of_each_step(qwen3: Oracle, ageing: float | None) -> None:
    """One, two or three places, and memory enough."""
    num_preemptions = 0
    for seed in range(6):
        rng, seats, way = random.Random(seed), 1 + seed % 3, ("swap", "recompute")[seed % 2]
        sizes = [(rng.randint(-2, 3), 2 * i, rng.randint(1, 20), rng.randint(1, 9)) for i in range(30)]
        jobs = [Job(str(i), *each) for i, each in enumerate(sizes)]
        ours = make(qwen3, priority_ageing=ageing, max_num_seqs=seats, preemption=way)
        steps, times = run(ours, rng.sample(jobs, k=30))
        assert steps == simulate(jobs, seats, ageing)
        num_preemptions += sum(times.values())
        assert num_preemptions >= seed, "the jobs show nothing"


FULL = [Job(str(i), p, 0, 8, 4) for i, p in enumerate([2, 1, 3, 1, 2])]  # five with three blocks each
FOUR = [Job(str(i), 1, 0, 7, 2) for i in range(4)]  # four with two blocks each
LONG = [Job("0", 0, 0, 8, 40), Job("1", 0, 0, 8, 40), Job("2", 2, 0, 24, 12), Job("3", 2, 0, 24, 12)]
UNCUT = {"num_blocks": 36, "max_model_len": 64, "max_num_batched_tokens": 64, "enable_chunked_prefill": False}
SMALL = {"num_blocks": 10, "watermark": 0.2}
CASES: dict[str, Any] = {  # options, jobs, who comes, the step of its first token, the victims
    "five blocks": ({"num_blocks": 15}, FULL, (0, 2, 20, 1), 2, "24"),
    "four blocks": ({"num_blocks": 10}, FOUR, (0, 1, 15, 1), 1, "3"),
    "two stay free": (SMALL, FOUR, (0, 1, 15, 1), 1, "23"),
    "the whole pool": (SMALL, FOUR, (0, 1, 40, 1), 1, "0123"),
    "in vain": ({"num_blocks": 20}, [Job("0", 0, 0, 30, 10), FULL[2]], (1, 1, 52, 1), 10, ""),
    "room to grow": ({"num_blocks": 5}, [Job("0", 0, 0, 8, 4), FOUR[1]], (0, 1, 12, 1), 4, ""),
    "no tokens left": (UNCUT, LONG, (1, 5, 63, 1), 40, ""),
    "budget": ({"max_num_batched_tokens": 8}, [Job("0", 1, 0, 60)], (0, 2, 16), 3, ""),
}


@pytest.mark.parametrize(("options", "jobs", "urgent", "step", "victims"), CASES.values(), ids=CASES.keys())
def test_victims(qwen3: Oracle, options: Any, jobs: list[Job], urgent: Any, step: int, victims: str) -> None:
    """The last ones go, as few as possible, and none if it would be in vain."""
    steps, times = run(make(qwen3, **options), [*jobs, Job("x", *urgent)])
    assert next(i for i, names in enumerate(steps) if "x" in names) == step
    assert times == dict.fromkeys(victims, 1)


class PriorityRun(Run):
    """With random priorities. What each request says alone is computed by the unchanged engine."""

    engine_class = PriorityEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        rng = random.Random(workload.seed)
        for asked in workload.requests:
            kind = BeamSearchParams if hasattr(asked.params, "beam_width") else SamplingParams
            asked.params = kind(**asdict(asked.params), priority=rng.randint(0, 3))
        super().__init__(folder, workload)
        self.engine.scheduler.ageing = rng.choice([None, 0.5, 3.0, 20.0])
        self.execute, self.engine.runner.execute = self.engine.runner.execute, self.check_batch

    def check_batch(self, batch: ScheduledBatch) -> StepResult:
        """What was admitted or scheduled in this step runs."""
        clock.step = self.num_steps + 1
        running, victims = set(self.engine.scheduler.running), {request for request, _ in batch.preempted}
        assert {seq.request for seq in batch.sequences} <= running
        # With a random order, a victim has another rank, and may preempt in turn what is not scheduled yet.
        assert self.workload.is_shuffled or running.issuperset(batch.admitted)
        self.happened["on arrival"] += bool(victims and set(batch.admitted) - victims)
        return self.execute(batch)


def test_random_workloads(qwen3: Oracle) -> None:
    events = ["on arrival", "swap", "recompute", "fault: schedule", "abort"]
    random_runs(PriorityRun, qwen3.folder, 30, events)


def test_an_llm_takes_priorities_and_refuses_wrong_ones() -> None:
    llm, plain = LLM(num_blocks=50, max_num_seqs=1, priority_ageing=1e6), nanopaged.SamplingParams()
    params = [SamplingParams(priority=1), BeamSearchParams(beam_width=1, priority=-2), plain]
    outputs = llm.generate(["a", "b", "c", "d"], [*params, SamplingParams(priority=-1)], use_tqdm=False)
    assert sorted(range(4), key=lambda i: outputs[i].metrics.first_token_time) == [1, 3, 2, 0]
    wrong = [({"priority": value}, f"priority .*{value}") for value in (1.0, 1 << 40, -(1 << 40))]
    check_refused(SamplingParams, wrong)
    check_refused(LLM, [({"priority_ageing": value}, f"ageing .*{value}") for value in (0, "5")])
