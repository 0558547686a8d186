"""example.py, bench.py and the experiments, with small sizes: they end without errors and print all rows."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from textwrap import indent
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from programs import environment, load_file, run_program

from nanopaged import LLM, SamplingParams
from nanopaged.trace.sentences import PARTS

ROOT = Path(__file__).parents[1]
TINY = ROOT / "nanopaged" / "tiny"
MEASUREMENTS = ["bench.py"] + [
    f"docs/experiments/{file.name}"
    for file in sorted((ROOT / "docs" / "experiments").glob("*.py"))
    if "def main()" in file.read_text(encoding="utf-8")
]
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
    printed = run("example.py", "--max-tokens", "12", TQDM_DISABLE="")
    assert printed.count(":\n  ") >= 6
    reused, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens reused", printed).groups())
    assert 0 < reused < asked
    assert "0 blocks in use" in printed
    saved = [int(share) for share in re.findall(r"\((\d+)% saved\)", printed)]
    assert len(saved) == 2
    assert min(saved) > 0
    texts = re.findall(r"^  (.*)$", printed.split("FALSTAFF: four samples")[1], flags=re.MULTILINE)
    assert len(texts) == 10, "four samples, four beams, and the blocks of both"
    assert max(map(len, texts[:4] + texts[5:9])) < 60, "--max-tokens holds for samples and beams as well"


def test_example_continues_prompts_of_the_user() -> None:
    """Each prompt as it is, one given twice both times, and without the speakers."""
    texts = ["To be, or", "ROMEO:\nI ", "To be, or"]
    options = [word for text in texts for word in ("--prompt", text)]
    printed = run("example.py", *options, "--temperature", "0", "--max-tokens", "9")
    answers = LLM().generate(texts, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    for i, (text, answer) in enumerate(zip(texts, answers, strict=True), start=1):
        continued = indent(answer.outputs[0].text.strip(), "  ")
        assert f"\n{i}. {text}\n{continued}\n" in printed
    assert "with up to 3 requests in each" in printed
    assert "HERALD" not in printed
    assert "samples" not in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-tokens", "0"], "max_tokens is 0, but must be at least 1"),
        (["--temperature", "-1"], "temperature is -1.0, but must lie in [0.0, 1000000.0]"),
        (["--prompt", "Hello", "--prompt", ""], "a prompt is empty: it needs at least one token"),
        (["--trace", "nowhere/run.html"], "there is no folder"),
        (["--model", "./typo"], "typo is not a folder: name the one that holds config.json, or a hub id"),
        (["--prompt", "word " * 3000], "the prompt has 3002 tokens, but max_model_len is 2048"),
    ],
)
def test_example_tells_a_mistake_in_one_line(arguments: list[str], complaint: str) -> None:
    """(The last one is found by the engine, which has said more before.)"""
    *before, last = run("example.py", *arguments, status=2).splitlines()
    assert last.startswith("example.py: error: ")
    assert complaint in last
    assert not before or "3002" in complaint


def test_example_with_a_trace_and_the_live_view(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    printed = run("example.py", "--max-tokens", "4", "--trace", str(page), "--watch")
    assert "step 4: 0 blocks in use" in printed
    _, data = page.read_text(encoding="utf-8").split('id="steps">\n')
    assert len(data.splitlines()) == 1 + 12, "a line for the engine, and one for each step of all three runs"


def test_example_with_another_model() -> None:
    """Any folder will do; the tiny one has a chat template, so it can stand for a real one."""
    printed = run("example.py", "--model", str(TINY), "--max-tokens", "5")
    assert "KING HENRY:" in printed
    reused, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens reused", printed).groups())
    assert asked > 396, "the chat template's tokens come on top"
    assert reused > 0


def test_example_asks_a_model_with_a_chat_template() -> None:
    options = ["--model", str(TINY), "--prompt", "What news?", "--temperature", "0"]
    printed = run("example.py", *options, "--max-tokens", "12")
    chat = [{"role": "user", "content": "What news?"}]
    (answer,) = LLM().chat(chat, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert f"1. What news?\n{indent(answer.outputs[0].text.strip(), '  ')}\n" in printed


def test_example_shows_the_size_of_the_cache_and_no_bar_if_tqdm_is_disabled() -> None:
    """With a single token, too: then no block is in use after the only step."""
    command = [sys.executable, str(ROOT / "example.py"), "--max-tokens", "1"]
    env = os.environ | {"TQDM_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"KV cache: [\d,]+ blocks of 16 tokens \([\d,]+ MiB\)", done.stderr)
    assert "steps/s" not in done.stderr


# ── the tour ──────────────────────────────────────────────────────────────────────────────────────


def test_the_tour_shows_everything(tmp_path: Path) -> None:
    """In about 60 steps. The page in the repository has today's viewer; tour.py writes it again."""
    page, in_docs = tmp_path / "tour.html", ROOT / "docs" / "tour.html"
    printed = experiment("tour", "--page", str(page))
    events = {kind: int(num) for num, kind in re.findall(r"^ +(\d+)  (\w+)$", printed, flags=re.MULTILINE)}
    assert {"copy", "fork", "beams", "chunk", "hit", "evict", "preempt", "swap", "finish"} <= events.keys()
    texts = [file.read_text(encoding="utf-8") for file in (page, in_docs)]
    viewers, data = zip(*[text.split('id="steps">\n') for text in texts], strict=True)
    assert viewers[0] == viewers[1], "run docs/experiments/tour.py again"
    captions = []
    for lines in data:
        header, *steps = map(json.loads, lines.splitlines())
        assert 50 <= len(steps) <= 70
        preempted = [said[1] for step in steps for said in step["said"] if said[0] == "preempt"]
        assert {text.partition("preempted. ")[2] for text in preempted} == {
            "Its K/V moves to the host.",
            "It gives its blocks back, and its K/V is computed again later.",
        }
        check_captions(header["captions"], steps)
        captions.append([{**caption, "step": 0} for caption in header["captions"]])
    assert captions[0] == captions[1], "run docs/experiments/tour.py again"
    assert in_docs.stat().st_size < 400_000


def check_captions(captions: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """The event of which a caption speaks has happened in its step, by its part; its terms are explained."""
    assert 8 <= len(captions) <= 10
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").replace("`", "")
    for caption in captions:
        said = steps[caption["step"] - 1]["said"]
        parts = [part for kinds, _, part in said if caption["event"] in kinds.split()]
        assert parts, f"step {caption['step']} has no {caption['event']}: {caption['title']}"
        assert min(parts) <= PARTS.index(caption["part"])
        assert caption["terms"]
        for term, address, meaning in caption["terms"]:
            assert term.lower() in caption["text"].lower()
            assert re.search(rf"^\| \*\*{term}\*\*.*\| {re.escape(meaning)} \|", glossary, flags=re.MULTILINE)
            assert address.startswith("glossary.html#")
            assert unquote(address.partition("text=")[2]) in meaning


# ── the tiny model ────────────────────────────────────────────────────────────────────────────────


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small step; the engine serves what was saved. Compiling the layers would take a minute."""
    train = load_file(ROOT / "nanopaged" / "tiny" / "train.py")
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
    (output,) = llm.chat(
        [{"role": "user", "content": "Good morrow!"}], SamplingParams(max_tokens=4, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == 4


# ── bench.py ──────────────────────────────────────────────────────────────────────────────────────


def test_bench_beside_transformers() -> None:
    small = ["--shape", "test", "--requests", "5", "--static", "2", "8", "16", "--budget", "64"]
    printed = run("bench.py", *small, *LENGTHS, "--baseline", "hf", "--repeat", "2", "--json")
    line = json.loads(printed.splitlines()[-1])
    assert list(line["rates"]) == [
        "nanopaged",
        "transformers, static batches of 2",
        "transformers, static batches of 5",  # 8 and 16 would be the same batch again
        "transformers, continuous",
    ]
    found = re.search(
        r"nanopaged is ([\d.]+) times .* \(transformers, .*; rounds: ([\d.]+), ([\d.]+)\)", printed
    )
    median, *rounds = map(float, found.groups())
    assert min(rounds) - 0.01 <= median <= max(rounds) + 0.01
    rows = re.findall(
        r"^(nanopaged|transformers, [a-z 0-9]+) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+$", printed, re.M
    )
    assert len(rows) == 4


FAKE_VLLM = """
import os, sys, time
from types import SimpleNamespace as SamplingParams

class LLM:
    def __init__(self, model, **options):
        assert os.path.exists(os.path.join(model, "config.json"))
        assert options["dtype"] == "float32" and os.environ["OMP_NUM_THREADS"] == "1"
        assert "GOMP_SPINCOUNT" not in os.environ, "a setting of nanopaged, which is not for others"
    def generate(self, prompts, params):
        print("a line of vLLM's own")
        if isinstance(params, list):
            assert len(prompts) == len(params) == 3 and all(each.ignore_eos for each in params)
            time.sleep(0.5)
"""


def test_bench_beside_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself is not installed here: a module of its name takes its place, and sleeps half a second."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    (tmp_path / "vllm.py").write_text(FAKE_VLLM, encoding="utf-8")
    small = ["--shape", "test", "--requests", "3", *LENGTHS, "--baseline", "vllm", "--threads", "1", "--json"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    line = json.loads(run("bench.py", *small, PYTHONPATH=path).splitlines()[-1])
    (rate,) = line["rates"]["vLLM"]
    num_output = line["output_tokens_per_second"] * line["seconds"]
    assert 0 < rate < num_output / 0.5
    (cpu_seconds,) = line["cpu_seconds_of"]["vLLM"]
    assert 0 <= cpu_seconds < num_output / rate, "sleeping takes no CPU time"
    (tmp_path / "vllm.py").write_text("raise ImportError", encoding="utf-8")
    assert "vLLM failed in" in run("bench.py", *small, status=1, PYTHONPATH=path)


@pytest.mark.slow
def test_bench_beside_another_checkout(tmp_path: Path) -> None:
    """It runs the package that is there, on the same requests; neither is installed for it."""
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "nanopaged" / "llm.py").open("a", encoding="utf-8") as file:
        file.write(ANOTHER_GENERATE)
    small = ["--shape", "test", "--requests", "3", *LENGTHS, "--baseline", str(tmp_path), "--threads", "1"]
    line = json.loads(run("bench.py", *small, "--json", IN_PATH=str(tmp_path / "seen")).splitlines()[-1])
    ours, theirs = line["rates"]
    assert (ours, theirs) == ("nanopaged", f"nanopaged in {tmp_path}")
    seen = json.loads((tmp_path / "seen").read_text(encoding="utf-8").splitlines()[-1])
    assert len(seen) == 3
    assert sum(seen) == round(line["output_tokens_per_second"] * line["seconds"])
    assert line["rates"][theirs][0] > 0


ANOTHER_GENERATE = """
import json, os
generate = LLM.generate
def note(llm, prompts, params, *args, **options):
    outputs = generate(llm, prompts, params, *args, **options)
    with open(os.environ["IN_PATH"], "a") as file:
        print(json.dumps([len(output.outputs[0].token_ids) for output in outputs]), file=file)
    return outputs
LLM.generate = note
"""


def test_bench_for_machines() -> None:
    """--json says what was measured, of what and where."""
    printed = run("bench.py", "--model", str(TINY), "--requests", "5", "--json", "--eager", *LENGTHS)
    line = json.loads(printed.splitlines()[-1])
    assert line["settings"]["requests"] == 5
    assert line["settings"]["model"] == str(TINY)
    assert "shape" not in line["settings"], "it would be the name of random weights"
    assert line["rates"]["nanopaged"] == [line["output_tokens_per_second"]]
    assert line["total_tokens_per_second"] > line["output_tokens_per_second"] > 0
    assert len(line["time_to_first_token"]) == len(line["time_per_output_token"]) == 3
    assert line["preemptions"] == 0
    assert datetime.fromisoformat(line["date"]).tzinfo is not None
    assert line["versions"]["torch"] == torch.__version__
    assert len(line["device"]) > 2
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", line["commit"])
    else:
        assert line["commit"] is None


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    """A file that differs from the commit is told."""
    common = load_file(ROOT / "docs" / "experiments" / "common.py")
    assert common.commit_of(tmp_path) is None
    file = tmp_path / "file"
    file.write_text("one", encoding="utf-8")
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "-q"], ["add", "file"], [*me, "commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert common.commit_of(tmp_path) == head.strip()
    file.write_text("two", encoding="utf-8")
    assert common.commit_of(tmp_path) == f"{head.strip()}-dirty"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backend", "flsh"], "attention_backend is 'flsh', but must be one of auto, flash,"),
        (["--model", "./typo"], "typo is not a folder: name the one that holds config.json, or a hub id"),
        (["--baseline", "typo"], "typo is neither hf, vllm nor nano-vllm, nor a checkout of nanopaged"),
        (["--peer-python", "typo"], "typo is not a program that can be run"),
    ],
)
def test_bench_refuses_wrong_names_before_it_loads(arguments: list[str], complaint: str) -> None:
    complaints = run("bench.py", *arguments, status=2)
    assert complaint in complaints.splitlines()[-1]
    assert "KV cache" not in complaints


# ── the command line ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("script", [*MEASUREMENTS, "example.py", "-m nanopaged"])
def test_help_answers_before_the_heavy_imports(script: str) -> None:
    """--help says what the script does, the command and the defaults, and does not wait for torch."""
    options = ["-X", "importtime", *script.split(), "--help"]
    done = subprocess.run([sys.executable, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"python {script}" in done.stdout
    assert "default: 0" in done.stdout
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, flags=re.MULTILINE))
    assert "argparse" in imported
    assert not imported & {"torch", "transformers", "matplotlib"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["memory", "--plot", "nowhere/picture.svg"], "there is no folder nowhere"),
        (["first_light", "--report", "nowhere/report.md"], "there is no folder"),
        (["memory", "--plot", "picture.jpeg"], "picture.jpeg does not end in .svg or .png"),
        (["overhead", "--nano-vllm", "/nowhere"], "/nowhere is no checkout of nano-vllm"),
        (["chunked", "--budget", "8"], "--budget 8 leaves no room for a prompt after 8 decodes"),
        (["kernel", "--context", "20-10"], "20-10 is not a length, or a range from low to high"),
    ],
)
def test_mistakes_are_told_before_the_work(arguments: list[str], complaint: str) -> None:
    name, *rest = arguments
    assert complaint in experiment(name, *rest, status=2)


def test_labels_of_a_logarithmic_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "experiments")
    common = importlib.import_module("common")
    picture = tmp_path / "picture.svg"
    common.save_lines(picture, [1, 2], {"a line": [0.02, 2.5e6]}, "x", "y", log_y=True)
    texts = set(re.findall(r">([^<>]+)</text>", picture.read_text(encoding="utf-8")))
    assert texts >= {"0.03", "0.1", "0.3", "1", "3", "10", "300", "1,000", "1,000,000"}
    assert "0" not in texts


# ── docs/experiments: what they measure ───────────────────────────────────────────────────────────


def test_throughput_at_equal_memory() -> None:
    """The less a rule reserves, the more requests run at once and the fewer steps all of them take."""
    sizes = ["--slots", "256", "--longest", "128", "--requests", "12", "--input", "10", "--output", "12"]
    printed = run("docs/experiments/equal_memory.py", "--shape", "test", "--rounds", "1", *sizes)
    rows = [line.split() for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == ["one", "max", "pow2", "oracle", "paging"]
    steps = [int(row[1]) for row in rows]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[1] > steps[2] > steps[-1]
    at_once = [float(row[2]) for row in rows]
    assert at_once == sorted(at_once)
    too_small = run("docs/experiments/equal_memory.py", "--slots", "100", "--longest", "128", status=2)
    assert "a request may have 128 tokens, but --slots is 100" in too_small
    too_long = run("docs/experiments/equal_memory.py", "--long", "1000", status=2)
    assert "--long 1000 and its 100 tokens of output are more than --longest 1024" in too_long


def test_a_long_prompt_amid_others_at_equal_memory() -> None:
    """Ranges for a request as long as it leave room for one request at a time."""
    sizes = [
        "--slots",
        "512",
        "--longest",
        "400",
        "--long",
        "380",
        "--requests",
        "6",
        "--input",
        "10",
        "--output",
        "12",
    ]
    printed = run("docs/experiments/equal_memory.py", "--shape", "test", "--rounds", "1", *sizes)
    rows = {name: line.split() for line in printed.splitlines()[2:] for name in line.split()[:1]}
    assert rows["max"][1:3] == rows["one"][1:3]
    assert int(rows["paging"][1]) < int(rows["max"][1])


def test_one_file_beside_the_engine() -> None:
    """The same number of tokens on all sides, and a rate for each."""
    printed = experiment("one_file_speed", "--rounds", "1", "--shrink", "16")
    rows = [re.findall(r"[\d.]+", line.split("  ", 1)[1]) for line in printed.splitlines()[2:]]
    assert len(rows) == 4
    assert all(len(row) == 4 and float(row[0]) > 0 for row in rows)


@pytest.mark.slow
def test_sharing_saves_more_with_more_sequences(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = experiment("sharing", "--requests", "30", "--plot", str(picture))
    assert "<svg" in picture.read_text(encoding="utf-8")
    rows = re.findall(r"-like +(parallel|cache alone|beam) +([\d.]+)% +([\d.]+)% +([\d.]+)%", printed)
    assert [row[0] for row in rows] == ["parallel", "cache alone", "beam"] * 2
    for _, *shares in rows:
        assert 0 < float(shares[0]) < float(shares[1]) < float(shares[2]) < 100
    for forked, cached in ((rows[0], rows[1]), (rows[3], rows[4])):
        assert all(float(a) >= float(b) for a, b in zip(forked[1:], cached[1:], strict=True))


@pytest.mark.slow
def test_preemption(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = experiment(
        "preemption", "--shape", "test", "--repeat", "1", "--requests", "150", "--plot", str(picture)
    )
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +[\d.]+$", printed, flags=re.MULTILINE)) == 9
    pools = re.findall(r"^ *(\d+)% +[\d.]+ +(\d+) +[\d.]+ +(\d+)$", printed, flags=re.MULTILINE)
    assert [int(share) for share, *_ in pools] == [100, 70, 50, 30]
    assert pools[0][1:] == ("0", "0"), "a pool with room for all preempts no request"
    assert int(pools[3][1]) > 0
    assert int(pools[3][2]) > 0
    rows = re.findall(r"^ShareGPT-like +(\d+)% +([\d.]+) +(\d+) +([\d.]+) +\d+$", printed, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3, 5, 10]
    assert float(rows[0][1]) > float(rows[4][1]) >= 1, "fewer tokens are computed again"
    assert int(rows[0][2]) > int(rows[4][2]), "fewer requests are preempted"
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_overhead(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = experiment("overhead", "--steps", "5", "--sequences", "1", "40", "--plot", str(picture))
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert len(re.findall(r"^1,000,000 +\d+ +[\d.]+ +[\d.]+$", printed, flags=re.MULTILINE)) == 2
    rows = len(re.findall(r"^ +(?:1|40)(?: +[\d.]+){5}$", printed, flags=re.MULTILINE))
    assert rows == (2 if importlib.util.find_spec("triton") else 0)


def test_kernel(tmp_path: Path) -> None:
    """Every way to decode, over a fixed length and a range; and the moves."""
    picture = tmp_path / "picture.png"
    small = ["--layers", "2", "--kv-heads", "2", "--group", "2", "--head-dim", "16", "--plot", str(picture)]
    printed = experiment("kernel", "--batch", "1", "3", "--context", "40", "10-60", *small)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "copying memory: " in printed
    for way, times in {"paged": 4, "dense": 4, "store": 4, "copy": 3}.items():
        assert len(re.findall(rf"^{way} .* [\d.]+%$", printed, flags=re.MULTILINE)) == times


def test_roofline() -> None:
    sizes = ["--batch", "1", "3", "--context", "8", "20"]
    printed = experiment("roofline", "--shape", "test", *sizes, "--steps", "5")
    rows = re.findall(r"^(prefill|decode) (\d x \d+) +[\d.]+ .* [\d.]+%$", printed, flags=re.MULTILINE)
    steps = ("1 x 8", "3 x 8", "1 x 20", "3 x 20")
    assert rows == [(name, step) for step in steps for name in ("prefill", "decode")]


def test_memory_keeps_the_papers_order(tmp_path: Path) -> None:
    """Each allocation holds more real tokens than the one before, and serves more requests at once."""
    picture = tmp_path / "picture.svg"
    arguments = ["--requests", "150", "--slots", "2500", "--plot", str(picture)]
    printed = experiment("memory", *arguments, timeout=60)
    rows = re.findall(r"-like +(max|pow2|oracle|paging) +([\d.]+)% +([\d.]+)", printed)
    assert [row[0] for row in rows] == ["max", "pow2", "oracle", "paging"] * 2
    for trace in (rows[:4], rows[4:]):
        for column in (1, 2):
            values = [float(row[column]) for row in trace]
            assert values == sorted(values)
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_memory_splits_the_waste() -> None:
    """Every slot is of one kind; only ranges of different lengths leave gaps between them."""
    arguments = ["--requests", "150", "--slots", "5000", "--trace", "Alpaca-like"]
    printed = experiment("memory", *arguments, TQDM_DISABLE="")
    rows = {}
    for name, shares in re.findall(r"^Alpaca-like +(\w+)(.+%)", printed, flags=re.MULTILINE):
        rows[name] = [float(share) for share in re.findall(r"([\d.]+)%", shares)[:5]]
    assert list(rows) == ["max", "pow2", "oracle", "paging"]
    for real, reserved, internal, external, too_few in rows.values():
        assert real + reserved + internal + external + too_few == pytest.approx(100, abs=0.3)
    internal, external = ({name: row[column] for name, row in rows.items()} for column in (2, 3))
    assert internal["max"] > internal["pow2"] > internal["paging"] > internal["oracle"] == 0
    assert min(external["pow2"], external["oracle"]) > 5
    assert external["max"] == external["paging"] == 0


def test_memory_says_where_no_request_waits(tmp_path: Path) -> None:
    """In a row as in the figure."""
    picture = tmp_path / "picture.svg"
    printed = experiment("memory", "--requests", "20", "--plot", str(picture))
    assert re.search(r"^Alpaca-like +paging +all requests fit at once", printed, flags=re.MULTILINE)
    assert re.search(r"^Alpaca-like +max +[\d.]+% +7\.0 ", printed, flags=re.MULTILINE)
    texts = re.findall(r">([^<>]+)</text>", picture.read_text(encoding="utf-8"))
    assert texts.count("no request waits") == printed.count("all requests fit at once") == 6
    assert texts.count("paging") == 2, "its place is not left out"


def test_larger_blocks_waste_more(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = experiment(
        "blocksize", "--requests", "40", "--block-size", "1", "16", "128", "--plot", str(picture)
    )
    rows = re.findall(r"^ +(\d+) +([\d.]+)% +([\d.]+)% +[\d.]+$", printed, flags=re.MULTILINE)
    wasted, found = ([float(row[column]) for row in rows] for column in (1, 2))
    assert wasted == sorted(wasted)
    assert found == sorted(found, reverse=True)
    assert wasted[0] == 0
    assert found[0] == 100
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_prefix(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    small = ["--shape", "test", "--requests", "4", "--output", "3", "--repeat", "1", "--plot", str(picture)]
    printed = experiment("prefix", "--prefix", "0", "64", *small)
    found = re.findall(r"^ +\d+ +(?:on|off) +[\d.]+ +[\d.]+ +([\d.]+)%$", printed, flags=re.MULTILINE)
    assert [float(share) for share in found] == [0, 0, 50, 0], "three of four find 64 of 96 tokens"
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_chunked(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    small = ["--shape", "test", "--prompt", "200", "--repeat", "2", "--plot", str(picture)]
    printed = experiment("chunked", "--budget", "32", "64", *small)
    assert len(re.findall(r"^ +(?:32|64|whole)(?: +[\d.]+){3}$", printed, flags=re.MULTILINE)) == 3
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_endurance() -> None:
    """Requests are aborted, swapped and recomputed, and afterwards no block is in use."""
    printed = experiment("endurance", "--requests", "1500", "--model-requests", "50")
    rows = re.findall(
        r"^ +([\d,]+) +(\d+) +(\d+) +(\d+)(?: +[\d.]+){3} +[\d,]+ +(\d+)$", printed, re.MULTILINE
    )
    assert [row[0] for row in rows[9:11]] == ["1,500", "5"]
    assert len(rows) == 20
    assert min(map(int, rows[9][1:4])) > 0
    assert {row[4] for row in rows} == {"0"}


def test_sampling() -> None:
    """A row for each setting, number of rows and vocabulary."""
    printed = experiment("sampling", "--rows", "1", "3", "--vocab", "300", "--repeat", "1")
    assert len(re.findall(r"^ +[13] +300 .+( +[\d.]+){3}$", printed, flags=re.MULTILINE)) == 2 * 6


@pytest.mark.slow
def test_busy() -> None:
    small = ["--shape", "test", "--prompt", "4", "--programs", "1", "--seconds", "0.1", "--repeat", "1"]
    printed = experiment("busy", *small)
    assert re.findall(r"^(\w+).*?(?: +[\d.]+){4}$", printed, flags=re.MULTILINE) == [
        "spin",
        "spin",
        "sleep",
        "one",
    ]
