"""The forks of docs/forks: a fork is a folder with a README, a program and a test, which passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import ROOT, copy_repository, run_commands, run_python

FOLDER = ROOT / "docs" / "forks"
FORKS = sorted(readme.parent for readme in FOLDER.glob("*/README.md"))
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
def test_a_page_is_short_and_begins_with_the_command_of_its_test(fork: Path) -> None:
    """The test has random workloads, except that of the server, which changes no engine."""
    page = (fork / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 400
    test = fork / f"test_{fork.name}.py"
    assert f"\npython -m pytest docs/forks/{fork.name}/{test.name}" in page.split("```")[1]
    assert fork.name == "server" or "random_runs(" in test.read_text(encoding="utf-8")


def test_the_forks_are_small_together() -> None:
    files = [file for file in FOLDER.rglob("*") if file.suffix in (".py", ".md")]
    assert sum(file.read_text(encoding="utf-8").count("\n") for file in files) <= 7900


def test_the_page_has_all_forks() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(\w+/README\.md\) \|", page, flags=re.MULTILINE)
    assert sorted(rows) == [fork.name for fork in FORKS]


def test_the_page_says_which_fork_uses_which_name() -> None:
    """A name of the engine that no fork gives another class or function is not needed."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:LLMEngine|ModelRunner)\.(\w+)` \| ([\w, ]+) \|$", page, flags=re.MULTILINE)
    engine = "".join(
        (ROOT / "nanopaged" / name).read_text(encoding="utf-8") for name in ("engine.py", "model_runner.py")
    )
    assert [name for name, _ in rows] == re.findall(
        r"^    (?:def )?(make_\w+|sample_next_tokens\b|score_mod\b)", engine, flags=re.MULTILINE
    )
    for name, forks in rows:
        given = re.compile(rf"^ +((\w+, )*{name}(, \w+)* =|(self\.)?{name} =|def {name}\()", re.MULTILINE)
        users = [
            fork.name
            for fork in FORKS
            if given.search((fork / f"{fork.name}.py").read_text(encoding="utf-8"))
        ]
        assert users == forks.split(", "), name
