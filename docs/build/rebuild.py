"""Rebuild the engine: write its functions yourself, stage by stage, and let its tests judge them.

    python docs/build/rebuild.py                      the stages, and how far you are
    python docs/build/rebuild.py start 3 FOLDER       a copy of the package without the functions of stage 3
    python docs/build/rebuild.py check 3 FOLDER       run the stage's tests on it; exits with 0 when done
    python docs/build/rebuild.py check 3 FOLDER --all       all that is wrong, not the first of each function
    python docs/build/rebuild.py hint 3 FOLDER        the next hint
    python docs/build/rebuild.py diff 3 FOLDER        your functions and the source's
    python docs/build/rebuild.py peek NAME            the source's own body, e.g. of BlockManager.take
    python docs/build/rebuild.py look 3 FOLDER        your engine at work: the blocks, a page for the browser
    python docs/build/rebuild.py race FOLDER          your engine beside the source's, in tokens per second

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
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs" / "build"
sys.path.insert(0, str(HERE))
from stages import STAGES  # noqa: E402

from nanopaged.terminal import run_program  # noqa: E402

LAST = Path(".rebuild.json")  # the folder of the last `start`, noted where the command was given
NOTES = "rebuild.json"  # in a folder: what is known of each stage
Wrong = tuple[str, str]  # (function or "", a sentence)
RACE = ["--shape", "28m", "--requests", "8", "--max-input", "64", "--max-output", "64", "--repeat", "3"]


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("command", nargs="?", default="list", choices=["list", "peek", "race", *COMMANDS])
    parser.add_argument("stage", nargs="?", help="1 to 9; for `peek` the name of a function")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--all", action="store_true", help="for `check`: all that is wrong")
    args = parser.parse_args()
    try:
        if args.command == "list":
            list_stages(Path(args.stage) if args.stage else last_folder())
        elif args.command == "peek":
            peek(args.stage or "")
        elif args.command == "race":
            sys.exit(race(Path(args.stage) if args.stage else last_folder()))
        elif args.stage is None or args.stage not in map(str, STAGES):
            raise ValueError(f"which stage? One of {', '.join(map(str, STAGES))}, got {args.stage}")
        else:
            folder = args.folder or (None if args.command == "start" else last_folder())
            if folder is None:
                raise ValueError(
                    f"which folder? python docs/build/rebuild.py {args.command} {args.stage} FOLDER"
                )
            options = {"show_all": True} if args.command == "check" and args.all else {}
            sys.exit(COMMANDS[args.command](int(args.stage), folder, **options))
    except ValueError as error:
        parser.error(str(error))


def last_folder() -> Path | None:
    return Path(read_note(LAST, str)) if LAST.exists() else None


# ── the source, by name ───────────────────────────────────────────────────────────────────────────


parse = cache(ast.parse)


def find_function(source: str, name: str) -> ast.FunctionDef:
    """The definition of `Class.method` or `function`.

    Raises:
        ValueError: there is no such function, or the source is not Python.
    """
    try:
        body: list[ast.stmt] = parse(source).body
    except SyntaxError as error:
        raise ValueError(
            f"the file of {name} cannot be read: {type(error).__name__} in line {error.lineno}: {error.msg}"
        ) from None
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            raise ValueError(f"there is no function {name}")
        node, body = found[0], getattr(found[0], "body", [])
    assert isinstance(node, ast.FunctionDef)
    return node


def body_lines(node: ast.FunctionDef) -> tuple[int, int]:
    """The lines of a function's body, without its docstring: [first, end), counted from 0."""
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return first.lineno - 1, node.end_lineno
    return first.end_lineno, node.end_lineno


def body_of(source: str, name: str) -> str:
    first, end = body_lines(find_function(source, name))
    return "".join(source.splitlines(keepends=True)[first:end])


def blank_body(source: str, name: str, number: int) -> str:
    """What stands in the place of a function's body."""
    node = find_function(source, name)
    indent = " " * (node.col_offset + 4)
    return f'{indent}raise NotImplementedError("stage {number}: {name}")\n'


def is_blank(source: str, name: str) -> bool:
    return 'raise NotImplementedError("stage ' in body_of(source, name)


def read(folder: Path, file: str) -> str:
    return (folder / file).read_text(encoding="utf-8")


def write_bodies(folder: Path, file: str, bodies: dict[str, str]) -> None:
    """Replace the bodies of functions in a file of the folder; they are indented as in the source."""
    source = read(folder, file)
    lines = source.splitlines(keepends=True)
    places = {body_lines(find_function(source, name)): body for name, body in bodies.items()}
    for (first, end), body in sorted(places.items(), reverse=True):  # the last first: line numbers stay
        lines[first:end] = [body]
    (folder / file).write_text("".join(lines), encoding="utf-8")


# ── the commands ──────────────────────────────────────────────────────────────────────────────────


def notes_of(folder: Path) -> dict[str, Any]:
    """What `check` and `hint` have noted in a folder: stage → its state, and its hints so far."""
    return read_note(folder / NOTES, dict) if (folder / NOTES).exists() else {}


def read_note(file: Path, kind: type) -> Any:
    """What `start` has written to a file.

    Raises:
        ValueError: the file has been changed since.
    """
    with suppress(ValueError):
        if isinstance(content := json.loads(file.read_text(encoding="utf-8")), kind):
            return content
    raise ValueError(f"{file} is broken: delete it, and start the stage again (what you wrote is kept)")


def note(folder: Path, number: int, **facts: Any) -> None:
    notes = notes_of(folder)
    notes[str(number)] = notes.get(str(number), {}) | facts
    (folder / NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")


def list_stages(folder: Path | None) -> None:
    notes = notes_of(folder) if folder is not None and folder.is_dir() else {}
    print(
        f"in {folder}"
        if folder is not None
        else "nothing is begun: python docs/build/rebuild.py start 1 FOLDER"
    )
    for number, stage in STAGES.items():
        state = notes.get(str(number), {}).get("state", "not begun")
        print(f"{number}  {state:10} {stage.title}  (docs/book/{stage.chapter}, docs/build/{number}.md)")
        for line in textwrap.wrap(", ".join(name for _, name in stage.functions), 96):
            print(f"   {'':10} {line}")


def start(number: int, folder: Path) -> int:
    """Copy the package, and blank the functions of the stage that the reader has not written yet."""
    stage = STAGES[number]
    if folder.resolve() == ROOT or ROOT / "nanopaged" in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"{folder} is the engine itself: give another folder")
    if not (folder / "nanopaged").exists():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "nanopaged", folder / "nanopaged", ignore=ignore)
    notes = notes_of(folder)
    begun = {name for each in notes for _, name in STAGES[int(each)].functions}
    print(f"stage {number}: {stage.title}. Its page is docs/build/{number}.md. Write:")
    for file, name in stage.functions:
        source = read(folder, file)
        if name in begun and not is_blank(source, name):
            more = "kept" if str(number) in notes else "kept: this stage asks more of it"
            print(f"  {folder / file}: {name} (yours, {more})")
            continue
        write_bodies(folder, file, {name: blank_body(source, name, number)})
        print(f"  {folder / file}:{find_function(source, name).lineno}: {name}")
    LAST.write_text(json.dumps(str(folder.resolve())), encoding="utf-8")
    if str(number) not in notes:
        note(folder, number, state="begun")
    print(f"then: python docs/build/rebuild.py check {number} {folder}")
    return 0


def check(number: int, folder: Path, show_all: bool = False) -> int:
    """Run the stage's tests on the package in the folder. Returns 0 if all pass."""
    check_folder(folder, f"start {number} {folder}")
    if str(number) not in notes_of(folder):
        raise ValueError(f"stage {number} is not begun: python docs/build/rebuild.py start {number} {folder}")
    functions = STAGES[number].functions
    blank = [name for file, name in functions if is_blank(read(folder, file), name)]
    if blank:
        print(f"not written yet: {', '.join(blank)}")
    if len(blank) == len(functions):
        return 1
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        copy = Path(name, "stage")
        complete_copy(folder, copy, {number})
        wrong = judge(number, copy, blank)
        wrong = [(function, with_own_lines(text, copy, folder)) for function, text in wrong]
        note_on_others = ""
        if not wrong and not blank:
            wrong, note_on_others = compare_texts(number, folder, copy, Path(name))
        took = time.monotonic() - began
    print_wrong(wrong, show_all)
    if wrong or blank:
        note(folder, number, state="failing" if wrong else "begun")
        if not wrong:
            print("What you have written is right, as far as it can be judged alone.")
        return 1
    note(folder, number, state="done")
    print(f"stage {number} is done, after {took:.0f} s of tests.{note_on_others}")
    print(f"see it at work: python docs/build/rebuild.py look {number} {folder}")
    return 0


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


def compare_texts(number: int, folder: Path, copy: Path, scratch: Path) -> tuple[list[Wrong], str]:
    """Print what the reader's engine says, and what the source's does.

    Returns what is wrong with the stage; and if nothing is, a remark on other stages that are.
    """
    whole = scratch / "whole"
    complete_copy(folder, whole, set(STAGES))
    engines, readers, all_of_readers = texts_of(ROOT, copy, whole)
    print(f"yours:\n{textwrap.indent(readers, '    ')}\nthe engine's:\n{textwrap.indent(engines, '    ')}")
    if readers != engines:
        return [("", f"The tests pass, but the texts above differ. {changes_elsewhere(folder)}")], ""
    if all_of_readers == engines:
        return [], ""
    others = [stage for stage in STAGES if stage != number]
    for stage in others:
        complete_copy(folder, scratch / str(stage), {stage})
    texts = texts_of(*(scratch / str(stage) for stage in others))
    at_fault = [str(stage) for stage, text in zip(others, texts, strict=True) if text != engines]
    stages = " and ".join(at_fault) or "several that do not fit together"
    return [], (
        f" With all that you have written the engine says something else. The fault is not in stage {number} "
        f"but in stage {stages}: `check` says more about it."
    )


def check_folder(folder: Path, way_out: str) -> None:
    if not (folder / "nanopaged").is_dir():
        raise ValueError(f"there is no {folder / 'nanopaged'}: python docs/build/rebuild.py {way_out}")


def complete_copy(folder: Path, copy: Path, numbers: set[int]) -> None:
    """Copy the reader's package. Blanks, and functions of other stages than these, get the source's bodies.

    So a stage is judged by its own functions: another one may be unfinished, or wrong.
    """
    shutil.copytree(folder / "nanopaged", copy / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    kept = {function for number in numbers for function in STAGES[number].functions}
    functions = {function for stage in STAGES.values() for function in stage.functions}
    for file in {file for file, _ in functions}:
        source, ours = read(copy, file), read(ROOT, file)
        names = [name for each, name in functions if each == file and source != ours]
        names = [name for name in names if (file, name) not in kept or is_blank(source, name)]
        write_bodies(copy, file, {name: body_of(ours, name) for name in names})


def with_own_lines(sentence: str, copy: Path, folder: Path) -> str:
    """A place such as (scheduler.py:98) in the copy becomes that line of the reader's file."""

    def own(found: re.Match[str]) -> str:
        line = int(found[2]) - 1
        for file in (copy / "nanopaged").rglob(found[1]):
            path = str(file.relative_to(copy))
            copied, written = read(copy, path).splitlines(), read(folder, path).splitlines()
            for same in difflib.SequenceMatcher(None, copied, written, autojunk=False).get_matching_blocks():
                if same.a <= line < same.a + same.size:
                    return f"({found[1]}:{line - same.a + same.b + 1})"
        return found[0]

    return re.sub(r"\((\w+\.py):(\d+)\)", own, sentence)


def changes_elsewhere(folder: Path) -> str:
    """Which line of the reader's package differs from the source's, outside of all functions to write."""
    with tempfile.TemporaryDirectory() as name:
        complete_copy(folder, Path(name), set())
        for file in sorted((ROOT / "nanopaged").rglob("*.py")):
            path = str(file.relative_to(ROOT))
            engines = read(ROOT, path).splitlines()
            readers = read(Path(name), path).splitlines() if Path(name, path).exists() else []
            if engines != readers:
                same = os.path.commonprefix([engines, readers])
                line = len(same) + 1
                return f"Outside of the functions to write, {path} differs from the source's in line {line}."
    return "The functions of this stage change what the engine says."


def judge(number: int, copy: Path, blank: list[str]) -> list[Wrong]:
    """What is wrong: by the stage's own tests and, if these pass, by the suite's."""
    names = ",".join(name.split(".")[-1] for name in blank)
    run = f"import one_sentence; one_sentence.judge({number}, {str(copy / 'report.json')!r}, {names!r})"
    done = run_python([sys.executable, "-c", run], copy)
    return verdict(copy, done.returncode, done.stdout + done.stderr)


def verdict(copy: Path, status: int, printed: str) -> list[Wrong]:
    """What a run of the judge has found wrong; nothing if all tests have passed."""
    if status == 0:
        return []
    report = copy / "report.json"
    said = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"at": "", "sentences": []}
    wrong = [(function, text) for function, text in said["sentences"]]
    if said["at"]:  # the process ended in the middle of a test
        wrong.append(("", what_ended(status, said["at"])))
    lines = printed.strip().splitlines() or [f"status {status}"]
    return wrong or [("", f"The tests cannot run: {lines[-1].removeprefix('E').strip()}")]


def what_ended(status: int, at: str) -> str:
    """Why the process of the tests is gone."""
    if status < 0:
        how = f"{signal.Signals(-status).name}: mostly an address outside of a tensor, or no memory left"
        return f"The process crashes ({how}) where the tests look at this: {at}."
    return f"The tests wait in vain where they look at this: {at}. Is there a loop that never ends?"


def run_python(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run a command with the package of the folder, and the helpers of the tests."""
    paths = [folder.resolve(), HERE, ROOT / "tests"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "TRITON_INTERPRET": "1",
    }
    # In the folder, because Python looks for `nanopaged` first where it was started.
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def texts_of(*folders: Path) -> list[str]:
    """What the tiny model says with the package of each folder, or why it says nothing."""
    done = run_python([sys.executable, str(HERE / "texts.py"), *map(str, folders)], HERE)
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1])
    return [(done.stderr.strip().splitlines() or [f"it ends with status {done.returncode}"])[-1]] * len(
        folders
    )


def look(number: int, folder: Path) -> int:
    """Show the reader's engine at work on a scene of the stage."""
    check_folder(folder, f"start {number} {folder}")
    with tempfile.TemporaryDirectory() as name:
        complete_copy(folder, Path(name), set(STAGES))
        page = folder.resolve() / f"look_{number}.html"
        done = run_python([sys.executable, str(HERE / "look.py"), str(number), str(page)], Path(name))
    print(done.stdout if done.returncode == 0 else (done.stderr.strip().splitlines() or ["nothing"])[-1])
    return done.returncode


def race(folder: Path | None) -> int:
    """Run bench.py with the reader's engine beside the source's, on a size that takes less than a minute."""
    if folder is None:
        raise ValueError("which folder? python docs/build/rebuild.py race FOLDER")
    check_folder(folder, f"start 1 {folder}")
    functions = [function for stage in STAGES.values() for function in stage.functions]
    blank = [name for file, name in functions if is_blank(read(folder, file), name)]
    if blank:
        print(f"not written yet, so the source's: {', '.join(dict.fromkeys(blank))}")
    with tempfile.TemporaryDirectory() as name:
        complete_copy(folder, Path(name, "yours"), set(STAGES))
        command = [sys.executable, str(ROOT / "bench.py"), "--baseline", "yours", *RACE]
        return subprocess.run(command, cwd=name).returncode


def hint(number: int, folder: Path) -> int:
    """Print the hints so far and the next one."""
    hints = STAGES[number].hints
    given = min(notes_of(folder).get(str(number), {}).get("hints", 0) + 1, len(hints))
    note(folder, number, hints=given)
    for i, text in enumerate(hints[:given], start=1):
        print(f"{i}. {text}")
    if given == len(hints):
        print("There are no more. `peek NAME` shows the source's own body.")
    return 0


def peek(name: str) -> None:
    """Print the source's own function."""
    for stage in STAGES.values():
        for file, each in stage.functions:
            if name in (each, each.split(".")[-1]):
                node = find_function(read(ROOT, file), each)
                lines = read(ROOT, file).splitlines()
                print(f"# {file}\n" + textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
                return
    names = [each for stage in STAGES.values() for _, each in stage.functions]
    raise ValueError(f"which function? One of {', '.join(dict.fromkeys(names))}, got {name!r}")


def diff(number: int, folder: Path) -> int:
    """Print how the reader's functions differ from the source's."""
    for file, name in STAGES[number].functions:
        ours, theirs = body_of(read(ROOT, file), name), body_of(read(folder, file), name)
        lines = difflib.unified_diff(
            ours.splitlines(), theirs.splitlines(), f"the engine's {name}", f"yours in {folder}", lineterm=""
        )
        print("\n".join(lines) or f"{name}: the same")
    return 0


COMMANDS = {"start": start, "check": check, "hint": hint, "diff": diff, "look": look}

if __name__ == "__main__":
    run_program(main)
