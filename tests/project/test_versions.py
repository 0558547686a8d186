"""versions.py and its table in docs/using.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import versions
from versions import COLUMNS, ROOT

FIRST, *REST = COLUMNS
TABLE = re.compile(rf"^\| {FIRST} \| {REST[0]} .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def rows_of_the_page() -> list[dict[str, str]]:
    """The rows of the table: column → what stands there."""
    table = TABLE.search((ROOT / "docs" / "using.md").read_text(encoding="utf-8"))
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()]
    assert header == [*COLUMNS, *versions.COUNTS, "date"]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_every_promise_was_tried_at_its_lower_bound() -> None:
    """A bound of pyproject.toml that is changed must be tried: a row has it, and its tests passed."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = {name: re.search(rf'"{name}>=([\d.]+)', project)[1] for name in REST}
    promised[FIRST] = re.search(r'requires-python = ">=([\d.]+)"', project)[1]

    def has(row: dict[str, str]) -> bool:
        return all(f"{row[name]}.".startswith(f"{bound}.") for name, bound in promised.items())

    [oldest] = filter(has, rows_of_the_page())
    assert oldest["failed"] == "0"
    assert int(oldest["passed"]) > 0


@pytest.mark.slow
def test_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a fixture and of a file that cannot be collected are failures."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_a(): pass\ndef test_b(): pass\ndef test_c(): assert False\ndef test_d(broken): pass\n"
        "@pytest.mark.skip\ndef test_e(): pass\n",
        encoding="utf-8",
    )
    broken = "import a_module_that_is_not_there"
    (tmp_path / "test_not_a_file_of_tests.py").write_text(broken, encoding="utf-8")
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "SELECTIONS", [["test_some.py"], ["test_not_a_file_of_tests.py"]])
    assert versions.run_tests(sys.executable, tmp_path) == {"passed": 2, "failed": 3, "skipped": 1}
    monkeypatch.setattr(versions, "SELECTIONS", [["--no-such-option"]])
    with pytest.raises(RuntimeError, match="--no-such-option exited with 4 and wrote no report"):
        versions.run_tests(sys.executable, tmp_path)


def test_a_word_that_no_pair_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py", "2.7"])
    with pytest.raises(SystemExit):
        versions.main()
    assert "no pair has one of 2.7" in capsys.readouterr().err
