"""Disaggregated prefill: the tokens of transformers and of one engine, and what becomes of two processes."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import psutil
import pytest
from disaggregated import LLM, DisaggregatedEngine, PromptEngine
from harness import GREEDY, Oracle, Run, Workload, random_prompts, serve

from nanopaged import EngineConfig
from nanopaged.sequence import ScheduledBatch, StepResult

OPTIONS = {"dtype": "float32", "attention_backend": "torch", "block_size": 4, "num_host_blocks": 400}


class InOneProcess(DisaggregatedEngine):
    """Prompts are computed here, late: when `work` is called."""

    def start_process(self, config: EngineConfig) -> Callable[..., Future]:
        self.there, self.jobs, self.begun = PromptEngine(config), list[Any](), None
        return self.submit

    def submit(self, *job: Any) -> Future:
        self.jobs.append((Future(), pickle.dumps(job)))
        return self.jobs[-1][0]

    def work(self) -> Future | None:
        """End the job that was begun, and begin the next one. One that has begun cannot be cancelled."""
        done, self.begun = self.begun, None
        if done is not None:
            method, *arguments = pickle.loads(done[1])
            try:
                done[0].set_result(pickle.loads(pickle.dumps(getattr(self.there, method)(*arguments))))
            except RuntimeError as error:
                done[0].set_exception(error)
            self.there.check_invariants()
        while self.jobs and self.begun is None:
            job = self.jobs.pop(0)
            self.begun = job if job[0].set_running_or_notify_cancel() else None
        return done and done[0]


class LateRun(Run):
    """Prompts come back late, and some fail. Alone, each request is served by a plain engine."""

    engine_class = InOneProcess

    def __init__(self, folder: Path, workload: Workload) -> None:
        workload.options["num_host_blocks"] = max(1, workload.options["num_host_blocks"])
        super().__init__(folder, workload)
        self.scheduler, there = self.engine.scheduler, self.engine.there.runner
        self.execute_there, there.execute = there.execute, self.fail_or_execute

    def fail_or_execute(self, batch: ScheduledBatch) -> StepResult:
        if self.rng.random() < 0.05:
            raise RuntimeError("the device is on fire")
        return self.execute_there(batch)

    def step(self) -> None:
        num, away = self.rng.choice([0, 0, 1, 1, 4]), self.scheduler.away
        is_idle = not (self.scheduler.running or self.scheduler.waiting)  # then the step waits for a prompt
        while num > 0 or (is_idle and away and not any(future.done() for future in away)):
            num, done = num - 1, self.engine.work()
            if done is not None:
                self.happened["late answer"] += done not in away
                self.happened["failed there"] += done.exception() is not None
        done = {request for future, request in away.items() if future.done()}
        super().step()
        self.happened["taken back"] += sum(request.is_swapped for request in done)

    def abort(self, i: int) -> None:
        self.happened["abort while away"] += self.engine.requests.get(str(i)) in self.scheduler.away.values()
        super().abort(i)


def test_random_workloads(qwen3: Oracle) -> None:
    events = ["taken back", "late answer", "failed there", "abort while away", "swap", "recompute"]
    harness.random_runs(LateRun, qwen3.folder, 20, [*events, "fault: update"])


@pytest.fixture(scope="module")
def llm(qwen3: Oracle) -> LLM:
    return LLM(qwen3.folder, num_blocks=60, preemption="swap", **OPTIONS)


def test_the_tokens_of_transformers(llm: LLM, qwen3: Oracle) -> None:
    """No prompt is computed here."""
    execute, prompts, most = llm.engine.runner.execute, random_prompts(7, seed=1), set[int]()

    def look_and_execute(batch: ScheduledBatch) -> StepResult:
        most.update(seq.num_scheduled_tokens for seq in batch.sequences)
        return execute(batch)

    llm.engine.runner.execute = look_and_execute
    for num in (8, 1):
        qwen3.check(serve(llm, prompts, replace(GREEDY, max_tokens=num, prompt_logprobs=0)))
    assert most == {1}


def test_the_prompt_process_dies(llm: LLM, qwen3: Oracle) -> None:
    """An error, and no hang. No request is lost: the next step computes their prompts here."""
    prompts = random_prompts(4, seed=3)
    requests = [llm.engine.prompts.make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    (child,) = multiprocessing.active_children()
    psutil.Process(child.pid).suspend()  # else it may have computed them all before it dies
    for request in requests:
        llm.engine.queue(request)
    child.kill()
    for is_told in (True, False):
        with pytest.raises(BrokenExecutor, match="terminated abruptly") if is_told else nullcontext():
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
    qwen3.check([request.output() for request in requests])


PROGRAM = """
import multiprocessing, sys
from disaggregated import LLM

if __name__ == "__main__":
    llm = LLM(num_blocks=99)
    (prompts,) = multiprocessing.active_children()
    print(prompts.pid, flush=True)
    for i in range(200):
        llm.engine.add_request(str(i), [5] * 200)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_prompt_process_lives_as_long_as_its_parent(is_killed: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], env=env, **pipes) as parent:
        prompt_process = psutil.Process(int(parent.stdout.readline()))
        if is_killed:
            parent.kill()
        parent.stdin.close()
        _, left = psutil.wait_procs([prompt_process], timeout=30)
        assert not left, "the prompt process lives"


def test_what_is_refused() -> None:
    wrong = {"num_host_blocks": 0, "preemption": "recompute", "tensor_parallel_size": 2, "trace": "x.html"}
    table = [({name: value}, f"{name}.*{value}.*: (set it|leave it)") for name, value in wrong.items()]
    harness.check_refused(LLM, table)
