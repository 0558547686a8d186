"""Programs in a terminal: what a user causes ends one with a line, not with a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper


def run_program(main: Callable[[], object]) -> None:
    """Run `main`. Ctrl-C, an OSError (a folder is read-only) and a closed stdout end the program.

    A closed stdin is empty. A character that the terminal cannot show becomes "?".
    """
    is_closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if (stream := getattr(sys, name)) is None:  # closed: the next file would get its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper) and name != "stderr":
            stream.reconfigure(errors="replace")
    if is_closed:
        sys.exit("stdout is closed")
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        # Its reader has gone (`| head`), or the disk is full: Python would write the rest again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else one_line(error))


def one_line(error: object) -> str:
    """A message without line breaks and control characters, which a file's contents may have."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(error)).split())
