"""The page of a trace, in a real browser."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, open_browser
from random_workloads import Workload, forked, mixed
from test_random_runs import make_engine
from test_trace import greedy, read_trace, run_to_end, tokens
from test_trace import make_engine as make_small_engine

from nanopaged.views.snapshot import Snapshot, short_key

COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"]
MOST_TABLES, MOST_ROWS = 16, 24  # that the page shows

READ_PAGE = """(() => {
  const all = (place, query) => [...place.querySelectorAll(query)];
  const cell = (c) => ({ kind: c.classList[1], shared: c.classList.contains("shared"),
    refs: +c.dataset.refs, colour: c.style.getPropertyValue("--a"),
    filled: c.style.getPropertyValue("--filled"),
    painted: getComputedStyle(c).backgroundColor + getComputedStyle(c).backgroundImage });
  const row = (r) => [+r.dataset.block, +r.lastChild.textContent];
  const queue = (id) => all(document.getElementById(id), ".chip").map((c) => c.textContent);
  const state = window.trace.stateAt(arguments[0]);
  return {
    pool: all(document, "#pool .cell").map(cell), host: all(document, "#host .cell").map(cell),
    tables: all(document, ".table").map((t) => all(t, "tbody tr[data-block]").map(row)),
    queues: ["running", "waiting", "swapped"].map(queue),
    cached: state.cached, keys: window.trace.blocksOf(state).map((b) => [b.key ?? null, b.tokens]),
    tokens: [...state.seqs.values()].sort((a, b) => a.number - b.number || a.index - b.index)
      .map((seq) => seq.tokens.slice(0, seq.n)),
  };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def record(workload: Workload, page: Path) -> list[Snapshot]:
    """Serve a workload with a trace, with steps that fail. Returns the state after each line of the trace."""
    engine, rng, snapshots = make_engine("fake", workload.config(page)), random.Random(workload.seed), []
    left = dict(enumerate(workload.requests))
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
                return snapshots
            continue
        engine.runner.fail_next = rng.random() < 0.02
        with suppress(RuntimeError):
            engine.step()
        snapshots.append(engine.snapshot())
    raise AssertionError("the workload does not end")


def check_page(shown: dict[str, Any], snapshot: Snapshot, names: dict[str, str]) -> None:
    """Everything that the page shows of a step is as in the snapshot.

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
    """At random steps of random runs, visited in any order, the page shows the engine's own state."""
    num_runs = max(8, request.config.getoption("--random-runs") // 50)
    first = request.config.getoption("--first-seed")
    for seed in range(first, first + num_runs):
        page = tmp_path / f"{seed}.html"
        snapshots = record(make(seed), page)
        header, *lines = read_trace(page)
        names = {fields[2]: fields[1] for line in lines for fields in line.get("requests", [])}
        assert len(lines) == len(snapshots)
        for line, snapshot in zip(lines, snapshots, strict=True):
            used = [block for block in snapshot.blocks if block.ref_count]
            assert line.get("used", 0) == len(used)
            assert line.get("filled", 0) == sum(block.num_filled for block in used)
        browser.open(page)
        steps = random.Random(seed).sample(range(len(lines)), k=min(12, len(lines)))
        for step in steps:
            browser.run("window.trace.go(arguments[0])", step + 1)
            check_page(browser.run(READ_PAGE, step + 1), snapshots[step], names)
        console, asked = browser.logs()
        assert console == []
        assert all(url.startswith(("file:", "data:")) for url in asked), asked


@pytest.fixture
def small_page(tmp_path: Path) -> Path:
    """A run with a copy on write, a prefix hit, a swap and an eviction."""
    engine = make_small_engine(tmp_path / "run.html", num_blocks=9, preemption="swap")
    engine.add_request("first", tokens(5, 7), greedy(12, n=2, seed=1))
    engine.add_request("second", tokens(5, 9), greedy(12))
    run_to_end(engine)
    return tmp_path / "run.html"


def steps_with(page: Path, kind: str) -> list[int]:
    """Numbers of the lines with an event of this kind, the first line is 1."""
    lines = read_trace(page)[1:]
    return [
        i for i, line in enumerate(lines, 1) if any(kind in said[0].split() for said in line.get("said", []))
    ]


def now(browser: Browser) -> int:
    return int(browser.run("document.getElementById('slider').value"))


def test_keys_and_jumps(browser: Browser, small_page: Path) -> None:
    browser.open(small_page)
    num_steps = len(read_trace(small_page)) - 1
    assert now(browser) == 0
    browser.press("\ue014")  # →
    browser.press("\ue014")
    assert now(browser) == 2
    browser.press("\ue012")  # ←
    assert now(browser) == 1
    browser.press("\ue010")  # End
    assert now(browser) == num_steps
    browser.press("\ue014")
    assert now(browser) == num_steps, "there is no step after the last one"
    browser.press("\ue011")  # Home
    assert now(browser) == 0
    for key, kind in zip("cpshe", ["copy", "preempt", "swap", "hit", "evict"], strict=True):
        steps = steps_with(small_page, kind)
        assert steps, f"the run should have a {kind}"
        browser.press("\ue011")
        for step in steps:
            browser.press(key)
            assert now(browser) == step
        browser.press(key)
        assert now(browser) == steps[-1], "there is no later one"
        for step in reversed(steps[:-1]):
            browser.press(key.upper())  # with Shift: backwards
            assert now(browser) == step
    assert browser.logs()[0] == []


def test_the_step_in_the_address(browser: Browser, small_page: Path) -> None:
    """Also in that of an open page."""
    for name, step in (("3", 3), ("5", 5), ("2.5", 2), ("-1", 0), ("none", 0)):
        browser.open(small_page, name)
        assert now(browser) == step
        assert browser.run("location.hash") == f"#{step}"
    browser.run("location.hash = '#4'")
    browser.driver.execute_async_script("setTimeout(arguments[0], 0)")
    assert now(browser) == 4


def test_buttons_slider_and_play(browser: Browser, small_page: Path) -> None:
    browser.open(small_page)
    num_steps = len(read_trace(small_page)) - 1
    for button, step in (("forward", 1), ("last", num_steps), ("back", num_steps - 1), ("first", 0)):
        browser.run(f"document.getElementById('{button}').click()")
        assert now(browser) == step
    browser.run("document.getElementById('slider').focus()")
    browser.press("\ue014")
    assert now(browser) == 1, "the slider has the focus, and moves once"
    browser.run("document.activeElement.blur()")
    browser.press(" ")
    assert browser.run("document.getElementById('play').ariaPressed") == "true"
    browser.driver.implicitly_wait(0)
    browser.driver.execute_async_script("setTimeout(arguments[0], 1500)")
    assert now(browser) > 1
    browser.press(" ")
    assert browser.run("document.getElementById('play').ariaPressed") == "false"


def test_the_sentence_and_the_marks_of_a_copy(browser: Browser, small_page: Path) -> None:
    browser.open(small_page, steps_with(small_page, "copy")[0])
    said = browser.run("document.getElementById('said').textContent")
    assert "A1 writes into block 1, which A2 also uses: copied to block " in said
    marked = browser.run(
        "[...document.querySelectorAll('#pool [data-mark=\"=\"]')].map((c) => +c.dataset.block)"
    )
    copies = read_trace(small_page)[steps_with(small_page, "copy")[0]]["copies"]
    assert marked == sorted(block_id for copy in copies for block_id in copy)


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
