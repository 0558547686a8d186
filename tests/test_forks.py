"""The forks of docs/forks: each patch still applies to the source, and the fork's own test passes.

A fork is a folder with a README, a patch (or a program that needs none) and a test. The test runs in a copy
of the source, beside the helpers of this folder. The code blocks of its README run there, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORKS = sorted(readme.parent for readme in (ROOT / "docs" / "forks").glob("*/README.md"))
TABLE = (ROOT / "docs" / "forks" / "README.md").read_text(encoding="utf-8")
ROW = r"\| \[[^\]]+\]\(NAME/README.md\) \| (\d+) \| \+(\d+) −(\d+) \|"


def git_apply(patch: Path, *options: str, folder: Path = ROOT) -> str:
    """The output of `git apply`. It needs no repository; inside one it would apply nothing to the copy."""
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", *options, patch]
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name} no longer applies:\n{done.stderr}"
    return done.stdout


def code_blocks(page: Path) -> list[str]:
    """The Python in a page of the docs."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and the tests."""
    for name in ("nanopaged", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_examples_of_the_guide_run() -> None:
    blocks = code_blocks(ROOT / "docs" / "forking.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})


def test_there_are_seven() -> None:
    assert len(FORKS) == 7


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.name)
def test_a_fork_passes_its_own_test(fork: Path, copy: Path) -> None:
    for patch in fork.glob("*.patch"):
        git_apply(patch, folder=copy)
    for file in fork.glob("*.py"):
        shutil.copy(file, copy / "tests")
    files = [f"tests/test_{fork.name}.py"]
    for i, block in enumerate(code_blocks(fork / "README.md")):
        files.append(f"tests/test_example_{i}.py")
        (copy / files[-1]).write_text(f"def test_example():\n    exec({block!r}, {{}})\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.name)
def test_the_table_has_its_size(fork: Path) -> None:
    row = re.search(ROW.replace("NAME", fork.name), TABLE)
    assert row is not None, "the fork is not in the table"
    patches = [git_apply(patch, "--numstat") for patch in fork.glob("*.patch")]
    counts = [line.split()[:2] for patch in patches for line in patch.splitlines()]
    if not patches:
        counts = [[str(len((fork / f"{fork.name}.py").read_text(encoding="utf-8").splitlines())), "0"]]
    added, removed = (sum(map(int, column)) for column in zip(*counts, strict=True))
    assert tuple(map(int, row.groups())) == (len(counts), added, removed)
    assert not patches or added <= 165, "a fork should stay small enough to be read"
