"""What can be seen between two steps: a snapshot, statistics, and invariants.

A snapshot is plain data, and a drawing in text. It shares nothing with the engine.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby

from nanopaged.block_manager import Block, BlockManager, blocks_needed
from nanopaged.outputs import EngineStats
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sequence
from nanopaged.swap import Swapper

COLUMNS = 20  # logical blocks in a row of the drawing


@dataclass
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


@dataclass
class RequestState:
    """An unfinished request with its unfinished sequences; `state` is "running", "waiting" or
    "swapped".
    """

    request_id: str
    state: str
    sequences: tuple[SequenceState, ...]


@dataclass(kw_only=True)
class BlockState(Block):
    """A physical block.

    Fields: those of `Block`, and
        state: "free", "partial" (some slots are empty), "full", or "cached": unused, but findable.
        num_filled: slots that hold K/V.
    """

    state: str
    num_filled: int


@dataclass
class Snapshot:
    """The state of an engine between two steps. `print(engine.snapshot())` draws it.

    Fields:
        requests: the unfinished ones, in order of arrival.
        blocks: the whole pool, in order of block id.
        num_free_blocks: blocks without references: free ones, and cached ones, which can be
            evicted.
        cached: block ids in the order in which they would be evicted.
    """

    num_steps: int
    block_size: int
    requests: tuple[RequestState, ...]
    blocks: tuple[BlockState, ...]
    num_free_blocks: int
    cached: tuple[int, ...]

    def __str__(self) -> str:
        """Block tables as in the paper (logical → physical block, # filled), then the pool."""
        lines = [
            f"after step {self.num_steps}: "
            f"of {len(self.blocks)} blocks with {self.block_size} slots, "
            f"{len(self.blocks) - self.num_free_blocks} in use, {len(self.cached)} cached, "
            f"{self.num_free_blocks - len(self.cached)} free"
        ]
        for request in self.requests:
            for seq in request.sequences:
                lines.append("")
                lines += self._draw_table(request, seq)
        lines += ["", "physical blocks"]
        lines += self._draw_pool()
        return "\n".join(lines)

    def _draw_table(self, request: RequestState, seq: SequenceState) -> list[str]:
        """A sequence with its block table.

        A.1, running: 7 tokens, 6 of them computed
          logical block    0  1
          physical block   7  1
          # filled         4  2
        """
        table = seq.host_table or seq.block_table
        title = "host block" if seq.host_table else "physical block"
        logical = range(len(table))
        filled = [num_filled_slots(seq.num_computed_tokens, i, self.block_size) for i in logical]
        width = len(str(max([*table, *filled], default=0))) + 2
        rows = {"logical block": logical, title: table, "# filled": filled}
        lines = [
            f"{seq.name}, {request.state}: {len(seq.token_ids)} tokens, "
            f"{seq.num_computed_tokens} of them computed"
        ]
        for begin in range(0, len(table), COLUMNS):
            for name, numbers in rows.items():
                cells = [f"{number:>{width}}" for number in numbers[begin : begin + COLUMNS]]
                lines.append(f"  {name:<14} {''.join(cells)}")
        return lines

    def _draw_pool(self) -> list[str]:
        """A line for each block with a mark for each slot, or for a run of blocks that look alike.

        0-4  ████  A.1 A.2
          5  ██··  A.2
        6-7  free
        """
        notes = defaultdict(str)  # block id → what is said of it
        for turn, block_id in enumerate(self.cached, start=1):
            notes[block_id] = f" cached, number {turn} to be evicted"
        for request in self.requests:
            for seq in request.sequences:
                for block_id in seq.block_table:
                    notes[block_id] += f" {seq.name}"
        drawings = {}  # block id → what is drawn of it
        for block in self.blocks:
            slots = "█" * block.num_filled + "·" * (self.block_size - block.num_filled)
            is_free = block.state == "free"
            drawings[block.block_id] = "free" if is_free else f"{slots} {notes[block.block_id]}"
        rows = {}  # block ids → what is drawn of them
        for drawing, run in groupby(drawings, key=drawings.get):
            first, *others = run
            rows[f"{first}-{others[-1]}" if others else str(first)] = drawing
        width = max(len(ids) for ids in rows)
        return [f"  {ids:>{width}}  {drawing}" for ids, drawing in rows.items()]


def take_snapshot(num_steps: int, scheduler: Scheduler, requests: Iterable[Request]) -> Snapshot:
    """The present state.

    Args:
        requests: all unfinished requests, in order of arrival.
    """
    manager = scheduler.block_manager
    filled = filled_slots(manager, scheduler.running_sequences)
    blocks = []
    for block in manager.blocks:
        num_filled = filled[block.block_id]
        state = "full" if num_filled == manager.block_size else "partial"
        if block.block_id in manager.cached:
            num_filled = manager.block_size
            state = "cached"
        elif block.ref_count == 0:
            state = "free"
        blocks.append(
            BlockState(
                block_id=block.block_id,
                ref_count=block.ref_count,
                key=block.key,
                state=state,
                num_filled=num_filled,
            )
        )
    return Snapshot(
        num_steps=num_steps,
        block_size=manager.block_size,
        requests=tuple(_request_state(request) for request in requests if request.live),
        blocks=tuple(blocks),
        num_free_blocks=manager.num_free_blocks,
        cached=tuple(manager.cached),
    )


def _request_state(request: Request) -> RequestState:
    state = "waiting"
    if request.is_swapped:
        state = "swapped"
    elif request.live[0].block_table:
        state = "running"
    sequences = []
    for seq in request.live:
        number = f".{seq.index + 1}" if len(request.sequences) > 1 else ""
        sequences.append(
            SequenceState(
                name=f"{request.request_id}{number}",
                token_ids=tuple(seq.token_ids),
                num_computed_tokens=seq.num_computed_tokens,
                block_table=tuple(seq.block_table),
                host_table=tuple(seq.host_table),
            )
        )
    return RequestState(request.request_id, state, tuple(sequences))


def short_key(key: bytes) -> str:
    """The first digits of a key's hash, for people to compare."""
    return sha256(key).hexdigest()[:8]


def filled_slots(manager: BlockManager, sequences: Iterable[Sequence]) -> Counter[int]:
    """Each block of the sequences' tables → its slots that hold K/V. A shared block counts once."""
    filled = Counter()
    for seq in sequences:
        for i, block_id in enumerate(seq.block_table):
            num_filled = num_filled_slots(seq.num_computed_tokens, i, manager.block_size)
            filled[block_id] = max(filled[block_id], num_filled)
    return filled


def num_filled_slots(num_computed_tokens: int, logical_block: int, block_size: int) -> int:
    """Slots that a sequence has filled in its i-th block."""
    return min(block_size, max(0, num_computed_tokens - logical_block * block_size))


# ── statistics ────────────────────────────────────────────────────────────────────────────────────


def engine_stats(num_steps: int, scheduler: Scheduler) -> EngineStats:
    """What the scheduler has counted, and the state of blocks and queues now."""
    manager = scheduler.block_manager
    swapper = scheduler.swapper
    sequences = scheduler.running_sequences
    filled = filled_slots(manager, sequences)
    shared = [block for block in manager.blocks if block.ref_count > 1]
    swapped = [request for request in scheduler.waiting if request.is_swapped]
    num_used_blocks = manager.num_blocks - manager.num_free_blocks
    return EngineStats(
        num_blocks=manager.num_blocks,
        num_free_blocks=manager.num_free_blocks,
        num_cached_blocks=len(manager.cached),
        num_used_blocks=num_used_blocks,
        num_shared_blocks=len(shared),
        num_blocks_saved=sum(len(seq.block_table) for seq in sequences) - num_used_blocks,
        num_host_blocks=swapper.num_host_blocks,
        num_free_host_blocks=len(swapper.free_ids),
        # The other slots are the ends of last blocks, or belong to a prompt that is being computed.
        slot_utilization=sum(filled.values()) / max(1, len(filled) * manager.block_size),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) - len(swapped),
        num_swapped=len(swapped),
        preemption=scheduler.preemption,
        num_steps=num_steps,
        **asdict(scheduler.counters),
    )


# ── invariants ────────────────────────────────────────────────────────────────────────────────────


def check_blocks(manager: BlockManager, sequences: Collection[Sequence]) -> None:
    """Raise AssertionError unless pool, prefix index and block tables agree. Call it between steps.

    Args:
        sequences: all sequences that have device blocks.
    """
    references = Counter()  # block → entries of tables
    for seq in sequences:
        references.update(seq.block_table)
    all_ids = sorted([*references, *manager.free_ids, *manager.cached])
    assert all_ids == list(range(manager.num_blocks)), (
        f"{len(references)} blocks in use + {manager.num_free_blocks} free != {manager.num_blocks}"
    )
    for block in manager.blocks:
        num_entries = references[block.block_id]
        assert block.ref_count == num_entries, (
            f"block {block.block_id} has {block.ref_count} references, but {num_entries} entries"
        )
    published = {block.key: block for block in manager.blocks if block.key is not None}
    assert manager.prefix_index == published, "the index points to another block"
    _check_tables(manager, sequences)


def _check_tables(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Check the length of each table, and that its blocks hold the sequence's tokens.

    A key identifies all tokens up to the end of its block, so it is compared with the sequence's
    own key. Blocks without a key are compared with the first sequence that uses them.
    """
    size = manager.block_size
    first_users = {}  # block without a key → its place in a table, the first sequence that uses it
    for seq in sequences:
        num_blocks = len(seq.block_table)
        assert seq.num_computed_tokens <= seq.num_tokens, "more tokens are computed than known"
        assert seq.num_computed_tokens <= num_blocks * size, "a computed token has no slot"
        assert num_blocks <= blocks_needed(seq.num_tokens, size), "a table has too many blocks"
        keys = manager.keys_of(seq, seq.num_computed_tokens // size)
        for i, block_id in enumerate(seq.block_table):
            key = manager.blocks[block_id].key
            if key is None:
                place, other = first_users.setdefault(block_id, (i, seq))
                assert place == i, f"block {block_id} stands at two places"
                assert seq.request is other.request, "requests share a block without a key"
                end = min((i + 1) * size, seq.num_computed_tokens, other.num_computed_tokens)
                assert seq.token_ids[:end] == other.token_ids[:end], "shared, with different tokens"
            else:
                assert [key] == keys[i : i + 1], (
                    f"block {block_id} can be found, but is not computed, or has other tokens"
                )


def check_host_blocks(swapper: Swapper, requests: Iterable[Request]) -> None:
    """Raise AssertionError unless every host block is free or in one request's tables."""
    block_size = swapper.block_manager.block_size
    all_ids = list(swapper.free_ids)
    for request in requests:
        host_blocks = set()
        for seq in request.sequences:
            host_blocks.update(seq.host_table)
            if seq.host_table:
                assert not seq.block_table, "a swapped sequence has device blocks"
                assert seq.num_computed_tokens <= len(seq.host_table) * block_size
        all_ids += host_blocks
    assert sorted(all_ids) == list(range(swapper.num_host_blocks)), (
        "a host block is lost or doubled"
    )
