"""The live view in the terminal."""

from __future__ import annotations

from io import StringIO
from itertools import combinations

import pytest
from conftest import tokens
from test_trace import greedy, make_engine

pytest.importorskip("rich", reason='the live view needs rich: pip install -e ".[watch]"')

from rich.console import Console

from nanopaged.trace.watch import COLOURS, Watch
from nanopaged.views.snapshot import Snapshot


def drawn(watch: Watch, snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """The cells of the pool, and the lines of the requests."""
    console = Console(width=80, record=True, file=StringIO())
    console.print(watch.draw(snapshot))
    _, pool, *lines = console.export_text().splitlines()
    return pool.split(), [line.rstrip() for line in lines]


def test_each_state_has_its_look() -> None:
    """Shared, full, partial, cached and free blocks; the letters follow the order of arrival."""
    engine = make_engine(None, num_blocks=10)
    watch = Watch()
    engine.add_request("first", tokens(5, 10), greedy(2))
    engine.step()
    watch.draw(engine.snapshot())
    engine.step()  # the first one is finished
    engine.add_request("second", tokens(40, 6), greedy(9, n=2))
    engine.step()
    console = Console(width=60, record=True, file=StringIO())
    console.print(watch.draw(engine.snapshot()))
    title, pool, line = console.export_text(clear=False).splitlines()
    assert title.startswith("step 3: 2 blocks in use, 2 cached, 6 free")
    assert pool.split() == ["a", "a", "B+", "B+"]
    assert line.rstrip() == "B  second running, 7 + 7 tokens"
    assert f"background-color: {COLOURS[1]}" in console.export_html()


def test_any_snapshots_can_be_drawn() -> None:
    """Also of blocks whose request came and went between them. A block is drawn once it was used."""
    engine = make_engine(None, num_blocks=10, num_host_blocks=4, preemption="swap")
    snapshots = [engine.snapshot()]
    for i, max_tokens in enumerate((1, 6, 1, 14, 1, 9, 1)):
        params = greedy(max_tokens, n=2, seed=1) if i == 3 else greedy(max_tokens)
        engine.add_request(f"{i % 2}{max_tokens}", tokens(9 * i, 6 + i), params)
        for _ in range(2):
            engine.step()
            snapshots.append(engine.snapshot())
    while engine.has_unfinished_requests():
        engine.step()
        snapshots.append(engine.snapshot())
    states, cells = set(), set()
    for first, second in combinations(snapshots, 2):
        watch = Watch()
        for snapshot in (first, second):
            pool, _ = drawn(watch, snapshot)
            assert all(block.state == "free" for block in snapshot.blocks[len(pool) :])
            for cell, block in zip(pool, snapshot.blocks, strict=False):
                assert (cell == "··") == (block.state == "free")
                assert (cell == "?" or cell.islower()) == (block.state == "cached")
                states.add(block.state)
                cells.add(cell)
    assert states == {"free", "partial", "full", "cached"}
    assert "?" in cells


def test_whose_a_block_was() -> None:
    engine, watch = make_engine(None, num_blocks=4), Watch()
    assert drawn(watch, engine.snapshot()) == ([], []), "no block was ever used"
    engine.add_request("id", tokens(5, 6), greedy(2))
    engine.step()
    assert drawn(watch, engine.snapshot()) == (["A", "A▄"], ["A  id running, 7 tokens"])
    engine.step()
    assert drawn(watch, engine.snapshot()) == (["a", "··"], [])
    engine.add_request("unseen", tokens(40, 9), greedy(1))
    engine.step()
    assert drawn(watch, engine.snapshot()) == (["a", "?", "?"], [])
    engine.add_request("unseen", tokens(60, 15), greedy(1))
    engine.step()
    assert drawn(watch, engine.snapshot()) == (["?", "··", "?", "?"], []), "it evicted block 0"
    engine.add_request("id", tokens(80, 3), greedy(2))
    engine.step()
    pool, lines = drawn(watch, engine.snapshot())
    assert lines == ["B  id running, 4 tokens"], "another request, with the id of the first"
    assert pool == ["?", "B▆", "?", "?"]


def test_the_last_step_stays_on_the_screen() -> None:
    engine = make_engine(None)
    engine.add_request("only", tokens(5, 6), greedy(3))
    console = Console(width=60, force_terminal=True, record=True)
    watch = Watch(pause=0, console=console)
    with console.capture() as captured, watch.shown():
        while engine.has_unfinished_requests():
            engine.step()
            watch.show(engine.snapshot())
    assert "step 3: 0 blocks in use, 2 cached, 10 free" in captured.get()
