"""The blocks of a running engine, live in the terminal: `python example.py --watch`. Needs rich.

Each block is a cell in the colour of its request, with the request's letter. After the letter stands how full
the block is, or "+" if several sequences share it. A cached block is a small letter without background; "?"
stands for a request that came and went between two drawings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nanopaged.views.snapshot import BlockState, RequestState, Snapshot

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
        self.num_requests = 0  # drawn so far
        self.numbers: dict[str, int] = {}  # id of an unfinished request → 0, 1, 2, …, in order of arrival
        self.users: dict[int, tuple[int | None, bytes | None]] = {}  # block → its last user, its last key
        self.num_drawn = 0  # blocks, up to the last one that was ever used
        self.live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The terminal shows the latest snapshot while the block runs."""
        with Live(console=self.console, auto_refresh=False) as self.live:
            yield

    def show(self, snapshot: Snapshot) -> None:
        """Draw the state after a step."""
        assert self.live is not None  # within `shown`
        self.live.update(self.draw(snapshot), refresh=True)
        time.sleep(self.pause)

    def draw(self, snapshot: Snapshot) -> Group:
        """The pool, then a line for each request."""
        self._remember(snapshot)
        num_used = sum(block.ref_count > 0 for block in snapshot.blocks)
        title = (
            f"step {snapshot.num_steps}: {num_used} blocks in use, {len(snapshot.cached)} cached, "
            f"{snapshot.num_free_blocks} free"
        )
        pool = Text()
        for block in snapshot.blocks[: self.num_drawn]:
            pool.append_text(self._cell(block, snapshot.block_size))
            pool.append(" ")
        return Group(Text(title, style="bold"), pool, *map(self._line, snapshot.requests))

    def _remember(self, snapshot: Snapshot) -> None:
        """Number the new requests, and note which of them uses each block."""
        before, self.numbers = self.numbers, {}
        for request in snapshot.requests:
            self.numbers[request.request_id] = before.get(request.request_id, self.num_requests)
            self.num_requests += request.request_id not in before
        users = {
            block_id: self.numbers[request.request_id]
            for request in snapshot.requests
            for seq in request.sequences
            for block_id in seq.block_table
        }
        for block in snapshot.blocks:
            user, key = self.users.get(block.block_id, (None, None))
            if block.ref_count > 0:
                user = users[block.block_id]
            elif block.state == "free" or key not in (None, block.key):  # or another request has filled it
                user = None
            self.users[block.block_id] = user, block.key
            if block.state != "free":
                self.num_drawn = max(self.num_drawn, block.block_id + 1)

    def _cell(self, block: BlockState, block_size: int) -> Text:
        if block.state == "free":
            return Text("··", style="dim")
        number, _ = self.users[block.block_id]
        if number is None:
            return Text("? ")
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
