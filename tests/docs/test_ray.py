"""docs/experiments/ray_batch.py on a local Ray, for two CPU cores, in a process that ends with it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nanopaged import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='Ray: pip install -e ".[ray]"'),
]

EXPERIMENTS = Path(__file__).parents[2] / "docs" / "experiments"
TAG = "NANOPAGED_TEST_RAY"  # in the environment of every process of the test
OPTIONS = ["--engines", "2", "--batch-size", "4", "--max-tokens", "12", "--temperature", "0.8"]


def processes_of(tag: str) -> list[psutil.Process]:
    """All processes of a Ray inherit the environment of the command that started it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # one that has ended has no environment
            if process.environ().get(TAG) == tag:
                found.append(process)
    return found


def test_each_prompt_has_its_output(tmp_path: Path) -> None:
    """Each prompt has the output of an engine alone, with the seed of its row, and no process is left."""
    rows = [{"prompt": f"Höre, Speaker {i}:\n", "seed": 100 + i, "id": f"row {i}"} for i in range(20)]
    files, results = tmp_path / "prompts", tmp_path / "results"
    files.mkdir()
    for i in range(3):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[i::3])
        (files / f"{i}.jsonl").write_text(lines, encoding="utf-8")
    env = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", TAG: str(results)}
    env["PYTHONPATH"] = os.pathsep.join([str(EXPERIMENTS), *sys.path])
    command = [sys.executable, str(EXPERIMENTS / "ray_batch.py"), str(files), str(results), *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=300)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 60
    while left := processes_of(str(results)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)

    params = [SamplingParams(temperature=0.8, seed=row["seed"], max_tokens=12) for row in rows]
    alone = LLM().generate([row["prompt"] for row in rows], params, use_tqdm=False)
    for row, output in zip(rows, alone, strict=True):
        row["output"] = output.outputs[0].text
    lines = [line for file in results.iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    assert sorted(map(json.loads, lines), key=lambda row: row["seed"]) == rows
