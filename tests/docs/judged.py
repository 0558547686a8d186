"""Judge solutions of docs/build: python tests/docs/judged.py FILES [--jobs 2] [--only WORD]

tests/docs/solutions/stage_3.py has solutions of stage 3, a section for each. What a section does not name
is the source's. It begins with a line that says whether it is right:

    # wrong: `take` puts a copy in the place of the free list
    class BlockManager:
        def take(self):
            self.free_ids = list(self.free_ids)
            return right(self)

    # wrong: a block that is taken has two references
    replace("BlockManager.take", "_block.ref_count = 1", "_block.ref_count = 2")

A method stands in its class. Signatures and docstrings do not count, imports come inside of the function,
and `right` is the source's own function. `replace` exchanges an expression or a statement wherever it
stands in the source's function. A name that begins with _ stands for any expression, so no local variable
of the source has to be named.

Printed are the verdict and the first sentence of each solution, then the right verdicts by stage.
`judge_all` is the same from Python. A solution is judged in a fork of this process, so PyTorch is loaded
once.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "build")]
import rebuild  # noqa: E402

# ── a solution as a package ───────────────────────────────────────────────────────────────────────


class Replacement(ast.NodeTransformer):
    """Puts `new` in the place of each node like `old`. Fields: num_found: how many there were."""

    def __init__(self, old: str, new: str) -> None:
        (statement,) = ast.parse(old).body
        self.pattern = statement.value if isinstance(statement, ast.Expr) else statement
        self.new = new
        self.num_found = 0

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        found: dict[str, str] = {}
        if not matches(self.pattern, node, found):
            return self.generic_visit(node)
        self.num_found += 1
        text = re.sub(r"\b_\w+", lambda name: found.get(name[0], name[0]), self.new)
        if isinstance(node, ast.stmt):
            return ast.parse(text).body
        return ast.parse(text, mode="eval").body


def matches(pattern: object, node: object, found: dict[str, str]) -> bool:
    """Whether a node is like the pattern. Notes what the pattern's names with an underscore stand for."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_") and isinstance(node, ast.expr):
        text = f"({ast.unparse(node)})"
        return found.setdefault(pattern.id, text) == text
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(map(matches, pattern, node, [found] * len(node)))
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        fields = [name for name in pattern._fields if name != "ctx"]
        return all(matches(getattr(pattern, name), getattr(node, name), found) for name in fields)
    return pattern == node


def replace(source: str, name: str, old: str, new: str) -> str:
    """The body of a function of the source with a replacement."""
    node = copy.deepcopy(rebuild.find_function(source, name))
    replacement = Replacement(old, new)
    node = replacement.generic_visit(node)
    if replacement.num_found == 0:
        raise ValueError(f"{name} has no {old}")
    body = [ast.unparse(statement) for statement in node.body]
    return textwrap.indent("\n".join(body), " " * (node.col_offset + 4)) + "\n"


def define(source: str, name: str, code: str) -> str:
    """The body that the code has for a function, with the source's function in it if it calls `right`."""
    body = rebuild.body_of(code, name)
    if "right(" not in body:
        return body
    node = copy.deepcopy(rebuild.find_function(source, name))
    node.name = "right"
    return textwrap.indent(ast.unparse(node), " " * (node.col_offset + 4)) + "\n" + body


@dataclass
class Solution:
    """One section of a file. Fields: sentences: what the judge says; none if it takes the solution."""

    stage: int
    is_right: bool
    title: str
    code: str
    sentences: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """A package with this solution."""
        rebuild.complete_copy(ROOT, folder, set())
        for name, arguments in self.changes():
            files = [file for file, other in rebuild.STAGES[self.stage].functions if other == name]
            if not files:
                raise ValueError(f"{self.title}: {name} is not a function of stage {self.stage}")
            source = rebuild.read(folder, files[0])
            body = replace(source, name, *arguments) if arguments else define(source, name, self.code)
            rebuild.write_bodies(folder, files[0], {name: body})

    def changes(self) -> Iterator[tuple[str, list[str]]]:
        """The functions that change, with the arguments of `replace`, or none for a definition."""
        for node in ast.parse(self.code).body:
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{method.name}", []) for method in node.body)
            elif isinstance(node, ast.FunctionDef):
                yield node.name, []
            else:
                name, *arguments = map(ast.literal_eval, node.value.args)
                yield name, arguments

    def judge(self) -> None:
        """Fill in the sentences."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            printed = Path(name, "printed")
            self.write(folder)
            child = os.fork()
            if child == 0:
                run_judge(self.stage, folder, printed)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            wrong = rebuild.verdict(folder, status, printed.read_text(encoding="utf-8"))
            self.sentences = [text for _, text in wrong]


def read_solutions(file: Path) -> Iterator[Solution]:
    stage = int(re.search(r"\d+", file.stem)[0])
    pieces = re.split(r"^# (wrong|right): (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for verdict, title, code in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        yield Solution(stage, verdict == "right", title, code)


# ── judging ───────────────────────────────────────────────────────────────────────────────────────

SECONDS = [0.0]  # that the imports of `judge_all` have taken


def run_judge(stage: int, folder: Path, printed: Path) -> None:
    """In the forked process: as rebuild.judge, with the modules that are loaded already."""
    own_code = tuple(str(ROOT / folder) for folder in ("nanopaged", "docs", "tests"))
    for name, module in list(sys.modules.items()):  # also tests that have imported another nanopaged
        if name != "__main__" and str(getattr(module, "__file__", None)).startswith(own_code):
            del sys.modules[name]
    os.chdir(folder)
    file = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.path[:0] = [str(folder), str(rebuild.HERE), str(ROOT / "tests")]
    sys.modules["__main__"].__file__ = str(rebuild.HERE / "stages.py")  # a spawned rank imports it

    import one_sentence

    one_sentence.BEGAN -= SECONDS[0]  # time limits follow from what the imports take
    try:
        one_sentence.judge(stage, str(folder / "report.json"))
    except SystemExit as end:
        os._exit(end.code or 0)
    finally:
        os._exit(3)


def judge_all(files: list[Path], jobs: int = 1, only: str = "") -> list[Solution]:
    """The solutions of all files whose title has the word `only`, judged."""
    os.environ |= {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    began = time.monotonic()
    import torch
    import transformers  # noqa: F401  heavy, and the same for all

    SECONDS[0] = time.monotonic() - began
    torch.set_num_threads(1)
    solutions = [solution for file in files for solution in read_solutions(file) if only in solution.title]
    with ThreadPoolExecutor(jobs) as pool:
        for solution, _ in zip(solutions, pool.map(Solution.judge, solutions), strict=True):
            verdict = "ok " if solution.is_right == (not solution.sentences) else "NOT"
            kind = "right" if solution.is_right else "wrong"
            print(f"{verdict} {solution.stage} {kind}: {solution.title}")
            print(f"       {solution.sentences[0] if solution.sentences else 'taken'}", flush=True)
    return solutions


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="a word of the title")
    args = parser.parse_args()
    solutions = judge_all(args.files, args.jobs, args.only)
    print("stage   wrong, refused   right, taken")
    for stage in sorted({solution.stage for solution in solutions}):
        counts = []
        for is_right in (False, True):
            kind = [s for s in solutions if (s.stage, s.is_right) == (stage, is_right)]
            judged = [s for s in kind if is_right == (not s.sentences)]
            counts.append(f"{len(judged)} of {len(kind)}")
        print(f"{stage:<7} {counts[0]:16} {counts[1]}")


if __name__ == "__main__":
    main()
