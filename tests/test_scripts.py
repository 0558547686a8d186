"""The scripts a newcomer runs, small: they must end well and print what they promise."""

from __future__ import annotations

import importlib.util
import json
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


def test_bench_sharing_saves_more_with_more_sequences(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = run("bench.py", "sharing", "--requests", "30", "--plot", str(picture))
    assert "<svg" in picture.read_text()
    rows = re.findall(r"-like +(parallel|cache alone|beam) +([\d.]+)% +([\d.]+)% +([\d.]+)%", printed)
    assert [row[0] for row in rows] == ["parallel", "cache alone", "beam"] * 2
    for _, *shares in rows:
        assert 0 < float(shares[0]) < float(shares[1]) < float(shares[2]) < 100
    for forked, cached in ((rows[0], rows[1]), (rows[3], rows[4])):
        assert all(float(a) >= float(b) for a, b in zip(forked[1:], cached[1:], strict=True))


def test_bench_preemption_and_overhead(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = run("bench.py", "preemption", "--shape", "test", "--plot", str(picture))
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+$", printed, flags=re.MULTILINE)) == 9
    pools = re.findall(r"^ *(\d+)% +[\d.]+ +(\d+) +[\d.]+ +(\d+)$", printed, flags=re.MULTILINE)
    assert [int(share) for share, *_ in pools] == [100, 70, 50, 30]
    assert pools[0][1:] == ("0", "0"), "nobody is preempted where there is room for all"
    assert int(pools[3][1]) > 0
    assert int(pools[3][2]) > 0
    assert "<svg" in picture.read_text()
    picture.unlink()
    printed = run("bench.py", "overhead", "--steps", "5", "--sequences", "1", "40", "--plot", str(picture))
    assert "<svg" in picture.read_text()
    assert len(re.findall(r"^1,000,000 +\d+ +[\d.]+ +[\d.]+$", printed, flags=re.MULTILINE)) == 2
    rows = len(re.findall(r"^ +(?:1|40)(?: +[\d.]+){5}$", printed, flags=re.MULTILINE))
    assert rows == (2 if importlib.util.find_spec("triton") else 0)


def test_bench_kernel(tmp_path: Path) -> None:
    """Every way to decode, over a fixed length and a range; and the moves."""
    small = ["--layers", "2", "--kv-heads", "2", "--group", "2", "--head-dim", "16"]
    picture = tmp_path / "picture.svg"
    small += ["--plot", str(picture)]
    printed = run("bench.py", "kernel", "--batch", "1", "3", "--context", "40", "10-60", *small)
    assert "<svg" in picture.read_text()
    assert "copying memory: " in printed
    for way, times in {"paged": 4, "dense": 4, "store": 4, "copy": 3}.items():
        assert len(re.findall(rf"^{way} .* [\d.]+%$", printed, flags=re.MULTILINE)) == times


def test_bench_roofline() -> None:
    printed = run("bench.py", "roofline", "--shape", "test", "--batch", "1", "3", "--steps", "5")
    rows = re.findall(r"^(prefill|decode) (\d+) +[\d.]+ .* [\d.]+%$", printed, flags=re.MULTILINE)
    assert rows == [("prefill", "1"), ("decode", "1"), ("prefill", "3"), ("decode", "3")]


def test_bench_for_machines() -> None:
    lengths = ["--min-input", "4", "--max-input", "20", "--min-output", "2", "--max-output", "9"]
    printed = run(
        "bench.py", "--shape", "test", "--requests", "5", "--json", "--backend", "reference", *lengths
    )
    line = json.loads(printed.splitlines()[-1])
    assert line["settings"]["requests"] == 5
    assert line["rates"]["nanopaged"] == [line["output_tokens_per_second"]]
    assert line["total_tokens_per_second"] > line["output_tokens_per_second"] > 0
    assert len(line["time_to_first_token"]) == len(line["time_per_output_token"]) == 3


def test_bench_memory_keeps_the_papers_order(tmp_path: Path) -> None:
    """Each allocation holds more real tokens than the one before, and serves more requests at once."""
    picture = tmp_path / "picture.svg"
    printed = run("bench.py", "memory", "--requests", "150", "--slots", "2500", "--plot", str(picture))
    rows = re.findall(r"-like +(max|pow2|oracle|paging) +([\d.]+)% +([\d.]+)", printed)
    assert [row[0] for row in rows] == ["max", "pow2", "oracle", "paging"] * 2
    for trace in (rows[:4], rows[4:]):
        for column in (1, 2):
            values = [float(row[column]) for row in trace]
            assert values == sorted(values)
    assert "<svg" in picture.read_text()


def test_bench_blocksize_wastes_more_in_larger_blocks(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    printed = run(
        "bench.py", "blocksize", "--requests", "40", "--block-size", "1", "16", "128", "--plot", str(picture)
    )
    rows = re.findall(r"^ +(\d+) +([\d.]+)% +([\d.]+)% +[\d.]+$", printed, flags=re.MULTILINE)
    wasted, found = ([float(row[column]) for row in rows] for column in (1, 2))
    assert wasted == sorted(wasted)
    assert found == sorted(found, reverse=True)
    assert wasted[0] == 0
    assert found[0] == 100
    assert "<svg" in picture.read_text()


def test_bench_prefix_and_chunked(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    small = ["--shape", "test", "--plot", str(picture)]
    printed = run("bench.py", "prefix", "--prefix", "0", "64", "--requests", "4", "--output", "3", *small)
    found = re.findall(r"^ +\d+ +(?:on|off) +[\d.]+ +[\d.]+ +([\d.]+)%$", printed, flags=re.MULTILINE)
    assert [float(share) for share in found] == [0, 0, 50, 0], "three of four find 64 of 96 tokens"
    assert "<svg" in picture.read_text()
    picture.unlink()
    printed = run("bench.py", "chunked", "--budget", "32", "64", "--prompt", "200", *small)
    assert len(re.findall(r"^ +(?:32|64|whole)(?: +[\d.]+){3}$", printed, flags=re.MULTILINE)) == 3
    assert "<svg" in picture.read_text()


def test_bench_sampling() -> None:
    """Each setting beside transformers', rows by vocabularies."""
    printed = run("bench.py", "sampling", "--rows", "1", "3", "--vocab", "300", "--repeat", "1")
    assert len(re.findall(r"^ +[13] +300 .+( +[\d.]+){3}$", printed, flags=re.MULTILINE)) == 2 * 6
