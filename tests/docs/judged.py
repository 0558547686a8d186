"""Judge many solutions of docs/build: python tests/docs/judged.py FILES [--jobs 2] [--only WORD]

The first number in a file's name is its stage, as in stage_3.py. It has sections, each a solution that
differs from the source's in a few functions. A section begins with a line that says whether it is right:

    # wrong: `take` forgets the reference
    class BlockManager:
        def take(self) -> int:
            return self.free_ids.pop()

    # right: the count is raised
    replace("BlockManager.take", "block.ref_count = 1", "block.ref_count += 1")

Definitions are written as in the source: a method stands in its class, signatures and docstrings do not
count, and imports come inside of the function. All that is not named is the source's. `replace` exchanges a
piece that stands once in the source's body; several may follow each other.

Printed are the verdict and the first sentence of each, then the right verdicts by stage. `judge_all` is the
same from Python. A solution is judged in a fork of this process, so PyTorch is loaded once.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "build")]
import rebuild  # noqa: E402


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
        tree, functions = ast.parse(self.code), rebuild.STAGES[self.stage].functions
        classes = {node.name: {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                   for node in tree.body if isinstance(node, ast.ClassDef)}  # fmt: skip
        given = {f"{name}.{each}" for name, methods in classes.items() for each in methods}
        given |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        calls = [node.value for node in tree.body if isinstance(node, ast.Expr)]
        replaced = [list(map(ast.literal_eval, c.args)) for c in calls if isinstance(c, ast.Call)]
        unknown = {*given, *(name for name, _, _ in replaced)} - {name for _, name in functions}
        if unknown or not (given or replaced):
            raise ValueError(f"{self.title}: {unknown or 'nothing'} is not a function of stage {self.stage}")
        for file, name in functions:
            body = rebuild.body_of(self.code if name in given else rebuild.read(folder, file), name)
            for _, piece, other in (each for each in replaced if each[0] == name):
                if body.count(piece) != 1:
                    raise ValueError(f"{self.title}: {name} has {body.count(piece)} times {piece!r}")
                body = body.replace(piece, other)
            rebuild.write_body(folder, file, name, body)

    def judge(self) -> None:
        """Fill in the sentences."""
        with tempfile.TemporaryDirectory() as name:
            folder, printed = Path(name), Path(name, "printed")
            self.write(folder)
            child = os.fork()
            if child == 0:
                run_judge(self.stage, folder, printed)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            self.sentences = rebuild.verdict(folder, status, printed.read_text(encoding="utf-8"))


SECONDS = [0.0]  # that the imports of `judge_all` have taken


def run_judge(stage: int, folder: Path, printed: Path) -> None:
    """In the forked process: as rebuild.judge, with the modules that are loaded already."""
    ours = tuple(str(ROOT / folder) for folder in ("nanopaged", "docs", "tests"))
    for name, module in list(sys.modules.items()):  # also tests that have imported another nanopaged
        if name != "__main__" and str(getattr(module, "__file__", None)).startswith(ours):
            del sys.modules[name]
    os.chdir(folder)
    file = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1), os.dup2(file, 2)
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


def read_solutions(file: Path) -> Iterator[Solution]:
    stage = int(re.search(r"\d+", file.stem)[0])
    pieces = re.split(r"^# (wrong|right): (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for verdict, title, code in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        yield Solution(stage, verdict == "right", title, code)


def judge_all(files: list[Path], jobs: int = 1, only: str = "") -> list[Solution]:
    """The solutions of all files whose title has the word `only`, judged."""
    os.environ |= {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    began = time.monotonic()
    import torch
    import transformers  # noqa: F401  heavy, and the same for all

    SECONDS[0] = time.monotonic() - began
    torch.set_num_threads(1)
    solutions = [each for file in files for each in read_solutions(file) if only in each.title]
    with ThreadPoolExecutor(jobs) as pool:
        for each, _ in zip(solutions, pool.map(Solution.judge, solutions), strict=True):
            right = each.is_right == (not each.sentences)
            print(
                "ok  " if right else "NOT ",
                each.stage,
                f"{'right' if each.is_right else 'wrong'}: {each.title}",
            )
            print(f"       {each.sentences[0] if each.sentences else 'taken'}", flush=True)
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
    for stage in sorted({each.stage for each in solutions}):
        counts = []
        for is_right in (False, True):
            here = [each for each in solutions if (each.stage, each.is_right) == (stage, is_right)]
            counts.append(f"{sum(is_right == (not each.sentences) for each in here)} of {len(here)}")
        print(f"{stage:<7} {counts[0]:16} {counts[1]}")


if __name__ == "__main__":
    main()
