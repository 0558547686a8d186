"""What a stage of docs/build/rebuild.py is. stage_1.py to stage_9.py have one each."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """A part of the engine to write.

    Fields:
        chapter: of the book, which explains it: a file of docs/book.
        functions: (file, dotted name) of each function that loses its body. One that the reader has written
            in an earlier stage is kept: this stage asks more of it.
        suite: arguments of pytest, from the root: the tests of the suite that judge it after judge_N.py.
        hints: in the order in which they are given.
    """

    title: str
    chapter: str
    functions: tuple[tuple[str, str], ...]
    suite: tuple[str, ...]
    hints: tuple[str, ...]


def load() -> dict[int, Stage]:
    """Number → stage."""
    files = sorted(Path(__file__).parent.glob("stage_*.py"))
    return {int(file.stem.removeprefix("stage_")): import_module(file.stem).STAGE for file in files}
