"""What can be seen between two steps: a snapshot, statistics, and invariants.

A snapshot is plain data, and a drawing in text. It shares nothing with the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby

from nanopaged.block_manager import BlockManager, blocks_needed
from nanopaged.outputs import EngineStats
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sequence
from nanopaged.swap import Swapper

COLUMNS = 20  # logical blocks in a row of the drawing


@dataclass(frozen=True)
class SequenceState:
    """One output of a request, and where its K/V is.

    Fields: as of `Sequence`, and
        name: "A" for the only sequence of request "A", "A.1" for the first of several.
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
        state: "free", "partial" (some slots are empty), "full", or "cached": unused, but findable.
        ref_count: block tables that name it.
        num_filled: slots that hold K/V.
        key: if the prefix cache can find it.
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
        num_free_blocks: blocks without references: free ones, and cached ones, which can be evicted.
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
        total, cached, free = (
            len(self.blocks),
            len(self.cached),
            self.num_free_blocks - len(self.cached),
        )
        counts = f"{total - cached - free} in use, {cached} cached, {free} free"
        lines = [
            f"after step {self.num_steps}: of {total} blocks with {self.block_size} slots, {counts}"
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
        table, computed = seq.host_table or seq.block_table, seq.num_computed_tokens
        place = "host block" if seq.host_table else "physical block"
        lines = [
            f"{seq.name}, {request.state}: {len(seq.token_ids)} tokens, {computed} of them computed"
        ]
        for begin in range(0, len(table), COLUMNS):
            logical = range(len(table))[begin : begin + COLUMNS]
            filled = [filled_here(computed, i, self.block_size) for i in logical]
            rows = {
                "logical block": logical,
                place: [table[i] for i in logical],
                "# filled": filled,
            }
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
        notes = {
            i: f" cached, number {turn} to be evicted"
            for turn, i in enumerate(self.cached, start=1)
        }
        for seq in (seq for request in self.requests for seq in request.sequences):
            for block_id in seq.block_table:
                notes[block_id] = f"{notes.get(block_id, '')} {seq.name}"
        rows: list[tuple[str, str]] = []
        for is_free, group in groupby(self.blocks, key=lambda block: block.state == "free"):
            run = list(group)
            if is_free:
                rows.append(
                    ("-".join(dict.fromkeys([str(run[0].block_id), str(run[-1].block_id)])), "free")
                )
                continue
            for block in run:
                slots = "█" * block.num_filled + "·" * (self.block_size - block.num_filled)
                rows.append((str(block.block_id), f"{slots} {notes.get(block.block_id, '')}"))
        width = max(len(ids) for ids, _ in rows)
        return [f"  {ids:>{width}}  {note}" for ids, note in rows]


def take_snapshot(num_steps: int, scheduler: Scheduler, requests: Iterable[Request]) -> Snapshot:
    """The present state.

    Args:
        requests: all unfinished requests, in order of arrival.
    """
    manager, size = scheduler.block_manager, scheduler.block_manager.block_size
    filled, waiting = filled_slots(manager, scheduler.running_sequences), set(scheduler.waiting)
    filled |= dict.fromkeys(manager.cached, size)
    blocks, states = [], []
    for block in manager.blocks:
        num_filled = filled.get(block.block_id, 0)
        state = "cached" if block.key is not None else "free"
        if block.ref_count > 0:
            state = "full" if num_filled == size else "partial"
        blocks.append(BlockState(block.block_id, state, block.ref_count, num_filled, block.key))
    for request in requests:
        state = (
            "running" if request not in waiting else "swapped" if request.is_swapped else "waiting"
        )
        sequences = []
        for seq in request.live:
            name = request.request_id + (f".{seq.index + 1}" if len(request.sequences) > 1 else "")
            tables = tuple(seq.block_table), tuple(seq.host_table)
            sequences.append(
                SequenceState(name, tuple(seq.token_ids), seq.num_computed_tokens, *tables)
            )
        if sequences:
            states.append(RequestState(request.request_id, state, tuple(sequences)))
    free, cached, num_host_blocks = (
        manager.num_free_blocks,
        manager.cached,
        scheduler.swapper.num_host_blocks,
    )
    return Snapshot(
        num_steps, size, tuple(states), tuple(blocks), free, tuple(cached), num_host_blocks
    )


def short_key(key: bytes) -> str:
    """The first digits of a key's hash, for people to compare."""
    return sha256(key).hexdigest()[:8]


def filled_slots(manager: BlockManager, sequences: Iterable[Sequence]) -> dict[int, int]:
    """Each block of their tables → its slots that hold K/V; a shared block counts once."""
    filled: dict[int, int] = {}
    for seq in sequences:
        for i, block_id in enumerate(seq.block_table):
            here = filled_here(seq.num_computed_tokens, i, manager.block_size)
            filled[block_id] = max(filled.get(block_id, 0), here)
    return filled


def filled_here(num_computed_tokens: int, logical_block: int, block_size: int) -> int:
    """Slots that a sequence has filled in its i-th block."""
    return min(block_size, max(0, num_computed_tokens - logical_block * block_size))


# ── statistics ─────────────────────────────────────────────────────────────────────────────────────────


def engine_stats(num_steps: int, scheduler: Scheduler) -> EngineStats:
    """What the scheduler has counted, and the state of blocks and queues now."""
    manager, swapper, sequences = (
        scheduler.block_manager,
        scheduler.swapper,
        scheduler.running_sequences,
    )
    num_swapped = sum(request.is_swapped for request in scheduler.waiting)
    num_used = manager.num_blocks - manager.num_free_blocks
    filled = filled_slots(manager, sequences)
    return EngineStats(
        num_blocks=manager.num_blocks,
        num_free_blocks=manager.num_free_blocks,
        num_cached_blocks=len(manager.cached),
        num_used_blocks=num_used,
        num_shared_blocks=sum(manager.blocks[block_id].ref_count > 1 for block_id in filled),
        num_blocks_saved=sum(len(seq.block_table) for seq in sequences) - num_used,
        num_host_blocks=swapper.num_host_blocks,
        num_free_host_blocks=len(swapper.free_ids),
        # The other slots are the ends of last blocks, or belong to a prompt that is being computed.
        slot_utilization=sum(filled.values()) / max(1, len(filled) * manager.block_size),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) - num_swapped,
        num_swapped=num_swapped,
        preemption=scheduler.preemption,
        num_steps=num_steps,
        **asdict(scheduler.counters),
    )


# ── invariants ─────────────────────────────────────────────────────────────────────────────────────────


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Raise AssertionError unless pool, prefix index and block tables agree. Call it between steps.

    Args:
        sequences: all sequences that have device blocks.
    """
    sequences = list(sequences)
    references = Counter(block_id for seq in sequences for block_id in seq.block_table)
    counts = f"{len(references)} blocks in use + {manager.num_free_blocks} free"
    everything = sorted([*references, *manager.free_ids, *manager.cached])
    assert everything == list(range(manager.num_blocks)), f"{counts} != {manager.num_blocks}"
    for block in manager.blocks:
        counts = (
            f"{block.ref_count} references, but stands {references[block.block_id]} times in tables"
        )
        assert block.ref_count == references[block.block_id], f"block {block.block_id} has {counts}"
    published = {block.key: block for block in manager.blocks if block.key is not None}
    assert manager.index == published, "the index names another block"
    holders: dict[
        int, tuple[int, Sequence]
    ] = {}  # block → its position in the first table that has it
    computed: set[tuple[Request, int]] = set()
    for seq in sequences:
        _check_table(manager, seq)
        for i, block_id in enumerate(seq.block_table):
            place, other = holders.setdefault(block_id, (i, seq))
            if other is not seq:
                assert place == i, "a block stands at different places of two tables"
                private = manager.blocks[block_id].key is None
                assert not private or seq.request is other.request, "requests share a private block"
                end = min(
                    (i + 1) * manager.block_size, seq.num_computed_tokens, other.num_computed_tokens
                )
                assert seq.token_ids[:end] == other.token_ids[:end], "shared, with different tokens"
            # The first sequence of a request that has a block computes it for its siblings.
            if manager.blocks[block_id].key is not None and (seq.request, block_id) not in computed:
                end = (i + 1) * manager.block_size
                assert seq.num_computed_tokens >= end, "a findable block is not computed"
                computed.add((seq.request, block_id))


def _check_table(manager: BlockManager, seq: Sequence) -> None:
    """Check one table: its length, its distinct blocks, and that published keys match the tokens."""
    num_blocks, size = len(seq.block_table), manager.block_size
    assert len(set(seq.block_table)) == num_blocks, "a block stands twice in one table"
    assert seq.num_computed_tokens <= min(seq.num_tokens, num_blocks * size)
    assert num_blocks <= blocks_needed(seq.num_tokens, size)
    keys = manager.keys_of(seq, seq.num_tokens // size)
    for i, block_id in enumerate(seq.block_table):
        key = manager.blocks[block_id].key
        assert key is None or [key] == keys[i : i + 1], (
            f"block {block_id} is found under other tokens"
        )


def check_host_blocks(swapper: Swapper, requests: Iterable[Request]) -> None:
    """Raise AssertionError unless every host block is free or in one request's tables."""
    everything, size = list(swapper.free_ids), swapper.block_manager.block_size
    for request in requests:
        everything += {host_id for seq in request.live for host_id in seq.host_table}
        for seq in request.live:
            assert not (seq.host_table and seq.block_table), "a swapped sequence has device blocks"
            assert not seq.host_table or seq.num_computed_tokens <= len(seq.host_table) * size
    assert sorted(everything) == list(range(swapper.num_host_blocks)), (
        "a host block is lost or used twice"
    )
