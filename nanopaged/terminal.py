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
    """Load a fork's file, say which fork runs, and return its class `LLM`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no class `LLM`, or has the name of another module without one.
    """
    path = Path(file).resolve(strict=True)
    sys.path.insert(0, str(path.parent))
    try:
        fork = import_module(path.stem)
        make_llm = fork.LLM
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"{file} cannot be loaded as a fork, a file with a class LLM and its own name: {error}"
        ) from error
    print(f"the fork {path.stem}: {fork.__doc__ or file}".splitlines()[0], file=sys.stderr)
    return make_llm


def one_line(error: object) -> str:
    """A message without the line breaks and control characters that a file may bring in."""
    line = " ".join(str(error).split())
    return "".join(filter(str.isprintable, line))
