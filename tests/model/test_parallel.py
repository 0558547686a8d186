"""Tensor parallelism on the CPU: several ranks give what one gives, and no failure of a rank is lost."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import Oracle, make_checkpoint, random_prompts, tokens

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.attention.metadata import AttentionMetadata, StepInputs
from nanopaged.checks.lengths import resolve_lengths
from nanopaged.model import parallel
from nanopaged.model.cuda_graphs import DecodeGraphs
from nanopaged.model.model_config import read_model_config
from nanopaged.model_runner import ModelRunner

OPTIONS: dict[str, Any] = {
    "num_blocks": 30,
    "num_host_blocks": 12,
    "block_size": 4,
    "max_num_batched_tokens": 40,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# ── the same outputs ──────────────────────────────────────────────────────────────────────────────


def everything(llm: LLM) -> list[Any]:
    """Requests of all kinds in a pool that is too small for them; tokens and log-probabilities."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(n=3, seed=5, temperature=0.8, top_p=0.9, max_tokens=16, logprobs=0),
        BeamSearchParams(beam_width=3, max_tokens=12),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20),
    ]
    prompts = random_prompts(4, seed=8, longest=30)
    prompts += [[*tokens(5, 21), i] for i in range(4)]  # with a common prefix
    results = []
    for way in ("swap", "recompute"):
        llm.engine.scheduler.preemption = way
        outputs = llm.generate(prompts, kinds * 2, use_tqdm=False)
        llm.engine.check_invariants()
        for output in outputs:
            scored = [max(logprobs.values()) for logprobs in (output.prompt_logprobs or [])[1:]]
            numbers = [c.cumulative_logprob for c in output.outputs] + scored
            results.append(([c.token_ids for c in output.outputs], numbers))
    stats = llm.engine.stats()
    for count in (
        stats.num_preemptions_swap,
        stats.num_preemptions_recompute,
        stats.num_blocks_copied,
        stats.prefix_cache_hits,
    ):
        assert count > 0, stats
    return results


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama", 2), ("qwen2", 2), ("qwen3", 2), pytest.param("llama", 4, marks=pytest.mark.slow)],
)
def test_ranks_together_give_what_one_gives(family: str, size: int, tmp_path: Path) -> None:
    """Four ranks share two KV heads, so that two ranks each have the same one."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    make_checkpoint(family, tmp_path, num_attention_heads=8 if family == "qwen3" else 4, **biases)
    alone = everything(LLM(tmp_path, **OPTIONS))
    llm = LLM(tmp_path, tensor_parallel_size=size, **OPTIONS)
    for (expected_ids, expected), (ids, numbers) in zip(alone, everything(llm), strict=True):
        assert ids == expected_ids
        assert numbers == pytest.approx(expected, abs=1e-4)


def test_sizes_that_cannot_be_divided(qwen3: Oracle) -> None:
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 4, which does not divide .* num_heads of 6"
    ):
        LLM(qwen3.folder, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="is 3, which neither divides the model's 2 KV heads"):
        LLM(qwen3.folder, tensor_parallel_size=3)


def test_a_message_has_the_changes_of_the_block_tables() -> None:
    class Tables(parallel.Ranks):
        def __init__(self) -> None:
            self.tables = {}

    here, there = Tables(), Tables()
    none = np.array([], dtype=np.int64)
    sent = []
    for tables in ({1: [5, 2], 2: [0]}, {1: [5, 2, 7], 2: [0]}, {2: [4], 1: [5, 3, 7]}, {3: [5]}, {}):
        metadata = AttentionMetadata(none, none, list(tables.values()), none, 0, list(tables))
        message = json.loads(json.dumps(here.encode(StepInputs(([], [], []), none, none, metadata, []))))
        sent.append(message["block_tables"])
        assert there.decode(message).metadata.block_tables == list(tables.values())
    assert sent == [
        [[0, [5, 2]], [0, [0]]],
        [[2, [7]], [1, []]],
        [[0, [4]], [1, [3, 7]]],
        [[0, [5]]],
        [],
    ]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


class Saboteur(ModelRunner):
    """A model runner of which a worker does what a file says."""

    def __init__(self, *args: Any, orders: Path, **kwargs: Any) -> None:
        self.orders = orders
        self.obey("start")
        super().__init__(*args, **kwargs)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        self.obey("before")
        hidden = super().forward(inputs)
        self.obey("after")
        return hidden

    def harmless(self) -> None:
        """Would do nothing."""

    def obey(self, when: str) -> None:
        order = self.orders.read_text(encoding="utf-8") if self.orders.exists() else ""
        if not order.startswith(when) or os.getpid() == int(os.environ["TEST_PID"]):
            return
        self.orders.write_text("", encoding="utf-8")
        if "raise" in order:
            raise ValueError("sabotage")
        if "die" in order:
            os.kill(os.getpid(), signal.SIGKILL)
        if "slow" in order:
            time.sleep(parallel.STEP_TIMEOUT + 1)
        if "hang" in order:
            time.sleep(1000)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEST_PID", str(os.getpid()))
    monkeypatch.setenv("NANOPAGED_STEP_TIMEOUT", "5")
    monkeypatch.setattr(parallel, "STEP_TIMEOUT", 5.0)
    return tmp_path / "orders"


def sabotaged(oracle: Oracle, orders: Path) -> LLMEngine:
    config = resolve_lengths(EngineConfig(model=oracle.folder, **OPTIONS), 160)
    arguments = config, read_model_config(oracle.folder), oracle.folder
    return LLMEngine(config, parallel.start(2, "cpu", partial(Saboteur, *arguments, orders=orders)))


def run(engine: LLMEngine, request_id: str = "a") -> list[int]:
    engine.add_request(request_id, [1, 2, 3], GREEDY)
    return drain(engine)


def drain(engine: LLMEngine) -> list[int]:
    while engine.has_unfinished_requests():
        outputs = engine.step()
        engine.check_invariants()
    return outputs[0].outputs[0].token_ids


def workers(engine: LLMEngine) -> list[Any]:
    return engine.runner.ranks.processes


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """The addresses and ports on which the process listens."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {(*connection.laddr,) for connection in connections if connection.status == psutil.CONN_LISTEN}


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Engines of the test end with their workers, and their ports are free again."""
    before, ports = set(psutil.Process().children(recursive=True)), listening()
    yield
    gc.collect()
    assert listening() <= ports
    left = {p for p in psutil.Process().children(recursive=True) if p.is_running()} - before
    left = [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]
    assert not left, left


@pytest.mark.usefixtures("no_orphans")
def test_a_step_that_fails_on_any_rank_is_tried_again(qwen3: Oracle, orders: Path) -> None:
    orders.write_text(
        "start slow", encoding="utf-8"
    )  # loading may take a rank longer than the others wait in a step
    engine = sabotaged(qwen3, orders)
    expected = qwen3.greedy([1, 2, 3], 8, ignore_eos=True)
    assert run(engine) == expected
    for when in ("before", "after"):
        engine.add_request("b", [1, 2, 3], GREEDY)
        engine.step()
        orders.write_text(f"{when} raise", encoding="utf-8")
        with pytest.raises(RuntimeError, match=r"rank 1:\nTraceback[^$]*ValueError: sabotage"):
            drain(engine)
        engine.check_invariants()
        engine.runner.graphs = graphs = DecodeGraphs.__new__(DecodeGraphs)
        graphs.model = engine.runner.model  # its connections are closed now, and it has nothing to run
        assert drain(engine) == expected
    # on rank 0: in the middle of a layer, or while a worker waits to send its logits
    for name, at in (("all_reduce", 3), ("gather", 1)):
        engine.add_request("c", [1, 2, 3], GREEDY)
        engine.step()
        real, calls = getattr(parallel.Ranks, name), []

        def interrupted(self: parallel.Ranks, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)  # noqa: B023
            if len(calls) == at:  # noqa: B023
                raise KeyboardInterrupt
            return real(self, x)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel.Ranks, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert drain(engine) == expected
    # a second Ctrl-C, before or while the ranks meet again
    for owner, name in ((parallel, "why_failed"), (parallel.Ranks, "_leave")):
        function = getattr(owner, name)

        def pressed(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return function(*args)  # noqa: B023

        engine.add_request("d", [1, 2, 3], GREEDY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, pressed)
            patch.setattr(parallel.Ranks, "gather", interrupted)
            calls[:] = []
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert drain(engine) == expected


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("before die", r"rank 1 died \(exit code -9\)"),
        ("before hang", "rank 1 has not answered for 10 seconds"),
    ],
)
def test_a_lost_worker_ends_the_engine(qwen3: Oracle, orders: Path, order: str, message: str) -> None:
    engine = sabotaged(qwen3, orders)
    processes = workers(engine)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    orders.write_text(order, encoding="utf-8")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        engine.step()
    assert time.monotonic() - began < 60
    assert not any(process.is_alive() for process in processes)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"the engine has ended: {message}"):
            engine.step()
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("order", "message"),
    [("start raise", r"cannot start: rank 1:\n[^$]*ValueError: sabotage"), ("start die", "rank 1 died")],
)
def test_a_worker_that_cannot_start(qwen3: Oracle, orders: Path, order: str, message: str) -> None:
    orders.write_text(order, encoding="utf-8")
    with pytest.raises(RuntimeError, match=message):
        sabotaged(qwen3, orders)


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_start_that_is_broken_off(
    qwen3: Oracle, orders: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU for the second worker; or Ctrl-C comes when the workers have just been started."""

    def fail(*args: Any) -> Any:
        raise error

    if error is ValueError:
        monkeypatch.setattr(parallel, "rank_device", lambda device, rank: fail() if rank == 2 else device)
    else:
        monkeypatch.setattr(parallel, "Ranks", fail)
    with pytest.raises(error):
        parallel.start(3, "cpu", partial(Saboteur, orders=orders))


@pytest.mark.usefixtures("no_orphans")
def test_engines_side_by_side_end_with_their_workers(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "NUM_THREADS", 8)
    torch.set_num_threads(8)
    llms = [LLM(qwen3.folder, tensor_parallel_size=2, **OPTIONS) for _ in range(2)]
    expected = qwen3.greedy([1, 2, 3], 8, ignore_eos=True)
    assert torch.get_num_threads() == 4  # the second engine does not halve it again
    torch.set_num_threads(1)
    for llm in llms:
        (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected


def test_what_a_stranger_reaches(qwen3: Oracle, orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ports are of the loopback address, even where this machine's name has another one. A message can
    call no other method of a worker than those that rank 0 calls: it is refused, and rank 0 is told."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address != "127.0.0.1" for a in addresses):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)  # gloo would listen there
    before = listening()
    engine = sabotaged(qwen3, orders)
    ports = [port for rank in workers(engine) for port in listening(rank.pid)]
    ports += listening() - before
    assert len(ports) == 3, "the store's, and two of gloo"
    assert {address for address, _ in ports} == {"127.0.0.1"}
    parallel.send(engine.runner.ranks.store, "harmless")
    engine.add_request("a", [1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError, match=r"rank 1:\n[^$]*a message names the method 'harmless', but may"):
        engine.step()
    assert drain(engine) == qwen3.greedy([1, 2, 3], 8, ignore_eos=True)


FORKS = """
import multiprocessing, os, signal, sys
from nanopaged import LLM, SamplingParams

def make():
    return LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=30)

def generate(llm):
    try:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        print(os.getpid(), output.outputs[0].token_ids, flush=True)
    except RuntimeError as error:
        print(error, flush=True)

def daemonic():
    try:
        make()
    except ValueError as error:
        print(error, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=daemonic, daemon=True)
    process.start()
    process.join()
    llm = make()
    for end in (lambda: None, sys.exit, lambda: os._exit(0)):
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends it if it hangs
            generate(llm)
            end()
            break
        print("ended with", os.waitpid(child, 0)[1], flush=True)
    else:
        generate(llm)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
def test_children_of_the_engines_process(qwen3: Oracle, tmp_path: Path) -> None:
    """A forked process cannot use its parent's engine, and its end does not end the parent's workers. A
    daemonic process cannot have workers."""
    script = tmp_path / "script.py"
    script.write_text(FORKS, encoding="utf-8")
    done = subprocess.run([sys.executable, script, qwen3.folder], capture_output=True, text=True, timeout=300)
    assert "AssertionError" not in done.stderr  # of multiprocessing
    daemonic, *forked, last = done.stdout.splitlines()
    assert re.match("tensor_parallel_size is 2, but this process is daemonic.*ProcessPoolExecutor", daemonic)
    pid = last.split()[0]
    refused = f"this engine belongs to process {pid}, from which this one was forked: make another here"
    assert forked == [refused, "ended with 0"] * 3
    assert last == f"{pid} {qwen3.greedy([1, 2, 3], 8)}"


SCRIPT = """
import os, sys
from nanopaged import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=30)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    pids = [process.pid for process in llm.engine.runner.ranks.processes]
    print(os.getpid(), pids, output.outputs[0].token_ids, flush=True)
    if len(sys.argv) > 2:
        input()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            LLM(sys.argv[1], tensor_parallel_size=2)
        except ValueError as error:
            print(error)
"""


@pytest.mark.slow
def test_workers_end_when_their_engine_is_killed(qwen3: Oracle, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, script, qwen3.folder, "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        _, pids, _ = process.stdout.readline().split(maxsplit=2)
        process.kill()
    worker = int(pids.strip("[]"))
    deadline = time.monotonic() + 30
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker goes on"
        time.sleep(0.1)


@pytest.mark.slow
def test_under_torchrun(qwen3: Oracle, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, script, qwen3.folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line, second = done.stdout.splitlines()  # of rank 0 alone
    assert second.startswith("under torchrun a program can have one engine")
    assert line.endswith(f"[] {qwen3.greedy([1, 2, 3], 8, ignore_eos=True)}")
