"""which.py: the tests of every file of the package."""

from __future__ import annotations

import subprocess
import sys

import which
from which import ROOT, TESTS

PACKAGE = ROOT / "nanopaged"


def test_every_file_of_the_package_has_tests() -> None:
    """Except a file without code; and the tests exist."""
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    assert TESTS.keys() == files.keys()
    for name, file in files.items():
        assert bool(TESTS[name]) == bool(file.read_text(encoding="utf-8").strip()), name
        for test in which.tests_of(str(file)):
            assert (ROOT / test).exists(), test


def test_the_command() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tests" / "which.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    assert run("nanopaged/scheduler.py").stdout.startswith("tests/test_scheduler.py\ntests/test_swap.py\n")
    for file in ("nanopaged/schedular.py", "README.md"):
        done = run(file)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"no tests are known for one of {file}" in done.stderr
