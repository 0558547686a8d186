"""What the front page and the comparison with other engines say of this project's size."""

from __future__ import annotations

import re

from doc_pages import ROOT
from programs import load_file

plain = load_file(ROOT / "tests" / "project" / "test_plain.py")


def lines_of_cpp() -> int:
    """Without comments, which begin with // everywhere, and blank lines."""
    files = [file for file in plain.PACKAGE.rglob("*") if file.suffix in (".cpp", ".h")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return len([line for line in lines if line.partition("//")[0].strip()])


def test_our_own_counts() -> None:
    """Tokens and lines to the nearest hundred (lines of C++ to the nearest twenty), on every page."""
    lines_of_files = [plain.lines_of_tokens(file) for file in plain.TREES]
    num_files = len(lines_of_files)
    num_tokens = f"{round(sum(len(lines) for lines in lines_of_files), -2):,}"
    num_lines = f"{round(sum(len(set(lines)) for lines in lines_of_files), -2):,}"
    num_cpp = 20 * round(lines_of_cpp() / 20)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "docs" / "zh" / "README.md").read_text(encoding="utf-8")
    production = (ROOT / "docs" / "reference" / "production.md").read_text(encoding="utf-8")
    assert f" {num_files} files with {num_lines} lines of Python ({num_tokens} tokens," in readme
    assert f" {num_cpp} lines of C++." in readme
    assert f" {num_files} 个文件，{num_lines} 行 Python" in chinese
    assert f"共 {num_tokens} 个词法单元）和 {num_cpp} 行 C++" in chinese
    for page in (readme, production):
        rows = dict(re.findall(r"^\| (tokens|lines) of Python \| ([\d,]+) \|", page, re.MULTILINE))
        assert rows == {"tokens": num_tokens, "lines": num_lines}
