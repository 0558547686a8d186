"""Overlapped scheduling: the same tokens as the plain engine and as transformers, and what is overlapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event, Semaphore
from types import SimpleNamespace

import pytest
import test_random_runs
from conftest import RANDOM_RUNS, Oracle, random_prompts
from faults import STAGES
from overlap import OverlappedEngine, OverlappedLLM, Step, publish_known, refuse
from random_workloads import Workload, forked, mixed, tiny
from test_random_runs import EVENTS, MIXED_EVENTS, Run, large_engine, make_engine

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.sequence import NonFiniteLogits, Request, ScheduledBatch, StepResult


def settle(engine: OverlappedEngine) -> None:
    """Wait until the worker has nothing to do."""
    engine.worker.submit(int).result()


class OverlappedRun(Run):
    """A run on an overlapped engine; what it says alone is still computed by a plain one.

    Faults are thrown in the worker, too. Such a fault is raised by the step that waits for its result.
    """

    def __init__(self, workload: Workload) -> None:
        large_engine(workload.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_random_runs, "LLMEngine", OverlappedEngine)
            super().__init__(workload)
        self.execute, self.engine.runner.execute = self.engine.runner.execute, self.execute_and_fail
        self.update, self.engine.update = self.engine.update, self.update_and_count

    @property
    def is_armed(self) -> bool:
        return bool(self.faults) and self.faults[0].step <= self.num_steps

    def execute_and_fail(self, batch: ScheduledBatch) -> StepResult:
        with self.thrower if self.is_armed else nullcontext():
            return self.execute(batch)

    def update_and_count(self, step: Step) -> list[Request]:
        """Count what only this engine has to deal with."""
        ahead, alive = self.engine.ahead, [seq for seq in step.batch.sequences if not seq.finished]
        self.happened["dropped token"] += len(step.batch.sequences) - len(alive)
        if ahead is not None:
            self.happened["scheduled ahead"] += 1
            again = {request for request, _ in ahead.batch.preempted} & set(ahead.batch.admitted)
            self.happened["preempted and admitted ahead"] += len(again & {seq.request for seq in alive})
        preempted = [seq for seq in alive if seq.request in self.engine.scheduler.waiting]
        swapped = [seq for seq in alive if seq.host_table]
        advanced = self.update(step)
        self.happened["ended while preempted ahead"] += sum(seq.finished for seq in preempted)
        self.happened["ended while swapped ahead"] += sum(seq.finished for seq in swapped)
        return advanced

    def has_failed(self) -> bool:
        """Whether the step ahead has failed already."""
        ahead = self.engine.ahead
        return ahead is not None and ahead.result.exception() is not None

    def attempt(self, operation: Callable[[], object]) -> object:
        thrower, result = self.thrower, None
        try:
            with thrower if self.is_armed else nullcontext():
                result = operation()
        except (RuntimeError, MemoryError, KeyboardInterrupt) as error:
            if error is not thrower.raised:
                raise
            settle(self.engine)
            if operation == self.engine.step and self.model == "fake":
                self.engine.runner.forget()
        settle(self.engine)
        if thrower.raised is not None and not self.has_failed():
            self.happened[f"fault: {self.faults.pop(0).stage}"] += 1
            self.happened[f"fault: {thrower.error.__name__}"] += 1
            self.happened["fault: start over"] += self.second.raised is not None
            self.next_fault()
        self.check()
        return result

    def check(self) -> None:
        if self.has_failed():
            self.engine.check_invariants()
        else:
            super().check()


MINE = ["scheduled ahead", "dropped token", "preempted and admitted ahead"]
MY_MIXED = [*MIXED_EVENTS, "ended while preempted ahead", "ended while swapped ahead"]


@pytest.mark.parametrize("make_workload", [mixed, forked, tiny])
def test_random_workloads(
    make_workload: Callable[[int], Workload], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    engine = OverlappedEngine
    mine = {
        "schedule": (engine.schedule_ahead, engine.launch, publish_known),
        "update": (engine.update, engine.publish_last),
    }
    for stage, functions in mine.items():
        monkeypatch.setitem(STAGES, stage, STAGES[stage] + functions)
    first, num = pytestconfig.getoption("first_seed"), pytestconfig.getoption("random_runs")
    events: list[str] = []  # that must happen
    if make_workload is tiny:
        num = -(-num // 20)
    elif num >= RANDOM_RUNS:
        events = EVENTS + MINE + (MY_MIXED if make_workload is mixed else [])
    happened: Counter[str] = Counter()
    for seed in range(first, first + 10 * num):
        if seed >= first + num and all(happened[event] for event in events):
            break
        try:
            run = OverlappedRun(make_workload(seed))
            run.serve()
        except Exception as error:
            raise AssertionError(f"{error}\nAgain: --first-seed {seed} --random-runs 1") from error
        happened += run.happened
    print(f"{make_workload.__name__}: {seed - first} runs, {dict(sorted(happened.items()))}")
    missing = [event for event in events if not happened[event]]
    assert not missing, f"the workloads no longer cover everything: {missing}"


# ── against transformers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_tokens_are_those_of_transformers(oracle: Oracle, preemption: str) -> None:
    """In a pool so small that requests are preempted, with prompts in chunks; log-probabilities, too."""
    llm = OverlappedLLM(
        oracle.folder,
        block_size=4,
        num_blocks=24,
        num_host_blocks=100,
        max_num_batched_tokens=24,
        watermark=0,
        preemption=preemption,
    )
    prompts = random_prompts(8, seed=5, longest=40)
    params = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=i % 2 > 0) for i in range(8)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        got = output.outputs[0]
        assert got.token_ids == oracle.greedy(prompt, 24, ignore_eos=i % 2 > 0)
        expected = oracle.logprobs(prompt + got.token_ids)
        for j, token_id in enumerate(got.token_ids):
            logprob = got.logprobs[j][token_id].logprob
            assert logprob == pytest.approx(expected[len(prompt) + j - 1, token_id].item(), abs=1e-4)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert stats.num_used_blocks == 0


def test_an_llm_says_the_same() -> None:
    """The model in the box, with text: samples, n outputs, beams, penalties, stop strings, scored prompts."""
    options = {"num_blocks": 200, "dtype": "float32"}
    sampled = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
    params = [
        SamplingParams(temperature=0, max_tokens=20, stop=["e ", "\n"]),
        sampled,
        replace(sampled, n=3, logprobs=2),
        replace(sampled, presence_penalty=1, repetition_penalty=1.2, min_tokens=8),
        replace(sampled, prompt_logprobs=1),
        BeamSearchParams(beam_width=3, max_tokens=12),
    ]
    prompts = ["ROMEO:", "To be, or not to be", "JULIET:\nO", "First Citizen:", "KING HENRY:\nWe", "HERALD:"]
    plain, overlapped = LLM(**options), OverlappedLLM(**options)
    for some in (params, params[:2] + params[3:4] * 4):
        before, after = (
            [output.outputs for output in llm.generate(prompts, some, use_tqdm=False)]
            for llm in (plain, overlapped)
        )
        for old, new in zip(before, after, strict=True):
            assert [completion.text for completion in new] == [completion.text for completion in old]
            for a, b in zip(old, new, strict=True):
                assert b.cumulative_logprob == pytest.approx(a.cumulative_logprob, abs=1e-4)
    streamed = [output.outputs[0].text for output in overlapped.stream(prompts[0], sampled)]
    assert streamed[-1] == plain.generate(prompts[0], sampled, use_tqdm=False)[0].outputs[0].text
    assert len(streamed) == 20


# ── what is overlapped, and what it costs ─────────────────────────────────────────────────────────


def make(kind: type[LLMEngine] = OverlappedEngine, **options: object) -> LLMEngine:
    """An engine over the fake runner."""
    config = {"block_size": 4, "num_blocks": 40, "num_host_blocks": 0, "preemption": "recompute"} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_random_runs, "LLMEngine", kind)
        return make_engine("fake", EngineConfig(**config))


def serve(engine: LLMEngine, prompt: list[int], **options: object) -> RequestOutput:
    """One greedy request, alone."""
    engine.add_request("r", prompt, SamplingParams(temperature=0, **{"ignore_eos": True} | options))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check_invariants()
    assert len(outputs) == len(outputs[-1].outputs[0].token_ids), "one output for each token"
    return outputs[-1]


def test_the_next_step_is_scheduled_while_one_computes() -> None:
    """Each step computes until the next one is scheduled. (For the last one nothing is left to schedule.)"""
    engine, scheduled, num_computed = make(), Semaphore(0), 0
    schedule, execute = engine.scheduler.schedule, engine.runner.execute

    def schedule_and_say() -> ScheduledBatch:
        batch = schedule()
        scheduled.release()
        return batch

    def execute_late(batch: ScheduledBatch) -> StepResult:
        nonlocal num_computed
        for _ in range(2 if num_computed == 0 else 1):  # this step, and the next one
            assert scheduled.acquire(timeout=10), "the next step was not scheduled"
        num_computed += 1
        return execute(batch)

    engine.scheduler.schedule, engine.runner.execute = schedule_and_say, execute_late
    serve(engine, [1, 2], max_tokens=5)
    assert num_computed == 5


@pytest.mark.parametrize(("ends_by", "too_many"), [("length", 0), ("token", 1), ("string", 1)])
def test_a_sequence_that_stops_computes_one_token_too_many(ends_by: str, too_many: int) -> None:
    """Its end by length is known before."""
    computed = []
    for kind in (LLMEngine, OverlappedEngine):
        engine = make(kind)
        rules = {"token": {"stop_token_ids": [1], "min_tokens": 4}, "string": {"stop": "a", "min_tokens": 4}}
        execute, tokens = engine.runner.execute, []

        def count(
            batch: ScheduledBatch, execute: Callable = execute, tokens: list[int] = tokens
        ) -> StepResult:
            tokens += [seq.num_scheduled_tokens for seq in batch.sequences]
            return execute(batch)

        engine.runner.execute = count
        output = serve(engine, [0, 2, 1, 1, 0], max_tokens=12, **rules.get(ends_by, {}))
        assert output.outputs[0].finish_reason == ("length" if ends_by == "length" else "stop")
        if kind is OverlappedEngine:
            settle(engine)
        computed.append(sum(tokens))
    assert computed[1] - computed[0] == too_many


def test_no_more_memory_is_needed() -> None:
    """The pool has exactly the blocks of the longest request, and of all its tokens but the last one."""
    for max_tokens in range(1, 12):
        output = serve(make(num_blocks=4, watermark=0.0), [1, 2, 0, 1, 1], max_tokens=max_tokens)
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.metrics.num_preemptions == 0


@pytest.mark.parametrize("stop", [(), "a"])
def test_outputs_are_found_in_the_prefix_cache(stop: object) -> None:
    """The second turn of a chat finds as many tokens as in a plain engine."""
    found = []
    for kind in (LLMEngine, OverlappedEngine):
        engine = make(kind)
        prompt = [0, 2, 1, 1, 0]
        for _ in range(3):
            output = serve(engine, prompt, max_tokens=14, min_tokens=7, stop=stop)
            prompt = prompt + output.outputs[0].token_ids + [2]
            found.append(output.metrics.num_cached_tokens)
    assert found[3:] == found[:3]
    assert 0 < found[1] < found[2]


@pytest.mark.parametrize("is_readmitted", [False, True])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_while_its_tokens_are_computed(preemption: str, is_readmitted: bool) -> None:
    """The last request is preempted when the k-th step is scheduled, and may be admitted again at once.

    One of its two outputs ends while the other goes on, and their host blocks are shared. Or its prompt is
    being scored, and the worker has done with the step ahead before the results of this one are known.
    """
    params = [
        SamplingParams(n=2, seed=1, max_tokens=12, stop="a", min_tokens=3, ignore_eos=True),
        SamplingParams(prompt_logprobs=0, seed=1, max_tokens=3, ignore_eos=True),
    ]
    options = {"preemption": preemption, "num_host_blocks": 40, "max_num_batched_tokens": 6}
    for param in params:
        texts = set()
        for k in (None, *range(2, 16)):
            engine = make(**options)
            preempt_at(engine, k, is_readmitted)
            update = engine.update

            def update_late(
                step: Step, engine: LLMEngine = engine, update: Callable = update
            ) -> list[Request]:
                if engine.ahead is not None:
                    engine.ahead.result.exception()  # waits for it
                return update(step)

            engine.update = update_late
            engine.add_request("other", [1, 1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
            engine.add_request("it", [0, 2, 1, 1, 0, 2, 0, 1, 1, 2] * 2, param)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished and output.request_id == "it":
                        texts.add(repr((output.outputs, output.prompt_logprobs)))
                engine.check_invariants()
            assert engine.stats().num_free_blocks == 40
        assert len(texts) == 1


def preempt_at(engine: LLMEngine, k: int | None, is_readmitted: bool) -> None:
    """When the k-th step is scheduled, preempt the last running request as if the pool were full."""
    scheduler, calls = engine.scheduler, []
    schedule, limit = scheduler.schedule, scheduler.max_num_seqs

    def preempt_and_schedule() -> ScheduledBatch:
        calls.append(k)
        before = ScheduledBatch()
        if len(calls) == k and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running.pop(), before)
            scheduler.max_num_seqs = limit if is_readmitted else 0
        batch = schedule()
        batch.swap_out, batch.preempted = before.swap_out + batch.swap_out, before.preempted + batch.preempted
        scheduler.max_num_seqs = limit
        return batch

    scheduler.schedule = preempt_and_schedule


def test_listeners_hear_of_every_batch() -> None:
    """The next batch is scheduled before a step ends."""
    engine, heard = make(), []
    engine.listeners.append(
        SimpleNamespace(
            batch_scheduled=lambda batch: heard.append(("scheduled", id(batch))),
            step_ended=lambda batch: heard.append(("ended", id(batch))),
        )
    )
    serve(engine, [1, 2], max_tokens=3)
    what, batches = zip(*heard, strict=True)
    assert what == ("scheduled", "scheduled", "ended", "scheduled", "ended", "ended")
    assert [batches[i] for i in (0, 1, 3)] == [batches[i] for i in (2, 4, 5)]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_failure_of_a_request_that_was_aborted_is_not_raised(is_aborted: bool) -> None:
    """The step ahead fails because of request a. If a was aborted meanwhile, b gets its token."""
    engine, aborted, num_calls = make(), Event(), 0
    execute = engine.runner.execute

    def fail_once(batch: ScheduledBatch) -> StepResult:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            assert aborted.wait(10)
            raise NonFiniteLogits("a", 3)
        return execute(batch)

    engine.runner.execute = fail_once
    for name in "ab":
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(engine.step()) == 2
    if is_aborted:
        engine.abort_request("a")
        aborted.set()
        assert [output.request_id for output in engine.step()] == ["b"]
    else:
        aborted.set()
        with pytest.raises(NonFiniteLogits, match="'a'"):
            engine.step()
        settle(engine)
        assert num_calls == 2, "the step behind a failed one was computed"
        assert [output.request_id for output in engine.step()] == ["a", "b"]


def test_ctrl_c_while_the_worker_computes() -> None:
    """The step that still computes is forgotten; the next one waits for its turn, and no token is lost."""
    whole = serve(make(), [1, 2, 0], max_tokens=9).outputs[0].token_ids
    engine, interrupted = make(), Event()
    execute, update = engine.runner.execute, engine.update

    def is_fourth(batch: ScheduledBatch) -> bool:
        return batch.sequences[0].num_output_tokens == 3 and not interrupted.is_set()

    def execute_late(batch: ScheduledBatch) -> StepResult:
        if is_fourth(batch):
            assert interrupted.wait(10)
        return execute(batch)

    def interrupt(step: Step) -> list[Request]:
        if is_fourth(step.batch):
            raise KeyboardInterrupt
        return update(step)

    engine.runner.execute, engine.update = execute_late, interrupt
    engine.add_request("r", [1, 2, 0], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            assert engine.ahead is None
            interrupted.set()
        engine.check_invariants()
    assert interrupted.is_set()
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 10))
    assert outputs[-1].outputs[0].token_ids == whole


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace='.*run.html' shows .* or use LLMEngine"):
        make(trace=tmp_path / "run.html")
    with pytest.raises(ValueError, match="num_speculative_tokens=3: .* use 0, or LLMEngine"):
        refuse(SimpleNamespace(trace=None, num_speculative_tokens=3))
