"""Pages of the docs as programs: their fenced blocks, and how they are run.

The kinds of fenced block:

    python                          runs; the blocks of a page share a namespace
    output                          what the block before it prints
    console                         `$ command` lines, and their output; those with an output run
    sh                              commands without output
    text                            a drawing, which is not checked
    python, first line # FILE: NAME a quotation, see docs/site/quote.py
    diff, first line --- FILE       a broken variant of the source: the console block after it must fail

In an output, … is any text in a line (a line of its own: any lines), and ≈ 12.3 is any number.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from programs import Done, environment, run_line, run_program

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "site"))

import quote  # noqa: E402

Block, blocks_of = quote.Block, quote.blocks_of

KINDS = {"python", "output", "console", "sh", "diff", "text"}

REAL_MODEL = "docs/experiments/real_model.py"  # run by test_real_model.py where the model is installed
TEST_OF_FORK = "-m pytest docs/forks/"


def copy_repository(folder: Path) -> Path:
    """A copy of the project. The hub id of the README's example is a folder there: the tiny model."""
    unneeded = shutil.ignore_patterns(".*", "*.egg-info", "dist", "pyodide")
    built = {str(ROOT): {"build"}}  # docs/build is a part of the book
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=lambda here, names: unneeded(here, names) | built.get(here, set()))
    shutil.copytree(copy / "nanopaged" / "tiny", copy / "Qwen" / "Qwen3-0.6B")
    return copy


def execute(command: str | list[str], copy: Path) -> Done:
    """Run a line of shell, or `python` with these arguments, as a reader who works in the copy does."""
    env = environment(PYTHONPATH=str(copy), GIT_CEILING_DIRECTORIES=str(copy.parent))
    return run_line(command, copy, env) if isinstance(command, str) else run_program(command, copy, env)


def check_output(shown: str, printed: str, where: str) -> None:
    """Compare what a page shows with what was printed."""
    pattern = ""
    for line in shown.rstrip("\n").split("\n"):
        parts = re.split(r"(…| *≈ ?[\d.,]*\d)", line.rstrip())
        kinds = {"…": ".*"} | {part: r" *(?:≈ ?)?[\d.,]*\d" for part in parts if "≈" in part}
        whole = "".join(kinds.get(part) or re.escape(part) for part in parts) + "\n"
        pattern += r"(?:.*\n)*?" if line.strip() == "…" else whole
    lines = "\n".join(line.rstrip() for line in printed.rstrip("\n").split("\n")) + "\n"
    assert re.fullmatch(pattern, lines), f"{where} shows\n\n{shown}\nbut this is printed:\n\n{lines}"


# Before the output of each block stands a line with its place.
RUN_BLOCKS = """
import json, sys
sys.path.insert(0, "")
namespace = {"__name__": "__main__"}
for line, code in json.loads(sys.argv[1]):
    print(f"\\n{sys.argv[2]}:{line}", flush=True)
    exec(compile("\\n" * (line - 1) + code, sys.argv[2], "exec"), namespace)
"""


def run_python(page: Path, copy: Path) -> None:
    """Run the Python blocks of a page in one process, and compare what they print."""
    blocks = blocks_of(page)
    code = [(block.line, block.text) for block in blocks if block.kind == "python" and not block.title]
    done = execute(["-c", RUN_BLOCKS, json.dumps(code), page.name], copy)
    assert done.returncode == 0, done.stderr
    _, *printed = re.split(rf"^{re.escape(page.name)}:(\d+)\n", done.stdout, flags=re.MULTILINE)
    printed_by = dict(zip(map(int, printed[::2]), printed[1::2], strict=True))
    for block, after in zip(blocks, blocks[1:], strict=False):
        if after.kind == "output":
            check_output(after.text, printed_by[block.line], f"{page.name}:{after.line}")


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console or sh block, each with the output shown. `> ` continues a command."""
    if block.kind == "sh":
        for command in block.text.replace("\\\n", "").splitlines():
            yield command.partition(" #")[0].rstrip(), ""
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = re.sub(r"\n> ", "\v", part).partition("\n")
        yield command.replace("\v", "\n"), shown


def run_commands(page: Path, copy: Path) -> str:
    """Run the commands that a page shows with an output, and compare it. Returns all that they printed."""
    diff, everything = None, ""
    for block in blocks_of(page):
        if block.kind == "diff":
            diff, original = block, break_source(copy, block)
        if block.kind not in ("console", "sh"):
            continue
        where = f"{page.name}:{block.line}"
        for command, shown in commands_of(block):
            if REAL_MODEL in command or not (shown or diff or TEST_OF_FORK in command):
                continue
            done = execute(command, copy)
            failed = done.returncode != 0
            assert failed == (diff is not None), f"{where}: $ {command}\n{done.stdout}{done.stderr}"
            if shown:
                check_output(shown, done.stdout, where)
            everything += done.stdout
        if diff is not None:
            (copy / diff.title).write_text(original, encoding="utf-8")
            diff = None
    return everything


def break_source(copy: Path, diff: Block) -> str:
    """Apply a diff without line numbers to the copy. Returns the file as it was."""
    original = (copy / diff.title).read_text(encoding="utf-8")
    lines = diff.text.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    assert original.count(old) == 1, f"these lines stand {original.count(old)} times in {diff.title}:\n{old}"
    (copy / diff.title).write_text(original.replace(old, new), encoding="utf-8")
    return original
