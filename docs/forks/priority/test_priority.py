"""Priority scheduling: the order of service, ageing, preemption on arrival, and unchanged outputs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import EOS, Oracle, random_prompts, tokens
from random_workloads import Workload, forked, mixed
from test_random_runs import Run, make_engine
from test_sharing import check_beams, transformers_beams

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams, engine
from nanopaged.sequence import Request, ScheduledBatch, StepResult
from nanopaged.views.outputs import request_output


class Clock:
    """The time of arrivals: a step takes a second. Two arrivals are never at the same time."""

    def __init__(self) -> None:
        self.num_steps, self.num_calls = 0, 0

    def monotonic(self) -> float:
        self.num_calls += 1
        return self.num_steps + self.num_calls * 1e-6


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(engine, "time", clock)
    return clock


@dataclass
class Job:
    """One request, and the step of its arrival."""

    name: str
    priority: int = 0
    arrival: int = 0
    num_prompt_tokens: int = 8
    max_tokens: int = 8


def make(num_blocks: int = 100, policy: str = "priority", **config: object) -> LLMEngine:
    """An engine with the fake runner and blocks of 4 slots."""
    options = {"preemption": "recompute", "num_host_blocks": 0, "watermark": 0.0} | config
    return make_engine(
        "fake", EngineConfig(block_size=4, num_blocks=num_blocks, scheduling_policy=policy, **options)
    )


@dataclass
class Served:
    """What `serve` has seen."""

    first: dict[str, int]  # name → the step of its first token, in the order of these
    last: dict[str, int]  # name → the step of its last token
    num_preemptions: dict[str, int]
    outputs: dict[str, list[int]]


def serve(engine: LLMEngine, jobs: list[Job], clock: Clock) -> Served:
    """Run the jobs to the end, with the invariants checked after every step."""
    served = Served({}, {}, {}, {})
    pending = dict(enumerate(jobs))
    clock.num_steps = 0
    while pending or engine.has_unfinished_requests():
        for i in [i for i, job in pending.items() if job.arrival <= clock.num_steps]:
            job = pending.pop(i)
            params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
            engine.add_request(job.name, tokens(i % 90, job.num_prompt_tokens), params, job.priority)
        for output in engine.step():
            served.first.setdefault(output.request_id, clock.num_steps)
            if output.finished:
                served.last[output.request_id] = clock.num_steps
                served.num_preemptions[output.request_id] = output.metrics.num_preemptions
                served.outputs[output.request_id] = output.outputs[0].token_ids
        engine.check_invariants()
        clock.num_steps += 1
        assert clock.num_steps < 2000, "the engine makes no progress"
    assert engine.stats().num_used_blocks == 0
    return served


# ── the order of service ──────────────────────────────────────────────────────────────────────────


def test_a_smaller_priority_is_served_first_and_equal_ones_by_arrival(clock: Clock) -> None:
    priorities = {"a": 1, "b": 0, "c": -2, "d": 0, "e": 1, "f": 7}
    jobs = [Job(name, priority) for name, priority in priorities.items()]
    assert list(serve(make(max_num_seqs=1), jobs, clock).first) == ["c", "b", "d", "a", "e", "f"]


def test_the_urgent_get_the_token_budget_first(clock: Clock) -> None:
    """Budget 8: the long prompt that is being computed waits while the urgent one is computed."""
    jobs = [Job("long", 1, num_prompt_tokens=60), Job("urgent", 0, 2, num_prompt_tokens=16)]
    served = serve(make(max_num_batched_tokens=8), jobs, clock)
    assert served.first["urgent"] == 3
    assert served.num_preemptions == {"urgent": 0, "long": 0}, "both fit"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_with_equal_priorities_the_policy_is_first_come_first_served(clock: Clock, preemption: str) -> None:
    """In a pool that is too small, which preempts anyway: step by step the same, with no more preemptions."""
    rng = random.Random(1)
    jobs = [Job(str(i), 0, rng.randint(0, 20), rng.randint(1, 20), rng.randint(5, 30)) for i in range(30)]
    seen = []
    for policy in ("fcfs", "priority"):
        engine = make(30, policy, max_num_seqs=6, preemption=preemption, num_host_blocks=100)
        seen.append((serve(engine, jobs, clock), engine.stats()))
    fcfs, priority = (sum(served.num_preemptions.values()) for served, _ in seen)
    assert fcfs > 10
    assert priority == fcfs, "thrash: equal priorities preempt each other"
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (lambda request: request.num_prompt_tokens, "cba"),
        (lambda r: r.stop_rules.max_length - max(seq.num_tokens for seq in r.live), "cab"),
    ],
    ids=["shortest prompt first", "shortest remaining first"],
)
def test_other_policies_are_one_line_each(clock: Clock, rank: Callable[[Request], int], order: str) -> None:
    """As the README shows them. They need no patch."""
    engine = make(policy="fcfs", max_num_seqs=1)
    engine.scheduler.rank = rank
    jobs = [Job("a", 0, 0, 12, 5), Job("b", 0, 0, 8, 9), Job("c", 0, 0, 4, 2)]
    assert "".join(serve(engine, jobs, clock).last) == order


# ── ageing ────────────────────────────────────────────────────────────────────────────────────────


def test_ageing_prevents_starvation(clock: Clock) -> None:
    """In each step an urgent request comes and takes the only place. Three priorities are worth 3 · 5 s."""
    jobs = [Job("ordinary", 3, 0, max_tokens=10)] + [Job(f"u{i}", 0, i, max_tokens=1) for i in range(60)]
    assert serve(make(max_num_seqs=1), jobs, clock).first["ordinary"] == 60, "after all urgent ones"
    served = serve(make(max_num_seqs=1, priority_ageing=5.0), jobs, clock)
    assert (served.first["ordinary"], served.last["ordinary"]) == (15, 24)
    assert served.num_preemptions["ordinary"] == 0, "it has aged, so it is not preempted either"
    assert served.first["u14"] < 15 < served.first["u15"]


def test_ageing_prevents_starvation_while_running(clock: Clock) -> None:
    """The ordinary request is admitted at once. Urgent requests preempt it for 10 s, and no longer."""
    jobs = [Job("ordinary", 2, 0, max_tokens=30)]
    jobs += [Job(f"u{i}", 0, i, max_tokens=2) for i in range(3, 90, 3)]
    with_ageing = serve(make(max_num_seqs=1, priority_ageing=5.0), jobs, clock)
    assert with_ageing.num_preemptions["ordinary"] == 3, "by those that came at 3, 6 and 9 s"
    assert with_ageing.last["ordinary"] == 29 + 3 * 2
    without = serve(make(max_num_seqs=1), jobs, clock)
    assert without.num_preemptions["ordinary"] == 27, "by all that came before it ended"


# ── preemption on arrival ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("full", ["seats", "blocks"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_an_urgent_request_gets_its_first_token_under_full_load(
    clock: Clock, full: str, preemption: str
) -> None:
    """Eight ordinary requests of 48 tokens: all places or all blocks are taken when an urgent one comes."""
    limits = {"seats": {"max_num_seqs": 8}, "blocks": {"num_blocks": 8 * 12}}[full]
    jobs = [Job(str(i), 1, 0, 8, 40) for i in range(8)] + [Job("urgent", 0, 38, 12, 4)]
    first, outputs = {}, []
    for name in ("fcfs", "waits", "preempts"):
        engine = make(
            policy="fcfs" if name == "fcfs" else "priority",
            preemption=preemption,
            num_host_blocks=50,
            **limits,
        )
        engine.scheduler.preempts_on_arrival = name == "preempts"
        asked = [replace(job, priority=0) for job in jobs] if name == "fcfs" else jobs
        served = serve(engine, asked, clock)
        first[name] = served.first["urgent"]
        if name == "preempts":
            assert served.num_preemptions == dict.fromkeys("0123456", 0) | {"7": 1, "urgent": 0}
            assert getattr(engine.stats(), f"num_preemptions_{preemption}") == 1
        outputs.append(served.outputs)
    assert first == {"fcfs": 40, "waits": 40, "preempts": 38}
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_worst_requests_are_preempted_and_only_as_many_as_needed(clock: Clock) -> None:
    """No block is free, and each of five requests has three. The urgent one needs five: the last two go."""
    priorities = [2, 1, 3, 1, 2]
    jobs = [Job(str(i), p, 0, 8, 4) for i, p in enumerate(priorities)] + [Job("urgent", 0, 2, 20, 1)]
    served = serve(make(15), jobs, clock)
    assert served.first["urgent"] == 2
    assert {name for name, times in served.num_preemptions.items() if times} == {"2", "4"}


def test_nothing_is_preempted_in_vain(clock: Clock) -> None:
    """Without the ordinary request, the pool is still too full for the urgent one: both keep what they have.

    20 blocks: "first" has 8 and grows to 10, "ordinary" has 3 of priority 2, "urgent" needs 13.
    """
    jobs = [Job("first", 0, 0, 30, 10), Job("ordinary", 2, 0, 8, 4), Job("urgent", 1, 1, 52, 1)]
    served = serve(make(20), jobs, clock)
    assert served.num_preemptions == {"first": 0, "ordinary": 0, "urgent": 0}
    assert served.last["ordinary"] == 3
    assert served.first["urgent"] == 10


def test_nothing_is_preempted_for_a_request_that_would_get_no_tokens(clock: Clock) -> None:
    """The prompt of 63 tokens has to fit in a step whole, and does not beside two more urgent decodes."""
    config = {"max_model_len": 64, "max_num_batched_tokens": 64, "enable_chunked_prefill": False}
    jobs = [Job("urgent 0", 0, 0, 8, 40), Job("urgent 1", 0, 0, 8, 40), Job("middle", 1, 5, 63, 1)]
    jobs += [Job("ordinary 0", 2, 0, 24, 12), Job("ordinary 1", 2, 0, 24, 12)]
    served = serve(make(36, **config), jobs, clock)
    assert set(served.num_preemptions.values()) == {0}
    assert served.first["middle"] == 40, "when the urgent ones have ended"


def test_the_watermark_stays_free_while_others_run(clock: Clock) -> None:
    """10 blocks: four requests have 2 each, the urgent prompt takes 4. With a reserve of 2, two go."""
    jobs = [Job(str(i), 1, 0, 7, 2) for i in range(4)] + [Job("urgent", 0, 1, 15, 1)]
    num_victims = {}
    for watermark in (0.0, 0.2):
        served = serve(make(10, watermark=watermark), jobs, clock)
        assert served.first["urgent"] == 1
        num_victims[watermark] = sum(served.num_preemptions.values())
    assert num_victims == {0.0: 1, 0.2: 2}
    served = serve(make(10, watermark=0.2), [*jobs[:4], replace(jobs[4], num_prompt_tokens=40)], clock)
    assert served.first["urgent"] == 1, "nothing else runs, so it may take every block"


def test_the_others_must_still_be_able_to_grow(clock: Clock) -> None:
    """5 blocks: "first" has 2 and needs another, "ordinary" has 2, and "urgent" needs 3: it waits."""
    jobs = [Job("first", 0, 0, 8, 4), Job("ordinary", 2, 0, 7, 2), Job("urgent", 1, 1, 12, 1)]
    served = serve(make(5), jobs, clock)
    assert served.num_preemptions == {"first": 0, "ordinary": 0, "urgent": 0}
    assert served.first["urgent"] == 4, "when the first one has ended"


def test_blocks_shared_with_a_request_that_stays_are_not_needed_twice() -> None:
    """8 blocks: "first" has 4 and needs a fifth. The urgent prompt begins alike: it needs 1 block, not 5."""
    engine, params = make(8), SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("first", tokens(1, 16), params)
    engine.add_request("ordinary", tokens(2, 8), params, priority=2)
    engine.step()
    engine.add_request("urgent", [*tokens(1, 16), 5, 5, 5, 5], params, priority=1)
    assert [output.request_id for output in engine.step()] == ["first", "urgent"]
    engine.check_invariants()
    assert engine.requests["ordinary"].num_preemptions == 1


def test_no_more_are_admitted_than_the_token_budget_serves() -> None:
    """Budget 8, the length of one urgent prompt: of four ordinary requests one goes, and then another."""
    engine, params = make(max_num_seqs=4, max_num_batched_tokens=8), SamplingParams(ignore_eos=True)
    for i in range(4):
        engine.add_request(str(i), tokens(i, 2), params, priority=1)
    engine.step()
    for i in range(2):
        engine.add_request(f"urgent {i}", tokens(10 + i, 8), params)
    for num_preemptions in (1, 2, 2):
        engine.step()
        assert engine.stats().num_preemptions_recompute == num_preemptions
        engine.check_invariants()


# ── the outputs do not change ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("chunked", [True, False])
def test_greedy_tokens_equal_transformers(qwen3: Oracle, preemption: str, chunked: bool) -> None:
    """The smallest pool, arrivals during the run: every request is preempted for others, or has preempted."""
    prompts = random_prompts(8, seed=3, longest=30)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    llm = LLM(
        qwen3.folder,
        dtype="float32",
        block_size=4,
        num_blocks=12,
        preemption=preemption,
        num_host_blocks=40,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=24 if chunked else None,
        scheduling_policy="priority",
    )
    requests = [
        llm.engine.prompts.make_request(str(i), prompt, params, priority=-i)
        for i, prompt in enumerate(prompts)
    ]
    waiting = requests[::-1]
    while waiting or llm.engine.has_unfinished_requests():
        if waiting:
            llm.engine.queue(waiting.pop())
        llm.engine.step()
        llm.engine.check_invariants()
    stats = llm.engine.stats()
    assert getattr(stats, f"num_preemptions_{preemption}") >= 4
    for request, prompt in zip(requests, prompts, strict=True):
        (got,) = request_output(request).outputs
        assert got.token_ids == qwen3.greedy(prompt, 12)
        oracle = qwen3.logprobs(prompt + got.token_ids)[len(prompt) - 1 : -1]
        expected = oracle.gather(1, torch.tensor([got.token_ids]).T)[:, 0].tolist()
        assert [lp[t].logprob for t, lp in zip(got.token_ids, got.logprobs, strict=True)] == pytest.approx(
            expected, abs=1e-4
        )


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_samples_and_beams_that_are_preempted_say_the_same(qwen3: Oracle, preemption: str) -> None:
    """Both families are running when an urgent prompt takes the place of both."""
    prompts = random_prompts(3, seed=5, longest=20)
    beams = BeamSearchParams(beam_width=3, max_tokens=10)
    samples = SamplingParams(n=3, seed=1, max_tokens=10, ignore_eos=True)
    options = {"dtype": "float32", "block_size": 4, "num_host_blocks": 60, "preemption": preemption}
    alone = LLM(qwen3.folder, **options, num_blocks=200).generate(prompts[1], samples, use_tqdm=False)
    llm = LLM(qwen3.folder, **options, num_blocks=40, scheduling_policy="priority")
    families = [
        llm.engine.prompts.make_request(name, prompt, params, 1)
        for name, prompt, params in zip("bs", prompts[:2], [beams, samples], strict=True)
    ]
    for request in families:
        llm.engine.queue(request)
    for _ in range(5):
        llm.engine.step()
    (urgent,) = llm.generate(
        tokens(1, 140), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False, priority=0
    )
    assert urgent.outputs[0].token_ids == qwen3.greedy(tokens(1, 140), 4)
    assert [request.num_preemptions for request in families] == [1, 1]
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        llm.engine.check_invariants()
    check_beams(request_output(families[0]), transformers_beams(qwen3, prompts[0], beams, EOS), 1.0)
    got, whole = request_output(families[1]).outputs, alone[0].outputs
    assert [completion.token_ids for completion in got] == [completion.token_ids for completion in whole]


# ── random workloads ──────────────────────────────────────────────────────────────────────────────


@dataclass
class PriorityWorkload(Workload):
    """A random workload whose requests have random priorities."""

    ageing: float | None = None

    def config(self, trace: Path | None = None) -> EngineConfig:
        policy = {"scheduling_policy": "priority", "priority_ageing": self.ageing}
        return replace(super().config(trace), **policy)


class PriorityRun(Run):
    """A run with random priorities that checks every decision to preempt."""

    def __init__(self, workload: PriorityWorkload, clock: Clock) -> None:
        super().__init__(workload)
        rng = random.Random(workload.seed)
        self.clock = clock
        if workload.order == "random":
            self.engine.scheduler.rank = self.random_rank
        self.priorities = [rng.randint(0, 3) for _ in workload.requests]
        self.victims: list[Request] = []  # of this step
        self.add_to_engine = self.engine.add_request
        self.engine.add_request = self.add_with_priority
        self.find_victims = self.engine.scheduler._find_victims
        self.engine.scheduler._find_victims = self.check_victims
        self.execute = self.engine.runner.execute
        self.engine.runner.execute = self.check_batch

    def add_with_priority(self, request_id: str, prompt: dict, params: SamplingParams) -> None:
        self.clock.num_steps = self.num_steps
        self.add_to_engine(request_id, prompt, params, self.priorities[int(request_id)])

    def random_rank(self, request: Request) -> float:
        """Another one in each step: then the order of service has nothing to do with the priorities."""
        return random.Random(f"{self.num_steps} {request.request_id}").random()

    def step(self) -> None:
        self.victims = []
        super().step()

    def check_victims(self, request: Request) -> list[Request] | None:
        victims = self.find_victims(request)
        assert all(victim.priority > request.priority for victim in victims or [])
        self.victims += victims or []
        self.happened["preempted on arrival"] += len(victims or [])
        self.happened["admitted ahead"] += victims is not None
        return victims

    def check_batch(self, batch: ScheduledBatch) -> StepResult:
        """What was admitted or scheduled in this step is still running."""
        running = self.engine.scheduler.running
        assert all(request in running for request in batch.admitted)
        assert all(seq.request in running for seq in batch.sequences)
        self.happened["victim came back at once"] += len(set(self.victims) & set(batch.admitted))
        return self.execute(batch)


@pytest.mark.parametrize(("make_workload", "share"), [(mixed, 5), (forked, 13)])
def test_random_workloads_with_random_priorities(
    make_workload: Callable[[int], Workload], share: int, clock: Clock, pytestconfig: pytest.Config
) -> None:
    """Every request says what it says alone, and every workload ends. `--random-runs 20000` runs more."""
    first, num = pytestconfig.getoption("first_seed"), pytestconfig.getoption("random_runs") // share
    happened: Counter[str] = Counter()
    for seed in range(first, first + num):
        ageing = random.Random(seed).choice([None, 0.5, 3.0, 20.0])
        workload = PriorityWorkload(**vars(make_workload(seed)), ageing=ageing)
        try:
            run = PriorityRun(workload, clock)
            run.serve()
        except Exception as error:
            raise AssertionError(f"{make_workload.__name__}, seed {seed}: {error}") from error
        happened += run.happened
    print(make_workload.__name__, num, dict(sorted(happened.items())))
    for event in ("preempted on arrival", "swap", "recompute", "fault: schedule"):
        assert happened[event], event


# ── wrong input ───────────────────────────────────────────────────────────────────────────────────


def test_errors_name_the_value_and_the_way_out() -> None:
    with pytest.raises(ValueError, match="scheduling_policy is 'sjf', but must be one of fcfs, priority"):
        EngineConfig(scheduling_policy="sjf")
    with pytest.raises(ValueError, match="priority_ageing is 5, but the scheduling_policy is 'fcfs': set"):
        EngineConfig(priority_ageing=5)
    for ageing, error in ((0, ValueError), (float("nan"), ValueError), ("5", TypeError)):
        with pytest.raises(error, match=f"priority_ageing .*{ageing}"):
            EngineConfig(scheduling_policy="priority", priority_ageing=ageing)
    fcfs, by_priority = make(policy="fcfs"), make()
    with pytest.raises(ValueError, match="priority is 1, but the scheduling_policy is 'fcfs', which ignores"):
        fcfs.add_request("a", [1], priority=1)
    fcfs.add_request("a", [1], priority=0)
    for priority in (1.0, "1", True, None):
        with pytest.raises(TypeError, match=f"priority must be an int, got {priority!r}"):
            by_priority.add_request("a", [1], priority=priority)
    with pytest.raises(ValueError, match="but must lie between"):
        by_priority.add_request("a", [1], priority=10**400)
    assert not by_priority.has_unfinished_requests()


def test_generate_takes_one_priority_or_one_for_each_prompt(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder, num_blocks=50, max_num_seqs=1, scheduling_policy="priority")
    prompts, params = random_prompts(3, seed=1), SamplingParams(max_tokens=2)
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=[1, 2, -1])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert sorted(range(3), key=lambda i: outputs[i].metrics.first_token_time) == [2, 0, 1]
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=4)
    assert sorted(range(3), key=lambda i: outputs[i].metrics.first_token_time) == [0, 1, 2]
    with pytest.raises(ValueError, match="there are 3 prompts, but 2 priorities: give one for all, or one"):
        llm.generate(prompts, params, priority=[1, 2])
    with pytest.raises(TypeError, match="priority must be an int, got 0.5"):
        llm.generate(prompts, params, priority=[1, 2, 0.5])
    assert not llm.engine.has_unfinished_requests(), "nothing was queued"
