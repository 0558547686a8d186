"""A pytest plugin for docs/build/rebuild.py: what is wrong, a sentence for each failed test, to a file."""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from stages import load

BEGAN = time.monotonic()
SENTENCES: list[str] = []
START: list[tuple[float, float]] = []  # what the imports took, once they are done: CPU and wall seconds


def cpu_limit() -> float:
    """CPU seconds that a test may take on this machine: five times what the imports took, and at least 8."""
    return max(8.0, 5 * START[-1][0]) if START else 60.0


def wall_limit(times: float) -> float:
    """So many times the seconds that the imports took, which take longer on a machine with much to do."""
    return times * max(3.0, START[-1][1] if START else time.monotonic() - BEGAN)


def judge(stage: int, report: str) -> None:
    """Run the judge of a stage and, if it finds nothing, the tests of the suite. Exits with their status."""
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    options = ["-c", str(root / "pyproject.toml"), f"--rootdir={root}", "-p", "no:cacheprovider"]
    options += ["-p", "one_sentence", f"--report={report}", f"--stage={stage}"]
    suite = [str(root / each) if each.startswith("tests/") else each for each in load()[stage].suite]
    for tests in ([str(here / f"judge_{stage}.py")], suite):
        if tests and (status := pytest.main([*tests, *options])):
            sys.exit(status)
    sys.exit()


class TooLong(BaseException):
    """Not an Exception, because the code under test may catch these."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path)
    parser.addoption("--stage", type=int)


def pytest_collection_finish(session: pytest.Session) -> None:
    START.append((time.process_time(), time.monotonic() - BEGAN))


def report(session: pytest.Session, at: str = "") -> None:
    """Write the sentences so far, and what is tested now, which is all that a crash leaves."""
    text = json.dumps({"at": at, "sentences": SENTENCES})
    session.config.option.report.write_text(text, encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """No test takes forever."""
    report(item.session, at=rule_of(item))
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit())
    faulthandler.dump_traceback_later(wall_limit(60), exit=True)  # if it waits for something
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        report(item.session)


def stop(_number: int, _frame: FrameType | None) -> None:
    raise TooLong


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    result = yield
    if result.failed:
        SENTENCES.append(sentence(item, call.excinfo.value))
        if isinstance(call.excinfo.value, TooLong):
            item.session.shouldstop = "one loop without an end is enough to wait for"
    return result


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
        SENTENCES.append(f"The package or its tests cannot be imported: {last}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    report(session)


def is_judge(item: pytest.Item) -> bool:
    return item.path.name.startswith("judge_")


def rule_of(item: Any) -> str:
    """What a test holds: its docstring, or its name in words."""
    rule = getattr(item.obj, "__doc__", None) or item.name.split("[")[0].removeprefix("test_").replace(
        "_", " "
    )
    return " ".join(rule.split("\n\n")[0].split()).rstrip(".")


def sentence(item: pytest.Item, error: BaseException) -> str:
    """The message of a judge; of any other error, the function that raised it and the rule that is tested."""
    said = str(error).split("\nassert ")[0].splitlines() or [""]
    inside = of_package(item, traceback.extract_tb(error.__traceback__)[-1:])  # raised by the engine itself
    says_enough = not inside or inside[0][1].startswith("check_")  # `check_blocks` names what is broken
    if isinstance(error, AssertionError | pytest.fail.Exception) and is_judge(item) and says_enough:
        return " ".join(said)
    what, rule = where(item, error), f"Tested is the rule: {rule_of(item)}"
    rule += "." if is_judge(item) else f" ({item.path.name})."
    if isinstance(error, TooLong):
        return f"{what} does not end within {cpu_limit():.0f} s: is there a loop that misses its end? {rule}"
    if isinstance(error, AssertionError) and not inside:
        found = said[0].removeprefix("assert ")
        return f"Alone each function is right, but the engine with them is not. {rule} Found: {found}"
    return f"{what} raises {type(error).__name__}: {said[0]}".rstrip(": ") + f". {rule}"


def of_package(item: pytest.Item, frames: list[traceback.FrameSummary]) -> list[tuple[str, str, int | None]]:
    """(file, function, line) of the frames that are in the copy of the package, beside the report."""
    package = item.config.option.report.parent.resolve() / "nanopaged"
    paths = [(Path(frame.filename).resolve(), frame) for frame in frames]
    return [(path.name, at.name, at.lineno) for path, at in paths if path.is_relative_to(package)]


def where(item: pytest.Item, error: BaseException) -> str:
    """The function in which an error arose: "`take` (block_manager.py:98), called by your `allocate`,"."""
    stage = load()[item.config.option.stage]
    own = {(Path(file).name, name.split(".")[-1]) for file, name in stage.functions}
    frames = of_package(item, traceback.extract_tb(error.__traceback__))
    if not frames:
        return "A test"
    file, name, line = frames[-1]
    if (file, name) in own:
        return f"Your `{name}` ({file}:{line})"
    callers = [caller for its_file, caller, _ in frames if (its_file, caller) in own]
    return f"`{name}` ({file}:{line})" + (f", called by your `{callers[-1]}`," if callers else "")
