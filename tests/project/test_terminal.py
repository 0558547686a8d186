"""Programs end with a line, not with a traceback: a reader that goes, Ctrl-C, a full disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import environment, run_process

from nanopaged.terminal import load_fork, one_line

ROOT = Path(__file__).parents[2]
needs_bash = pytest.mark.skipif(sys.platform == "win32", reason="there is no bash on Windows")
SCRIPT = """
import os, sys
from nanopaged.terminal import run_program
def main():
    {}
run_program(main)
"""
MUCH = "print('first\\n' * 100_000)"


@needs_bash
@pytest.mark.parametrize(
    ("body", "redirect", "status", "stdout", "stderr"),
    [
        (MUCH, "| head -1", 0, "first\n", ""),
        (f"{MUCH}; sys.exit(0)", "| head -1", 0, "first\n", ""),
        (f"{MUCH}; sys.exit('a complaint')", "| head -1", 0, "first\n", "(a complaint\n)?"),
        ("print(1)", "> /dev/full", 1, "", r"\[Errno 28\] No space left on device\n"),
        ("open('/nowhere/a', 'w')", "", 1, "", r"\[Errno 2\] No such file or directory: '/nowhere/a'\n"),
        ("raise OSError('two\\nlines \\033[31m')", "", 1, "", r"two lines \[31m\n"),
        ("print('began'); raise KeyboardInterrupt", "", 130, "began\n", "interrupted\n"),
        ("sys.exit(7)", "", 7, "", ""),
        ("1 / 0", "", 1, "", "Traceback(?s:.*)ZeroDivisionError: division by zero\n"),
    ],
)
def test_what_ends_a_program(
    body: str, redirect: str, status: int, stdout: str, stderr: str, tmp_path: Path
) -> None:
    """`| head -1` wants no more than a line: nothing is said of that."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body), encoding="utf-8")
    done = run_process(f"{sys.executable} {script} {redirect}", ROOT, environment(PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stdout) == (status, stdout)
    assert re.fullmatch(stderr, done.stderr)


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b\tc\x1b[31m\x00\x9b d")) == "a b c[31m d"


def test_a_fork_says_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    file = tmp_path / "first_come.py"
    file.write_text('"""Serves in order.\n\nNothing else."""\nclass LLM: pass\n', encoding="utf-8")
    assert load_fork(str(file)).__module__ == "first_come"
    assert capsys.readouterr() == ("", "the fork first_come: Serves in order.\n")
    with pytest.raises(FileNotFoundError, match="gone.py"):
        load_fork(str(tmp_path / "gone.py"))
    for name, text in {"empty": "", "broken": "def", "needs_more": "import no_such_module"}.items():
        file = tmp_path / f"{name}.py"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(
            ValueError, match=f"{file.name} cannot be loaded as a fork, a file with a class LLM"
        ):
            load_fork(str(file))
