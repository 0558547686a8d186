"""Ctrl-C at any line of the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanopaged
from nanopaged.sequence import Sample, Sequence

PACKAGE = str(Path(nanopaged.__file__).parent)
# Not in the lines that call `start_over`, and not in `step`: an interrupt after its `with` loses the outputs.
SPARED = {"_or_start_over", "step"}


@contextmanager
def interrupt_at_line(number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the `number`-th line that the package executes in this block, if any."""
    left = number

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE) and code.co_name not in SPARED
        return at_line if inside and left > 0 else None

    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(None)


def interrupt_second_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise KeyboardInterrupt instead of the second `Sequence.append` from now on; the others go through."""
    append, calls = Sequence.append, []

    def interrupted(self: Sequence, sample: Sample) -> bool:
        calls.append(sample)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return append(self, sample)

    monkeypatch.setattr(Sequence, "append", interrupted)
