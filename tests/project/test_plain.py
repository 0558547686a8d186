"""The package is written plainly: few tokens, one thing a line, and arguments with names.

Line breaks change only the second of these numbers. An f-string counts as one token, as before Python 3.12.
"""

from __future__ import annotations

import ast
from pathlib import Path

from doc_pages import quote

PACKAGE = Path(__file__).parents[2] / "nanopaged"
TREES = {
    file: ast.parse(file.read_text(encoding="utf-8"))
    for file in PACKAGE.rglob("*.py")
    if file.read_text(encoding="utf-8").strip()
}
NODES = [node for tree in TREES.values() for node in ast.walk(tree)]


def names_only_starred(function: ast.FunctionDef) -> set[str]:
    """Tuples with a name that are only unpacked into the arguments of a call."""
    tuples = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            tuples |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    starred, used = [], []
    for node in ast.walk(function):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
            starred.append(node.value.id)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.append(node.id)
    return {name for name in tuples if starred.count(name) > 0 and starred.count(name) == used.count(name)}


def is_packed(assignment: ast.Assign) -> bool:
    """Whether it is `a, b = x, y`: several statements in one."""
    return isinstance(assignment.value, ast.Tuple) and isinstance(assignment.targets[0], ast.Tuple)


def test_the_package_is_plain() -> None:
    lines = [quote.lines_of_code(file.read_text(encoding="utf-8")) for file in TREES]
    num_tokens = sum(map(len, lines))
    assert num_tokens <= 37_000
    assert num_tokens / sum(len(set(of_file)) for of_file in lines) <= 9.3, "tokens a line of code"
    functions = [node for node in NODES if isinstance(node, ast.FunctionDef)]
    assert set().union(*map(names_only_starred, functions)) == set()
    assignments = [node for node in NODES if isinstance(node, ast.Assign)]
    assert sum(map(is_packed, assignments)) <= 0.03 * len(assignments)


def test_a_module_is_one_sitting() -> None:
    """And no folder is made for one or two modules."""
    lengths = {file.name: file.read_text(encoding="utf-8").count("\n") for file in TREES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    folders = [file.parent for file in TREES if file.stem != "__init__"]
    assert min(folders.count(folder) for folder in folders) >= 3
