"""Programs end with a line, not with a traceback: a reader that goes, Ctrl-C, a full disk."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import environment

from nanopaged.terminal import one_line

ROOT = Path(__file__).parents[2]
PROGRAMS = {  # how they are called → what they print first
    "example.py --max-tokens 2": "HERALD:",
    "bench.py --shape test --requests 2 --max-input 20 --max-output 20": "2 requests",
    "-m nanopaged --max-tokens 2": "",
    "-m nanopaged.kernels.build": "the C++ kernels are ready",
    "docs/one_file.py": " 108 tokens",
    "docs/build/rebuild.py": "nothing is begun",
    "docs/experiments/arrivals.py --requests 2": "",
}
SCRIPT = """
import os, sys
from nanopaged.terminal import run_program
def main():
    {}
if __name__ == "__main__":
    run_program(main)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def run(script: Path, body: str, redirect: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """A program with this `main`, started by a shell."""
    script.write_text(SCRIPT.format(body), encoding="utf-8")
    line = f"{sys.executable} {script} {redirect}"
    return subprocess.run(["bash", "-c", line], capture_output=True, env=environment(**env), timeout=60)


needs_bash = pytest.mark.skipif(sys.platform == "win32", reason="there is no bash on Windows")


@needs_bash
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit('a complaint')"])
def test_a_reader_that_goes(script: Path, end: str) -> None:
    """`| head -1` wants no more: nothing is said, also if the program ends by itself."""
    done = run(script, f"print('first\\n' * 100_000); {end}", "| head -1")
    assert done.stdout == b"first\n"
    assert done.stderr in (b"", b"a complaint\n")


@needs_bash
@pytest.mark.parametrize(
    ("body", "redirect", "status", "stdout", "stderr"),
    [
        ("print(1)", "> /dev/full", 1, b"", b"[Errno 28] No space left on device\n"),
        ("open('/nowhere/a', 'w')", "", 1, b"", b"[Errno 2] No such file or directory: '/nowhere/a'\n"),
        ("raise OSError('two\\nlines \\033[31m')", "", 1, b"", b"two lines [31m\n"),
        ("print('began'); raise KeyboardInterrupt", "", 130, b"began\n", b"interrupted\n"),
        ("sys.exit(7)", "", 7, b"", b""),
    ],
)
def test_what_ends_a_program(
    script: Path, body: str, redirect: str, status: int, stdout: bytes, stderr: bytes
) -> None:
    done = run(script, body, redirect)
    assert (done.returncode, done.stdout, done.stderr) == (status, stdout, stderr)


@needs_bash
def test_a_mistake_of_the_program_itself_has_its_traceback(script: Path) -> None:
    assert b"ZeroDivisionError" in run(script, "1 / 0").stderr


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b\tc\x1b[31m\x00\x9b d")) == "a b c [31m d"


def test_every_program_is_run_so() -> None:
    """Except where nanopaged is not installed or is a reader's, in figures, and in one_file.py."""
    command = ["git", "ls-files", "*.py", ":!*test_*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    others = ("tests/", "docs/book/figures/", "docs/site/", "docs/play/")
    others += ("docs/one_file.py", "docs/build/texts.py")
    for name in listed.stdout.split():
        text = (ROOT / name).read_text(encoding="utf-8")
        if re.search(r"(?m)^if __name__ ==", text) and not name.startswith(others):
            assert text.endswith("    run_program(main)\n"), name


def start(program: str, **options: object) -> subprocess.Popen[str]:
    # SIGINT as in a terminal; a shell's background jobs ignore it, and their children inherit that.
    handlers = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    command = [sys.executable, *program.split()]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **handlers, **streams)


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize("program", [name for name in PROGRAMS if not name.startswith(("bench", "example"))])
def test_ctrl_c_at_any_moment(program: str) -> None:
    """Also while it loads, except in bench.py and example.py, which import PyTorch before `main`.

    (In the first instants Python itself starts, and no line of ours has run.)
    """
    for seconds in (0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        with start(program) as process:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr, (seconds, stderr)
        assert process.returncode in (0, 130, -signal.SIGINT), (seconds, stderr)


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("redirect", ["| head -1", "> /dev/full"])
def test_real_programs(program: str, redirect: str) -> None:
    line = f"{sys.executable} {program} {redirect}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    if program == "docs/one_file.py" and redirect.startswith(">"):  # it imports no wrapper
        return
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if redirect == "| head -1":
        assert done.stdout.startswith(PROGRAMS[program])
    else:
        assert done.returncode == 1, done.stderr
