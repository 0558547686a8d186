"""The tests that need a GPU (`python -m pytest -m gpu`), by function. In a rehearsal a few that need none."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

from common import ROOT

from light import Light, NotRun

if TYPE_CHECKING:
    import pytest

LONGEST = 150  # lines of the first failure
RESERVE = 8  # seconds before the time limit: no test begins later


def engine_tests(light: Light) -> str:
    """tests/kernels/test_gpu.py: the whole engine."""
    if light.on_gpu and light.no_kernels is not None:
        light.cannot(f"run the tests of the kernels: {light.no_kernels}")
        return run_tests(light, ["tests/kernels/test_gpu.py", "-m", "gpu", "-k", "not triton and not flash"])
    if light.on_gpu:
        return run_tests(light, ["tests/kernels/test_gpu.py", "-m", "gpu"])
    if light.no_kernels is not None:
        raise NotRun(light.no_kernels)
    light.cannot("run tests/kernels/test_gpu.py; tests of the graphs' inputs take its place")
    return run_tests(light, ["tests/model/test_cuda_graphs.py", "-k", "every_batch or longest_context"])


def kernel_tests(light: Light) -> str:
    """The large grids, in random order: as many tests as the time allows."""
    if light.no_kernels is not None:
        raise NotRun(light.no_kernels)
    if not light.on_gpu:
        light.cannot("run the tests of the kernels for GPUs; a few small ones take their place")
    which = ["-m", "gpu"] if light.on_gpu else ["-k", "in_each_type"]
    return run_tests(light, ["tests/kernels/test_kernels.py", *which], shuffled=True)


def run_tests(light: Light, arguments: list[str], shuffled: bool = False) -> str:
    """Run pytest in this process."""
    try:
        import pytest
    except ImportError:
        raise NotRun('pytest is not installed: pip install -e ".[test]"') from None
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of others, which might choose or order tests
    watch = Watch(light, shuffled)
    files = [str(ROOT / each) if each.startswith("tests/") else each for each in arguments]
    options = [f"--rootdir={ROOT}", f"-c{ROOT / 'pyproject.toml'}", "-p", "no:cacheprovider"]
    status = pytest.main([*files, *options], plugins=[watch])
    light.table("test", "passed", "failed", "skipped", "seconds")
    for name, counts in sorted(watch.groups.items()):
        cells = [counts[outcome] for outcome in ("passed", "failed", "skipped")]
        light.row(f"`{name}`", *cells, f"{watch.seconds[name]:.1f}")
    if not watch.total["passed"]:
        light.wrong(f"no test has passed; pytest ended with {pytest.ExitCode(status).name}")
    if watch.num_run < watch.num_selected:
        command = f"`python -m pytest {' '.join(arguments)}`"
        light.say(
            "", f"The time was over before {watch.num_selected - watch.num_run} of the tests: {command}"
        )
    return f"{watch.counted()} of {watch.num_selected} tests"


class Watch:
    """A plugin of pytest that counts the tests by function, and stops in time."""

    def __init__(self, light: Light, shuffled: bool) -> None:
        self.light, self.shuffled = light, shuffled
        self.groups: dict[str, Counter[str]] = {}  # function → outcome → tests
        self.total: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.num_selected = self.num_run = 0

    def counted(self) -> str:
        """For a sentence: "40 passed, 1 failed"."""
        return ", ".join(f"{number} {outcome}" for outcome, number in self.total.items()) or "0 passed"

    def failed(self, what: str, text: str) -> None:
        """Show the text of the first failure."""
        self.light.wrong(what)
        if not self.total["failed"]:
            self.light.say("", "The first failure:", "", "````text", *text.splitlines()[-LONGEST:], "````")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed(f"{report.nodeid} cannot be imported", report.longreprtext)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.shuffled:  # so that every grid gets its share of the time
            random.Random(0).shuffle(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session, self.num_selected = session, len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.light.now(f"{nodeid}, after {self.counted()}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        self.seconds[name] += report.duration
        if report.failed:
            self.failed(report.nodeid, report.longreprtext)
        if report.failed or report.skipped or report.when == "call":
            self.groups.setdefault(name, Counter())[report.outcome] += 1
            self.total[report.outcome] += 1

    def pytest_runtest_logfinish(self) -> None:
        self.num_run += 1
        if time.monotonic() > self.light.deadline - RESERVE:
            self.session.shouldstop = "the time is over"
