"""A pytest plugin for docs/build/rebuild.py: it writes a sentence for each failed test to a file.

A test of judge_N.py says in one of two ways which function it judges:

    @pytest.mark.function("take")                           all cases of the test judge `take`
    @pytest.mark.parametrize(("function", "rule", …), …)    a table: the parameter `function` has the name

While such a case runs, the other functions of the stage are the source's, so the sentence blames the right
one. A case is left out if its function is still blank. A test without a function judges all of them
together, and runs if no other case has failed, so it stands last. The rule that a sentence names is the
parameter `rule`, or the test's docstring.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import beside
import pytest
from stages import STAGES

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
BEGAN = time.monotonic()
SENTENCES: list[tuple[str, str]] = []  # (function or "", what is wrong)
START: list[tuple[float, float]] = []  # what the imports took, once they are done: CPU and wall seconds


def cpu_limit(item: pytest.Item) -> float:
    """CPU seconds that a test may take on this machine: a few times what the imports took."""
    return max(8.0, 5 * START[-1][0]) * (1 if is_judge(item) else 4)


def wall_limit() -> float:
    """Sixty times the seconds that the imports took, which take longer on a machine with much to do."""
    return 60 * max(3.0, START[-1][1])


def judge(stage: int, report: str, blank: str = "") -> None:
    """Run the judge of a stage and, if it finds nothing, the tests of the suite. Exits with their status.

    Args:
        blank: the functions that are not written yet, separated by commas. If there are any, the suite waits.
    """
    options = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    options += ["-p", "one_sentence", f"--report={report}", f"--stage={stage}", f"--blank={blank}"]
    status = pytest.main([str(HERE / f"judge_{stage}.py"), *options])
    suite = [str(ROOT / word) if word.startswith("tests/") else word for word in STAGES[stage].suite]
    if status == 0 and suite and not blank:
        status = pytest.main([*suite, *options, "-m", "not slow"])
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)


class TooLong(BaseException):
    """Not an Exception, because the code under test may catch these."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path)
    parser.addoption("--stage", type=int)
    parser.addoption("--blank", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "function(name): the function that a test of docs/build judges")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    blank = config.option.blank.split(",")
    items[:] = [item for item in items if function_of(item) == "" or function_of(item) not in blank]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not SENTENCES and not beside.FUNCTIONS:
        beside.find_functions(STAGES[session.config.option.stage].functions)
    START.append((time.process_time(), time.monotonic() - BEGAN))


def is_judge(item: pytest.Item) -> bool:
    return item.path.name.startswith("judge_")


def function_of(item: pytest.Item) -> str:
    """The function that a case judges; "" if it judges them together, or belongs to the suite."""
    marker = item.get_closest_marker("function")
    return parameters_of(item).get("function") or (marker.args[0] if marker else "")


def parameters_of(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def rule_of(item: Any) -> str:
    """What a test holds: its parameter `rule`, its docstring, or its name in words."""
    name = item.name.split("[")[0].removeprefix("test_").replace("_", " ")
    rule = parameters_of(item).get("rule") or item.obj.__doc__ or name
    return " ".join(rule.split("\n\n")[0].split()).rstrip(".")


def write_report(session: pytest.Session, at: str = "") -> None:
    """Write the sentences so far, and what is tested now, which is all that a crash leaves."""
    text = json.dumps({"at": at, "sentences": SENTENCES})
    session.config.option.report.write_text(text, encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A function is judged beside the source's others. No test takes forever."""
    write_report(item.session, at=rule_of(item))
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit(item))
    faulthandler.dump_traceback_later(wall_limit(), exit=True)  # if it waits for something
    function = function_of(item)
    try:
        with beside.engines_own(except_for=function) if function else nullcontext():
            return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        write_report(item.session)


def stop(_number: int, _frame: FrameType | None) -> None:
    raise TooLong


def pytest_runtest_setup(item: pytest.Item) -> None:
    if SENTENCES and is_judge(item) and not function_of(item):
        pytest.skip("a function is wrong by itself")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    result = yield
    if result.failed:
        SENTENCES.append((function_of(item), sentence(item, call.excinfo.value)))
        if isinstance(call.excinfo.value, TooLong):
            item.session.shouldstop = "one loop without an end is enough to wait for"
    return result


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
        SENTENCES.append(("", f"The package or its tests cannot be imported: {last}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    write_report(session)


@dataclass
class Frame:
    """A call inside of the package. `is_own`: it runs what the reader wrote for a function of the stage."""

    file: str
    function: str
    line: int | None
    is_own: bool


def frames_of(item: pytest.Item, error: BaseException) -> list[Frame | None]:
    """The calls that led to an error, the last one last; None for each one outside of the package."""
    copy = item.config.option.report.parent.resolve() / "nanopaged"
    to_write = {
        (Path(file).name, name.split(".")[-1]) for file, name in STAGES[item.config.option.stage].functions
    }
    frames: list[Frame | None] = []
    for call in traceback.extract_tb(error.__traceback__):
        path = Path(call.filename).resolve()
        if path.is_relative_to(copy) or path.is_relative_to(ROOT / "nanopaged"):
            is_own = path.is_relative_to(copy) and (path.name, call.name) in to_write
            frames.append(Frame(path.name, call.name, call.lineno, is_own))
        else:
            frames.append(None)
    return frames


def sentence(item: pytest.Item, error: BaseException) -> str:
    """The message of a judge; of any other error, the function that raised it and the rule that is tested."""
    said = str(error).split("\nassert ")[0].splitlines() or [""]
    frames = frames_of(item, error)
    raised_by = frames[-1] if frames else None
    is_assertion = isinstance(error, AssertionError | pytest.fail.Exception)
    if is_judge(item) and is_assertion and raised_by is None:
        return " ".join(said)
    rule = f"Tested is the rule: {rule_of(item)}" + ("." if is_judge(item) else f" ({item.path.name}).")
    if isinstance(error, TooLong):
        limit = f"{cpu_limit(item):.0f} s"
        return f"{place_of(frames)} does not end within {limit}: is there a loop that misses its end? {rule}"
    if is_assertion and raised_by is None:
        found = said[0].removeprefix("assert ")
        return f"Alone each function is right, but the engine with them is not. {rule} Found: {found}"
    if is_judge(item) and not any(frames):
        return f"What it returns or leaves cannot be used ({type(error).__name__}: {said[0]}). {rule}"
    return f"{place_of(frames)} raises {type(error).__name__}: {said[0]}".rstrip(": ") + f". {rule}"


def place_of(frames: list[Frame | None]) -> str:
    """The function in which an error arose: "`take` (block_manager.py:98), called by your `allocate`,"."""
    inside = [frame for frame in frames if frame is not None]
    if not inside:
        return "A test"
    last = inside[-1]
    if last.is_own:
        return f"Your `{last.function}` ({last.file}:{last.line})"
    callers = [frame.function for frame in inside if frame.is_own]
    called_by = f", called by your `{callers[-1]}`," if callers else ""
    return f"`{last.function}` ({last.file}:{last.line}){called_by}"
