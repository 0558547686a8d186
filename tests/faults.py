"""Exceptions at any line of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from fake_runner import FakeRunner

import nanopaged
from nanopaged import LLMEngine
from nanopaged.kv_cache import KVCache
from nanopaged.model.decoder import Model
from nanopaged.sampler import sample_next_tokens
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request
from nanopaged.text import Detokenizer

PACKAGE = str(Path(nanopaged.__file__).parent)
# Not while a step that failed starts over, and not in `step`, which has the only copy of the outputs.
SPARED = {"_or_start_over", "start_over", "step"}

# The stages of the engine's work: everything that these functions do, of the fake or of the real model.
STAGES: dict[str, tuple[Callable, ...]] = {
    "schedule": (Scheduler.schedule,),
    "swap": (FakeRunner.swap, KVCache.move_blocks),
    "copy": (FakeRunner.copy_on_write, KVCache.move_blocks),
    "forward": (FakeRunner.store, Model.forward),
    "sample": (FakeRunner.sample, sample_next_tokens),
    "update": (Scheduler.update,),
    "detokenise": (Detokenizer.find_stop, Request.output),
    "add": (LLMEngine.queue,),
    "abort": (LLMEngine.abort_request,),
}


class FailAtLine:
    """A context manager that raises at the `number`-th line executed in its blocks, once.

    Args:
        functions: only lines that these functions execute count, and what they call in the package; none
            means all of the package.
    """

    def __init__(
        self, number: int, error: type[BaseException] = KeyboardInterrupt, functions: Iterable[Callable] = ()
    ) -> None:
        self.left, self.error = number, error
        self.codes = {function.__code__ for function in functions}
        self.raised: BaseException | None = None

    def __enter__(self) -> None:
        if self.raised is None:
            sys.settrace(self._at_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _at_call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Python calls it at each call of a function; what it returns is called at each of its lines."""
        code = frame.f_code
        if code in self.codes:
            return self._at_line
        if not code.co_filename.startswith(PACKAGE) or code.co_name in SPARED:
            return None
        caller: FrameType | None = frame
        while self.codes and caller is not None and caller.f_code not in self.codes:
            caller = caller.f_back
        return None if caller is None else self._at_line

    def _at_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.left -= 1
        if self.left == 0 and self.raised is None:
            sys.settrace(None)
            self.raised = self.error(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            raise self.raised
        return self._at_line
