"""`python -m pytest docs/book/exercises/01_1.py` says in one sentence what is wrong with a solution."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "experiments"))  # for the scheduler without a model


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The message of a failed check, or the line of the solution that raised an error; no traceback."""
    report = yield
    if call.excinfo is not None and report.failed:
        report.longrepr = sentence(call.excinfo.value, item.path)
    return report


def sentence(error: BaseException, file: Path) -> str:
    if isinstance(error, NotImplementedError):
        return f"Not written yet: {error}" if str(error) else "Not written yet."
    if isinstance(error, AssertionError) and str(error):
        return str(error).split("\nassert ")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    return f"{file.name}:{lines[-1]}: {type(error).__name__}: {error}"
