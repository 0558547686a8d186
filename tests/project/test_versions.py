"""versions.py and its table in docs/reference/using.md."""

from __future__ import annotations

import re

import versions
from versions import COLUMNS, ROOT

FIRST, *REST = COLUMNS
TABLE = re.compile(rf"^\| {FIRST} \| {REST[0]} .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def rows_of_the_page() -> list[dict[str, str]]:
    """The rows of the table: column → what stands there."""
    table = TABLE.search((ROOT / "docs" / "reference" / "using.md").read_text(encoding="utf-8"))
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
