"""docs/experiments/first_light.py: its report and time limits; its parts on a CPU and on a fake GPU."""

from __future__ import annotations

import argparse
import ast
import importlib
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
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from browser import open_browser
from doc_pages import copy_repository
from programs import environment, run_process

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

ROOT = Path(__file__).parents[1]
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
    (
        'light.row("found", 2)\nlight.now("kernel 7")\nimport os; os.abort()',
        "FAILED",
        "it was ended by the signal SIGABRT (at: kernel 7)",
    ),
    ('raise MemoryError("Tried to allocate.\\nA hint.")', "FAILED", "MemoryError: Tried to allocate."),
    ("import os; os._exit(3)", "FAILED", "its process ended with status 3"),
    ("import no_package", "FAILED", "ModuleNotFoundError: No module named 'no_package'"),
    ('light.wrong("error 0.01"); light.wrong("error 9")', "FAILED", "error 0.01; and 1 more"),
    ('light.wrong("error 0.01")\nimport os; os.abort()', "FAILED", "error 0.01; and 1 more"),
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
    assert "**8 of 10 parts failed: machine, kernels, prefill" in text
    hang = text.split("## tokens")[0]
    assert re.search(r'File "<string>", line \d in part', hang), "where it was when its time was nearly over"
    assert "| found | 2 |" in text, "what it had found before the crash"
    assert "A hint." in text, "the output of a failed part"
    assert is_gone(int(re.search(r"\| its process \| (\d+) \|", text)[1]))
    failed = [part.name for part, (_, state, _) in zip(parts, PLANTED, strict=True) if state == "FAILED"]
    assert re.findall(r"^\| ([\w-]+) \| [^|]+ \| [^|]+ \|$", advice, re.MULTILINE)[2:] == failed
    *shown, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [part.name for part in parts]
    assert last.startswith("failed: machine, kernels, prefill")


def is_gone(pid: int) -> bool:
    """A process that has ended; its parent may not have asked for its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("quick", "most"), [(False, 600), (True, 120)])
def test_the_time_limits_add_up(first_light: ModuleType, quick: bool, most: int) -> None:
    """To ten and to two minutes."""
    parts = first_light.chosen(None, "quick" if quick else "full")
    assert sum(part.quick if quick else part.seconds for part in parts) <= most
    assert len(first_light.chosen(None, "rehearsal")) == len(first_light.PARTS) > 0


def test_a_part_may_use_what_earlier_ones_leave_over(
    first_light: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a part that takes longer, because it cannot be killed at once, takes from those after it."""
    clock, limits = [100.0], []

    def run_part(part: object, size: str, seconds: float, notes: Path) -> tuple[object, dict[str, str]]:
        limits.append(round(seconds))
        clock[0] += {"a": 4, "b": 26, "c": 1}[part.name]
        return Result(part.name, "ok", 1.0, ""), {"size": size}

    from light.report import Result

    monkeypatch.setattr(first_light, "PARTS", [first_light.Part(name, "", 10, 5) for name in "abc"])
    monkeypatch.setattr(first_light, "run_part", run_part)
    monkeypatch.setattr(first_light.time, "monotonic", lambda: clock[0])
    assert first_light.run_all(arguments(tmp_path / "report.md"))
    assert limits == [10, 16, 1]
    clock[0], limits[:] = 100.0, []
    assert first_light.run_all(arguments(tmp_path / "report.md", quick=True, patience=3.0))
    assert limits == [15, 26, 15]


def test_a_signal_ends_the_part_as_well(tmp_path: Path) -> None:
    """As Ctrl-C does, and a scheduler of jobs. The report is there."""
    report = tmp_path / "report.md"
    command = [sys.executable, str(EXPERIMENTS / "first_light.py"), "--report", str(report)]
    script = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    while not (parts := psutil.Process(script.pid).children()):
        time.sleep(0.05)
    script.terminate()
    printed, _ = script.communicate(timeout=30)
    assert script.returncode == 1
    assert "interrupted" in printed
    assert "**The run has not ended**" in report.read_text(encoding="utf-8")
    assert is_gone(parts[0].pid)


def test_an_interrupted_run_leaves_a_report(
    first_light: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning on there is one; it never is that of an earlier run."""
    from light.report import Result

    report, seen = tmp_path / "report.md", []
    report.write_text("# Yesterday's", encoding="utf-8")

    def run_part(part: object, size: str, seconds: float, notes: Path) -> tuple[object, dict[str, str]]:
        seen.append(report.read_text(encoding="utf-8"))
        if part.name == "kernels":
            raise KeyboardInterrupt
        return Result(part.name, "ok", 1.0, "found this"), {"size": "rehearsal", "machine": "a CPU"}

    monkeypatch.setattr(first_light, "run_part", run_part)
    assert not first_light.run_all(arguments(report))
    assert "**The run has not ended**: 0 of 11 parts are done." in seen[0]
    text = report.read_text(encoding="utf-8")
    assert "**The run has not ended**: 2 of 11 parts are done." in text
    assert text.startswith("# A rehearsal of first light: nothing here ran on a GPU\n")
    assert states(text) == dict.fromkeys(("machine", "tokens"), ("ok", "found this"))
    assert "What to do" not in text


@pytest.mark.parametrize("prefix", ["/opt/python", f"{ROOT}/.venv", str(ROOT.parent)])
def test_paths_stay_out_of_the_report(
    first_light: ModuleType, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the virtual environment lies: beside the repository, in it or around it."""
    from light.report import Result, render

    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setenv("HOME", "/home/reader")
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
    files = {file.name for file in ROOT.rglob("*.py")}
    for look, avoid in ADVICE.values():
        assert set(re.findall(r"\w+\.py", look)) <= files
        assert all(
            (ROOT / folder).exists() for folder in re.findall(r"(?:nanopaged|tests|docs)/[\w/.]*\w", look)
        )
        for option in re.findall(r"`(\w+)=", avoid):
            assert option in EngineConfig.__dataclass_fields__


TESTS = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): assert n == "the number expected"
@pytest.mark.skip
def test_skipped(): pass
"""


class Notes:
    """In place of a `Light`: what is said, by kind."""

    def __init__(self, seconds: float) -> None:
        self.deadline, self.lines, self.wrongs, self.last = time.monotonic() + seconds, [], [], ""

    def say(self, *lines: str) -> None:
        self.lines += lines

    def table(self, *columns: str) -> None:
        pass

    def row(self, *cells: object) -> None:
        self.lines.append(cells)

    def wrong(self, what: str) -> None:
        self.wrongs.append(what.rpartition("::")[2])

    def now(self, what: str) -> None:
        self.last = what.rpartition("::")[2]


@pytest.mark.slow
def test_the_tests_are_counted(
    first_light: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By function, with the first failure in full; and what did not run in time is told."""
    checks = importlib.import_module("light.checks")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = tmp_path / "test_some.py"
    file.write_text(TESTS, encoding="utf-8")
    notes = Notes(seconds=60)
    assert checks.run_tests(notes, [str(file)]) == "1 passed, 2 failed, 1 skipped of 4 tests"
    counts = {str(line[0]).rpartition("::")[2]: line[1:4] for line in notes.lines if isinstance(line, tuple)}
    assert counts == {"test_good`": (1, 0, 0), "test_bad`": (0, 2, 0), "test_skipped`": (0, 0, 1)}
    assert notes.wrongs == ["test_bad[1]", "test_bad[2]"]
    text = [line for line in notes.lines if isinstance(line, str)]
    assert text.count("E   AssertionError: assert 1 == 'the number expected'") == 1
    assert not any("assert 2 ==" in line for line in text)
    assert notes.last == "test_skipped, after 1 passed, 2 failed"

    notes = Notes(seconds=checks.RESERVE - 1)
    assert checks.run_tests(notes, [str(file)]) == "1 passed of 4 tests"
    assert notes.lines[-1].startswith("The time was over before 3 of the tests")
    assert notes.wrongs == []

    for wrong, expected in (("import no_package", "cannot be imported"), ("x = 1", "no test has passed")):
        file = tmp_path / f"test_{len(wrong)}.py"
        file.write_text(wrong, encoding="utf-8")
        notes = Notes(seconds=60)
        checks.run_tests(notes, [str(file)])
        assert expected in notes.wrongs[0]


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


def run_on(cuda: FakeCuda, part: str, notes: Path) -> tuple[str, dict[str, list[str]]]:
    """(what the part returns, its notes of each kind)"""
    import light

    given = light.Light(notes, "quick", 1000)
    given.args.shape, given.args.steps, given.size = "test", 4, "rehearsal"  # the small sizes
    module, function = part.split(".")
    sentence = getattr(importlib.import_module(f"light.{module}"), function)(given)
    found: dict[str, list[str]] = {}
    for line in notes.read_text(encoding="utf-8").splitlines():
        note = json.loads(line)
        found.setdefault(note["kind"], []).append(note["value"])
    return sentence, found


FUSED = {"norm_rotate_kernel", "silu_mul_kernel"}
# part → (some of what it launches, rows of its tables by their beginning, and how many there are)
ON_A_GPU: dict[str, tuple[set[str], dict[str, int]]] = {
    "machine.machine": ({"linear"}, {"| GPU |": 1, "| memory |": 1}),
    "tokens.tokens": (
        {"decode_kernel", "norm_rotate_kernel", "varlen"},
        {"| triton, graphs": 2, "| triton, eager": 2, "| torch |": 1},
    ),
    "kernels.kernels": (
        {"decode_kernel", "reduce_kernel", "store_kernel", "copy_kernel"} | FUSED,
        {"| decode |": 9, "| store |": 1, "| copy |": 1, "| norm, rotate |": 1, "| SiLU |": 1},
    ),
    "prefill.prefill": ({"_varlen_attn"}, {"| 2 x (24 of 24) | PyTorch's varlen attention | 0.0": 1}),
    "steps.steps": ({"decode_kernel", "varlen"} | FUSED, {"| graphs |": 4, "| eager |": 4, "| torch |": 4}),
    "memory.memory": ({"decode_kernel", "varlen", "sort"}, {"| KV cache |": 1, "| free": 2}),
    "memory.swap": ({"decode_kernel", "varlen"}, {"| 16 |": 1}),
    "throughput.workload": ({"decode_kernel", "varlen"}, {"| steps |": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", list(ON_A_GPU))
def test_parts_on_a_fake_gpu(cuda: FakeCuda, part: str, tmp_path: Path) -> None:
    """The branches for a GPU run, and none of the checks fails, since the references are 0 as well."""
    launched, rows = ON_A_GPU[part]
    sentence, notes = run_on(cuda, part, tmp_path / "notes")
    assert "wrong" not in notes
    assert "cannot" not in notes
    assert launched <= set(cuda.launched)
    for row, times in rows.items():
        assert sum(line.startswith(row) for line in notes["line"]) == times, row
    assert len(sentence) > 20


@pytest.mark.slow
def test_an_older_gpu_has_no_kernels(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 runs all but Triton's kernels and CUDA graphs, in float16; the report says so."""
    from light import NotRun

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    with pytest.raises(NotRun, match="compute capability 7.5 or more, and cuda:0 has 7.0"):
        run_on(cuda, "kernels.kernels", tmp_path / "kernels")
    sentence, notes = run_on(cuda, "machine.machine", tmp_path / "machine")
    assert "TFLOP/s in float16; attention by TorchAttention" in sentence
    sentence, notes = run_on(cuda, "prefill.prefill", tmp_path / "prefill")
    assert "wrong" not in notes
    assert sum("compute capability" in line for line in notes["line"]) > 0
    assert "plain PyTorch" in sentence
    assert not any(name.endswith("_kernel") for name in cuda.launched)


@pytest.mark.slow
def test_one_case_without_memory(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a wrong row, and the cases after it run."""
    from decode_case import DecodeCase

    exact = DecodeCase.exact

    def fail_once(case: DecodeCase, i: int) -> torch.Tensor:
        if max(case.lens) == 300:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return exact(case, i)

    monkeypatch.setattr(DecodeCase, "exact", fail_once)
    _, notes = run_on(cuda, "kernels.kernels", tmp_path / "notes")
    assert [re.sub(r"decode, (\d of \d+).*: Out", r"\1: Out", what) for what in notes["wrong"]] == [
        f"{n} of 300: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB." for n in (1, 3)
    ]
    assert sum(line.startswith("| decode |") for line in notes["line"]) == 7


# ── on a CPU: faults in the package, and the notebook ─────────────────────────────────────────────

FAULTS = {  # name → (file of the package, a line of it, what takes its place, the part that fails, its line)
    "a wrong kernel": (
        "kernels/paged_attention.py",
        "tl.store(out, (acc / l[:, None]).to(",
        "tl.store(out, (acc / l[:, None] + 0.01).to(",
        "kernels",
        r"decode, 1 of 40, .* float32: error .*, more than 2e-05; and \d+ more",
    ),
    "a kernel that stores at another place": (
        "kernels/paged_attention.py",
        "tl.store(v_cache_ptr + target, v, mask=mask)",
        "tl.store(v_cache_ptr + target + 1, v, mask=mask)",
        "kernels",
        r"store, 5 tokens, float32: error .*, more than 0e\+00",
    ),
    "a hang": (
        "kv_cache.py",
        "for device_block, host_block in swap_out:",
        "for device_block, host_block in [__import__('time').sleep(1000)]:",
        "swap",
        r"it was ended after \d+ s, its time limit \(at: a prefill\)",
    ),
    "out of memory": (
        "model/sizing.py",
        "block_bytes = shape.block_bytes(config.block_size)",
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')",
        "memory",
        r"OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB \(at: starting the engine\)",
    ),
    "a pool that does not survive": (
        "block_manager.py",
        "        if self.free_ids:",
        "        assert self.num_free_blocks > 1, 'no last block'\n        if self.free_ids:",
        "memory",
        r"AssertionError: no last block \(at: step \d+, after \d+ of 16 blocks were in use\)",
    ),
    "a crash": (
        "attention/torch_backend.py",
        "    num_kv_heads, context_len, _ = k.shape",
        "    import os; os.abort()",
        "prefill",
        r"it was ended by the signal SIGABRT \(at: 2 x \(24 of 24\)\)",
    ),
    "a wrong token": (
        "sampler.py",
        "        token_ids = allowed.argmax(-1)",
        "        token_ids = (allowed.argmax(-1) + (allowed.shape[0] == 4)) % 1024",
        "tokens",
        r"torch, a prompt of 1: token \d is \d+, not \d+, the likeliest by .*; and \d+ more",
    ),
}


def rehearse(folder: Path, *options: str, first: Path) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Run the script with `first` in front of the path. (exit status, the states, the report)"""
    report = folder / "report.md"
    script = [str(EXPERIMENTS / "first_light.py"), "--report", str(report), "--device", "cpu", *options]
    done = run_process([sys.executable, *script], folder, environment(PYTHONPATH=str(first)), timeout=600)
    assert done.stderr == ""
    text = report.read_text(encoding="utf-8")
    return done.returncode, states(text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_a_line_of_the_report(name: str, tmp_path: Path) -> None:
    """With the part before it fine, and the part after it run."""
    file, line, planted, part, expected = FAULTS[name]
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / "nanopaged" / file).read_text(encoding="utf-8")
    assert line in source
    (tmp_path / "nanopaged" / file).write_text(source.replace(line, planted), encoding="utf-8")
    status, found, text = rehearse(tmp_path, "--parts", "machine", part, "peers", first=tmp_path)
    assert status == 1
    assert list(found) == ["machine", part, "peers"]
    assert found["machine"][0] == "ok"
    assert found["peers"] == ("not run", "neither vLLM nor nano-vllm is installed here")
    state, sentence = found[part]
    assert state == "FAILED"
    assert re.fullmatch(expected, sentence), sentence
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


FAKE_NANO_VLLM = """
from pathlib import Path
from types import SimpleNamespace as SamplingParams
class LLM:
    def __init__(self, model, **options):
        assert Path(model, "tokenizer.json").exists()
    def generate(self, prompts, params):
        for each in params if isinstance(params, list) else [params]:
            assert each.temperature > 0 and each.ignore_eos
"""


@pytest.mark.slow
def test_beside_other_engines(tmp_path: Path) -> None:
    """Modules of their names take their places: one works, one fails, and nanopaged has a row."""
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no GPU')", encoding="utf-8")
    (tmp_path / "nanovllm.py").write_text(FAKE_NANO_VLLM, encoding="utf-8")
    status, found, text = rehearse(tmp_path, "--parts", "peers", first=tmp_path)
    assert status == 1
    state, sentence = found["peers"]
    assert state == "FAILED"
    assert sentence.startswith("vLLM: SystemExit: vLLM failed in ")
    assert re.search(r"^\| nanopaged \| [\d,]+ \|$", text, re.MULTILINE)
    assert re.search(r"^\| nano-vllm \| [\d,]+ \|$", text, re.MULTILINE)


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
    names: dict[str, object] = {"ADDRESS": str(folder)}
    shown = run_notebook(ROOT / "docs" / "first_light.ipynb", names, env)

    assert (tmp_path / "pip.txt").read_text(encoding="utf-8") == "install --quiet -e .\n"
    report, page = (each.data for each in shown)
    found = states(report)
    assert report.startswith("# A rehearsal of first light: nothing here ran on a GPU")
    assert "**No part failed.**" in report
    assert list(found) == [part.name for part in first_light.PARTS]
    assert {name for name, (state, _) in found.items() if state != "ok"} <= {"kernels", "peers"}
    with open_browser() as browser:
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        browser.open(tmp_path / "page.html")
        browser.driver.switch_to.frame(0)
        browser.run("document.getElementById('last').click()")
        assert re.match(r"Step (\d+) of \1,", browser.run("document.getElementById('where').textContent"))
        console, asked = browser.logs()
        assert console == []
        assert {address.partition(":")[0] for address in asked} <= {"file", "data"}


def run_notebook(file: Path, names: dict[str, object], env: dict[str, str]) -> list[object]:
    """Run the cells of code as a notebook does. Returns the values of last lines that are expressions.

    Args:
        names: variables; a line that sets one of these in capitals is left out, as the reader changes it.
    """
    shown = []
    given = tuple(f"{name} = " for name in names)
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        python = []
        for line in "".join(cell["source"]).splitlines():
            if line.startswith("%cd "):
                os.chdir(line.removeprefix("%cd "))
            elif line.startswith("!"):
                done = run_process(line[1:].format(**names), Path.cwd(), env, timeout=900)
                assert done.returncode == 0, done.stderr
            elif not line.startswith(given):
                python.append(line)
        tree = ast.parse("\n".join(python))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file.name, "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), file.name, "eval"), names))
    return shown
