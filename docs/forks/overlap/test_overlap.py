"""Overlapped scheduling: the same tokens as the plain engine and as transformers, and what is overlapped."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import test_random_runs
from conftest import Oracle, memory_that_was_never_written, qwen3, random_prompts  # noqa: F401  (fixtures)
from faults import STAGES
from overlap import LLM, LateBlockManager, OverlappedEngine, Step
from random_workloads import Workload, forked, mixed, siblings, tiny
from serving import serve
from test_random_runs import EVENTS, MIXED_EVENTS, Run, large_engine, make_engine, serve_random

import nanopaged
from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.sequence import NonFiniteLogits, Request, ScheduledBatch, StepResult

# What must have happened in the random workloads of each kind.
MINE = ["dropped token", "ended while preempted ahead", "ended while swapped ahead"]
WORKLOADS = [(mixed, 80, [*EVENTS, *MIXED_EVENTS, *MINE]), (forked, 40, ["copy on write"]), (tiny, 3, [])]
WORKLOADS.append((siblings, 60, [*MINE, "ended together while swapped ahead"]))


def settle(engine: OverlappedEngine) -> None:
    """Wait until the worker has nothing to do."""
    engine.worker.submit(int).result()


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replace a method by `around`, which gets the method and its arguments."""
    setattr(owner, name, partial(around, getattr(owner, name)))


class OverlappedRun(Run):
    """A run on an overlapped engine; what a request says alone is still computed by a plain one.

    Faults are thrown in the worker, too. One of the step ahead is raised by the next call of `step`: `late`.
    """

    def __init__(self, workload: Workload) -> None:
        large_engine(workload.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_random_runs, "LLMEngine", OverlappedEngine)
            super().__init__(workload)
        wrap(self.engine.runner, "execute", self.execute_and_fail)
        wrap(self.engine, "update", self.update_and_count)
        self.late: BaseException | None = None

    def execute_and_fail(self, execute: Callable, batch: ScheduledBatch) -> StepResult:
        is_armed = bool(self.faults) and self.faults[0].step <= self.num_steps
        with self.thrower if is_armed else nullcontext():
            return execute(batch)

    def update_and_count(self, update: Callable, step: Step) -> list[Request]:
        """Count what only this engine has to deal with."""
        alive = [seq for seq in step.batch.sequences if not seq.finished]
        preempted = [seq for seq in alive if seq.request in self.engine.scheduler.waiting]
        swapped, advanced = [seq for seq in alive if seq.host_table], update(step)
        self.happened["dropped token"] += len(step.batch.sequences) - len(alive)
        self.happened["ended while preempted ahead"] += sum(seq.finished for seq in preempted)
        self.happened["ended while swapped ahead"] += sum(seq.finished for seq in swapped)
        ended = Counter(seq.request for seq in swapped if seq.finished)
        self.happened["ended together while swapped ahead"] += sum(num > 1 for num in ended.values())
        return advanced

    def attempt(self, operation: Callable[[], object]) -> object:
        def and_settle() -> object:
            try:
                return operation()
            except BaseException as error:
                settle(self.engine)
                if operation == self.engine.step and self.model == "fake":
                    self.engine.runner.forget()
                if error is not self.late:
                    raise
                return None
            finally:
                settle(self.engine)
                self.late = self.engine.scheduler.ahead and self.engine.scheduler.ahead.result.exception()

        return super().attempt(and_settle)

    def check(self) -> None:
        """After a failure in the step ahead, the runner has not computed what is published."""
        if self.late is None:
            super().check()


@pytest.mark.parametrize(("make_workload", "num", "events"), WORKLOADS)
def test_random_workloads(
    make_workload: Callable[[int], Workload], num: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    ahead = OverlappedEngine.schedule_ahead, OverlappedEngine.launch, LateBlockManager.publish
    monkeypatch.setitem(STAGES, "schedule", STAGES["schedule"] + ahead)
    monkeypatch.setitem(STAGES, "update", (OverlappedEngine.update, LateBlockManager.publish_last))
    serve_random(make_workload, num, events, OverlappedRun)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_tokens_are_those_of_transformers(qwen3: Oracle, preemption: str) -> None:  # noqa: F811
    """In a pool so small that requests are preempted, with prompts in chunks; log-probabilities, too."""
    options = {"block_size": 4, "num_blocks": 24, "num_host_blocks": 100, "watermark": 0}
    llm = LLM(qwen3.folder, max_num_batched_tokens=24, preemption=preemption, **options)
    prompts = random_prompts(8, seed=5, longest=40)
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    outputs = serve(llm, prompts, [replace(greedy, ignore_eos=i % 2 > 0) for i in range(8)])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        assert token_ids == qwen3.greedy(prompt, 24, ignore_eos=i % 2 > 0)
        rows = qwen3.logprobs(prompt + token_ids)[len(prompt) - 1 :]
        for row, token_id, ours in zip(rows, token_ids, output.outputs[0].logprobs, strict=False):
            assert ours[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-4)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0


def test_an_llm_says_the_same() -> None:
    """The model in the box, with text: samples, n outputs, beams, penalties, stop strings, scored prompts."""
    prompts = ["ROMEO:", "To be, or not to be", "JULIET:\nO", "First Citizen:", "KING HENRY:\nWe", "HERALD:"]
    sampled, outputs = SamplingParams(temperature=0.8, seed=1, max_tokens=20), []
    penalized = replace(sampled, presence_penalty=1, repetition_penalty=1.2, min_tokens=8)
    simple = [SamplingParams(temperature=0, max_tokens=20, stop=["e ", "\n"]), sampled]
    beams = BeamSearchParams(beam_width=3, max_tokens=12)
    more = [replace(sampled, n=3, logprobs=2), penalized, replace(sampled, prompt_logprobs=1), beams]
    for llm in (kind(num_blocks=200, dtype="float32") for kind in (nanopaged.LLM, LLM)):
        both = (llm.generate(prompts, params, False) for params in (simple + more, simple + [penalized] * 4))
        outputs.append(
            [[(out.text, out.stop_reason) for out in each.outputs] for all in both for each in all]
        )
    assert outputs[0] == outputs[1]


def make(kind: type[LLMEngine] = OverlappedEngine, **options: Any) -> Any:
    """An engine over the fake runner."""
    config = {"block_size": 4, "num_blocks": 40, "num_host_blocks": 0, "preemption": "recompute"} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_random_runs, "LLMEngine", kind)
        return make_engine("fake", EngineConfig(**config))


def finish(engine: LLMEngine, prompt: list[int], **options: Any) -> RequestOutput:
    """One greedy request, alone."""
    engine.add_request("r", prompt, SamplingParams(temperature=0, **{"ignore_eos": True} | options))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check_invariants()
    assert len(outputs) == len(outputs[-1].outputs[0].token_ids), "one output for each token"
    return outputs[-1]


def test_the_next_step_is_scheduled_while_one_computes() -> None:
    """Each step computes until the next one is scheduled, of which a listener hears before a step ends."""
    engine, scheduled, heard = make(), Semaphore(0), []

    def execute_late(execute: Callable, batch: ScheduledBatch) -> StepResult:
        for _ in range(1 if batch.sequences[0].num_output_tokens else 2):  # this step, and always the next
            assert scheduled.acquire(timeout=60), "the next step was not scheduled"
        return execute(batch)

    engine.listeners.append(SimpleNamespace(batch_scheduled=heard.append, step_ended=heard.append))
    wrap(engine.runner, "execute", execute_late)
    wrap(engine.scheduler, "schedule", lambda schedule: (schedule(), scheduled.release())[0])
    finish(engine, [1, 2], max_tokens=5)
    batches = list(map(id, heard))
    assert list(map(batches.index, batches)) == [0, 1, 0, 3, 1, 5, 3, 7, 5, 7]
    assert engine.num_steps == engine.stats().num_steps == 5


@pytest.mark.parametrize(("rule", "too_many"), [({}, 0), ({"stop_token_ids": [1]}, 1), ({"stop": "a"}, 1)])
def test_a_sequence_that_stops_computes_one_token_too_many(rule: dict, too_many: int) -> None:
    """Its end by length is known before. The figures count no token that was dropped."""
    num_tokens, stats = [], []
    for kind in (LLMEngine, OverlappedEngine):
        engine = make(kind)
        output = finish(engine, [0, 2, 1, 1, 0], max_tokens=12, min_tokens=4, **rule)
        assert output.outputs[0].finish_reason == ("stop" if rule else "length")
        if kind is OverlappedEngine:
            settle(engine)
        num_tokens.append(len(engine.runner.slots))  # written, of a pool that is large enough
        stats.append(replace(engine.stats(), num_cached_blocks=0))
    assert num_tokens[1] - num_tokens[0] == too_many
    assert stats[1] == stats[0]


def test_no_more_memory_is_needed() -> None:
    """The pool has exactly the blocks of the longest request, and of all its tokens but the last one."""
    for max_tokens in range(1, 12):
        output = finish(make(num_blocks=4, watermark=0.0), [1, 2, 0, 1, 1], max_tokens=max_tokens)
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.metrics.num_preemptions == 0


@pytest.mark.parametrize("stop", [(), "a"])
def test_outputs_are_found_in_the_prefix_cache(stop: object) -> None:
    """The second turn of a chat finds as many tokens as in a plain engine."""
    found = []
    for kind in (LLMEngine, OverlappedEngine):
        engine, prompt = make(kind), [0, 2, 1, 1, 0]
        for _ in range(3):
            output = finish(engine, prompt, max_tokens=14, min_tokens=7, stop=stop)
            prompt = prompt + output.outputs[0].token_ids + [2]
            found.append(output.metrics.num_cached_tokens)
    assert found[3:] == found[:3]
    assert 0 < found[1] < found[2]


def test_steps_without_outputs() -> None:
    """A request that ends in `run_step` stays known until the next `step`, which returns its output once."""
    engine = make()
    for i in range(3):
        engine.add_request(str(i), [1, 2], SamplingParams(max_tokens=2 + 4 * i, ignore_eos=True))
    for names in ("012", "012", "12", "12"):
        assert [request.request_id for request in engine.run_step()] == list(names)
    assert list(engine.requests) == ["0", "1", "2"]
    outputs = {output.request_id: output.finished for output in engine.step()}
    assert outputs == {"0": True, "1": False, "2": False}
    while not engine.requests["2"].finished:
        engine.run_step()
    assert [output.request_id for output in engine.step()] == ["1", "2"]
    assert engine.step() == []


@pytest.mark.parametrize("is_readmitted", [False, True])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_while_its_tokens_are_computed(preemption: str, is_readmitted: bool) -> None:
    """The last request is preempted when the k-th step is scheduled, and may be admitted again at once.

    One of its two outputs ends while the other goes on, or both end in one step, and they share host blocks.
    Or its prompt is being scored, and the worker has done with the step ahead before this one is updated.
    """

    def preempt(left: list[int], schedule: Callable) -> ScheduledBatch:
        scheduler, before, left[0] = engine.scheduler, ScheduledBatch(), left[0] - 1
        if left[0] == 0 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running.pop(), before)
            scheduler.max_num_seqs = 256 if is_readmitted else 0
        batch, scheduler.max_num_seqs = schedule(), 256
        batch.moves.swap_out[:0] = before.moves.swap_out
        batch.preempted[:0] = before.preempted
        return batch

    prompt, several = [0, 2, 1, 1, 0, 2, 0, 1, 1, 2], {"n": 2, "max_tokens": 12, "stop": "a", "min_tokens": 3}
    kinds = [several | {"seed": 1}, several | {"temperature": 0}]
    kinds.append({"prompt_logprobs": 0, "max_tokens": 3, "seed": 1})
    for options in kinds:
        texts = set()
        for k in (0, *range(2, 16)):
            engine = make(preemption=preemption, num_host_blocks=40, max_num_batched_tokens=6)
            wrap(engine, "update", lambda update, step, engine=engine: (settle(engine), update(step))[1])
            wrap(engine.scheduler, "schedule", partial(preempt, [k]))
            params = [
                SamplingParams(max_tokens=30, ignore_eos=True),
                SamplingParams(**options, ignore_eos=True),
            ]
            _, output = serve(SimpleNamespace(engine=engine), [[1, 1, 2], prompt * 2], params)
            texts.add(repr((output.outputs, output.prompt_logprobs)))
            assert engine.stats().num_free_host_blocks == 40
        assert len(texts) == 1


@pytest.mark.parametrize("case", ["unfinished", "aborted", "id used again", "interrupted"])
def test_failures(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ahead fails because of a. If a was aborted meanwhile, b and a new a get their tokens.

    After Ctrl-C the step of the worker is forgotten, and no token is lost.
    """
    engine, calls, four = make(), [], SamplingParams(max_tokens=4, ignore_eos=True)

    def fail_once(execute: Callable, batch: ScheduledBatch) -> StepResult:
        calls.append(batch)
        if len(calls) == 2 and case != "interrupted":
            raise NonFiniteLogits("a", 3)
        return execute(batch)

    def interrupt_once(update: Callable, step: Step) -> None:
        engine.update = update
        raise KeyboardInterrupt

    wrap(engine.runner, "execute", fail_once)
    for name in "ab":
        engine.add_request(name, [1, 2], four)
    assert len(engine.step()) == 2
    if case == "interrupted":
        wrap(engine, "update", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.scheduler.ahead is None
    elif case == "unfinished":
        with pytest.raises(NonFiniteLogits, match="'a'"):
            engine.step()
        settle(engine)
        assert len(calls) == 2, "the step behind a failed one was computed"
    else:
        assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    if case == "id used again":
        engine.add_request("a", [2, 2, 0], four)
    num_tokens = {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
    assert num_tokens == {"b": 2} | {"aborted": {}, "id used again": {"a": 1}}.get(case, {"a": 2})
    assert engine.num_steps == 2


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace='.*run.html' shows .* or use nanopaged.LLM"):
        make(trace=tmp_path / "run.html")
