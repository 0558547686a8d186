"""The exercises: their checks take the solution that the chapter shows, and reject wrong ones.

A wrong solution of tests/docs/wrong is the right one with a piece of it replaced.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from doc_pages import ROOT
from programs import environment, load_file, run_program

sys.path.append(str(ROOT / "docs" / "experiments"))  # as conftest.py of the exercises does
EXERCISES = {file.stem: file for file in sorted((ROOT / "docs" / "book" / "exercises").glob("*_[0-9].py"))}
APPENDIX = ROOT / "docs" / "reference" / "wrong-claims.md"  # it has the exercises claims_1 and claims_2
WRONG: dict[str, list[tuple[str, str, str]]] = {}  # exercise → (what is wrong, a piece, its replacement)
for file in sorted((Path(__file__).parent / "wrong").glob("c*.py")):
    lists = vars(import_module(f"wrong.{file.stem}")).items()
    WRONG |= {
        file.stem.removeprefix("ch") + name[5:]: wrong for name, wrong in lists if name.startswith("WRONG_")
    }


def page_of(exercise: str) -> Path:
    if exercise.startswith("claims"):
        return APPENDIX
    (page,) = (ROOT / "docs" / "book").glob(f"{exercise[:2]}-*.md")
    return page


def solution_of(exercise: str) -> str:
    """The first block of Python in the solution that is folded in the chapter."""
    sections = re.split(r"^### Exercise ", page_of(exercise).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = (each for each in sections[1:] if each.startswith(f"{int(exercise[-1])}:"))
    folded = section[section.index("<details") : section.index("</details>")]
    return re.search(r"^```python\n(.*?)^```$", folded, re.MULTILINE | re.DOTALL)[1]


def check(exercise: str, solution: str) -> None:
    """Run the checks of an exercise on a solution."""
    module = load_file(EXERCISES[exercise], f"exercise_{exercise}")
    exec(compile(solution, f"solution of {exercise}", "exec"), module.__dict__)
    checks = [getattr(module, name) for name in vars(module) if name.startswith("test_")]
    assert checks
    for each in checks:
        each()


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_in_the_page_is_right(exercise: str) -> None:
    page = page_of(exercise).read_text(encoding="utf-8")
    assert f"python -m pytest docs/book/exercises/{exercise}.py" in page
    check(exercise, solution_of(exercise))


@pytest.mark.parametrize(
    ("exercise", "wrong"),
    [pytest.param(name, each, id=f"{name}-{each[0]}") for name, wrongs in WRONG.items() for each in wrongs],
)
def test_a_wrong_solution_is_told_why(exercise: str, wrong: tuple[str, str, str]) -> None:
    """By one sentence; a solution that raises an error of its own is rejected, too."""
    what, piece, replacement = wrong
    right = solution_of(exercise)
    assert right.count(piece) == 1, f"the solution has {right.count(piece)} times {piece!r}"
    with pytest.raises(Exception) as rejected:  # noqa: PT011  any error of the solution's own
        check(exercise, right.replace(piece, replacement))
    message = str(rejected.value).split("\nassert ")[0]
    assert "\n" not in message
    assert not message.startswith("assert "), "a check without a sentence"
    print(f"{exercise}  {what}: {message}")


def test_each_exercise_has_wrong_solutions() -> None:
    for page in [*sorted((ROOT / "docs" / "book").glob("[0-9]*.md")), APPENDIX]:
        for number in re.findall(r"^### Exercise (\d+):", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"{'claims' if page == APPENDIX else page.name[:2]}_{number}" in EXERCISES
    assert all(len(WRONG[exercise]) >= 3 for exercise in EXERCISES)


def test_a_failure_is_one_sentence() -> None:
    """As a reader runs it: a starter file says that it is not written yet, without a traceback."""
    done = run_program(
        ["-m", "pytest", "docs/book/exercises/01_1.py"], ROOT, environment(PYTHONPATH=str(ROOT))
    )
    assert done.returncode == 1
    assert "Not written yet." in done.stdout
    assert "Traceback" not in done.stdout
    assert "raise NotImplementedError" not in done.stdout
