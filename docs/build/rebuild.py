"""Rebuild the engine: write its functions yourself, stage by stage, and let its tests judge them.

    python docs/build/rebuild.py                      the stages, and how far you are
    python docs/build/rebuild.py start 3 FOLDER       a copy of the package without the functions of stage 3
    python docs/build/rebuild.py check 3 FOLDER       run the stage's tests on it; exits with 0 when done
    python docs/build/rebuild.py check 3 --all        all that is wrong, not only the first of each function
    python docs/build/rebuild.py hint 3 FOLDER        the next hint
    python docs/build/rebuild.py diff 3 FOLDER        your functions and the source's
    python docs/build/rebuild.py peek NAME            the source's own body, e.g. of BlockManager.take

`start` writes FOLDER/nanopaged. A later stage can be started in the same folder: it keeps what you have
written. docs/build has a page for each stage. FOLDER may be left out after `start`: it is the last one.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs" / "build"
sys.path.insert(0, str(HERE))
from stages import STAGES  # noqa: E402

from nanopaged.terminal import run_program  # noqa: E402

LAST = Path(".rebuild")  # the folder of the last `start`, noted where the command was given
NOTES = "rebuild.json"  # in a folder: what is known of each stage
Wrong = tuple[str, str]  # (function or "", a sentence)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("command", nargs="?", default="list", choices=["list", "check", "peek", *COMMANDS])
    parser.add_argument("stage", nargs="?", help="1 to 9; for `peek` the name of a function")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--all", action="store_true", help="for `check`: all that is wrong")
    args = parser.parse_args()
    try:
        if args.command == "list":
            return list_stages(Path(args.stage) if args.stage else last_folder())
        if args.command == "peek":
            return peek(args.stage or "")
        if args.stage is None or args.stage not in map(str, STAGES):
            raise ValueError(f"which stage? One of {', '.join(map(str, STAGES))}, got {args.stage}")
        folder = args.folder or (None if args.command == "start" else last_folder())
        if folder is None:
            raise ValueError(f"which folder? python docs/build/rebuild.py {args.command} {args.stage} FOLDER")
        if args.command != "start" and not (folder / "nanopaged").is_dir():
            raise ValueError(f"there is no {folder / 'nanopaged'}: start {args.stage} {folder}")
        if args.command == "check":
            sys.exit(check(int(args.stage), folder, args.all))
        COMMANDS[args.command](int(args.stage), folder)
    except ValueError as error:
        parser.error(str(error))


# ── the source, by name ───────────────────────────────────────────────────────────────────────────


def find_function(source: str, name: str) -> ast.FunctionDef:
    """The definition of `Class.method` or `function`.

    Raises:
        ValueError: there is no such function, or the source is not Python.
    """
    try:
        node: Any = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(
            f"the file of {name} has a SyntaxError in line {error.lineno}: {error.msg}"
        ) from None
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise ValueError(f"there is no function {name}")
        node = found[0]
    return node


def body_lines(node: ast.FunctionDef) -> tuple[int, int]:
    """The lines of a function's body, without its docstring: [first, end), counted from 0."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    return first.end_lineno if has_docstring else first.lineno - 1, node.end_lineno


def body_of(source: str, name: str) -> str:
    first, end = body_lines(find_function(source, name))
    return "".join(source.splitlines(keepends=True)[first:end])


def is_blank(source: str, name: str) -> bool:
    return 'raise NotImplementedError("stage ' in body_of(source, name)


def read(folder: Path, file: str) -> str:
    return (folder / file).read_text(encoding="utf-8")


def write_body(folder: Path, file: str, name: str, body: str) -> None:
    """Replace the body of a function in a file of the folder; it is indented as in the source."""
    source = read(folder, file)
    lines = source.splitlines(keepends=True)
    first, end = body_lines(find_function(source, name))
    lines[first:end] = [body]
    (folder / file).write_text("".join(lines), encoding="utf-8")


# ── what is known of a folder ─────────────────────────────────────────────────────────────────────


def last_folder() -> Path | None:
    return Path(LAST.read_text(encoding="utf-8")) if LAST.exists() else None


def notes_of(folder: Path) -> dict[str, Any]:
    """What `check` and `hint` have noted in a folder: stage → its state, and its hints so far."""
    file = folder / NOTES
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError:
        raise ValueError(
            f"{file} is broken: delete it, and start the stage again, which keeps your work"
        ) from None


def note(folder: Path, number: int, **facts: Any) -> None:
    notes = notes_of(folder)
    notes[str(number)] = notes.get(str(number), {}) | facts
    (folder / NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")


# ── the commands ──────────────────────────────────────────────────────────────────────────────────


def list_stages(folder: Path | None) -> None:
    notes = notes_of(folder) if folder is not None and folder.is_dir() else {}
    print(f"in {folder}" if folder else "nothing is begun: python docs/build/rebuild.py start 1 FOLDER")
    for number in STAGES:
        state = notes.get(str(number), {}).get("state", "not begun")
        print(f"{state:10} {title_of(number)}  (docs/build/{number}.md)")


def title_of(number: int) -> str:
    """The first heading of a stage's page, without the mark."""
    return read(HERE, f"{number}.md").splitlines()[0].removeprefix("# ")


def start(number: int, folder: Path) -> None:
    """Copy the package, and blank the functions of the stage that the reader has not written yet."""
    stage = STAGES[number]
    if folder.resolve() == ROOT or ROOT / "nanopaged" in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"{folder} is the engine itself: give another folder")
    if not (folder / "nanopaged").exists():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "nanopaged", folder / "nanopaged", ignore=ignore)
    notes = notes_of(folder)
    begun = {name for begun_stage in notes for _, name in STAGES[int(begun_stage)].functions}
    print(f"{title_of(number)}. Its page is docs/build/{number}.md. Write:")
    for file, name in stage.functions:
        source = read(folder, file)
        node = find_function(source, name)
        if name in begun and not is_blank(source, name):
            more = "kept" if str(number) in notes else "kept: this stage asks more of it"
            print(f"  {folder / file}: {name} (yours, {more})")
        else:
            indent = " " * (node.col_offset + 4)
            blank = f'{indent}raise NotImplementedError("stage {number}: {name}")\n'
            write_body(folder, file, name, blank)
            print(f"  {folder / file}:{node.lineno}: {name}")
    LAST.write_text(str(folder.resolve()), encoding="utf-8")
    if str(number) not in notes:
        note(folder, number, state="begun")
    print(f"then: python docs/build/rebuild.py check {number} {folder}")


def check(number: int, folder: Path, show_all: bool) -> int:
    """Run the stage's tests on the package in the folder. Returns 0 if all pass."""
    if str(number) not in notes_of(folder):
        raise ValueError(f"stage {number} is not begun: python docs/build/rebuild.py start {number} {folder}")
    functions = STAGES[number].functions
    blank = [name for file, name in functions if is_blank(read(folder, file), name)]
    if blank:
        print(f"not written yet: {', '.join(blank)}")
    if len(blank) == len(functions):
        return 1
    wrong = judge(number, folder, blank)
    print_wrong(wrong, show_all)
    if not wrong and blank:
        print("What you have written is right, as far as it can be judged alone.")
    is_done = not wrong and not blank
    note(folder, number, state="done" if is_done else "failing" if wrong else "begun")
    if is_done:
        print(f"stage {number} is done. Chat with your engine: cd {folder} && python -m nanopaged")
    return 0 if is_done else 1


def print_wrong(wrong: list[Wrong], show_all: bool) -> None:
    """Print the first sentence of each function, and how many more there are; or all of them."""
    sentences: dict[str, list[str]] = {}
    for function, text in wrong:
        sentences.setdefault(function, []).append(f"`{function}`: {text}" if function else text)
    for first, *others in sentences.values():
        more = f" (+{len(others)} more: --all)" if others and not show_all else ""
        print(f"- {first}{more}")
        for text in others if show_all else ():
            print(f"- {text}")


def hint(number: int, folder: Path) -> None:
    """Print the hints so far and the next one."""
    section = read(HERE, "hints.md").split(f"## Stage {number}\n")[1].split("## ")[0]
    hints = re.split(r"\n(?=\d\. )", section.strip())
    given = min(notes_of(folder).get(str(number), {}).get("hints", 0) + 1, len(hints))
    note(folder, number, hints=given)
    print("\n".join(hints[:given]))
    if given == len(hints):
        print("There are no more. `peek NAME` shows the source's own body.")


def diff(number: int, folder: Path) -> None:
    """Print how the reader's functions differ from the source's."""
    for file, name in STAGES[number].functions:
        bodies = [body_of(read(root, file), name).splitlines() for root in (ROOT, folder)]
        lines = difflib.unified_diff(*bodies, f"the engine's {name}", f"yours in {folder}", lineterm="")
        print("\n".join(lines) or f"{name}: the same")


def peek(name: str) -> None:
    """Print the source's own function."""
    functions = [function for stage in STAGES.values() for function in stage.functions]
    for file, full_name in functions:
        if name in (full_name, full_name.split(".")[-1]):
            source = read(ROOT, file)
            function = ast.get_source_segment(source, find_function(source, full_name), padded=True)
            print(f"# {file}\n{textwrap.dedent(function or '')}")
            return
    names = dict.fromkeys(full_name for _, full_name in functions)
    raise ValueError(f"which function? One of {', '.join(names)}, got {name!r}")


# ── judging ───────────────────────────────────────────────────────────────────────────────────────


def judge(number: int, folder: Path, blank: list[str]) -> list[Wrong]:
    """What is wrong: by the stage's own tests and, if these pass, by the suite's.

    A judge runs with the reader's package, in which functions of other stages and those that are not written
    yet have the source's bodies (see beside.py). So a stage is judged by its own functions.
    """
    paths = [folder.resolve(), HERE, ROOT / "tests", ROOT / "docs" / "forks"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "TRITON_INTERPRET": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        program = f"import one_sentence; one_sentence.judge({number}, {str(report)!r}, {blank})"
        command = [sys.executable, "-c", program]
        # In the folder, because Python looks for `nanopaged` first where it was started.
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        said = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if done.returncode == 0:
        return []
    wrong = [(function, text) for function, text in said.get("sentences", [])]
    if said.get("at"):  # the process has ended in the middle of a test
        how = "waits in vain, perhaps for a loop,"
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            how = f"crashes ({name}: mostly an address outside of a tensor, or no memory left)"
        wrong.append(("", f"The process {how} where the tests look at this: {said['at']}."))
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
    return wrong or [("", f"The tests cannot run: {lines[-1].removeprefix('E').strip()}")]


COMMANDS = {"start": start, "hint": hint, "diff": diff}

if __name__ == "__main__":
    run_program(main)
