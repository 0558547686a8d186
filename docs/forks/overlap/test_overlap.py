"""Overlapped scheduling: the same tokens as the plain engine and as transformers, and what is overlapped."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import harness
import pytest
from harness import GREEDY, SMALL, Oracle, Run, Workload, random_prompts, serve
from overlap import LLM, OverlappedEngine, Step

import nanopaged
from nanopaged.sequence import Request, ScheduledBatch, StepResult


def settle(engine: Any) -> None:
    """Wait until the worker has nothing to do."""
    engine.worker.submit(int).result()


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replace a method by `around`, which gets the method and its arguments."""
    setattr(owner, name, partial(around, getattr(owner, name)))


class OverlappedRun(Run):
    """What a request says alone is computed by a plain engine.

    Faults are thrown in the worker, too. One of the step ahead is raised by the next call of `step`: `late`.
    """

    engine_class = OverlappedEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload)
        self.late: BaseException | None = None
        wrap(self.engine.runner, "execute", self.execute_and_fail)
        wrap(self.engine, "update", self.update_and_count)

    def execute_and_fail(self, execute: Callable, batch: ScheduledBatch) -> StepResult:
        if not self.faults or self.faults[0][0] > self.num_steps:
            return execute(batch)
        with self.thrower:
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

    def attempt(self, operation: Callable[[], Any]) -> Any:
        return super().attempt(partial(self.operate_and_settle, operation))

    def operate_and_settle(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            settle(self.engine)
            if error is not self.late:
                raise
            return None
        finally:
            settle(self.engine)
            self.late = self.engine.scheduler.ahead and self.engine.scheduler.ahead.result.exception()


EVENTS = ["swap", "recompute", "copy on write", "cache hit", "fault: execute", "fault: schedule"]
AHEAD = ["dropped token", "ended while preempted ahead", "ended while swapped ahead"]
AHEAD += ["ended together while swapped ahead"]


@pytest.mark.parametrize(("draw", "events"), [(harness.draw_workload, EVENTS), (harness.crowded, AHEAD)])
def test_random_workloads(qwen3: Oracle, draw: Any, events: list[str]) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    harness.random_runs(OverlappedRun, qwen3.folder, 20, events, draw)


def test_the_tokens_are_those_of_transformers(qwen3: Oracle) -> None:
    """In a pool so small that requests are preempted, with prompts in chunks; log-probabilities, too."""
    llm = LLM(qwen3.folder, preemption="swap", **SMALL)
    params = [replace(GREEDY, ignore_eos=i % 2 > 0) for i in range(8)]
    qwen3.check(serve(llm, random_prompts(8, seed=5, longest=16), params))
    assert harness.num_preempted(llm) > 0


def test_the_next_step_is_scheduled_while_one_computes(qwen3: Oracle) -> None:
    """Each step computes until the next one is scheduled, of which a listener hears before a step ends."""
    llm, scheduled, heard = LLM(qwen3.folder), Semaphore(0), []
    engine = llm.engine

    def execute_late(execute: Callable, batch: ScheduledBatch) -> StepResult:
        for _ in range(1 if batch.sequences[0].num_output_tokens else 2):  # this step, and always the next
            assert scheduled.acquire(timeout=60), "the next step was not scheduled"
        return execute(batch)

    def schedule_and_tell(schedule: Callable) -> ScheduledBatch:
        batch = schedule()
        scheduled.release()
        return batch

    engine.listeners.append(SimpleNamespace(batch_scheduled=heard.append, step_ended=heard.append))
    wrap(engine.runner, "execute", execute_late)
    wrap(engine.scheduler, "schedule", schedule_and_tell)
    serve(llm, [[1, 2]], replace(GREEDY, max_tokens=5))
    batches = list(map(id, heard))
    assert list(map(batches.index, batches)) == [0, 1, 0, 3, 1, 5, 3, 7, 5, 7]
    assert engine.num_steps == engine.stats().num_steps == 5


@pytest.mark.parametrize(("ends", "too_many"), [("length", 0), ("token", 1)])
def test_a_sequence_that_stops_computes_one_token_too_many(qwen3: Oracle, ends: str, too_many: int) -> None:
    """Its end by length is known before. The figures count no token that was dropped; pools are as small."""
    prompt, params, computed = [20, 22, 21, 21, 20], replace(GREEDY, max_tokens=12), list[int]()

    def count_and_execute(execute: Callable, batch: ScheduledBatch) -> StepResult:
        computed.append(sum(seq.num_scheduled_tokens for seq in batch.sequences))
        return execute(batch)

    if ends == "token":
        (output,) = serve(nanopaged.LLM(qwen3.folder), [prompt], params)
        params = replace(params, stop_token_ids=output.outputs[0].token_ids[6:7])
    llm = LLM(qwen3.folder, block_size=4, num_blocks=4, watermark=0.0)
    wrap(llm.engine.runner, "execute", count_and_execute)
    (output,) = serve(llm, [prompt], params)
    settle(llm.engine)
    num_said = len(output.outputs[0].token_ids)
    assert sum(computed) == len(prompt) + num_said - 1 + too_many
    assert llm.engine.stats().num_generated_tokens == num_said
    assert output.metrics.num_preemptions == 0, "16 slots are for all tokens but the last one"


def test_what_is_refused(tmp_path: Path) -> None:
    message = r"trace='.*run.html' shows .* or use nanopaged.LLM"
    harness.check_refused(LLM, [({"trace": tmp_path / "run.html"}, message)])
