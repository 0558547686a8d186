"""Small wrong changes to the package, one at a time: does a test fail for each of them?

    python tests/mutate.py --num 100 --seed 0        a sample of the mutants of the whole package
    python tests/mutate.py --num 0 nanopaged/swap.py    all mutants of one file

Prints a line for each mutant: where it is, the change, and the test that failed, or SURVIVED. A survivor is a
missing test, a line that is not needed, or an equivalent program. (Needs Linux or macOS.)
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"nanopaged": "engine", "attention": "kernels"}  # of the package → of the tests; others are alike
CPU_SECONDS = 600  # for the tests of one mutant, because a mutant may loop forever
MEMORY = 16 << 30  # bytes, for the same reason
SWAPS = {
    "Lt": "LtE", "LtE": "Lt", "Gt": "GtE", "GtE": "Gt", "Eq": "NotEq", "NotEq": "Eq", "Is": "IsNot",
    "IsNot": "Is", "In": "NotIn", "NotIn": "In", "And": "Or", "Or": "And", "Add": "Sub", "Sub": "Add",
    "BitAnd": "BitOr", "BitOr": "BitAnd", "Mult": "FloorDiv", "FloorDiv": "Mult", "Div": "Mult", "Mod": "Add",
}  # fmt: skip
NOT_MUTATED = (ast.JoinedStr, ast.arguments, ast.Assert)  # messages, signatures, invariants


@dataclass
class Mutant:
    """One changed file."""

    file: str
    line: int
    change: str
    source: bytes


def with_other(op: ast.AST, node: ast.AST) -> str:
    """The source of a node with another operator."""
    changed = copy.copy(node)
    name = type(op).__name__
    changed.op = getattr(ast, SWAPS.get(name, name))()
    changed.ops = [changed.op]
    return ast.unparse(changed)


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Parts of the node, and what may stand in their place."""
    match node:
        case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op):
            yield node, f"({with_other(op, node)})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, ast.unparse(operand)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test]):
            yield test, "True"
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"
        case ast.AugAssign(op=op):
            yield node, with_other(op, node)
            yield node, "pass"
        case ast.Expr(value=ast.Constant()):
            return  # a docstring
        case ast.Expr() | ast.Assign() | ast.Delete() | ast.Return() | ast.Raise():
            yield node, "pass"


def nodes_in_functions(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """All nodes whose change a test should notice."""
    for child in ast.iter_child_nodes(tree):
        is_annotation = child in (getattr(tree, "annotation", None), getattr(tree, "returns", None))
        if is_annotation or isinstance(child, NOT_MUTATED):
            continue
        if inside:
            yield child
        yield from nodes_in_functions(child, inside or isinstance(tree, ast.FunctionDef))


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = (ROOT / file).read_bytes()
    lines = source.splitlines(keepends=True)
    for node in nodes_in_functions(ast.parse(source)):
        for place, text in changes(node):
            begin = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
            end = sum(map(len, lines[: place.end_lineno - 1])) + place.end_col_offset
            before = " ".join(source[begin:end].decode().split())
            if before != text.strip("()"):
                changed = source[:begin] + text.encode() + source[end:]
                yield Mutant(file, place.lineno, f"{before}  →  {text}", changed)


def tests_of(file: str) -> list[str]:
    """The tests of a file, such as nanopaged/scheduler.py, those that find most in the least time first.

    These are the test of the same name, the random workloads, those that import the file's module, then the
    rest of the folder for this part of the package.
    """
    path = Path(file).absolute().relative_to(ROOT)
    folder = FOLDERS.get(path.parent.name, path.parent.name)
    tests = sorted((ROOT / "tests").glob("*/test_*.py"), key=lambda test: (test.parent.name != folder, test))
    found = [test for test in tests if test.stem == f"test_{path.stem}"]
    found += [test for test in tests if test.stem == "test_random_runs" and folder == "engine"]
    name = re.compile(rf"nanopaged[.\w]*\.{path.stem}\b|import .*\b{path.stem}\b")
    found += [test for test in tests if test.parent.name != "docs" and name.search(test.read_text("utf-8"))]
    found += [test for test in tests if test.parent.name == folder]
    return [test.relative_to(ROOT).as_posix() for test in dict.fromkeys(found)]


def limit() -> None:
    """What the tests of one mutant may use."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def failing_test(folder: Path, tests: list[str]) -> str | None:
    """The test that fails in this copy of the repository; None if all pass."""
    # A file that changes twice in a second would be taken from the cache of bytecode.
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=folder, env=environment, preexec_fn=limit, capture_output=True, text=True
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1].removeprefix("tests/") if failed else "the tests do not end, or not by themselves"


def main() -> None:
    """Sample, test, print."""
    package = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "nanopaged").rglob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", default=package, help="of the package; all of them if none")
    parser.add_argument("--num", type=int, default=100, help="mutants in the sample, 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    args = parser.parse_args()
    everything = [mutant for file in args.files for mutant in mutants(file)]
    sample = random.Random(args.seed).sample(everything, min(args.num or len(everything), len(everything)))
    num_killed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("nanopaged", "tests", "docs/experiments", "docs/forks", "docs/site"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        needed = {test: None for mutant in sample for test in tests_of(mutant.file)}
        if (test := failing_test(folder, list(needed))) is not None:
            sys.exit(f"{test} fails without any change")
        for mutant in sorted(sample, key=lambda mutant: (mutant.file, mutant.line)):
            (folder / mutant.file).write_bytes(mutant.source)
            test = failing_test(folder, tests_of(mutant.file))
            shutil.copy(ROOT / mutant.file, folder / mutant.file)
            num_killed += test is not None
            print(f"{mutant.file}:{mutant.line}  {mutant.change:60}  {test or 'SURVIVED'}", flush=True)
    print(f"{num_killed} of {len(sample)} mutants killed ({len(everything)} in all, seed {args.seed})")


if __name__ == "__main__":
    main()
