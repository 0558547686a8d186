"""docs/experiments/gpu: the script's limits and its summary, and all its parts on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import environment, run_process

ROOT = Path(__file__).parents[2]
GPU = ROOT / "docs" / "experiments" / "gpu"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the script is one of bash")


def run_script(folder: Path, *parts: str, **variables: str) -> tuple[int, dict[str, str]]:
    """The exit status, and part → its line of the summary."""
    variables = {"OUT": str(folder / "out"), "PYTHON": sys.executable, **variables}
    done = run_process(["bash", str(GPU / "gpu_day.sh"), *parts], folder, environment(**variables), 1200)
    lines = (folder / "out" / "summary.txt").read_text(encoding="utf-8").splitlines()
    return done.returncode, dict(re.findall(r"^ *\d+ s  (\w+): (.*)$", "\n".join(lines), re.MULTILINE))


# What stands in the place of Python: a part that works, one that fails, one that hangs.
PROGRAM = """#!/bin/bash
case $2 in
    machine) sleep 0.1 ;;
    varlen) echo '!! 4 x 512 of 4096: it does not fit'; exit 1 ;;
    engine) sleep 60 ;;
esac
"""


def test_a_part_that_fails_or_hangs_stops_nothing(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    parts = ["machine", "varlen", "engine", "decode"]
    status, lines = run_script(tmp_path, *parts, PYTHON=str(program), REHEARSE="1", BUDGET="1")
    assert status == 1
    assert list(lines) == parts
    assert lines["machine"].startswith("ok, ")
    assert re.fullmatch(r"FAILED with status 1, \d s: !! 4 x 512 of 4096: it does not fit", lines["varlen"])
    assert re.fullmatch(r"ENDED at its limit of [123] s", lines["engine"])
    assert lines["decode"] == "NOT RUN, the time is over"


@pytest.mark.slow
def test_a_rehearsal_of_all_parts(tmp_path: Path) -> None:
    status, lines = run_script(tmp_path)
    assert status == 0, lines
    assert len(lines) == 12
    assert all(line.startswith("ok, ") for line in lines.values()), lines
