"""Programs in a terminal end with a line, not with a traceback, when the user causes the end."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def run_program(main: Callable[[], object]) -> None:
    """Run `main`. Ctrl-C, a reader that has gone (`| head`) and other OSErrors end it."""
    try:
        main()
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        # Python flushes stdout once more when it exits; that must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1 if isinstance(error, BrokenPipeError) else one_line(error))


def load_fork(file: str) -> Any:
    """Return the class `LLM` of a fork's file. Raises ValueError if the file has none."""
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    try:
        return import_module(path.stem).LLM
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{file} is not a fork: its file has no class LLM: {error}") from error


def one_line(error: object) -> str:
    """Return a message without the line breaks and control characters that a file may bring in."""
    printable = [char if char.isprintable() else " " for char in str(error)]
    return " ".join("".join(printable).split())
