"""The forks of docs/forks: each patch still applies to the source, and the fork's own test passes.

A fork is a folder with a README, a patch (or a program that needs none) and a test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
from doc_pages import ROOT, copy_repository, run_commands, run_python

FORKS = sorted(readme.parent for readme in (ROOT / "docs" / "forks").glob("*/README.md"))
PATCHES = {fork.name: fork / f"{fork.name}.patch" for fork in FORKS if list(fork.glob("*.patch"))}
ALONE = {"hybrid", "invariant", "quest"}  # they cannot be merged with all others
NOT_IN_PAIRS = ALONE | {"grammar"}  # merged with the others, but not used with each
SMALL = {name: patch for name, patch in PATCHES.items() if name not in ALONE}
TABLE = (ROOT / "docs" / "forks" / "README.md").read_text(encoding="utf-8")
ROW = r"\| \[[^\]]+\]\(NAME/README.md\) \| (\d+) \| \+(\d+) −(\d+) \|"


@pytest.mark.slow
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
    programs = [file for file in fork.glob("*.py") if not file.name.startswith(("test_", "measure"))]
    command = ["git", "apply", "--numstat", *patches]
    if patches:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts = [line.split()[:2] for line in done.stdout.splitlines()]
    else:
        counts = [[str(len(file.read_text(encoding="utf-8").splitlines())), "0"] for file in programs]
    added, removed = (sum(map(int, column)) for column in zip(*counts, strict=True))
    assert tuple(map(int, row.groups())) == (len(counts), added, removed)
    chapter = (ROOT / "docs" / "13-forks.md").read_text(encoding="utf-8")
    assert re.search(rf"\| \[{fork.name}\]\([^|]*\| {added} \|", chapter), "chapter 13 shows another number"
    assert not patches or fork.name in ALONE or added <= 175, "a fork should stay small enough to be read"


# ── several forks in one tree ─────────────────────────────────────────────────────────────────────


def git(copy: Path, *arguments: str | Path) -> None:
    settings = ("user.name=test", "user.email=test@localhost", "commit.gpgsign=false")
    options = [option for setting in settings for option in ("-c", setting)]
    done = subprocess.run(["git", *options, *arguments], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, f"git {arguments}: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project as a repository: the branch `source`, and one with each patch."""
    copy = copy_repository(tmp_path_factory.mktemp("forks"))
    git(copy, "init", "--quiet")
    for name in ("source", *PATCHES):
        if name == "source":
            git(copy, "checkout", "--quiet", "-b", name)
        else:
            git(copy, "checkout", "--quiet", "-b", name, "source")
            git(copy, "apply", PATCHES[name])
        git(copy, "add", "nanopaged")
        git(copy, "commit", "--quiet", "--message", name)
    return copy


def check_out(copy: Path, names: Iterable[str]) -> None:
    """The source with these patches: a three-way merge, as `git apply --3way` makes it."""
    git(copy, "checkout", "--quiet", "--detach", "source")
    for name in names:
        git(copy, "merge", "--quiet", "--no-edit", name)


def test_every_two_patches_apply_together(branches: Path) -> None:
    for pair in combinations(SMALL, 2):
        check_out(branches, pair)


def test_the_table_of_pairs_has_them_all() -> None:
    head, *rows = re.findall(
        r"^\|(.*)\|$", TABLE.split("## Two forks")[1].split("## Beside")[0], re.MULTILINE
    )
    others = [cell.strip() for cell in head.split("|")[1:]]
    pairs = set()
    for row in rows[1:]:  # the first is the line below the head
        name, *cells = (cell.strip(" *") for cell in row.split("|"))
        pairs |= {frozenset((name, other)) for other, cell in zip(others, cells, strict=True) if cell}
    names = [fork.name for fork in FORKS if fork.name not in NOT_IN_PAIRS]
    assert pairs == set(map(frozenset, combinations(names, 2)))


@pytest.fixture(scope="module")
def all_forks(branches: Path) -> Path:
    """A tree with all of them, and their tests."""
    check_out(branches, SMALL)
    for name in SMALL:
        shutil.copy(branches / "docs" / "forks" / name / f"test_{name}.py", branches / "tests")
    for file in (branches / "docs" / "forks" / "overlap").glob("*overlap.py"):
        shutil.copy(file, branches / "tests")
    shutil.copy(branches / "docs" / "forks" / "test_pairs.py", branches / "tests")
    return branches


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        ["tests/test_pairs.py"],
        [f"tests/test_{name}.py" for name in SMALL],
        ["docs/forks/server", "tests/test_overlap.py"],
    ],
)
def test_all_forks_in_one_tree(all_forks: Path, tests: list[str]) -> None:
    """Each two of them in use, or refused together; and the tests of each, beside the code of the others."""
    names = {"PYTHONPATH": str(all_forks), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *tests]
    done = subprocess.run(command, cwd=all_forks, env=os.environ | names, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


@pytest.mark.slow
def test_the_suite_for_forks_passes_on_a_fork(branches: Path) -> None:
    """The command of chapter 13, with the quick tests."""
    check_out(branches, ["priority"])
    for file in (branches / "tests").glob("*.py"):
        if not (ROOT / "tests" / file.name).exists():
            file.unlink()  # of another fork
    chapter = (ROOT / "docs" / "13-forks.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"^python -m pytest -n 2 (.*--ignore.*)$", chapter, re.MULTILINE)
    names = {"PYTHONPATH": str(branches), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options.split(), "-m", "quick"]
    done = subprocess.run(command, cwd=branches, env=os.environ | names, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
