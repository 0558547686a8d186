"""The blocks of a running engine, live in the terminal: `python example.py --watch`. Needs rich.

Each block is a cell in the colour of its request, with the request's letter. After the letter stands how full
the block is, or "+" if several sequences share it. A cached block is a small letter without background.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nanopaged.trace.snapshot import BlockState, RequestState, Snapshot

# Paul Tol's light scheme, as in page.html: distinct for the colour-blind, and readable under black letters.
COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"]
LEVELS = " ▁▂▃▄▅▆▇"  # a full block has no sign


class Watch:
    """Draws snapshots, one after the other. It remembers which request used a block last.

    Args:
        pause: seconds to look at each step.
    """

    def __init__(self, pause: float = 0.1, console: Console | None = None) -> None:
        self.pause, self.console = pause, console
        self.numbers: dict[str, int] = {}  # request id → 0, 1, 2, …, in order of arrival
        self.last_user: dict[int, int] = {}  # block → the number of the request
        self.live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The terminal shows the latest snapshot while the block runs."""
        with Live(console=self.console, auto_refresh=False) as self.live:
            yield

    def show(self, snapshot: Snapshot) -> None:
        """Draw the state after a step."""
        self.live.update(self.draw(snapshot), refresh=True)
        time.sleep(self.pause)

    def draw(self, snapshot: Snapshot) -> Group:
        """The pool, then a line for each request."""
        for request in snapshot.requests:
            number = self.numbers.setdefault(request.request_id, len(self.numbers))
            for seq in request.sequences:
                self.last_user.update(dict.fromkeys(seq.block_table, number))
        num_used = sum(block.ref_count > 0 for block in snapshot.blocks)
        title = (
            f"step {snapshot.num_steps}: {num_used} blocks in use, {len(snapshot.cached)} cached, "
            f"{snapshot.num_free_blocks} free"
        )
        pool = Text()
        for block in snapshot.blocks[: 1 + max(self.last_user, default=-1)]:  # others were never used
            pool.append_text(self._cell(block, snapshot.block_size))
            pool.append(" ")
        return Group(Text(title, style="bold"), pool, *map(self._line, snapshot.requests))

    def _cell(self, block: BlockState, block_size: int) -> Text:
        if block.state == "free":
            return Text("··", style="dim")
        number = self.last_user[block.block_id]
        letter, colour = _letter(number), COLOURS[number % len(COLOURS)]
        if block.state == "cached":
            return Text(f"{letter.lower()} ", style=colour)
        sign = " " if block.state == "full" else LEVELS[block.num_filled * len(LEVELS) // block_size]
        return Text(letter + ("+" if block.ref_count > 1 else sign), style=f"#111111 on {colour}")

    def _line(self, request: RequestState) -> Text:
        number = self.numbers[request.request_id]
        tokens = " + ".join(str(len(seq.token_ids)) for seq in request.sequences)
        return Text.assemble(
            (f"{_letter(number)} ", f"#111111 on {COLOURS[number % len(COLOURS)]}"),
            f" {request.request_id} {request.state}, {tokens} tokens",
        )


def _letter(number: int) -> str:
    return chr(ord("A") + number % 26)
