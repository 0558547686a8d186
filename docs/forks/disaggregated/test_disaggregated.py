"""Disaggregated prefill: the tokens of transformers and of one engine, and what becomes of two processes."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_random_runs
from children import check_children
from conftest import Oracle, memory_that_was_never_written, qwen3, random_prompts, tokens  # noqa: F401
from disaggregated import LLM, DecodeScheduler, DisaggregatedEngine, PromptEngine
from fake_runner import GARBAGE, FakeRunner
from faults import STAGES
from random_workloads import Workload, forked, mixed, tiny
from serving import KINDS, serve, tokens_of
from test_random_runs import Run, large_engine

import nanopaged
from nanopaged import EngineConfig, SamplingParams

OPTIONS = {"dtype": "float32", "attention_backend": "torch", "block_size": 4, "num_host_blocks": 400}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class FakeKV(FakeRunner):
    """A block is sent as the numbers of the prefixes that its slots hold, which both runners know."""

    dtype = "float32"

    def read_blocks(self, table: list[int]) -> list[list[int]]:
        return [[self.slots.get((b, i), GARBAGE) for i in range(self.block_size)] for b in table]

    def write_host_blocks(self, table: list[int], kv: list[list[int]]) -> None:
        rows = zip(table, kv, strict=True)
        self.host_slots |= {(b, i): number for b, row in rows for i, number in enumerate(row)}

    def forget(self) -> None:
        self.slots, self.host_slots = {}, {}


class InOneProcess(DisaggregatedEngine):
    """Prompts are computed here, late: when `work` is called."""

    def start_process(self, config: EngineConfig) -> Callable[..., Future]:
        is_fake, self.jobs, self.begun = isinstance(self.runner, FakeKV), [], None
        self.there = PromptEngine(config, FakeKV(config.num_blocks, config.block_size) if is_fake else None)
        if is_fake:
            self.there.runner.prefixes = self.runner.prefixes
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
    """What a request says alone is computed by a plain engine."""

    def __init__(self, workload: Workload) -> None:
        large_engine(workload.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_random_runs, "LLMEngine", InOneProcess)
            patch.setattr(test_random_runs, "FakeRunner", FakeKV)
            super().__init__(replace(workload, num_host_blocks=max(1, workload.num_host_blocks)))
        self.scheduler = self.engine.scheduler

    def step(self) -> None:
        num, away = self.rng.choice([0, 0, 1, 1, 4]), self.scheduler.away
        self.engine.there.runner.fail_next = self.rng.random() < 0.05  # the tiny model's ignores it
        is_idle = not (self.scheduler.running or self.scheduler.waiting)  # then `update` waits for a prompt
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


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts, faults in any line, tiny pools: each request says what it says alone in a plain engine."""
    mine, happened = DecodeScheduler, Counter[str]()
    more = {"update": (mine.update, mine._take_back), "add": (mine.add,), "abort": (mine.abort,)}
    for stage, functions in more.items():
        monkeypatch.setitem(STAGES, stage, STAGES[stage] + functions)
    for workload in (*map(mixed, range(60)), *map(forked, range(30)), *map(tiny, range(2))):
        run = LateRun(workload)
        run.serve()
        happened += run.happened
    events = ["taken back", "late answer", "failed there", "abort while away", "swap", "recompute"]
    assert all(happened[event] > 2 for event in (*events, "fault: update")), happened


def test_an_id_is_used_again_while_the_first_answer_is_late() -> None:
    """The first prompt waits, is being computed, or is computed when it is aborted."""
    config = EngineConfig(num_blocks=99, **OPTIONS)
    engine, said = InOneProcess(config), []
    for num in (0, 1, 2, None):
        if num is not None:
            engine.add_request("it", tokens(20, 9), replace(GREEDY, n=2, prompt_logprobs=1))
            _ = [engine.work() for _ in range(num)], engine.abort_request("it")
        engine.add_request("it", tokens(40, 30), GREEDY)
        while engine.has_unfinished_requests():
            _ = engine.work(), engine.work()
            said += [output.outputs[0].token_ids for output in engine.step() if output.finished]
            engine.check_invariants()
    assert said == [said[0]] * 4
    assert engine.stats().num_free_host_blocks == 400


@pytest.fixture(scope="module")
def llm(qwen3: Oracle) -> LLM:  # noqa: F811
    return LLM(qwen3.folder, num_blocks=60, preemption="swap", **OPTIONS)


def test_the_tokens_of_transformers_and_of_one_engine(
    llm: LLM,
    qwen3: Oracle,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No prompt is computed here. Then the pool is too small for all: decoding requests are swapped."""
    execute, prompts, most = llm.engine.runner.execute, random_prompts(9, seed=1), set[int]()

    def look_and_execute(batch: Any) -> Any:
        most.update(seq.num_scheduled_tokens for seq in batch.sequences)
        return execute(batch)

    llm.engine.runner.execute = look_and_execute
    for num in (8, 1):
        said = tokens_of(serve(llm, prompts, replace(GREEDY, max_tokens=num)))
        assert said == [qwen3.greedy(prompt, num, ignore_eos=True) for prompt in prompts]
    plain, longest = nanopaged.LLM(qwen3.folder, num_blocks=400, **OPTIONS), replace(GREEDY, max_tokens=60)
    kinds = [*KINDS.values(), replace(GREEDY, prompt_logprobs=1), replace(GREEDY, max_tokens=1, n=2)]
    kinds += [longest] * 4
    prompts, scheduler = random_prompts(len(kinds), seed=2, longest=30), llm.engine.scheduler
    schedule = scheduler.schedule
    monkeypatch.setattr(
        scheduler, "schedule", lambda: wait(list(scheduler.away)) and schedule()
    )  # all at once
    for ours, theirs in zip(*(serve(each, prompts, kinds) for each in (llm, plain)), strict=True):
        assert tokens_of([ours]) == tokens_of([theirs])
        for a, b in zip(ours.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True):
            assert a == (b and pytest.approx(b, abs=1e-4))
    assert llm.engine.stats().num_preemptions_swap > 0
    assert most == {1}


def test_the_prefix_cache_is_in_the_prompt_process(llm: LLM) -> None:
    hits = []
    for salt in ("x", "x", "y", "x"):
        prompt = {"prompt_token_ids": tokens(30, 21), "cache_salt": salt}
        hits.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].metrics.num_cached_tokens)
        if salt == "y":
            llm.reset_prefix_cache()
    assert hits == [0, 20, 0, 0]


def test_the_prompt_process_dies(llm: LLM, qwen3: Oracle) -> None:  # noqa: F811
    """An error, and no hang. No request is lost: the next step computes their prompts here."""
    prompts = random_prompts(4, seed=3)
    requests = [llm.engine.prompts.make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for request in requests:
        llm.engine.queue(request)
    multiprocessing.active_children()[0].kill()
    for says in ("exit code -9.: its error is on stderr; make the engine anew", None):
        with pytest.raises(BrokenExecutor, match=says) if says else nullcontext():
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
    said = tokens_of([request.output() for request in requests])
    assert said == [qwen3.greedy(prompt, 8, ignore_eos=True) for prompt in prompts]


PROGRAM = """
import gc, multiprocessing, sys
from disaggregated import LLM
if __name__ == "__main__":
    LLM(num_blocks=99)
    gc.collect()  # its process ends
    llm = LLM(num_blocks=99)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    for i in range(200):
        llm.engine.add_request(str(i), [5] * 200)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_child_outlives_its_parent(is_killed: bool, tmp_path: Path) -> None:
    """It ends, or is killed, while prompts are being computed."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], env=env, **pipes) as parent:
        (pid,) = map(int, parent.stdout.readline().split())
        if is_killed:
            parent.kill()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the prompt process lives"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
def test_a_fork_leaves_the_prompt_process_to_its_parent(qwen3: Oracle, tmp_path: Path) -> None:  # noqa: F811
    options = {"model": str(qwen3.folder), "num_blocks": 30}
    expected = qwen3.greedy([1, 2, 3], 8, ignore_eos=True)
    check_children("disaggregated", options, expected, tmp_path)


REFUSED = {"num_host_blocks": 0, "preemption": "recompute", "tensor_parallel_size": 2, "trace": "x.html"}


@pytest.mark.parametrize("option", REFUSED)
def test_what_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*{REFUSED[option]}.*: (set it|leave it)"):
        LLM(**{option: REFUSED[option]})
