"""A pytest plugin for docs/build/rebuild.py: it writes a sentence for each failed test to a file.

A test of judge_N.py says in one of two ways which function it judges:

    def test_take(…): …                                     all cases of the test judge `take`
    @pytest.mark.parametrize(("function", "rule", …), …)    a table: the parameter `function` has the name

While such a case runs, the other functions of the stage are the source's, so the sentence blames the right
one. A case is left out if its function is still blank. A test without a function judges all of them
together, and runs last, if no other case has failed. The rule that a sentence names is the parameter `rule`,
or the test's docstring.
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
from pathlib import Path
from types import FrameType
from typing import Any

import beside
import pytest
from stages import STAGES

ROOT = Path(__file__).parents[2]
READERS = Path.cwd() / "nanopaged"  # the judge is started in the reader's folder
SENTENCES: list[tuple[str, str]] = []  # (function or "", what is wrong)
IMPORTS = time.process_time()  # the CPU seconds that the imports above took


def cpu_limit(item: pytest.Item) -> float:
    """CPU seconds that a test may take on this machine: a few times what the imports took."""
    return max(8.0, 5 * IMPORTS) * (1 if is_judge(item) else 4)


def judge(stage: int, report: str, blank: list[str]) -> None:
    """Run the judge of a stage and, if it finds nothing, the tests of the suite. Exits with their status.

    Args:
        blank: the functions that are not written yet. If there are any, the suite waits.
    """
    options = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    options += ["-p", "one_sentence", f"--report={report}", f"--stage={stage}", f"--blank={','.join(blank)}"]
    status = pytest.main([str(ROOT / f"docs/build/judge_{stage}.py"), *options])
    suite = [str(ROOT / word) if word.startswith("tests/") else word for word in STAGES[stage].suite]
    if status == 0 and suite and not blank:
        status = pytest.main([*suite, *options, "-m", "not slow"])
    sys.exit(status)


class TooLong(BaseException):
    """Not an Exception, because the code under test may catch these."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path)
    parser.addoption("--stage", type=int)
    parser.addoption("--blank", type=lambda names: names.split(",") if names else [])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    blank = [name.split(".")[-1] for name in config.option.blank]
    items[:] = [item for item in items if function_of(item) not in blank]
    items.sort(key=lambda item: function_of(item) == "")


def pytest_collection_finish(session: pytest.Session) -> None:
    if not beside.FUNCTIONS:
        beside.find_functions(session.config.option.stage, session.config.option.blank)


def is_judge(item: pytest.Item) -> bool:
    return item.path.name.startswith("judge_")


def function_of(item: pytest.Item) -> str:
    """The function that a case judges; "" if it judges them together, or belongs to the suite."""
    to_write = [name.split(".")[-1] for _, name in STAGES[item.config.option.stage].functions]
    name = parameters_of(item)["function"]
    return name if is_judge(item) and name in to_write else ""


def rule_of(item: pytest.Item) -> str:
    return " ".join(parameters_of(item)["rule"].split("\n\n")[0].split()).rstrip(".")


def parameters_of(item: Any) -> dict[str, Any]:
    """Those of a case. A `function` is otherwise the test's name, and a `rule` its docstring, or its name."""
    name = item.name.split("[")[0].removeprefix("test_")
    rule = item.obj.__doc__ or name.replace("_", " ")
    return {"function": name, "rule": rule} | (item.callspec.params if hasattr(item, "callspec") else {})


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
    faulthandler.dump_traceback_later(300, exit=True)  # if it waits for something
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


def pytest_exception_interact(node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
    """A test has failed, or the judge cannot be imported."""
    if isinstance(node, pytest.Collector):
        last = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
        SENTENCES.append(("", f"The package or its tests cannot be imported: {last}"))
        return
    SENTENCES.append((function_of(node), sentence(node, call.excinfo.value)))
    if isinstance(call.excinfo.value, TooLong):
        node.session.shouldstop = "one loop without an end is enough to wait for"


def pytest_sessionfinish(session: pytest.Session) -> None:
    write_report(session)


def sentence(item: pytest.Item, error: BaseException) -> str:
    """The message of a judge; of any other error, the function that raised it and the rule that is tested."""
    said = str(error).split("\nassert ")[0].splitlines() or [""]
    places = places_of(item, error)
    is_of_test = isinstance(error, AssertionError | pytest.fail.Exception) and not places[-1]
    if is_judge(item) and is_of_test:
        return " ".join(said)
    rule = f"Tested is the rule: {rule_of(item)}" + ("." if is_judge(item) else f" ({item.path.name}).")
    place = next((place for place in reversed(places) if place), "A test")
    if isinstance(error, TooLong):
        limit = f"{cpu_limit(item):.0f} s"
        return f"{place} does not end within {limit}: is there a loop that misses its end? {rule}"
    if is_of_test:
        found = said[0].removeprefix("assert ")
        return f"Alone each function is right, but the engine with them is not. {rule} Found: {found}"
    if is_judge(item) and not any(places):
        return f"What it returns or leaves cannot be used ({type(error).__name__}: {said[0]}). {rule}"
    return f"{place} raises {type(error).__name__}: {said[0]}".rstrip(": ") + f". {rule}"


def places_of(item: pytest.Item, error: BaseException) -> list[str]:
    """The calls that led to an error, the last one last; "" for each one outside of the package.

    "Your `take` (block_manager.py:98)", and of others "`append` (sequence.py:80), called by your `take`,".
    """
    functions = STAGES[item.config.option.stage].functions
    to_write = {(Path(file).name, name.split(".")[-1]) for file, name in functions}
    places = [""]
    called_by = ""
    for call in traceback.extract_tb(error.__traceback__):
        path = Path(call.filename).resolve()
        is_readers = path.is_relative_to(READERS)
        place = f"`{call.name}` ({path.name}:{call.lineno})"
        if is_readers and (path.name, call.name) in to_write:
            called_by = f", called by your `{call.name}`,"
            places.append(f"Your {place}")
        elif is_readers or path.is_relative_to(ROOT / "nanopaged"):
            places.append(place + called_by)
        else:
            places.append("")
    return places
