"""The live view in the terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from conftest import tokens
from test_trace import greedy, make_engine

pytest.importorskip("rich", reason='the live view needs rich: pip install -e ".[watch]"')

from rich.console import Console

from nanopaged.trace.watch import COLOURS, Watch


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
