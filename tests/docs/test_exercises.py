"""The exercises: their checks take the solution that the chapter shows, and reject wrong ones."""

from __future__ import annotations

import re
import sys

import pytest
from doc_pages import ROOT
from programs import environment, load_file, run_program
from wrong_solutions import WRONG

sys.path.append(str(ROOT / "docs" / "experiments"))  # as conftest.py of the exercises does
EXERCISES = {file.stem: file for file in sorted((ROOT / "docs" / "book" / "exercises").glob("*_[0-9].py"))}
APPENDIX = ROOT / "docs" / "reference" / "wrong-claims.md"  # it has the exercise claims_1
PAGES = {page.name[:2]: page for page in (ROOT / "docs" / "book").glob("[0-9]*.md")} | {"claims": APPENDIX}
ROWS = []
for name, wrongs in WRONG.items():
    ROWS += [pytest.param(name, *wrong, id=f"{name}-{wrong[0]}") for wrong in wrongs]


def page_of(exercise: str) -> str:
    return PAGES[exercise.partition("_")[0]].read_text(encoding="utf-8")


def solution_of(exercise: str) -> str:
    """The first block of Python in the solution that is folded in the chapter."""
    start = rf"^### Exercise {exercise[-1]}:.*?<details.*?^```python\n(.*?)^```$"
    return re.search(start, page_of(exercise), re.MULTILINE | re.DOTALL)[1]


def check(exercise: str, solution: str) -> None:
    """Run the checks of an exercise on a solution."""
    module = load_file(EXERCISES[exercise], f"exercise_{exercise}")
    exec(compile(solution, f"solution of {exercise}", "exec"), module.__dict__)
    checks = [getattr(module, name) for name in vars(module) if name.startswith("test_")]
    assert checks
    for test in checks:
        test()


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_in_the_page_is_right(exercise: str) -> None:
    assert f"python -m pytest docs/book/exercises/{exercise}.py" in page_of(exercise)
    check(exercise, solution_of(exercise))


@pytest.mark.parametrize(("exercise", "what", "piece", "replacement"), ROWS)
def test_a_wrong_solution_is_told_why(exercise: str, what: str, piece: str, replacement: str) -> None:
    """By one sentence; a solution that raises an error of its own is rejected, too."""
    right = solution_of(exercise)
    assert right.count(piece) == 1, f"the solution has {right.count(piece)} times {piece!r}"
    with pytest.raises(Exception) as rejected:  # noqa: PT011  any error of the solution's own
        check(exercise, right.replace(piece, replacement))
    message = str(rejected.value).split("\nassert ")[0]
    assert "\n" not in message
    assert not message.startswith("assert "), "a check without a sentence"


def test_each_exercise_has_a_check_and_wrong_solutions() -> None:
    in_pages = []
    for chapter, page in PAGES.items():
        numbers = re.findall(r"^### Exercise (\d+):", page.read_text(encoding="utf-8"), re.MULTILINE)
        in_pages += [f"{chapter}_{number}" for number in numbers]
    assert sorted(in_pages) == sorted(EXERCISES)
    assert EXERCISES.keys() == WRONG.keys()


def test_a_failure_is_one_sentence() -> None:
    """As a reader runs it: a starter file says that it is not written yet, without a traceback."""
    arguments = ["-m", "pytest", "docs/book/exercises/01_1.py"]
    done = run_program(arguments, ROOT, environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 1
    assert "Not written yet." in done.stdout
    assert "Traceback" not in done.stdout
    assert "raise NotImplementedError" not in done.stdout
