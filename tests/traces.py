"""Reads a trace as its page does, for the tests: the lines, the states of each step, the kinds of events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import load_file

PARTS = ("scheduled", "copied", "computed", "updated")
tour = load_file(Path(__file__).parents[1] / "docs" / "experiments" / "tour.py")
find_events = tour.find_events


def read_trace(page: Path | str) -> list[dict[str, Any]]:
    """The line of the engine, and those of the steps with whole states, of a page or of its text."""
    return tour.read_lines(page.read_text(encoding="utf-8") if isinstance(page, Path) else page)


def parts_of(line: dict[str, Any]) -> list[str]:
    """The parts of a step, as the page shows them."""
    if "failed" in line:
        return ["failed"]
    happens = {"copied": line.keys() & {"copies", "out", "in"}, "computed": "batch" in line}
    return [part for part in PARTS if happens.get(part, True)]


def name_of(number: int) -> str:
    """A, B, …, Z, AA"""
    return (name_of(number // 26 - 1) if number > 25 else "") + chr(ord("A") + number % 26)


@dataclass
class State:
    """Names of requests in order of service; name of a sequence → tokens, how many are computed, tables."""

    running: list[str]
    waiting: list[str]
    cached: list[int]
    keys: dict[int, str]
    seqs: dict[str, tuple[list[int], int, list[int], list[int]]]


def states_of(lines: list[dict[str, Any]]) -> list[dict[str, State]]:
    """For each step, the states that its line has."""
    several: dict[int, bool] = {}
    steps = []
    for line in lines:
        several |= {number: width > 1 for number, _, _, width, _ in line.get("requests", [])}
        steps.append({})
        for part, state in ((part, line[part]) for part in ("scheduled", "updated") if part in line):
            seqs = {}
            for number, index, computed, table, host, reason, tokens in state["seqs"]:
                if reason is None:
                    name = f"{name_of(number)}{index + 1 if several[number] else ''}"
                    seqs[name] = (tokens, computed, table, host)
            queues = [[name_of(number) for number in state[queue]] for queue in ("running", "waiting")]
            steps[-1][part] = State(*queues, state["cached"], state["keys"], seqs)
    return steps
