"""The scripts a newcomer runs, small: they must end well and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example() -> None:
    """Six speakers answer, the pages are accounted for, and samples and beams save blocks."""
    printed = run("example.py", "--max-tokens", "12")
    assert printed.count(":\n  ") >= 6
    reused, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens reused", printed).groups())
    assert 0 < reused < asked
    assert "0 blocks in use" in printed
    saved = [int(share) for share in re.findall(r"\((\d+)% saved\)", printed)]
    assert len(saved) == 2
    assert min(saved) > 0


def test_example_with_another_model() -> None:
    """Any folder will do; the tiny one has a chat template, so it can stand for a real one."""
    printed = run("example.py", "--model", str(ROOT / "nanopaged" / "tiny"), "--max-tokens", "5")
    assert "What is virtual memory?" in printed
    assert "prompt tokens reused" in printed


def test_bench_throughput_beside_transformers() -> None:
    lengths = ["--min-input", "4", "--max-input", "20", "--min-output", "2", "--max-output", "9"]
    printed = run(
        "bench.py",
        "--shape",
        "test",
        "--requests",
        "5",
        "--budget",
        "64",
        "--baseline",
        "hf",
        "--repeat",
        "2",
        *lengths,
    )
    found = re.search(
        r"nanopaged is ([\d.]+) times .* \(transformers, .*; rounds: ([\d.]+), ([\d.]+)\)", printed
    )
    median, *rounds = map(float, found.groups())
    assert min(rounds) - 0.01 <= median <= max(rounds) + 0.01
    assert (
        len(re.findall(r"^(nanopaged|transformers, [a-z 0-9]+) +[\d.]+ +[\d.]+ +[\d.]+$", printed, re.M)) == 5
    )


def test_bench_sharing_saves_more_with_more_sequences() -> None:
    printed = run("bench.py", "sharing", "--requests", "30")
    rows = re.findall(r"-like +(parallel|beam) +([\d.]+)% +([\d.]+)% +([\d.]+)%", printed)
    assert len(rows) == 4
    for _, *shares in rows:
        assert 0 < float(shares[0]) < float(shares[1]) < float(shares[2]) < 100


def test_bench_preemption_and_overhead(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = run("bench.py", "preemption", "--shape", "test", "--plot", str(picture))
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +[\d.]+$", printed, flags=re.MULTILINE)) == 9
    assert "<svg" in picture.read_text()
    printed = run("bench.py", "overhead", "--steps", "5")
    assert "1,000,000" in printed


def test_bench_kernel() -> None:
    """Every way to decode, over a fixed length and a range, in both layouts; and the moves."""
    small = ["--layers", "2", "--kv-heads", "2", "--group", "2", "--head-dim", "16"]
    printed = run("bench.py", "kernel", "--batch", "1", "3", "--context", "40", "10-60", *small)
    assert "copying memory: " in printed
    for way, times in {"paged": 8, "dense": 4, "store": 4, "copy": 3}.items():
        assert len(re.findall(rf"^{way} .* [\d.]+%$", printed, flags=re.MULTILINE)) == times


def test_bench_roofline() -> None:
    printed = run("bench.py", "roofline", "--shape", "test", "--batch", "1", "3", "--steps", "5")
    rows = re.findall(r"^(prefill|decode) (\d+) +[\d.]+ .* [\d.]+%$", printed, flags=re.MULTILINE)
    assert rows == [("prefill", "1"), ("decode", "1"), ("prefill", "3"), ("decode", "3")]
