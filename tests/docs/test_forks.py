"""The forks of docs/forks: a fork is a folder with a README, a program and a test, which passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import ROOT, copy_repository, run_commands, run_python

FORKS = sorted(readme.parent for readme in (ROOT / "docs" / "forks").glob("*/README.md"))
each_fork = pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.name)


@pytest.mark.slow
@each_fork
def test_a_fork_passes_its_own_test(fork: Path, tmp_path: Path) -> None:
    """In a copy of the project, the commands of its page run the test, then its code runs."""
    copy, page = copy_repository(tmp_path), fork / "README.md"
    printed = run_commands(page, copy)
    assert re.search(r"^\d+ passed", printed, flags=re.MULTILINE), printed
    assert "skipped" not in printed
    run_python(page, copy)


@each_fork
def test_the_tables_have_its_size(fork: Path) -> None:
    programs = [file for file in fork.glob("*.py") if not file.name.startswith(("test_", "measure"))]
    num_lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in programs)
    text = (ROOT / "docs" / "forks" / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| \[{fork.name}\]\([^|]*\| {num_lines} \|", text, re.MULTILINE)
