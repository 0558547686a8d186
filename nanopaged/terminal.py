"""Programs in a terminal: what a user causes ends one with a line, not with a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any


def run_program(main: Callable[[], object]) -> None:
    """Run `main`. Ctrl-C, an OSError and a closed stdout end it. What a terminal cannot show becomes "?"."""
    if sys.stdout is None:
        sys.exit("stdout is closed")
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file would get its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    pressed: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    if is_ours := signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
        if is_ours:  # not within finalizers
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except OSError as error:
        # Its reader has gone (`| head`), or the disk is full; Python would write again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else one_line(error))
    except (Exception, KeyboardInterrupt) as error:
        # Imports may swallow Ctrl-C, and fail later.
        if not pressed and isinstance(error, Exception):
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def load_fork(file: str) -> Any:
    """The class `LLM` of a fork's file. Raises ValueError if it has none."""
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        return import_module(Path(file).stem).LLM
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{file} is no fork, which has a class LLM: {error}") from error


def one_line(error: object) -> str:
    """A message without line breaks and control characters, which a file's contents may have."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(error)).split())
