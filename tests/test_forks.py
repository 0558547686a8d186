"""The forks of docs/forks: each patch still applies to the source, and the fork's own test passes.

A fork is a folder with a README, a patch (or a program that needs none) and a test.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from doc_pages import ROOT, copy_repository, run_commands, run_python

FORKS = sorted(readme.parent for readme in (ROOT / "docs" / "forks").glob("*/README.md"))
TABLE = (ROOT / "docs" / "forks" / "README.md").read_text(encoding="utf-8")
ROW = r"\| \[[^\]]+\]\(NAME/README.md\) \| (\d+) \| \+(\d+) −(\d+) \|"


def test_there_are_seven() -> None:
    assert len(FORKS) == 7


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.name)
def test_a_fork_passes_its_own_test(fork: Path, tmp_path: Path) -> None:
    """In a copy of the project, the commands of its page apply the patch and run the test, then its code."""
    copy, page = copy_repository(tmp_path), fork / "README.md"
    printed = run_commands(page, copy)
    assert re.search(r"^\d+ passed", printed, flags=re.MULTILINE), printed
    assert "skipped" not in printed
    run_python(page, copy)


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.name)
def test_the_table_has_its_size(fork: Path) -> None:
    row = re.search(ROW.replace("NAME", fork.name), TABLE)
    assert row is not None, "the fork is not in the table"
    patches = list(fork.glob("*.patch"))
    command = ["git", "apply", "--numstat", *patches]
    if patches:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts = [line.split()[:2] for line in done.stdout.splitlines()]
    else:
        counts = [[str(len((fork / f"{fork.name}.py").read_text(encoding="utf-8").splitlines())), "0"]]
    added, removed = (sum(map(int, column)) for column in zip(*counts, strict=True))
    assert tuple(map(int, row.groups())) == (len(counts), added, removed)
    assert not patches or added <= 165, "a fork should stay small enough to be read"
