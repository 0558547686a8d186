"""A snapshot: everything that stands between two steps, as plain data, and as a drawing in text.

It is made of numbers, tuples and strings, and shares nothing with the engine, so it stays as it is while the
engine goes on. It knows no tensors: what a block contains is known by the tokens of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request
from nanopaged.views.statistics import filled_here, filled_slots

COLUMNS = 20  # logical blocks in a row of the drawing


@dataclass(frozen=True)
class SequenceState:
    """One output of a request, and where its K/V is.

    Fields:
        name: "A" for the only sequence of request "A", "A.1" for the first of several.
        token_ids: the prompt and the generated tokens.
        num_computed_tokens: tokens whose K/V is stored, from the first on.
        block_table: i-th logical block → physical block; empty while the request waits.
        host_table: the same in host memory, while the request is swapped out.
    """

    name: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_table: tuple[int, ...]
    host_table: tuple[int, ...]


@dataclass(frozen=True)
class RequestState:
    """An unfinished request with its unfinished sequences; `state` is "running", "waiting" or "swapped"."""

    request_id: str
    state: str
    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True)
class BlockState:
    """A physical block.

    Fields:
        state: "free", "partial" (some of its slots are empty), "full", or "cached": unused, but the
            prefix cache can still find it.
        ref_count: block tables that name it.
        num_filled: slots that hold K/V.
        key: of its tokens and all tokens before them, if the prefix cache can find it.
    """

    block_id: int
    state: str
    ref_count: int
    num_filled: int
    key: bytes | None


@dataclass(frozen=True)
class Snapshot:
    """The state of an engine between two steps. `print(engine.snapshot())` draws it.

    Fields:
        requests: the unfinished ones, in order of arrival.
        blocks: the whole pool, in order of block id.
        num_free_blocks: length of the free list. Cached blocks are not in it.
        cached: block ids in the order in which they would be evicted.
    """

    num_steps: int
    block_size: int
    requests: tuple[RequestState, ...]
    blocks: tuple[BlockState, ...]
    num_free_blocks: int
    cached: tuple[int, ...]
    num_host_blocks: int

    def __str__(self) -> str:
        """Block tables as in the paper (logical block → physical block, # filled), then the pool."""
        num_used = len(self.blocks) - self.num_free_blocks - len(self.cached)
        lines = [
            f"after step {self.num_steps}: of {len(self.blocks)} blocks with {self.block_size} slots, "
            f"{num_used} in use, {len(self.cached)} cached, {self.num_free_blocks} free"
        ]
        for request in self.requests:
            for seq in request.sequences:
                lines += ["", *self._draw_table(request, seq)]
        return "\n".join([*lines, "", "physical blocks", *self._draw_pool()])

    def _draw_table(self, request: RequestState, seq: SequenceState) -> list[str]:
        """A sequence with its block table.

        A.1, running: 7 tokens, 6 of them computed
          logical block    0  1
          physical block   7  1
          # filled         4  2
        """
        table, place = seq.block_table, "physical block"
        if seq.host_table:
            table, place = seq.host_table, "host block"
        num_tokens, num_computed = len(seq.token_ids), seq.num_computed_tokens
        lines = [f"{seq.name}, {request.state}: {num_tokens} tokens, {num_computed} of them computed"]
        filled = [filled_here(num_computed, i, self.block_size) for i in range(len(table))]
        for begin in range(0, len(table), COLUMNS):
            part = slice(begin, begin + COLUMNS)
            rows = {"logical block": range(len(table))[part], place: table[part], "# filled": filled[part]}
            width = max(len(str(number)) for row in rows.values() for number in row) + 2
            for title, row in rows.items():
                lines.append(f"  {title:<14} " + "".join(f"{number:>{width}}" for number in row))
        return lines

    def _draw_pool(self) -> list[str]:
        """A line for each block that is not free, with a mark for each slot; one line for a run of free ones.

          0  ████  A.1 A.2
          1  ██··  A.2
        2-7  free
        """
        holders: dict[int, list[str]] = {}
        for request in self.requests:
            for seq in request.sequences:
                for block_id in seq.block_table:
                    holders.setdefault(block_id, []).append(seq.name)
        turn = {block_id: place for place, block_id in enumerate(self.cached, start=1)}
        rows: list[tuple[str, str]] = []
        first_free: int | None = None
        for block in (*self.blocks, None):  # None: the end of the pool, and of a run of free blocks
            if block is not None and block.state == "free":
                first_free = block.block_id if first_free is None else first_free
                continue
            end = len(self.blocks) if block is None else block.block_id
            if first_free is not None:
                rows.append((str(first_free) if end == first_free + 1 else f"{first_free}-{end - 1}", "free"))
                first_free = None
            if block is not None:
                slots = "█" * block.num_filled + "·" * (self.block_size - block.num_filled)
                note = " ".join(holders.get(block.block_id, []))
                if block.state == "cached":
                    note = f"cached, number {turn[block.block_id]} to be evicted"
                rows.append((str(block.block_id), f"{slots}  {note}"))
        width = max(len(ids) for ids, _ in rows)
        return [f"  {ids:>{width}}  {note}" for ids, note in rows]


def take_snapshot(num_steps: int, scheduler: Scheduler, requests: Iterable[Request]) -> Snapshot:
    """The present state.

    Args:
        requests: all unfinished requests, in order of arrival.
    """
    manager = scheduler.block_manager
    filled = filled_slots(manager, scheduler.running_sequences)
    blocks = []
    for block in manager.blocks:
        state, num_filled = "free", 0
        if block.ref_count > 0:
            num_filled = filled[block.block_id]
            state = "full" if num_filled == manager.block_size else "partial"
        elif block.key is not None:
            state, num_filled = "cached", manager.block_size
        blocks.append(BlockState(block.block_id, state, block.ref_count, num_filled, block.key))
    return Snapshot(
        num_steps=num_steps,
        block_size=manager.block_size,
        requests=tuple(
            _request_state(request, waits=request.request_id in scheduler.waiting)
            for request in requests
            if request.live
        ),
        blocks=tuple(blocks),
        num_free_blocks=len(manager.free_ids),
        cached=tuple(manager.cached),
        num_host_blocks=scheduler.swapper.num_host_blocks,
    )


def _request_state(request: Request, waits: bool) -> RequestState:
    name = request.request_id
    return RequestState(
        request_id=name,
        state="running" if not waits else "swapped" if request.is_swapped else "waiting",
        sequences=tuple(
            SequenceState(
                name=name if len(request.sequences) == 1 else f"{name}.{seq.index + 1}",
                token_ids=tuple(seq.token_ids),
                num_computed_tokens=seq.num_computed_tokens,
                block_table=tuple(seq.block_table),
                host_table=tuple(seq.host_table),
            )
            for seq in request.live
        ),
    )


def short_key(key: bytes) -> str:
    """The first digits of a key's hash, for people to compare. The next block's key begins with this hash."""
    return sha256(key).hexdigest()[:8]
