"""A pytest plugin for docs/build/rebuild.py: what is wrong, in one sentence for each failed test, to a file."""

from __future__ import annotations

import json
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SENTENCES: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        SENTENCES.append(sentence(item, call.excinfo.value))
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        SENTENCES.append(f"The tests cannot be imported: {str(report.longrepr).strip().splitlines()[-1]}")


def pytest_sessionfinish(session: Any) -> None:
    session.config.option.report.write_text(json.dumps(SENTENCES), encoding="utf-8")


def sentence(item: pytest.Item, error: BaseException) -> str:
    """The message of a judge; of a test of the suite, the rule that it holds."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "nanopaged" in Path(frame.filename).parts and "site-packages" not in frame.filename:
            place = f" ({Path(frame.filename).name}:{frame.lineno})"
    if isinstance(error, AssertionError) and item.path.name.startswith("judge_"):
        return str(error).split("\nassert ")[0]
    message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    if item.path.name.startswith("judge_"):
        return f"{message}{place}"
    rule = (getattr(item.obj, "__doc__", None) or item.name.split("[")[0].replace("_", " ")).strip()
    rule = rule.split("\n\n")[0].replace("\n", " ")
    if isinstance(error, AssertionError):
        return f"{item.path.name}::{item.name} fails, which holds: {' '.join(rule.split())}"
    return f"{message}{place}, in {item.path.name}::{item.name}: {' '.join(rule.split())}"
