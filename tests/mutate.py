"""Small wrong changes to the package, one at a time: does a test fail for each of them?

    python tests/mutate.py --num 100 --seed 0        a sample of the mutants of all files below
    python tests/mutate.py --num 0 nanopaged/swap.py    all mutants of one file

Prints a line for each mutant: where it is, the change, and the test that failed, or SURVIVED. A survivor is a
missing test, a line that is not needed, or an equivalent program. (Needs `os.fork`: Linux or macOS.)
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from which import TESTS, tests_of

# As conftest.py: kernels are interpreted without a GPU, and transformers imports triton.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM  # noqa: E402, F401  see `os.fork`

ROOT = Path(__file__).parents[1]
CPU_SECONDS = 120  # for one test: a mutant that loops for ever is killed, too
MEMORY = 16 << 30  # bytes that are written to, for the same reason (a browser reserves far more addresses)
OPTIONS = ["--random-runs", "100", "-m", "not slow"]  # random runs of each kind
FILES = [f"nanopaged/{file}" for file in TESTS]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Return, ast.Raise)
NOT_MUTATED = (ast.JoinedStr, ast.arguments, ast.Assert)  # messages, signatures, invariants
CHECKS = ("check_blocks", "_check_table", "check_host_blocks")  # called by other tests, too


@dataclass
class Mutant:
    """One changed file."""

    file: str
    line: int
    change: str
    source: str


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may stand in the place of this one."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield _with(node, "ops", [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]])
    elif type(getattr(node, "op", None)) in SWAPS:
        yield _with(node, "op", SWAPS[type(node.op)]())
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield _with(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield _with(node, "ifs", [])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
    if isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, DROPPED) and not is_text:
        yield ast.Pass()


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return changed


def places(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, str, int | None]]:
    """(parent, field, index) of each node in a function, except annotations, messages and invariants."""
    for field, value in ast.iter_fields(tree):
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            is_code = isinstance(child, ast.AST) and not isinstance(child, NOT_MUTATED)
            is_left = field in ("annotation", "returns") or getattr(child, "name", "") in CHECKS
            if is_code and not is_left:
                if inside:
                    yield tree, field, i if isinstance(value, list) else None
                yield from places(child, inside or isinstance(tree, ast.FunctionDef))


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for parent, field, i in list(places(tree)):
        siblings = getattr(parent, field)
        node = siblings if i is None else siblings[i]
        for changed in list(changes(node)):
            new = changed if i is None else [*siblings[:i], changed, *siblings[i + 1 :]]
            setattr(parent, field, new)
            source = ast.unparse(ast.fix_missing_locations(tree))
            setattr(parent, field, siblings)
            before, after = (ast.unparse(n).partition("\n")[0].strip() for n in (node, changed))
            yield Mutant(file, getattr(node, "target", node).lineno, f"{before}  →  {after}", source)


class LastTest:
    """A pytest plugin that writes the name of each test as it begins, and ends one that loops for ever."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(nodeid.removeprefix("tests/"), encoding="utf-8")
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def failing_test(folder: Path, mutant: Mutant | None, tests: list[str]) -> str | None:
    """The test that fails for the mutant, in this copy of the repository; None if all pass."""
    if mutant is not None:
        shutil.copy(folder / mutant.file, folder / "unchanged")
        (folder / mutant.file).write_text(mutant.source, encoding="utf-8")
    last_test = folder / "last_test"
    last_test.write_text("none: the tests cannot be imported", encoding="utf-8")
    child = os.fork()  # with torch and transformers' models, which take seconds to import
    if child == 0:
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True  # a file that changes twice in a second would be taken from the cache
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os._exit(pytest.main([*dict.fromkeys(tests), "-x", "-p", "no:cacheprovider"], [LastTest(last_test)]))
    _, status = os.waitpid(child, 0)
    if mutant is not None:
        shutil.copy(folder / "unchanged", folder / mutant.file)
    return last_test.read_text(encoding="utf-8") if status else None


def main() -> None:
    """Sample, test, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="of the package; all of them if none")
    parser.add_argument("--num", type=int, default=100, help="mutants in the sample, 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    args = parser.parse_args()
    everything = [mutant for file in args.files for mutant in mutants(file)]
    sample = random.Random(args.seed).sample(everything, min(args.num or len(everything), len(everything)))
    num_killed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("nanopaged", "tests", "docs/experiments"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        needed = [test for file in {each.file for each in sample} for test in tests_of(file)] + OPTIONS
        if (test := failing_test(folder, None, needed)) is not None:
            sys.exit(f"{test} fails without any change")
        for mutant in sorted(sample, key=lambda mutant: (mutant.file, mutant.line)):
            test = failing_test(folder, mutant, tests_of(mutant.file) + OPTIONS)
            num_killed += test is not None
            print(f"{mutant.file}:{mutant.line}  {mutant.change:60}  {test or 'SURVIVED'}", flush=True)
    print(f"{num_killed} of {len(sample)} mutants killed ({len(everything)} in all, seed {args.seed})")


if __name__ == "__main__":
    main()
