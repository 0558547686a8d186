"""docs/experiments/ray_batch.py on a local Ray: every prompt once, with the text of an engine alone.

Each test starts a Ray of its own, for two CPU cores, in a process that ends with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanopaged import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='Ray: pip install -e ".[ray]"'),
]

EXPERIMENTS = Path(__file__).parents[2] / "docs" / "experiments"
TAG = "NANOPAGED_TEST_RAY"  # in the environment of every process of a test
Result = tuple[str, str]  # a prompt and its output

# The recipe, with an engine that is killed when it has the outputs of the first batch of all.
KILLED = """
import os, signal, sys
import pyarrow as pa
import ray_batch

class Killed(ray_batch.Engine):
    def __call__(self, batch: pa.Table) -> pa.Table:
        results = super().__call__(batch)
        try:
            open(os.environ["MARKER"], "x").close()
        except FileExistsError:
            return results
        os.kill(os.getpid(), signal.SIGKILL)

ray_batch.Engine = Killed
ray_batch.main()
"""


def ray_batch(code: list[str], prompts: Path, results: Path, *options: str, **environment: str) -> None:
    """Run the recipe; no process is left when it ends."""
    paths = os.pathsep.join([str(EXPERIMENTS), *sys.path])
    mine = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths, TAG: str(results)}
    options = ("--engines", "2", "--batch-size", "4", "--max-tokens", "12", *options)
    done = subprocess.run(
        [sys.executable, *code, str(prompts), str(results), *options],
        capture_output=True,
        text=True,
        env=os.environ | mine | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 10
    while left := [process for process in psutil.process_iter() if tag_of(process) == str(results)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def tag_of(process: psutil.Process) -> str | None:
    """All processes of a Ray inherit the environment of the command that started it.

    One that has ended has none, also if its parent has not waited for it.
    """
    try:
        return process.environ().get(TAG)
    except (psutil.Error, OSError):
        return None


def read(results: Path) -> list[Result]:
    """Sorted, since results are in no order."""
    lines = [line for file in results.iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted((row["prompt"], row["output"]) for row in map(json.loads, lines))


def expected(prompts: list[str], params: list[SamplingParams]) -> list[Result]:
    outputs = LLM().generate(prompts, params, use_tqdm=False)
    return sorted(zip(prompts, (output.outputs[0].text for output in outputs), strict=True))


def test_every_prompt_once(tmp_path: Path) -> None:
    """Sampled, with a seed in each row."""
    rows = [{"prompt": f"Höre, Speaker {i}:\n", "seed": 100 + i, "id": f"row {i}"} for i in range(20)]
    files, results = tmp_path / "prompts", tmp_path / "results"
    files.mkdir()
    for i in range(3):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[i::3])
        (files / f"{i}.jsonl").write_text(lines, encoding="utf-8")
    ray_batch([str(EXPERIMENTS / "ray_batch.py")], files, results, "--temperature", "0.8")
    params = [SamplingParams(temperature=0.8, seed=row["seed"], max_tokens=12) for row in rows]
    assert read(results) == expected([row["prompt"] for row in rows], params)
    assert sum(file.read_text(encoding="utf-8").count('"id":"row ') for file in results.iterdir()) == 20


def test_nothing_is_lost_or_doubled_when_an_engine_is_killed(tmp_path: Path) -> None:
    """Greedy, from text files."""
    prompts = [f"SPEAKER {i}:" for i in range(20)]
    files, results, marker = tmp_path / "prompts", tmp_path / "results", tmp_path / "killed"
    files.mkdir()
    for i in range(2):
        (files / f"{i}.txt").write_text("\n".join(prompts[i::2]) + "\n\n", encoding="utf-8")
    ray_batch(["-c", KILLED], files, results, "--text", MARKER=str(marker))
    assert marker.exists()
    assert read(results) == expected(prompts, [SamplingParams(temperature=0, max_tokens=12)] * 20)
