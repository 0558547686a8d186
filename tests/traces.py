"""Reads a trace as its page does, for the tests: the lines, the states of each step, the kinds of events."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("scheduled", "copied", "computed", "updated")
Line = dict[str, Any]
"""A step; `Recorder` in nanopaged/trace.py describes its fields. The states are whole, see `read_trace`."""


def read_trace(page: Path | str) -> list[Line]:
    """The line of the engine, and those of the steps with whole states, of a page or of its text.

    `seqs` of a state is a list of (request, index, number of computed tokens, block table, host table, finish
    reason, tokens).
    """
    text = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
    header, *lines = map(json.loads, text.split('id="steps">\n')[1].splitlines())
    state: dict[str, Any] = {}
    for line in lines:
        if "failed" in line:
            state = {}
        for part in ("scheduled", "updated")["failed" in line :]:
            state = change(state, line.get(part, {}))
            line[part] = whole(state)
    return [header, *lines]


def change(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The state, name → lists, after these changes of a line."""
    state = dict(old)
    for name, lists in changes.items():
        before = state.pop(name, [[]] * len(lists))
        if lists:
            state[name] = [change_list(*pair) for pair in zip(before, lists, strict=True)]
    return state


def change_list(old: list[Any], changes: list[list[Any]]) -> list[Any]:
    removed, added = changes
    gone = set(removed)
    return [item for place, item in enumerate(old) if place not in gone] + added


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its fields by name."""
    names = ("queue", "running", "cached", "keys")
    queue, (num_running,), cached, keys = (state.get(name, [[]])[0] for name in names)
    sequences = []
    for name in (name for name in state if "." in name):
        number, index = map(int, name.split("."))
        (reason, computed), tokens, table, host = state[name]
        sequences.append((number, index, computed, table, host, reason, tokens))
    queues = {"running": queue[:num_running], "waiting": queue[num_running:], "cached": cached}
    return queues | {"seqs": sequences, "keys": dict(keys)}


def find_events(lines: list[Line]) -> list[dict[str, str]]:
    """For each step, kind of event → the part of the step in which it happens."""
    requests = {fields[0]: fields for line in lines for fields in line.get("requests", [])}
    events, before = [], {"running": [], "waiting": [], "cached": [], "keys": {}}
    for line in lines:
        events.append(events_of(line, before, requests))
        before = line["updated"]
    return events


def events_of(line: Line, before: dict[str, Any], requests: dict[int, list[Any]]) -> dict[str, str]:
    """As the page finds them, where it says what has happened.

    Args:
        before: the state after the step before.
        requests: number → what the trace says of it.
    """
    if "failed" in line:
        return {"fail": "failed"}
    now, after = line["scheduled"], line["updated"]
    came_in = {block_id for _, block_id in line.get("swap_in", [])}
    in_use = {block_id for row in now["seqs"] for block_id in row[3]}
    lengths = {(row[0], row[1]): len(row[6]) for row in now["seqs"]}
    num_seqs = Counter(row[0] for row in now["seqs"])
    hits = decodes = chunks = forks = beams = False
    for number, index, computed, table, *_ in now["seqs"]:
        admitted = index == 0 and number in line.get("admitted", ())
        hits |= admitted and computed > 0 and not came_in.intersection(table)
        for _, _, num in (its for its in line.get("batch", ()) if its[:2] == [number, index]):
            is_decode = num == 1 and lengths[number, index] > requests[number][2]
            decodes |= is_decode
            chunks |= not is_decode and computed + num < lengths[number, index]
    for number, index, _, _, _, reason, tokens in after["seqs"]:
        forks |= num_seqs[number] == 1 and index > 0 and reason is None
        longer = len(tokens) > lengths.get((number, index), 0)
        beams |= requests[number][4] and num_seqs[number] > 1 and reason is None and longer
    ended = [{(row[0], row[1]) for row in state["seqs"] if row[5]} for state in (now, after)]
    left = {*before["running"], *before["waiting"]} - {*now["running"], *now["waiting"]}
    keys = after["keys"]
    lost = {block_id for block_id, key in before["keys"].items() if keys.get(block_id) != key} & in_use
    was_reset = {*before["cached"]} - in_use - {*now["cached"]}  # by reset_prefix_cache
    happened = {
        "scheduled": {
            "finish": bool(left),  # aborted
            "arrive": "requests" in line,
            "preempt": "preempted" in line,
            "admit": "admitted" in line,
            "hit": hits,
            "evict": bool(lost) and not was_reset,
        },
        "copied": {"copy": "copies" in line, "swap": "swap_out" in line or "swap_in" in line},
        "computed": {"decode": decodes, "chunk": chunks},
        "updated": {"fork": forks, "beams": beams, "finish": bool(ended[1] - ended[0])},
    }
    return {kind: part for part, kinds in happened.items() for kind, happens in kinds.items() if happens}


def parts_of(line: dict[str, Any]) -> list[str]:
    """The parts of a step, as the page shows them."""
    if "failed" in line:
        return ["failed"]
    happens = {"copied": line.keys() & {"copies", "swap_out", "swap_in"}, "computed": "batch" in line}
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
