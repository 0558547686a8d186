"""Tensor parallelism on the CPU: several ranks give what one gives, and no failure of a rank is lost."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from conftest import Oracle, make_checkpoint, random_prompts, tokens, tokens_of
from saboteur import Saboteur

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams, parallel
from nanopaged.model.model_config import read_model_config

OPTIONS: dict[str, Any] = {"num_blocks": 30, "num_host_blocks": 12, "block_size": 4}
OPTIONS |= {"max_num_batched_tokens": 40}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
slow = partial(pytest.param, marks=pytest.mark.slow)  # each start of ranks takes seconds


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
    for preemption in ("swap", "recompute"):
        llm.engine.scheduler.preemption = preemption
        outputs = llm.generate(prompts, kinds * 2, use_tqdm=False)
        llm.engine.check_invariants()
        for output in outputs:
            scored = [max(logprobs.values()) for logprobs in (output.prompt_logprobs or [])[1:]]
            numbers = [c.cumulative_logprob for c in output.outputs] + scored
            results.append(([c.token_ids for c in output.outputs], numbers))
    stats = llm.engine.stats()
    assert min(stats.num_preemptions_swap, stats.num_preemptions_recompute) > 0, stats
    assert min(stats.num_blocks_copied, stats.prefix_cache_hits) > 0, stats
    return results


Pair = tuple[LLM, set[tuple[str, int]]]
BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two ranks, and where they listen. This machine's name may have an address of a network."""
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder, num_attention_heads=4, **BIASES)
    with pytest.MonkeyPatch.context() as patch:
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.family == socket.AF_INET and a.address != "127.0.0.1" for a in addresses):
                patch.setenv("GLOO_SOCKET_IFNAME", name)  # gloo would listen there
        before = listening()
        llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    ports = listening() - before
    for process in processes_of(llm.engine):
        ports |= listening(process.pid)
    return llm, ports


def test_ports_are_of_the_loopback_address(pair: Pair) -> None:
    _, ports = pair
    assert len(ports) == 2, "two of gloo"
    assert {address for address, _ in ports} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), slow("qwen3", 2), slow("qwen2", 2), slow("llama", 4)]
)
def test_ranks_together_give_what_one_gives(family: str, size: int, pair: Pair, tmp_path: Path) -> None:
    """Four ranks share two KV heads, so that two ranks each have the same one."""
    llm, _ = pair
    if (family, size) != ("llama", 2):
        biases = BIASES if family == "llama" else {}
        make_checkpoint(family, tmp_path, num_attention_heads=8 if family == "qwen3" else 4, **biases)
        llm = LLM(tmp_path, tensor_parallel_size=size, **OPTIONS)
    alone = everything(LLM(llm.engine.config.model, **OPTIONS))
    for (expected_ids, expected), (ids, numbers) in zip(alone, everything(llm), strict=True):
        assert ids == expected_ids
        assert numbers == pytest.approx(expected, abs=1e-4)


def test_sizes_that_cannot_be_divided(qwen3: Oracle) -> None:
    for size in (3, 4):
        message = f"tensor_parallel_size is {size}, but must divide .* num_heads of 6"
        with pytest.raises(ValueError, match=message):
            LLM(qwen3.folder, tensor_parallel_size=size)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEST_PID", str(os.getpid()))
    monkeypatch.setenv("NANOPAGED_STEP_TIMEOUT", "5")
    monkeypatch.setattr(parallel, "STEP_TIMEOUT", 5.0)
    return tmp_path / "orders"


def sabotaged(oracle: Oracle, orders: Path) -> LLMEngine:
    options = OPTIONS | {"max_model_len": 160, "tensor_parallel_size": 2}
    config = EngineConfig(model=oracle.folder, **options)
    make_runner = partial(
        Saboteur,
        config=config,
        model_config=read_model_config(oracle.folder),
        folder=oracle.folder,
        orders=orders,
    )
    return LLMEngine(config, parallel.start_ranks(2, make_runner))


def processes_of(engine: LLMEngine) -> list[Any]:
    return engine.runner.ranks.workers.processes


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """The addresses and ports on which the process listens."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {(*connection.laddr,) for connection in connections if connection.status == psutil.CONN_LISTEN}


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def stores() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("nanopaged-*"))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of a test end with their workers, their ports are free again, their stores are removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where no other test puts its stores
    monkeypatch.setattr(tempfile, "tempdir", None)
    before, ports, folders = set(psutil.Process().children(recursive=True)), listening(), stores()
    yield
    gc.collect()
    assert listening() <= ports
    assert stores() <= folders
    left = {p for p in psutil.Process().children(recursive=True) if p.is_running()} - before
    left = [p for p in left if "resource_tracker" not in command_of(p)]
    assert not left, left


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("step raise", r"rank 1 has failed: [^$]*Traceback[^$]*ValueError: sabotage"),
        slow("step die", "rank 1 has failed: .* terminated with signal SIGKILL"),
        slow("step hang", "rank 0 failed within a step: .*imed out"),
    ],
)
def test_a_worker_that_fails_ends_the_engine(qwen3: Oracle, orders: Path, order: str, message: str) -> None:
    """One error says which rank failed and how. All later steps raise the same, without waiting."""
    engine = sabotaged(qwen3, orders)
    processes = processes_of(engine)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    orders.write_text(order, encoding="utf-8")
    with pytest.raises(RuntimeError, match=f"^the engine has ended: {message}") as first:
        engine.step()
    assert not any(process.is_alive() for process in processes)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RuntimeError) as later:
            engine.step()
        assert str(later.value) == str(first.value)
        assert time.monotonic() - began < 1
        engine.check_invariants()
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


def test_a_worker_that_cannot_start(qwen3: Oracle, orders: Path) -> None:
    orders.write_text("start raise", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"has ended: rank 1 [^$]*ValueError: sabotage"):
        sabotaged(qwen3, orders)


def test_a_failure_outside_the_ranks_work_starts_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the inputs are sent, or when a request's token is drawn: as on one process."""
    engine = pair[0].engine
    (expected,) = tokens_of(LLM(engine.config.model, **OPTIONS).generate([1, 2, 3], GREEDY, use_tqdm=False))
    for name in ("prepare", "ModelRunner.sample_next_tokens"):
        engine.add_request("a", [1, 2, 3], GREEDY)
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(f"nanopaged.model_runner.{name}", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        while engine.has_unfinished_requests():
            (output,) = engine.step()
            engine.check_invariants()
        assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("name", "error", "raised"),
    [
        ("dist.broadcast_object_list", ValueError, RuntimeError),
        slow("Ranks.gather", KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_a_failure_of_rank_0_in_a_step_ends_the_engine(
    pair: Pair,
    name: str,
    error: type[BaseException],
    raised: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks are out of step. Ctrl-C itself passes through. (It is the last test of the pair.)"""
    engine = pair[0].engine
    if name == "Ranks.gather":
        engine = LLM(engine.config.model, tensor_parallel_size=2, **OPTIONS).engine
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(f"nanopaged.parallel.{name}", Mock(side_effect=error("in a step")))
        with pytest.raises(raised):
            engine.step()
    ended = rf"the engine has ended: rank 0 failed within a step: {error.__name__}\('in a step'\)"
    with pytest.raises(RuntimeError, match=ended):
        engine.step()


SCRIPT = """
import os, sys
from nanopaged import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=30)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    print(output.outputs[0].token_ids, flush=True)
    if len(sys.argv) > 2:
        input()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            LLM(sys.argv[1], tensor_parallel_size=2)
        except ValueError as error:
            print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [None, 1.0, 3.0])
def test_workers_end_when_their_engine_is_killed(
    qwen3: Oracle, tmp_path: Path, seconds: float | None
) -> None:
    """When it waits for requests, or while it starts. They remove its folder, see `nothing_is_left`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, script, qwen3.folder, "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        engine, workers = psutil.Process(process.pid), []
        while not workers:
            workers = [child for child in engine.children() if "spawn_main" in command_of(child)]
            time.sleep(0.01)
        if seconds is None:
            process.stdout.readline()
        else:
            time.sleep(seconds)
        process.kill()
    _, left = psutil.wait_procs(workers, timeout=30)
    assert not left


@pytest.mark.slow
def test_under_torchrun(qwen3: Oracle, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, script, qwen3.folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line, second = done.stdout.splitlines()  # of rank 0 alone
    assert second.startswith("under torchrun a program can have one engine")
    assert line == str(qwen3.greedy([1, 2, 3], 8, ignore_eos=True))


FORKING = """
import gc, json, os, signal, sys
from nanopaged import LLM, SamplingParams

def main():
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=30)
    for ending in ("exit", "drop", "raise"):
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends it if it hangs
            if ending == "drop":
                del llm
                gc.collect()
            if ending == "raise":
                raise ValueError("the child's own")
            sys.exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        print(json.dumps([ending, status, output.outputs[0].token_ids]), flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
def test_a_fork_leaves_the_workers_to_its_parent(qwen3: Oracle, tmp_path: Path) -> None:
    """Children end by `sys.exit`, after they have dropped the LLM, and by an exception.

    None of them hangs or says more than its own traceback, and the engine goes on after each.
    """
    (tmp_path / "temporary").mkdir()
    (tmp_path / "program.py").write_text(FORKING, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, tmp_path / "program.py", qwen3.folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    expected = qwen3.greedy([1, 2, 3], 8, ignore_eos=True)
    assert lines == [["exit", 3, expected], ["drop", 3, expected], ["raise", 1, expected]], done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("ValueError: the child's own\n"), done.stderr
    assert not [path for path in (tmp_path / "temporary").iterdir() if path.name.startswith("nanopaged")]


def test_a_start_whose_workers_cannot_be_started() -> None:
    """Their arguments cannot be pickled, so there is no process to remove the folder but this one."""
    with pytest.raises(AttributeError, match="pickle"):
        parallel.start_ranks(2, lambda ranks: None)
    assert not stores()
