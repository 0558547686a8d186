"""The page of a trace, in a real browser."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from browser import Browser, open_browser
from random_workloads import Workload, forked, mixed
from test_random_runs import make_engine
from test_trace import greedy, read_trace, run_to_end, tokens
from test_trace import make_engine as make_small_engine

from nanopaged import BeamSearchParams, LLMEngine
from nanopaged.sequence import ScheduledBatch
from nanopaged.trace.sentences import PARTS
from nanopaged.views.snapshot import SequenceState, Snapshot, short_key

COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"]
MOST_TABLES, MOST_ROWS, MOST_ARROWS = 16, 24, 100  # that the page shows

GO_AND_READ = """(() => {
  window.trace.go(arguments[0], arguments[1]);
  const all = (place, query) => [...place.querySelectorAll(query)];
  const cell = (c) => ({ kind: c.classList[1], shared: c.classList.contains("shared"),
    refs: +c.dataset.refs, colour: c.style.getPropertyValue("--a"),
    filled: c.style.getPropertyValue("--filled"),
    painted: getComputedStyle(c).backgroundColor + getComputedStyle(c).backgroundImage });
  const row = (r) => [+r.dataset.block, +r.lastChild.textContent];
  const queue = (id) => all(document.getElementById(id), ".chip").map((c) => c.textContent);
  const state = window.trace.stateAt(arguments[0], arguments[1]);
  return {
    pool: all(document, "#pool .cell").map(cell), host: all(document, "#host .cell").map(cell),
    tables: all(document, ".table").map((t) => all(t, "tbody tr[data-block]").map(row)),
    changed: all(document, ".table").map((t) => all(t, "tbody tr[data-block]").map((r) => r.className)),
    queues: ["running", "waiting", "swapped"].map(queue),
    moves: all(document, "#arrows [data-move]").map((path) => [path.classList[0], path.dataset.move]),
    marked: all(document, ".cell[data-mark]")
      .map((c) => [c.dataset.mark, c.parentElement.id, +c.dataset.block]),
    parts: window.trace.parts(arguments[0]), cached: state.cached,
    keys: window.trace.blocksOf(state).map((b) => [b.key ?? null, b.tokens]),
    tokens: [...state.seqs.values()].sort((a, b) => a.number - b.number || a.index - b.index)
      .map((seq) => seq.tokens.slice(0, seq.n)),
  };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@dataclass
class Recorded:
    """A line of a trace, as the engine itself saw the step.

    Fields:
        moves: "pool 3 host 0" for each block that is copied, in the order in which it is done.
        num_scheduled: (request id, index of the sequence) → tokens.
    """

    scheduled: Snapshot | None = None  # None: the step failed
    updated: Snapshot | None = None
    moves: list[str] = field(default_factory=list)
    num_scheduled: dict[tuple[str, int], int] = field(default_factory=dict)

    def parts(self) -> dict[str, Snapshot]:
        """Part of the step → the state at its end. What is copied and computed, the batch says."""
        if self.scheduled is None:
            return {"failed": self.updated}
        parts = {"scheduled": self.scheduled}
        if self.moves:
            parts["copied"] = self.scheduled
        if self.num_scheduled:
            parts["computed"] = self.computed()
        return parts | {"updated": self.updated}

    def computed(self) -> Snapshot:
        """The scheduled tokens have K/V, and no token has followed yet."""
        size, filled, sequences = self.scheduled.block_size, {}, {}
        for key, seq in by_index(self.scheduled).items():
            num = seq.num_computed_tokens + self.num_scheduled.get(key, 0)
            sequences.setdefault(key[0], []).append(replace(seq, num_computed_tokens=num))
            for i, block_id in enumerate(seq.block_table):
                here = min(size, max(0, num - i * size))
                filled[block_id] = max(filled.get(block_id, 0), here)
        requests = [replace(r, sequences=tuple(sequences[r.request_id])) for r in self.scheduled.requests]
        blocks = tuple(
            replace(block, num_filled=here, state="full" if here == size else "partial")
            if (here := filled.get(block.block_id)) is not None
            else block
            for block in self.scheduled.blocks
        )
        return replace(self.scheduled, requests=tuple(requests), blocks=blocks)


def by_index(snapshot: Snapshot) -> dict[tuple[str, int], SequenceState]:
    """(request id, index) → sequence, in order."""
    sequences = {}
    for request in snapshot.requests:
        for seq in request.sequences:
            _, _, number = seq.name.removeprefix(request.request_id).rpartition(".")  # "3.2" is the second
            sequences[request.request_id, int(number or 1) - 1] = seq
    return sequences


class Watcher:
    """A listener that takes snapshots where the trace does."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.now = engine, Recorded()
        engine.listeners.append(self)

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        moves = [f"pool {src} host {dst}" for src, dst in batch.swap_out]
        moves += [f"host {src} pool {dst}" for src, dst in batch.swap_in]
        moves += [f"pool {src} pool {dst}" for src, dst in batch.copies]
        num = {(seq.request.request_id, seq.index): seq.num_scheduled_tokens for seq in batch.sequences}
        self.now = Recorded(self.engine.snapshot(), None, moves, num)

    def step_ended(self, batch: ScheduledBatch) -> None: ...

    def step_failed(self, error: BaseException) -> None:
        self.now = Recorded()


def record(workload: Workload, page: Path) -> list[Recorded]:
    """Serve a workload with a trace, with steps that fail. Returns what each line of the trace should say."""
    engine, rng, lines = make_engine("fake", workload.config(page)), random.Random(workload.seed), []
    watcher, left = Watcher(engine), dict(enumerate(workload.requests))
    for now in range(1000):
        for i, asked in list(left.items()):
            if asked.arrival <= now:
                engine.add_request(str(i), asked.prompt, asked.params)
                del left[i]
        for name in list(engine.requests):
            after = workload.requests[int(name)].aborted_after
            if after is not None and workload.requests[int(name)].arrival + after <= now:
                engine.abort_request(name)
        if rng.random() < 0.02:
            engine.block_manager.reset_prefix_cache()
        if not engine.has_unfinished_requests():
            if not left:
                return lines
            continue
        engine.runner.fail_next = rng.random() < 0.02
        with suppress(RuntimeError):
            engine.step()
        lines.append(replace(watcher.now, updated=engine.snapshot()))
    raise AssertionError("the workload does not end")


def check_page(shown: dict[str, Any], snapshot: Snapshot, names: dict[str, str]) -> None:
    """Everything that the page shows of a part of a step is as in the snapshot.

    Args:
        names: request id → its name in the page.
    """
    size = snapshot.block_size
    numbers = {request_id: i for i, request_id in enumerate(names)}
    users: dict[int, list[int]] = {}
    host_users: dict[int, list[int]] = {}
    tables = []
    for request in snapshot.requests:
        for seq in request.sequences:
            for table, its_users in ((seq.block_table, users), (seq.host_table, host_users)):
                for block_id in table:
                    its_users.setdefault(block_id, []).append(numbers[request.request_id])
            table = seq.block_table or seq.host_table
            filled = [min(size, max(0, seq.num_computed_tokens - i * size)) for i in range(len(table))]
            if table:
                tables.append(list(map(list, zip(table, filled, strict=True)))[-MOST_ROWS:])
    assert shown["tables"] == tables[:MOST_TABLES]
    assert shown["tokens"] == [
        list(seq.token_ids) for request in snapshot.requests for seq in request.sequences
    ]
    for state, queue in zip(("running", "waiting", "swapped"), shown["queues"], strict=True):
        assert queue == [names[r.request_id] for r in snapshot.requests if r.state == state]

    assert shown["cached"] == list(snapshot.cached)
    assert all(block.state == "free" for block in snapshot.blocks[len(shown["pool"]) :])
    for cell, block, (key, its_tokens) in zip(shown["pool"], snapshot.blocks, shown["keys"], strict=False):
        assert (cell["kind"], cell["refs"]) == (block.state, block.ref_count)
        assert cell["shared"] == (block.ref_count > 1)
        if block.state != "free":
            assert float(cell["filled"].rstrip("%")) == pytest.approx(100 * block.num_filled / size, 1e-4)
        assert len(its_tokens) == block.num_filled
        assert key == (None if block.key is None else short_key(block.key))
        if block.key is not None and block.num_filled == size:
            assert its_tokens == array("q", block.key[-8 * size :]).tolist()
        if block.ref_count:
            assert cell["colour"] == COLOURS[min(users[block.block_id]) % len(COLOURS)]
            red, green, blue = (int(cell["colour"][i : i + 2], 16) for i in (1, 3, 5))
            assert f"rgb({red}, {green}, {blue})" in cell["painted"]
    for block_id, cell in enumerate(shown["host"]):
        assert cell["kind"] == ("used" if block_id in host_users else "free")
        assert cell["refs"] == len(host_users.get(block_id, []))


@pytest.mark.parametrize("make", [mixed, forked])
def test_random_runs(make: Any, browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In every part of random steps, visited in any order, the page shows the engine's own state."""
    num_runs = max(3, request.config.getoption("--random-runs") // 50)
    first = request.config.getoption("--first-seed")
    for seed in range(first, first + num_runs):
        page = tmp_path / f"{seed}.html"
        recorded = record(make(seed), page)
        header, *lines = read_trace(page)
        changes = [changes for line in lines for changes in (line.get("scheduled", {}), line)]
        names = {fields[2]: fields[1] for each in changes for fields in each.get("requests", [])}
        assert len(lines) == len(recorded)
        for line, step in zip(lines, recorded, strict=True):
            used = [block for block in step.updated.blocks if block.ref_count]
            assert line.get("used", 0) == len(used)
            assert line.get("filled", 0) == sum(block.num_filled for block in used)
            check_words_of_swaps(line)
        browser.open(page)
        rng = random.Random(seed)
        moving = [i for i, step in enumerate(recorded) if step.moves]
        steps = {
            *rng.sample(range(len(lines)), k=min(3, len(lines))),
            *rng.sample(moving, k=min(1, len(moving))),
        }
        places = [(i, part) for i in steps for part in recorded[i].parts()]
        for i, part in rng.sample(places, k=min(10, len(places))):
            shown = browser.run(GO_AND_READ, i + 1, part)
            parts = recorded[i].parts()
            assert shown["parts"] == list(parts)
            check_page(shown, parts[part], names)
            check_moves(shown, part, recorded[i].moves)
            states = [recorded[i - 1].updated, *parts.values()]  # the last one, before the first, is empty
            check_changed_rows(shown, parts[part], states[list(parts).index(part)])
        console, asked = browser.logs()
        assert console == []
        assert all(url.startswith(("file:", "data:")) for url in asked), asked


def check_words_of_swaps(line: dict[str, Any]) -> None:
    """Each moved block is told once, in order, unless a sentence leaves some out."""
    told: dict[str, list[tuple[int, int]]] = {"out": [], "in": []}
    for kinds, text, _ in line.get("said", []):
        if kinds == "swap":
            way, blocks = re.fullmatch(r"\w+ (leaves|comes back): (.+)\.", text).groups()
            if "others" in text:
                return
            parts = [
                re.sub(r"(host )?blocks? ", "", part).replace(" and ", ", ") for part in blocks.split(" → ")
            ]
            ids = [[i for run in part.split(", ") for i in ids_of(run)] for part in parts]
            told["out" if way == "leaves" else "in"] += zip(*ids, strict=True)
    for way, moves in told.items():
        assert moves == list(map(tuple, line.get(way, []))), line["said"]


def ids_of(run: str) -> range:
    """Of "3 to 6", or "9"."""
    first, _, last = run.partition(" to ")
    return range(int(first), int(last or first) + 1)


def check_changed_rows(shown: dict[str, Any], snapshot: Snapshot, before: Snapshot) -> None:
    """A row is marked if the sequence of this name had another block there at the end of the part before."""
    old, changed = by_index(before), []
    for key, seq in by_index(snapshot).items():
        table, its_old = seq.block_table, old[key].block_table if key in old else ()
        if seq.host_table:
            table, its_old = seq.host_table, old[key].host_table if key in old else ()
        rows = [("changed", "")[table[i : i + 1] == its_old[i : i + 1]] for i in range(len(table))]
        changed += [rows[-MOST_ROWS:]] if rows else []
    assert shown["changed"] == changed[:MOST_TABLES]


def check_moves(shown: dict[str, Any], part: str, moves: list[str]) -> None:
    """An arrow for each block that is moved: planned, then done. Both its ends are marked when it is done."""
    kind = {"scheduled": "planned", "copied": "done"}.get(part)
    assert shown["moves"] == ([[kind, move] for move in moves[:MOST_ARROWS]] if kind else [])
    if part == "copied":
        ends = [move.split(" ") for move in moves]
        copies = {(to, int(copy)) for _, _, to, copy in ends}
        sources = {(place, int(source)) for place, source, _, _ in ends}
        marked = {
            mark: {(place, block) for its, place, block in shown["marked"] if its == mark}
            for mark in ("copy", "source")
        }
        assert marked == {"copy": copies, "source": sources - copies}
        assert {mark for mark, _, _ in shown["marked"]} <= {"copy", "source"}


@pytest.fixture
def small_page(tmp_path: Path) -> Path:
    """A run with a copy on write, a prefix hit, a swap and an eviction."""
    engine = make_small_engine(tmp_path / "run.html", num_blocks=9, preemption="swap")
    engine.add_request("first", tokens(5, 7), greedy(12, n=2, seed=1))
    engine.add_request("second", tokens(5, 9), greedy(12))
    run_to_end(engine)
    return tmp_path / "run.html"


def places_with(page: Path, kind: str) -> list[tuple[int, str]]:
    """The steps, the first one is 1, and parts with an event of this kind."""
    places = {
        (step, PARTS[part]): None
        for step, line in enumerate(read_trace(page)[1:], 1)
        for kinds, _, part in line.get("said", [])
        if kind in kinds.split()
    }
    return list(places)


def parts_of(line: dict[str, Any]) -> list[str]:
    moves, batch = line.keys() & {"copies", "out", "in"}, "batch" in line
    return ["scheduled", *["copied"] * bool(moves), *["computed"] * batch, "updated"]


def now(browser: Browser) -> int:
    return int(browser.run("document.getElementById('slider').value"))


def here(browser: Browser) -> tuple[int, str]:
    place = browser.run("window.trace.at()")
    return place["step"], place["part"]


LEFT, RIGHT, HOME, END, ENTER, ESCAPE, SHIFT = (
    "\ue012",
    "\ue014",
    "\ue011",
    "\ue010",
    "\ue007",
    "\ue00c",
    "\ue008",
)


def test_the_arrows_walk_part_by_part_and_step_by_step(browser: Browser, small_page: Path) -> None:
    browser.open(small_page)
    _, *lines = read_trace(small_page)
    places = [(i, part) for i, line in enumerate(lines, 1) for part in parts_of(line)]
    assert 2 * len(lines) < len(places) < 4 * len(lines), "some steps copy blocks, others do not"
    assert here(browser) == (0, "")
    for place in places[:7]:
        browser.press(RIGHT)
        assert here(browser) == place
    for place in places[5::-1]:
        browser.press(LEFT)
        assert here(browser) == place
    browser.press(LEFT)
    assert here(browser) == (0, "")
    browser.press(SHIFT + RIGHT)
    browser.press(SHIFT + RIGHT)
    assert here(browser) == (2, "updated")
    browser.press(LEFT)
    browser.press(SHIFT + RIGHT)
    assert here(browser) == (2, "updated"), "first to the end of the step"
    browser.press(SHIFT + LEFT)
    assert here(browser) == (1, "updated")
    browser.press(END)
    browser.press(RIGHT)
    assert here(browser) == (len(lines), "updated"), "there is no step after the last one"
    browser.press(HOME)
    assert here(browser) == (0, "")


def test_keys_jump_to_events(browser: Browser, small_page: Path) -> None:
    browser.open(small_page)
    for key, kind in zip("cpshef", ["copy", "preempt", "swap", "hit", "evict", "fork"], strict=True):
        places = places_with(small_page, kind)
        assert places, f"the run should have a {kind}"
        browser.press(HOME)
        for place in places:
            browser.press(key)
            assert here(browser) == place
        browser.press(key)
        assert here(browser) == places[-1], "there is no later one"
        for place in reversed(places[:-1]):
            browser.press(key.upper())  # with Shift: backwards
            assert here(browser) == place
    assert browser.logs()[0] == []


def test_the_place_in_the_address(browser: Browser, small_page: Path) -> None:
    """Also in that of an open page. A part that the step does not have is the one before it."""
    assert "copies" in read_trace(small_page)[2]
    for name, place, shown in (
        ("3", (3, "updated"), "#3"),
        ("2-copied", (2, "copied"), "#2-copied"),
        ("1-copied", (1, "scheduled"), "#1-scheduled"),
        ("1-nothing", (1, "updated"), "#1"),
        ("2.5", (2, "updated"), "#2"),
        ("-1", (0, ""), "#0"),
        ("none", (0, ""), "#0"),
    ):
        browser.open(small_page, name)
        assert here(browser) == place
        assert browser.run("location.hash") == shown
    browser.run("location.hash = '#4-computed'")
    browser.driver.execute_async_script("setTimeout(arguments[0], 0)")
    assert here(browser) == (4, "computed")


def test_buttons_slider_and_play(browser: Browser, small_page: Path) -> None:
    browser.open(small_page)
    num_steps = len(read_trace(small_page)) - 1
    for button, place in (
        ("forward", (1, "scheduled")),
        ("step-forward", (1, "updated")),
        ("last", (num_steps, "updated")),
        ("back", (num_steps, "computed")),
        ("step-back", (num_steps - 1, "updated")),
        ("first", (0, "")),
    ):
        browser.run(f"document.getElementById('{button}').click()")
        assert here(browser) == place
    browser.run("document.getElementById('slider').focus()")
    browser.press(RIGHT)
    assert here(browser) == (1, "updated"), "the slider has the focus, and moves once"
    browser.run("document.activeElement.blur()")
    browser.press(" ")
    assert browser.run("document.getElementById('play').ariaPressed") == "true"
    browser.driver.execute_async_script("setTimeout(arguments[0], 700)")
    assert now(browser) > 1
    browser.press(" ")
    assert browser.run("document.getElementById('play').ariaPressed") == "false"


def words(browser: Browser) -> list[str]:
    """The sentences of the part that is shown."""
    return browser.run(
        "[...document.querySelectorAll('.part.now li[data-kinds]')].map((li) => li.textContent)"
    )


def rows(browser: Browser, name: str) -> list[int]:
    """The physical blocks in the table of a sequence that is shown."""
    query = f".table[data-seq='{name}'] tr[data-block]"
    return browser.run("[...document.querySelectorAll(arguments[0])].map((row) => +row.dataset.block)", query)


def test_words_and_picture_agree_also_in_a_beam_search(browser: Browser, tmp_path: Path) -> None:
    """What is said of a part holds in its picture: the tables of the names, the arrows, the blocks."""
    engine = make_small_engine(tmp_path / "run.html", num_blocks=30)
    engine.add_request("beams", tokens(5, 7), BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True))
    run_to_end(engine)
    browser.open(tmp_path / "run.html")
    num_copies = num_renamed = 0
    for step, part in places_with(tmp_path / "run.html", "copy"):
        arrows = [move for _, move in browser.run(GO_AND_READ, step, part)["moves"]]
        tables = {}
        for sentence in words(browser):
            writer, src, others, dst = re.fullmatch(
                r"(A\d) writes into block (\d+), which (.+) also uses?: copied to block (\d+)\.", sentence
            ).groups()
            tables[writer] = rows(browser, writer)
            assert int(dst) in tables[writer]
            assert int(src) not in tables[writer]
            assert f"pool {src} pool {dst}" in arrows
            num_copies += 1
        browser.run("window.trace.go(arguments[0])", step)
        num_renamed += any(rows(browser, writer) != table for writer, table in tables.items())
    assert num_copies > 3
    assert num_renamed > 0, "at the end of a step another beam has the name"
    for step, part in places_with(tmp_path / "run.html", "beams"):
        browser.run("window.trace.go(arguments[0], 'computed')", step)
        old = {name: rows(browser, name) for name in ("A1", "A2", "A3")}
        browser.run("window.trace.go(arguments[0], arguments[1])", step, part)
        (sentence,) = [sentence for sentence in words(browser) if sentence.startswith("The next beams")]
        for parent, children in re.findall(r"(A\d) → ([A\d ]+)", sentence):
            for child in children.split():
                assert rows(browser, child) == old[parent], "a fork has the table of its parent"


def test_the_signs_of_a_copy(browser: Browser, small_page: Path) -> None:
    """Every sign is seen at every size of the cells, and no two kinds look alike."""
    step, part = places_with(small_page, "copy")[0]
    browser.open(small_page, f"{step}-{part}")
    assert words(browser)[0].startswith("A1 writes into block 1, which A2 also uses: copied to block ")
    looks = """[...document.querySelectorAll("#pool .cell[data-mark]")].map((cell) => {
      const sign = getComputedStyle(cell, "::after");
      return [cell.dataset.mark, sign.content + getComputedStyle(cell).outlineStyle, sign.display];
    })"""
    seen: dict[str, dict[str, set[str]]] = {}
    for _ in range(3):
        size = browser.run("document.getElementById('pool').classList[1]")
        for kind in ("copy", "hit", "evict", "preempt", "swap", "finish", "fork", "grow"):
            for place in places_with(small_page, kind)[:2]:
                browser.run("window.trace.go(arguments[0], arguments[1])", *place)
                for mark, look, display in browser.run(looks):
                    assert display != "none"
                    seen.setdefault(size, {}).setdefault(mark, set()).add(look)
        browser.press("-")
    assert seen.keys() == {"large", "medium", "small"}
    for marks in seen.values():
        assert {"source", "copy", "taken", "freed", "kept", "evicted", "hit"} <= marks.keys()
        assert all(len(looks) == 1 for looks in marks.values())
        assert len({look for looks in marks.values() for look in looks}) == len(marks)


def test_blocks_say_of_which_sequence_they_are(browser: Browser, tmp_path: Path) -> None:
    engine = make_small_engine(tmp_path / "run.html", num_blocks=30)
    engine.add_request("four", tokens(5, 7), greedy(9, n=4, seed=1))
    engine.add_request("one", tokens(5, 9), greedy(9))
    run_to_end(engine)
    browser.open(tmp_path / "run.html", 1)
    labels = "[...document.querySelectorAll('#pool .label')].map((label) => label.textContent)"
    assert browser.run(labels)[:4] == ["A1–4 B", "A1–4", "B", "B"]
    browser.press("-")
    assert browser.run(labels)[:4] == ["A×4+", "A1–4", "B", "B"], "shorter in a smaller cell"
    browser.press("+")
    browser.press(RIGHT)
    browser.press(RIGHT)
    assert browser.run(labels)[:7] == ["A1–4 B", "A4", "B", "B", "A1", "A2", "A3"]


def test_a_row_says_that_the_newest_token_has_no_kv(browser: Browser, small_page: Path) -> None:
    texts = "[...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
    note, framed = (f".table[data-seq='B'] td {what}" for what in ("small", ".pending"))
    browser.open(small_page, "1-scheduled")
    assert browser.run(texts, note)[-1] == "5 tokens have no K/V yet", (
        "4 of 9 are in the block that A fills now"
    )
    for place, notes in (("1-computed", []), ("1", ["the newest token: no K/V yet"]), ("2-computed", [])):
        browser.open(small_page, place)
        assert browser.run(texts, note) == notes
        assert len(browser.run(texts, framed)) == len(notes)
    step = places_with(small_page, "copy")[0][0]
    browser.open(small_page, f"{step}-scheduled")
    assert browser.run(texts, ".table[data-seq='A1'] td small")[0] == "K/V still in block 1"
    browser.press(RIGHT)
    assert "K/V still in" not in browser.run("document.getElementById('tables').textContent")


def test_a_block_tells_what_it_holds(browser: Browser, small_page: Path) -> None:
    """The grid is reached with the keyboard, and the arrows move from block to block."""
    browser.open(small_page, 1)
    browser.run("document.querySelector('#pool .cell').focus()")
    detail = "document.getElementById('detail').textContent"
    assert browser.run(detail).startswith(
        "Block 0 · full, 4 of 4 slots filled · 3 references: A1 (its block 0)"
    )
    browser.press("\ue014")
    assert browser.run(detail).startswith("Block 1 · ")
    assert now(browser) == 1


def test_the_table_view(browser: Browser, small_page: Path) -> None:
    browser.open(small_page, 1)
    browser.press("t")
    rows = browser.run(
        "[...document.querySelectorAll('#pool-table tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    refs = browser.run(
        "window.trace.blocksOf(window.trace.stateAt(1)).filter((b) => b.refs).map((b) => [b.id, b.refs])"
    )
    assert [[int(row[0]), int(row[2])] for row in rows] == refs
    assert rows[0][3] == "A1 A2 B"
    assert not browser.run("document.getElementById('pool').checkVisibility()")
    browser.press("t")
    assert browser.run("document.getElementById('pool').checkVisibility()")


def test_the_timeline_has_an_axis(browser: Browser, small_page: Path) -> None:
    """It is seen without scrolling, says what y means, and leads to the step that is clicked."""
    num_steps = len(read_trace(small_page)) - 1
    browser.screen(1280, 860)
    browser.open(small_page)
    x, bottom = browser.run(
        "(({ x, bottom }) => [x, bottom])(document.getElementById('timeline').getBoundingClientRect())"
    )
    assert bottom < 860
    texts = browser.run("[...document.querySelectorAll('#timeline text')].map((text) => text.textContent)")
    assert {"9", "0", "blocks", "tok/s", "step 0"} <= set(texts)
    assert browser.run("document.querySelectorAll('#timeline .area').length") == 1
    ticks = browser.run(
        "[...document.querySelectorAll('#timeline text[text-anchor=middle]')]"
        ".map((text) => [+text.textContent.replace('step ', ''), +text.getAttribute('x')])"
    )
    assert [ticks[0][0], len(ticks)] == [0, 1 + num_steps], "there is room for a number at each step"
    for (_, left), (step, right) in pairwise(ticks):
        click = "new MouseEvent('click', {clientX: arguments[0]})"
        browser.run(f"document.getElementById('timeline').dispatchEvent({click})", x + (left + right) / 2)
        assert here(browser) == (step, "updated")
    browser.screen(1400, 1000)


def test_finding(browser: Browser, small_page: Path) -> None:
    """A request by name or id, a sequence, a block; then the steps in which it changes."""
    browser.open(small_page, "2")
    tables = "[...document.querySelectorAll('.table')].map((table) => table.dataset.seq)"

    def find(text: str) -> None:
        browser.press("/")
        browser.press(text + ENTER)
        browser.run("document.activeElement.blur()")

    for text, names in (("A", ["A1", "A2"]), ("a2", ["A2"]), ("second", ["B"]), ("sec", ["B"])):
        find(text)
        assert browser.run(tables) == names
        browser.press("/")
        browser.press(ESCAPE)
        assert browser.run(tables) == ["A1", "A2", "B"]
    find("nobody")
    assert "Nothing is called nobody" in browser.run("document.getElementById('found').textContent")
    find("block 2")
    assert browser.run("[...document.querySelectorAll('.cell.target')].map((c) => +c.dataset.block)") == [2]
    assert browser.run("document.getElementById('detail').textContent").startswith("Block 2 · ")
    browser.press(HOME)
    _, *lines = read_trace(small_page)
    states_of_2 = browser.run(
        """window.trace.lines.map((line, i) => window.trace.parts(i + 1).map((part) => {
          const block = window.trace.blocksOf(window.trace.stateAt(i + 1, part))[2];
          return [block.who, block.filled, block.state].join();
        }))"""
    )
    changed, last = [], ",0,free"
    for step, line in enumerate(lines, 1):
        copies = line.get("copies", [])
        moved = [src for src, _ in copies + line.get("out", [])] + [
            dst for _, dst in copies + line.get("in", [])
        ]
        for part, state in zip(parts_of(line), states_of_2[step - 1], strict=True):
            if state != last or (part == "copied" and 2 in moved):
                changed.append((step, part))
            last = state
    assert len(changed) > 3
    for place in changed[:4]:
        browser.press("n")
        assert here(browser) == place
    browser.press(END)
    browser.press("n")
    assert browser.run("document.getElementById('found').textContent") == "There is no later change."
    for place in reversed([place for place in changed if place != here(browser)][-4:]):
        browser.press("N")
        assert here(browser) == place
    browser.press(HOME)
    find("B")
    assert here(browser) == (1, "scheduled"), "where it arrives"
    assert browser.logs()[0] == []


def test_cells_of_a_large_pool_can_be_enlarged(browser: Browser, tmp_path: Path) -> None:
    engine = make_small_engine(tmp_path / "run.html", num_blocks=1200, max_num_batched_tokens=5000)
    for i in range(30):
        engine.add_request(str(i), tokens(i, 150), greedy(2))
    engine.step()
    browser.open(tmp_path / "run.html", 1)
    assert browser.run("document.getElementById('pool').classList[1]") == "small"
    font = "getComputedStyle(document.querySelector('#pool .label')).display"
    assert browser.run(font) == "none"
    labels = "new Set([...document.querySelectorAll('#pool .label')].map((label) => label.textContent)).size"
    for size in ("medium", "large"):
        browser.press("+")
        assert browser.run("document.getElementById('pool').classList[1]") == size
        assert browser.run(font) == "block"
        assert browser.run(labels) >= 30, "eight colours, thirty names"


def frame(browser: Browser, script: str) -> Any:
    """The value of an expression in the window of the first frame."""
    return browser.run(f"((window) => {script})(document.querySelector('iframe').contentWindow)")


def wait_for_frame(browser: Browser) -> None:
    browser.driver.execute_async_script(
        "const done = arguments[0], look = () => document.querySelector('iframe')?.contentWindow.trace "
        "? setTimeout(done, 50) : setTimeout(look, 10); look()"
    )


def test_two_runs_side_by_side(browser: Browser, small_page: Path, tmp_path: Path) -> None:
    """They step together, the shorter one stays at its end; or each alone."""
    engine = make_small_engine(tmp_path / "other.html")
    engine.add_request("other", tokens(5, 7), greedy(3))
    run_to_end(engine)
    browser.open(small_page, "1-computed")
    file = browser.driver.find_element("id", "file")
    file.send_keys(str(tmp_path / "other.html"))
    wait_for_frame(browser)
    at = "Object.values(window.trace.at())"
    assert frame(browser, at) == [1, "computed"]
    browser.press(RIGHT)
    assert frame(browser, at) == [1, "updated"]
    frame(browser, "window.document.getElementById('forward').click()")
    assert here(browser) == (2, "scheduled"), "also the other way round"
    browser.press(END)
    assert frame(browser, at) == [3, "updated"]
    assert here(browser) == (len(read_trace(small_page)) - 1, "updated")
    browser.run("document.getElementById('together').click()")
    browser.press(HOME)
    assert frame(browser, at) == [3, "updated"]
    frame(browser, "window.document.getElementById('back').click()")
    assert here(browser) == (0, ""), "each alone"
    browser.run("document.getElementById('together').click()")
    assert frame(browser, at) == [0, ""]
    browser.run("document.getElementById('close').click()")
    assert browser.run("document.querySelectorAll('iframe').length") == 0
    drop = """(() => {
      const files = new DataTransfer();
      files.items.add(new File([arguments[0]], "dropped.html"));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true }));
    })()"""
    browser.run(drop, "no trace")
    browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
    assert "dropped.html is not the page of a trace" in browser.run(
        "document.getElementById('found').textContent"
    )
    browser.run(drop, (tmp_path / "other.html").read_text(encoding="utf-8"))
    wait_for_frame(browser)
    assert frame(browser, "window.trace.lines.length") == 3
    assert browser.logs()[0] == []


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a page on a web server: a blob made by a file may not be read by it."""
    (tmp_path / "around.html").write_text(
        "<!doctype html><title>around</title><link rel=icon href='data:,'>", encoding="utf-8"
    )

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/around.html"
        server.shutdown()


@pytest.mark.parametrize("how", ["srcdoc", "blob"])
def test_embedded_in_another_page(browser: Browser, small_page: Path, served: str, how: str) -> None:
    """It has no address of its own there. The page around it moves it, and hears when the reader moves."""
    browser.driver.get(served)
    browser.run(
        """(() => {
          const frame = document.createElement("iframe"), [text, how] = arguments;
          if (how === "srcdoc") frame.srcdoc = text;
          else frame.src = URL.createObjectURL(new Blob([text], { type: "text/html" }));
          window.heard = [];
          const hear = (event) => window.heard.push(event.detail);
          frame.onload = () => frame.contentWindow.addEventListener("trace-step", hear);
          document.body.append(frame);
        })()""",
        small_page.read_text(encoding="utf-8"),
        how,
    )
    wait_for_frame(browser)
    frame(browser, "window.trace.go(2, 'copied')")
    assert frame(browser, "window.trace.at()") == {"step": 2, "part": "copied"}
    assert frame(browser, "window.trace.parts(2)") == ["scheduled", "copied", "computed", "updated"]
    assert frame(browser, "window.trace.lines.length") == len(read_trace(small_page)) - 1
    assert browser.run("window.heard") == [], "the reader did not move"
    frame(browser, "window.document.getElementById('forward').click()")
    assert browser.run("window.heard") == [{"step": 2, "part": "computed", "caption": None}]
    assert browser.logs()[0] == []


@pytest.fixture
def captioned(small_page: Path) -> Path:
    """The page with a title and three captions, which are not in order."""
    viewer, data = small_page.read_text(encoding="utf-8").split('id="steps">\n')
    first, rest = data.split("\n", 1)
    header = json.loads(first)
    header["title"] = "A run"
    terms = [["Block table", "glossary.html#words", "where a block is"], ["slot", "glossary.html#slot"]]
    header["captions"] = [
        {
            "step": 2,
            "part": "copied",
            "title": "Copies",
            "text": "Each slot of the block tables moves.",
            "terms": terms,
        },
        {"step": 1, "part": "scheduled", "text": "It begins."},
        {"step": 3, "part": "updated", "text": "It goes on."},
    ]
    small_page.write_text(f'{viewer}id="steps">\n{json.dumps(header)}\n{rest}', encoding="utf-8")
    return small_page


def test_a_guided_tour(browser: Browser, captioned: Path) -> None:
    """The captions are stops; words of a caption lead to the glossary."""
    browser.open(captioned)
    caption = "document.getElementById('caption').textContent"
    assert browser.run("document.querySelector('h1').textContent") == "A run"
    assert "3 stops. The next stop is step 1, scheduled." in browser.run(caption)
    for place, text in (
        ((1, "scheduled"), "1 of 3."),
        ((2, "copied"), "2 of 3. Copies Each slot"),
        ((3, "updated"), "3 of 3."),
    ):
        browser.press("g")
        assert here(browser) == place
        assert browser.run(caption).startswith(text)
    assert browser.run("document.getElementById('stop-forward').disabled")
    browser.press("G")
    assert here(browser) == (2, "copied")
    assert browser.run("document.querySelector('#caption a').getAttribute('href')") == "glossary.html#slot"
    term = browser.driver.find_element("css selector", "#caption .term")
    assert term.text == "block tables"
    term.click()
    assert (
        browser.run("document.getElementById('definition').textContent")
        == "Block table: where a block is Glossary"
    )
    assert (
        browser.run("document.querySelector('#definition a').getAttribute('href')") == "glossary.html#words"
    )
    browser.press(RIGHT)
    assert "The next stop is step 3, updated" in browser.run(caption)
    assert browser.logs()[0] == []


def test_choosing_a_request(browser: Browser, small_page: Path) -> None:
    browser.open(small_page, 2)
    browser.run("document.querySelectorAll('#running .chip')[0].click()")
    assert browser.run("[...document.querySelectorAll('.table')].map((t) => t.dataset.seq)") == ["A1", "A2"]
    assert browser.run("document.querySelectorAll('.cell.dimmed').length") > 0


@pytest.mark.parametrize("width", [1400, 390])
def test_dark_mode_and_phones(browser: Browser, small_page: Path, width: int) -> None:
    """The colours change, the text keeps its contrast, and a phone need not scroll sideways."""
    colours = []
    for dark in (False, True):
        browser.screen(width, 900, dark)
        browser.open(small_page, 2)
        style = "getComputedStyle(document.body)"
        paper, ink = (browser.run(f"{style}.{name}") for name in ("backgroundColor", "color"))
        colours.append((paper, ink))
        assert contrast(paper, ink) > 7
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        for cell in browser.run(
            "[...document.querySelectorAll('.cell.full:not(.shared), .chip')].map((c) => getComputedStyle(c))"
            ".map((s) => [s.backgroundColor, s.color])"
        ):
            assert contrast(*cell) > 4.5
    browser.screen(1400, 1000)
    (light, _), (dark, _) = colours
    assert luminance(light) > 0.8 > 0.1 > luminance(dark)


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as the web's accessibility guidelines define it."""
    parts = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted([luminance(a), luminance(b)])
    return (light + 0.05) / (dark + 0.05)


def test_an_interrupted_run(browser: Browser, small_page: Path) -> None:
    """Half a line at the end is left out."""
    whole = small_page.read_text(encoding="utf-8")
    num_lines = len(read_trace(small_page)) - 1
    small_page.write_text(whole[:-40], encoding="utf-8")
    browser.open(small_page)
    assert browser.run("window.trace.lines.length") == num_lines - 1
    assert browser.logs()[0] == []


def test_a_trace_without_steps(browser: Browser, tmp_path: Path) -> None:
    make_small_engine(tmp_path / "run.html")
    browser.open(tmp_path / "run.html")
    assert "Nothing has run yet" in browser.run("document.getElementById('said').textContent")
    assert browser.logs()[0] == []
