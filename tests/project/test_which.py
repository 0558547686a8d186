"""which.py: the tests of every file of the package."""

from __future__ import annotations

import which
from which import ROOT, TESTS

PACKAGE = ROOT / "nanopaged"


def test_every_file_of_the_package_has_tests() -> None:
    """Except a file without code; and the tests exist."""
    files = [file for file in PACKAGE.rglob("*.py") if file.read_text(encoding="utf-8").strip()]
    assert TESTS.keys() == {file.relative_to(PACKAGE).as_posix() for file in files}
    assert all(which.tests_of(str(file)) for file in files)
