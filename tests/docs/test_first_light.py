"""docs/experiments/first_light.py: its report and time limits; its parts on a CPU and on a fake GPU."""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from doc_pages import copy_repository
from programs import environment, run_process

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "docs" / "experiments"


@pytest.fixture
def first_light(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the folders on the path that it gives to its processes."""
    for folder in (ROOT, EXPERIMENTS):
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module("first_light")


def arguments(report: Path, **changes: object) -> argparse.Namespace:
    defaults = {"device": "auto", "quick": False, "parts": None, "patience": 1.0, "report": report}
    return argparse.Namespace(**defaults | changes)


def states(report: str) -> dict[str, tuple[str, str]]:
    """part → (state, sentence), from the table at the top."""
    rows = re.findall(r"^\| ([\w-]+) \| (ok|FAILED|not run) \| [\d.]+ \| (.*) \|$", report, re.MULTILINE)
    return {name: (state, sentence) for name, state, sentence in rows}


# ── the report and the time limits, with a few lines in place of each part ────────────────────────

HANG = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
light.row("its process", child.pid)
light.now("loop 2")
child.wait()
"""
PLANTED = [  # (a part's code, its state, what its line says)
    (HANG, "FAILED", "it was ended after 1 s, its time limit (at: loop 2)"),
    ('return "all is well"', "ok", "all is well"),
    ("import os; light.row('found', 2); os.abort()", "FAILED", "it was ended by the signal SIGABRT"),
    ('raise MemoryError("Tried to allocate.\\nA hint.")', "FAILED", "MemoryError: Tried to allocate."),
    ("import os; os._exit(3)", "FAILED", "its process ended with status 3"),
    ('light.wrong("error 0.01"); light.wrong("error 9")', "FAILED", "error 0.01; and 1 more"),
    ('with light.trying("x"): 1 / 0', "FAILED", "x: ZeroDivisionError: division by zero"),
    ('from light import NotRun; raise NotRun("no | peers")', "not run", "no \\| peers"),
]
PROGRAM = """
import sys, light
class Bare(light.Light):  # without torch
    def __init__(self, file, wanted, seconds):
        self.file = file
        self.note("machine", "a machine")
light.Light = Bare
exec("def part(light):\\n" + sys.argv[1])
sys.modules["light.planted"] = sys.modules["__main__"]
light.main("planted.part", *sys.argv[3:])
"""


def test_what_a_part_can_do_wrong(
    first_light: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A hang, a crash, an exception: each is a line of the report, and the next part runs."""
    from light.report import ADVICE

    parts = [
        first_light.Part(name, code, 1 if code == HANG else 30, 0)
        for name, (code, *_) in zip(ADVICE, PLANTED, strict=False)
    ]
    monkeypatch.setattr(first_light, "PARTS", parts)
    run = first_light.run_process

    def run_planted(command: list[str], *rest: object) -> int | None:
        code = "\n".join(f"    {line}" for line in command[3].splitlines())
        return run([sys.executable, "-c", PROGRAM, code, *command[3:]], *rest)

    monkeypatch.setattr(first_light, "run_process", run_planted)
    report = tmp_path / "report.md"
    assert not first_light.run_all(arguments(report))
    text = report.read_text(encoding="utf-8")
    advice = text.split("## What to do")[1]
    assert list(states(text).values()) == [(state, sentence) for _, state, sentence in PLANTED]
    assert text.startswith("# First light of nanopaged: a machine\n")
    assert "**6 of 8 parts failed: machine, kernels, prefill" in text
    hang = text.split("## tokens")[0]
    assert re.search(r'File "<string>", line \d in part', hang), "where it was when its time was nearly over"
    assert "| found | 2 |" in text, "what it had found before the crash"
    assert "A hint." in text, "the output of a failed part"
    assert is_gone(int(re.search(r"\| its process \| (\d+) \|", text)[1]))
    failed = [part.name for part, (_, state, _) in zip(parts, PLANTED, strict=True) if state == "FAILED"]
    assert re.findall(r"^\| ([\w-]+) \| [^|]+ \| [^|]+ \|$", advice, re.MULTILINE)[2:] == failed
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: machine, kernels, prefill")


def is_gone(pid: int) -> bool:
    """A process that has ended; its parent may not have asked for its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_time_limits(first_light: ModuleType) -> None:
    """They add up to ten and to two minutes; other engines, where they are installed, take their own."""
    assert sum(part.seconds for part in first_light.chosen(None, "full") if part.name != "peers") <= 600
    assert sum(part.quick for part in first_light.chosen(None, "quick")) <= 120
    assert first_light.chosen(None, "rehearsal") == first_light.PARTS


def test_a_signal_ends_the_part_as_well(tmp_path: Path) -> None:
    """As Ctrl-C does, and a scheduler of jobs. The report is there, and is not that of an earlier run."""
    report = tmp_path / "report.md"
    report.write_text("# Yesterday's", encoding="utf-8")
    command = [sys.executable, str(EXPERIMENTS / "first_light.py"), "--report", str(report)]
    script = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    while not (parts := psutil.Process(script.pid).children()):
        time.sleep(0.05)
    script.terminate()
    printed, _ = script.communicate(timeout=30)
    assert script.returncode == 1
    assert "interrupted" in printed
    text = report.read_text(encoding="utf-8")
    assert "**The run has not ended**: 0 of 11 parts are done." in text
    assert "What to do" not in text
    assert is_gone(parts[0].pid)


def test_paths_stay_out_of_the_report(first_light: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from light.report import Result, render

    monkeypatch.setenv("HOME", "/home/reader")
    for prefix in ("/opt/python", f"{ROOT}/.venv", str(ROOT.parent)):  # wherever the environment lies
        monkeypatch.setattr(sys, "prefix", prefix)
        log = f'File "{ROOT}/nanopaged/engine.py"\nFile "{sys.prefix}/lib/torch"\n{Path.home()}/notes'
        text = render([Result("kernels", "FAILED", 1.0, "x", log=log)], 1, "a GPU", "full", 2.0)
        assert 'File "nanopaged/engine.py"\nFile "PYTHON/lib/torch"\n~/notes' in text


def test_every_part_exists_and_has_advice(first_light: ModuleType) -> None:
    """Also the files and the options that the advice names."""
    from light.report import ADVICE

    from nanopaged import EngineConfig

    assert list(ADVICE) == [part.name for part in first_light.PARTS]
    for part in first_light.PARTS:
        module, function = part.function.split(".")
        assert callable(getattr(importlib.import_module(f"light.{module}"), function))
    for look, avoid in ADVICE.values():
        assert all((ROOT / path).exists() for path in re.findall(r"(?:nanopaged|tests|docs)/[\w/.]*\w", look))
        assert set(re.findall(r"`(\w+)=", avoid)) <= EngineConfig.__dataclass_fields__.keys()


# ── the parts on a fake GPU ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def cuda(first_light: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU whose tensors hold no data (fake_cuda.py). A call that is timed runs once, and takes 1 ms."""
    pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform has not")
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU")
    from fake_cuda import pretend

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "a fake GPU",
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "synchronize": lambda *_: None,
    }

    def time_call(call: Callable[[], object], *_: object, **__: object) -> float:
        call()
        return 1e-3

    for name in ("common", "roofline", "light.kernels", "light.prefill"):
        monkeypatch.setattr(importlib.import_module(name), "time_call", time_call)
    tokens = importlib.import_module("light.tokens")  # the tokens and logits of a fake GPU are 0
    monkeypatch.setattr(tokens, "greedy_of_transformers", lambda prompt, n: ([0] * n, [1.0] * n))
    logits = torch.zeros(1, 1000, 1024)
    monkeypatch.setattr(tokens, "reference_model", lambda: lambda ids: SimpleNamespace(logits=logits))
    monkeypatch.setattr("nanopaged.model.checkpoint._draw_weights", lambda model, seed: None)
    memory = importlib.import_module("light.memory")
    make_llm, small = memory.make_llm, {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    monkeypatch.setattr(memory, "make_llm", lambda args, **options: make_llm(args, **small | options))
    monkeypatch.setattr(memory, "serve_in_turns", lambda *_: [(5.0, 2), (4.0, 3)])  # which takes a minute
    monkeypatch.setattr("preemption.NUM_TOKENS", 256)
    with pretend(monkeypatch) as cuda:
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        yield cuda


# part → (some of what it launches, rows of its tables by their beginning, and how many there are)
ON_A_GPU: dict[str, tuple[str, dict[str, int]]] = {
    "machine.machine": ("linear", {"| GPU |": 1, "| memory |": 1}),
    "tokens.tokens": ("decode_kernel varlen", {"| triton, graphs": 1, "| triton, eager": 1, "| torch |": 1}),
    "kernels.kernels": (
        "decode_kernel reduce_kernel store_kernel",
        {"| decode |": 9, "| store |": 1, "| copy |": 1, "| 16 | 3 | 4 | 1,000.0 |": 1},
    ),
    "prefill.prefill": ("_varlen_attn", {"| 2 x (24 of 24) | PyTorch's varlen attention | 0.0": 1}),
    "steps.steps": ("decode_kernel varlen", {"| graphs |": 4, "| eager |": 4, "| torch |": 4}),
    "memory.memory": ("decode_kernel varlen sort", {"| KV cache |": 1, "| free": 2}),
    "memory.swap": ("decode_kernel varlen", {"| 16 |": 1}),
    "throughput.workload": ("decode_kernel varlen", {"steps, sequences in each": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", list(ON_A_GPU))
def test_parts_on_a_fake_gpu(cuda: FakeCuda, part: str, tmp_path: Path) -> None:
    """The branches for a GPU run, and none of the checks fails, since the references are 0 as well."""
    import light

    launched, rows = ON_A_GPU[part]
    given = light.Light(tmp_path / "notes", "quick", 1000)
    given.args.shape, given.args.steps, given.size = "test", 4, "rehearsal"  # the small sizes
    module, function = part.split(".")
    assert len(getattr(importlib.import_module(f"light.{module}"), function)(given)) > 20
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text(encoding="utf-8").splitlines()]
    assert not {"wrong", "cannot"} & {note["kind"] for note in notes}
    assert set(launched.split()) <= set(cuda.launched)
    lines = [note["value"] for note in notes if note["kind"] == "line"]
    assert {row: sum(line.startswith(row) for line in lines) for row in rows} == rows


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_dtype_of_a_run(
    cuda: FakeCuda, capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T4 (7.5) has Triton's kernels, but emulates bfloat16."""
    import light

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    given = light.Light(tmp_path / "notes", "quick", 1000)
    assert given.dtype == (torch.bfloat16 if capability >= (8, 0) else torch.float16)
    assert given.args.dtype == str(given.dtype).removeprefix("torch.")
    assert (given.no_kernels is None) == (capability >= (7, 5))


@pytest.mark.parametrize("free", [1 << 30, 4 << 30, 60 << 30])
def test_a_shared_gpu_is_not_filled(cuda: FakeCuda, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying memory takes at most a quarter of what is free, and no more than 4 GiB."""
    common = importlib.import_module("common")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))
    copied = []
    monkeypatch.setattr(torch, "empty_like", lambda src: copied.append(src) or src)
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)  # each copy takes a second
    assert common.copy_bandwidth(torch.device("cuda:0")) == 2 * copied[0].nbytes
    assert 2 * copied[0].nbytes <= min(free / 4, 4 << 30)


@pytest.mark.parametrize(("bandwidth", "times"), [(3e12, 1), (1e12, 1), (0.4e12, 2.5), (0.1e12, 4)])
def test_a_slow_gpu_has_more_time(
    first_light: ModuleType, bandwidth: float, times: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def run_part(part: Any, size: str, seconds: float, notes: Path) -> tuple[Any, dict[str, Any]]:
        limits.append(seconds)
        result = first_light.Result(part.name, "ok", 0.0, "", [], "")
        return result, {"size": "quick", "bandwidth": bandwidth}

    monkeypatch.setattr(first_light, "run_part", run_part)
    parts = ["machine", "tokens"]
    first_light.run_all(arguments(tmp_path / "report.md", quick=True, parts=parts))
    machine, tokens = (part.quick for part in first_light.PARTS[:2])
    assert limits == [pytest.approx(machine, abs=1), pytest.approx(machine + times * tokens, abs=1)]


# ── on a CPU: faults in the package, and the notebook ─────────────────────────────────────────────


def rehearse(folder: Path, *options: str, first: Path) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Run the script with `first` in front of the path. (exit status, the states, the report)"""
    report = folder / "report.md"
    script = [str(EXPERIMENTS / "first_light.py"), "--report", str(report), "--device", "cpu", *options]
    done = run_process([sys.executable, *script], folder, environment(PYTHONPATH=str(first)), timeout=600)
    assert done.stderr == ""
    text = report.read_text(encoding="utf-8")
    return done.returncode, states(text), text


@pytest.mark.slow
def test_a_fault_is_a_line_of_the_report(tmp_path: Path) -> None:
    """Of a wrong kernel: with the part before it fine, and the part after it run."""
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "nanopaged" / "kernels" / "paged_attention.py"
    line = "tl.store(partial_ptr + rows[:, None] * HEAD_DIM + dims, acc / l[:, None]"
    source = file.read_text(encoding="utf-8")
    assert source.count(line) == 1
    file.write_text(source.replace(line, f"{line} + 0.01"), encoding="utf-8")
    status, found, text = rehearse(tmp_path, "--parts", "machine", "kernels", "peers", first=tmp_path)
    assert status == 1
    assert found["machine"][0] == "ok"
    state, sentence = found["kernels"]
    assert state == "FAILED"
    assert re.fullmatch(r"decode, 1 of 40, .* float32: error .*, more than 2e-05; and \d+ more", sentence)
    assert found["peers"] == ("not run", "neither vLLM nor nano-vllm is installed here")
    assert str(tmp_path) not in text.replace(str(tmp_path / "nanopaged"), "")


@pytest.mark.slow
def test_without_triton(tmp_path: Path) -> None:
    """What needs it is not run; nothing fails, since it does not exist for every platform."""
    (tmp_path / "triton.py").write_text("raise ImportError('no Triton here')", encoding="utf-8")
    parts = ["tokens", "kernels", "prefill", "kernel-tests"]
    status, found, text = rehearse(tmp_path, "--parts", *parts, first=tmp_path)
    assert status == 0
    for part in ("kernels", "kernel-tests"):
        assert found[part] == ("not run", "Triton cannot be imported (no Triton here)")
    assert found["tokens"] == ("ok", "1 of 1 ways give transformers' tokens in float32")
    assert found["prefill"][0] == "ok"
    assert "| 2 x (24 of 24) | flash-attn | not there: No module named 'flash_attn' | – | – |" in text
    assert "It could not run Triton's kernels: Triton cannot be imported (no Triton here)." in text


@pytest.mark.slow
def test_the_notebook(first_light: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run on a CPU: the check is a whole rehearsal. pip is noted, and not run."""
    folder, programs = copy_repository(tmp_path), tmp_path / "bin"
    git = "git init -q && git add . && git -c user.name=me -c user.email=me@example.org commit -q -m one"
    assert run_process(git, folder, environment()).returncode == 0
    programs.mkdir()
    (programs / "pip").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/pip.txt\n', encoding="utf-8")
    (programs / "pip").chmod(0o755)
    env = environment(PYTHONPATH="")
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    display = ModuleType("IPython.display")
    display.HTML = display.Markdown = lambda data: SimpleNamespace(data=data)
    for name, module in {"IPython": ModuleType("IPython"), "IPython.display": display}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"input": lambda _: str(folder)}
    shown = run_notebook(ROOT / "docs" / "experiments" / "first_light.ipynb", names, env)

    assert (tmp_path / "pip.txt").read_text(encoding="utf-8") == "install --quiet -e .\n"
    report, page = (each.data for each in shown)
    found = states(report)
    assert report.startswith("# A rehearsal of first light: nothing here ran on a GPU")
    assert "**No part failed.**" in report
    assert list(found) == [part.name for part in first_light.PARTS]
    assert {name for name, (state, _) in found.items() if state != "ok"} <= {"kernels", "peers"}
    assert "<iframe" in page


def run_notebook(file: Path, names: dict[str, object], env: dict[str, str]) -> list[object]:
    """Run the cells of code as a notebook does. Returns the values of last lines that are expressions."""
    shown = []

    def shell(command: str) -> None:
        done = run_process(command, Path.cwd(), env, timeout=900)
        assert done.returncode == 0, done.stderr

    names["shell"] = shell
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        python = []
        for line in "".join(cell["source"]).splitlines():
            python.append(f"shell({line[1:]!r})" if line.startswith("!") else line)
        tree = ast.parse("\n".join(python))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file.name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), file.name, "eval"), names)
            shown += [value] if value is not None else []
    return shown
