"""What the front page and the comparison with other engines say of this project's size."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

from doc_pages import ROOT

PACKAGE = ROOT / "nanopaged"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(file: Path) -> int:
    """Without docstrings, comments and blank lines."""
    text = file.read_text(encoding="utf-8")
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def lines_of_cpp(file: Path) -> int:
    """Without comments, which begin with // everywhere, and blank lines."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return sum(bool(line.partition("//")[0].strip()) for line in lines)


def test_our_own_counts() -> None:
    """Lines to the nearest hundred (of C++ to the nearest twenty), in every table and sentence."""
    counts = [lines_of_code(file) for file in PACKAGE.rglob("*.py")]
    files, python = sum(count > 0 for count in counts), f"{round(sum(counts), -2):,}"
    cpp = sum(lines_of_cpp(file) for name in ("*.cpp", "*.h") for file in PACKAGE.rglob(name))
    readme, chinese, production = (
        (ROOT / page).read_text(encoding="utf-8")
        for page in ("README.md", "docs/zh/README.md", "docs/reference/production.md")
    )
    cpp = f"{20 * round(cpp / 20)}"
    assert f" {files} files, {python} lines of Python and {cpp} of C++ in all" in readme
    assert f"{files} 个文件，{python} 行 Python 和 {cpp} 行 C++" in chinese
    for page in (readme, production):
        (row,) = re.findall(r"^\| lines of Python[^|]*\| ([^|]*) \|", page, re.MULTILINE)
        assert row == python
