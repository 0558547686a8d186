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
"""The stages of the engine's work: everything that these functions do, of the fake or of the real model."""


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

    def __enter__(self) -> FailAtLine:
        if self.raised is None:
            sys.settrace(self._at_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _at_call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._at_line if self.raised is None and self._counts(frame) else None

    def _counts(self, frame: FrameType) -> bool:
        code, caller = frame.f_code, frame
        if code in self.codes or not code.co_filename.startswith(PACKAGE) or code.co_name in SPARED:
            return code in self.codes
        while self.codes and caller is not None and caller.f_code not in self.codes:
            caller = caller.f_back
        return caller is not None

    def _at_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.raised = self.error(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise self.raised
        return self._at_line
