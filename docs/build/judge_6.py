"""Stage 6: preemption and swapping. By hand first; then random families of sequences go out and come back.

The pool here is a simple one of its own, so that stage 6 does not depend on what you wrote in earlier stages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Move, Moves, Request, Sample, ScheduledBatch, Sequence
from nanopaged.swap import Swapper
from nanopaged.text import StopRules

SIZE = 4  # slots of a block


class Pool(BlockManager):
    """Blocks with reference counts, and no prefix cache. The lowest free block is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, SIZE, enable_prefix_caching=False)

    @property
    def num_free_blocks(self) -> int:
        return sum(block.ref_count == 0 for block in self.blocks)

    def take(self) -> int:
        block = next((block for block in self.blocks if block.ref_count == 0), None)
        assert block is not None, "`take` was called, but no device block is free: count before you take."
        block.ref_count = 1
        return block.block_id

    def share(self, block_id: int) -> None:
        assert self.blocks[block_id].ref_count > 0, f"`share` was called for block {block_id}, which is free."
        self.blocks[block_id].ref_count += 1

    def release(self, block_id: int) -> None:
        assert self.blocks[block_id].ref_count > 0, f"Device block {block_id} was given back too often."
        self.blocks[block_id].ref_count -= 1

    def free(self, seq: Sequence) -> None:
        self.trim(seq, 0)
        seq.num_computed_tokens = 0

    def trim(self, seq: Sequence, num_tokens: int | None = None) -> None:
        num_tokens = seq.num_tokens if num_tokens is None else num_tokens
        while len(seq.block_table) > -(-num_tokens // SIZE):
            self.release(seq.block_table.pop())

    def references(self) -> dict[int, int]:
        return {block.block_id: block.ref_count for block in self.blocks if block.ref_count > 0}


@dataclass
class World:
    """A pool, a swapper, and requests whose sequences have the tables that a test gives them."""

    num_blocks: int = 8
    num_host_blocks: int = 8
    pool: Pool = field(init=False)
    swapper: Swapper = field(init=False)

    def __post_init__(self) -> None:
        self.pool = Pool(self.num_blocks)
        self.swapper = Swapper(self.pool, self.num_host_blocks)

    def request(
        self, *sequences: tuple[int, int, list[int]], params: SamplingParams | BeamSearchParams | None = None
    ) -> Request:
        """A request whose sequences have (tokens, computed tokens, block table)."""
        params = params or SamplingParams(n=len(sequences), max_tokens=100, ignore_eos=True)
        rules = StopRules.of(params, 1, frozenset(), max_model_len=1 << 20)
        request = Request("a", None, [0], params, rules, seed=0)
        request.sequences = [
            Sequence(request, [0] * num, i, num_computed_tokens=computed, block_table=list(table))
            for i, (num, computed, table) in enumerate(sequences)
        ]
        request.live = list(request.sequences)
        for _, _, table in sequences:
            for block_id in table:
                self.pool.blocks[block_id].ref_count += 1
        return request

    def state(self, request: Request) -> tuple[object, ...]:
        """All that a refused call must leave as it is."""
        tables = [(list(seq.block_table), list(seq.host_table)) for seq in request.live]
        computed = [seq.num_computed_tokens for seq in request.live]
        return tables, computed, self.pool.references(), sorted(self.swapper.free_ids)


def host_tables(request: Request) -> list[list[int]]:
    return [seq.host_table for seq in request.live]


def tables(request: Request) -> list[list[int]]:
    return [seq.block_table for seq in request.live]


# ── KVCache.move_blocks ───────────────────────────────────────────────────────────────────────────


def make_cache(num_blocks: int = 4, num_host_blocks: int = 3) -> KVCache:
    """All numbers of device block i are i, of host block i they are 100 + i."""
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    cache = KVCache(shape, num_blocks, SIZE, torch.device("cpu"), num_host_blocks)
    for i in range(num_blocks):
        cache.data[i] = i
    for i in range(num_host_blocks):
        cache.host[i] = 100 + i
    return cache


def contents(blocks: Tensor) -> list[int]:
    """The number in each block; -1 if a block is not the same in all layers, heads and slots."""
    return [int(block.max()) if block.min() == block.max() else -1 for block in blocks]


@pytest.mark.parametrize(
    ("swap_out", "swap_in", "copies", "device", "host"),
    [
        ([(3, 1)], [], [], [0, 1, 2, 3], [100, 3, 102]),
        ([], [(2, 0)], [], [102, 1, 2, 3], [100, 101, 102]),
        ([], [], [(1, 3), (1, 0)], [1, 1, 2, 1], [100, 101, 102]),
        ([(1, 2)], [(0, 1)], [], [0, 100, 2, 3], [100, 101, 1]),
        ([], [(0, 1)], [(1, 2)], [0, 100, 100, 3], [100, 101, 102]),
        ([(2, 1)], [], [(0, 2)], [0, 1, 0, 3], [100, 2, 102]),
        ([(3, 1), (0, 2)], [(0, 3)], [(3, 0)], [100, 1, 2, 100], [100, 3, 0]),
    ],
)
def test_the_moves_of_a_step(
    swap_out: list[Move], swap_in: list[Move], copies: list[Move], device: list[int], host: list[int]
) -> None:
    cache = make_cache()
    k, _ = cache.layer(1)  # attention holds such views from the beginning
    data, at = cache.data, (cache.data.data_ptr(), cache.host.data_ptr())
    moves = Moves(list(swap_out), list(swap_in), list(copies))
    cache.move_blocks(moves)
    assert moves == Moves(swap_out, swap_in, copies), (
        f"move_blocks was given {Moves(swap_out, swap_in, copies)}, and has left {moves}: the lists belong "
        "to the batch, which is counted and drawn afterwards."
    )
    got = contents(k), contents(cache.host)
    is_in_place = cache.data is data and at == (cache.data.data_ptr(), cache.host.data_ptr())
    assert is_in_place, (
        "move_blocks has put another tensor in the place of `data` or `host`. Write into the memory that is "
        "there (`copy_`, `index_copy_` or an assignment to `data[…]`): attention holds views of it."
    )
    assert got == (device, host), (
        f"Device blocks hold the numbers 0 1 2 3 and host blocks 100 101 102. After move_blocks of swap_out "
        f"{swap_out}, swap_in {swap_in} and copies {copies} they hold {got[0]} and {got[1]}, not {device} "
        f"and {host} (-1: mixed). The order is: out, in, copies."
    )


# ── Swapper.swap_out ──────────────────────────────────────────────────────────────────────────────


def check_moved_out(world: World, moves: list[Move] | None, expected: list[int], case: str) -> dict[int, int]:
    assert moves is not None, f"{case} `swap_out` returns None, though enough host blocks are free."
    sources, hosts = [source for source, _ in moves], [host for _, host in moves]
    assert sorted(sources) == sorted(expected), (
        f"{case} The device blocks {sorted(expected)} hold computed tokens and are moved, each once, but "
        f"the moves are {moves}."
    )
    free = sorted(set(range(world.num_host_blocks)) - set(hosts))
    assert len(set(hosts)) == len(hosts), f"{case} Each block needs a host block of its own; moves: {moves}."
    assert sorted(world.swapper.free_ids) == free, (
        f"{case} The moves are {moves}, so the host blocks {free} are still free, but `free_ids` has "
        f"{sorted(world.swapper.free_ids)}."
    )
    return dict(moves)


def test_one_sequence_goes_out() -> None:
    world = World()
    request = world.request((10, 6, [7, 2, 5]))
    (seq,) = request.live
    case = "A sequence of 10 tokens has the blocks [7, 2, 5] of 4 slots, and 6 tokens are computed."
    host_of = check_moved_out(world, world.swapper.swap_out(request), [7, 2], case)
    assert seq.host_table == [host_of[7], host_of[2]], (
        f"{case} They moved like {host_of}, so its host_table is {[host_of[7], host_of[2]]}, but it is "
        f"{seq.host_table}."
    )
    assert seq.block_table == [], f"{case} `swap_out` leaves its block_table as {seq.block_table}, not empty."
    assert world.pool.references() == {}, (
        f"{case} All its device blocks are given back, also block 5, but references remain: "
        f"{world.pool.references()}."
    )
    assert seq.num_computed_tokens == 6, (
        f"{case} They stay computed, on the host, but num_computed_tokens is {seq.num_computed_tokens}."
    )


@pytest.mark.parametrize(("computed", "moved"), [(8, [7, 2]), (9, [7, 2, 5]), (1, [7]), (4, [7])])
def test_only_blocks_with_computed_tokens_move(computed: int, moved: list[int]) -> None:
    world = World()
    request = world.request((10, computed, [7, 2, 5]))
    case = f"A sequence of 10 tokens has the blocks [7, 2, 5] of 4 slots, and {computed} tokens are computed."
    check_moved_out(world, world.swapper.swap_out(request), moved, case)


def test_a_refused_swap_out() -> None:
    for num_host_blocks, computed, why in (
        (1, 6, "needs 2 host blocks, and 1 is free"),
        (0, 1, "needs a host block, and there is none"),
        (8, 0, "has no computed token"),
        (0, 0, "has no computed token"),
    ):
        world = World(num_host_blocks=num_host_blocks)
        request = world.request((10, computed, [7, 2, 5]))
        before = world.state(request)
        moves = world.swapper.swap_out(request)
        assert moves is None, f"A sequence {why}, but `swap_out` returns {moves}, and not None."
        assert world.state(request) == before, (
            f"A sequence {why}: nothing may change, but (tables and host tables, computed tokens, "
            f"references, free host blocks) are {world.state(request)}; before they were {before}."
        )
    world = World(num_host_blocks=2)
    moves = world.swapper.swap_out(world.request((10, 6, [7, 2, 5])))
    assert moves is not None, "2 host blocks are enough for 2 computed blocks, but `swap_out` returns None."


def test_shared_blocks_go_out_once() -> None:
    world = World()
    request = world.request((11, 10, [0, 1, 2]), (11, 10, [0, 1, 3]), (9, 8, [0, 1, 4]))
    case = "Three sequences have the tables [0, 1, 2], [0, 1, 3] and [0, 1, 4], and 10, 10 and 8 computed."
    host_of = check_moved_out(world, world.swapper.swap_out(request), [0, 1, 2, 3], case)
    expected = [[host_of[block_id] for block_id in table] for table in ([0, 1, 2], [0, 1, 3], [0, 1])]
    assert host_tables(request) == expected, (
        f"{case} They moved like {host_of}, so the host tables are {expected}, but they are "
        f"{host_tables(request)}."
    )
    assert world.pool.references() == {}, (
        f"{case} Each gives back its references, but some remain: {world.pool.references()}."
    )


def test_a_block_that_a_sibling_is_to_compute() -> None:
    """As after a recomputation: the second shares blocks that the first has not computed yet."""
    world = World()
    request = world.request((9, 2, [0, 1, 2]), (9, 8, [0, 1, 3]))
    case = (
        "Two sequences of 9 tokens have the tables [0, 1, 2] and [0, 1, 3]. The first has computed 2 tokens; "
        "for the second 8 count as computed, because the first computes them."
    )
    host_of = check_moved_out(world, world.swapper.swap_out(request), [0, 1], case)
    expected = [[host_of[0], host_of[1]]] * 2
    assert host_tables(request) == expected, (
        f"{case} Blocks 0 and 1 move, and are in both host tables, {expected}, so that the two share them "
        f"again later. The host tables are {host_tables(request)}."
    )


def test_two_requests_on_the_host() -> None:
    world = World(num_host_blocks=4)
    first, second = world.request((9, 8, [0, 1, 2])), world.request((9, 8, [3, 4, 5]))
    world.swapper.swap_out(first)
    world.swapper.swap_out(second)
    used = [host for request in (first, second) for table in host_tables(request) for host in table]
    assert sorted(used) == [0, 1, 2, 3], (
        "Two requests with 2 computed blocks each are swapped out to 4 host blocks. Each host block is used "
        f"once, but they use {used}."
    )


# ── Swapper.swap_in and Swapper.release ───────────────────────────────────────────────────────────


def on_the_host(world: World, *sequences: tuple[int, int, list[int]]) -> Request:
    """A swapped request: (tokens, computed tokens, host table)."""
    request = world.request(*[(num, computed, []) for num, computed, _ in sequences])
    for seq, (_, _, table) in zip(request.live, sequences, strict=True):
        seq.host_table = list(table)
        world.swapper.free_ids = [i for i in world.swapper.free_ids if i not in table]
    return request


def test_one_sequence_comes_back() -> None:
    world = World()
    other = world.request((4, 4, [0]))
    request = on_the_host(world, (10, 6, [5, 3]))
    (seq,) = request.live
    moves = world.swapper.swap_in(request)
    case = "A sequence of 10 tokens has computed 6, its host table is [5, 3], and device block 0 is in use."
    assert moves is not None, f"{case} `swap_in` returns None, though 7 device blocks are free."
    device_of = dict(moves)
    assert [host for host, _ in sorted(moves)] == [3, 5], (
        f"{case} The host blocks 3 and 5 are moved, each once, but the moves (host, device) are {moves}."
    )
    assert seq.block_table == [device_of[5], device_of[3]], (
        f"{case} The moves are {moves}, so its block_table is {[device_of[5], device_of[3]]}, but it is "
        f"{seq.block_table}."
    )
    expected = dict.fromkeys([*tables(other)[0], *seq.block_table], 1)
    assert world.pool.references() == expected, (
        f"{case} With its table {seq.block_table} the references are {expected}, but they are "
        f"{world.pool.references()}."
    )
    assert (seq.host_table, sorted(world.swapper.free_ids)) == ([], list(range(8))), (
        f"{case} Afterwards its host_table is empty and all 8 host blocks are free, but they are "
        f"{seq.host_table} and {sorted(world.swapper.free_ids)}."
    )
    assert seq.num_computed_tokens == 6, f"{case} It has now computed {seq.num_computed_tokens}, and not 6."


def test_shared_blocks_come_back_once() -> None:
    world = World()
    request = on_the_host(world, (11, 10, [4, 1, 2]), (11, 10, [4, 1, 3]), (9, 8, [4, 1]))
    moves = world.swapper.swap_in(request)
    case = "Three sequences have the host tables [4, 1, 2], [4, 1, 3] and [4, 1]."
    assert moves is not None, f"{case} `swap_in` returns None, though 8 device blocks are free."
    assert sorted(host for host, _ in moves) == [1, 2, 3, 4], (
        f"{case} Each distinct host block is moved once, but the moves (host, device) are {moves}."
    )
    device_of = dict(moves)
    expected = [[device_of[host] for host in table] for table in ([4, 1, 2], [4, 1, 3], [4, 1])]
    assert tables(request) == expected, (
        f"{case} The moves are {moves}, so the block tables are {expected}, but they are {tables(request)}."
    )
    counts = {device_of[4]: 3, device_of[1]: 3, device_of[2]: 1, device_of[3]: 1}
    assert world.pool.references() == counts, (
        f"{case} Their block tables are {tables(request)}, so the references (block: number) are {counts}, "
        f"but they are {world.pool.references()}."
    )
    assert sorted(world.swapper.free_ids) == list(range(8)), (
        f"{case} Afterwards each of the 8 host blocks is free once, but `free_ids` is "
        f"{sorted(world.swapper.free_ids)}."
    )


@pytest.mark.parametrize(
    ("sequences", "needed", "why"),
    [
        ([(8, 7, [0, 1])], 2, "2 host blocks, and a slot for the newest token is in the second"),
        ([(9, 8, [0, 1])], 3, "2 host blocks, and a new one for the ninth token"),
        ([(20, 6, [0, 1])], 5, "2 host blocks, and 3 new ones for the rest of its 20 tokens"),
        ([(9, 8, [0, 1]), (9, 8, [0, 1])], 4, "2 host blocks, and a new one for each sequence"),
        ([(7, 6, [0, 1]), (7, 6, [0, 1])], 3, "2 host blocks, and a copy of the second, that both write"),
    ],
)
def test_blocks_that_must_be_free(sequences: list[tuple[int, int, list[int]]], needed: int, why: str) -> None:
    for num_reserved in (0, 2):
        case = f"Sequences with (tokens, computed tokens, host table) {sequences} need {needed} device blocks"
        case += f" ({why}), and {num_reserved} must stay free."
        world = World(num_blocks=needed + num_reserved - 1)
        request = on_the_host(world, *sequences)
        before = world.state(request)
        moves = world.swapper.swap_in(request, num_reserved)
        assert moves is None, (
            f"{case} {world.num_blocks} are free, but `swap_in` returns {moves}, and not None."
        )
        assert world.state(request) == before, (
            f"{case} `swap_in` returns None, so nothing may change, but (tables and host tables, computed "
            f"tokens, references, free host blocks) are {world.state(request)}; before they were {before}."
        )
        world = World(num_blocks=needed + num_reserved)
        request = on_the_host(world, *sequences)
        moves = world.swapper.swap_in(request, num_reserved)
        assert moves is not None, f"{case} {world.num_blocks} are free, but `swap_in` returns None."


def test_release() -> None:
    world = World(num_host_blocks=6)
    request = on_the_host(world, (11, 10, [4, 1, 2]), (11, 10, [4, 1, 3]))
    world.swapper.release(request)
    assert sorted(world.swapper.free_ids) == [0, 1, 2, 3, 4, 5], (
        "Two sequences have the host tables [4, 1, 2] and [4, 1, 3] of 6 host blocks. After `release` each "
        f"host block is free once, but `free_ids` is {sorted(world.swapper.free_ids)}."
    )
    assert host_tables(request) == [[], []], (
        f"After `release` the host tables are {host_tables(request)}, and not empty."
    )
    world.swapper.release(request)
    assert len(world.swapper.free_ids) == 6, (
        "`release` of a request without host blocks must do nothing, but then `free_ids` is "
        f"{sorted(world.swapper.free_ids)}."
    )


# ── Scheduler._preempt ────────────────────────────────────────────────────────────────────────────


def preempt(way: str, num_host_blocks: int, *computed: int) -> tuple[Scheduler, Request, ScheduledBatch]:
    """`_preempt` of a beam search whose beams have one block each; two other requests already wait."""
    world = World()
    params = BeamSearchParams(beam_width=len(computed), max_tokens=50)
    request = world.request(*[(3, num, [i]) for i, num in enumerate(computed)], params=params)
    for seq in request.live:
        seq.candidates = [Sample(0, 0.0)]
    scheduler = Scheduler(world.pool, 9, 99, preemption=way, num_host_blocks=num_host_blocks)
    scheduler.rank = lambda request: {"early": 1, "a": 2, "new": 2}[request.request_id]
    for name in ("early", "new"):
        other = world.request((1, 0, []))
        other.request_id = name
        scheduler.add(other)
    batch = ScheduledBatch(moves=Moves(swap_out=[(7, 7)]), preempted=[(other, "swap")])
    scheduler._preempt(request, batch)
    return scheduler, request, batch


@pytest.mark.parametrize(
    ("way", "num_host_blocks", "expected"),
    [("swap", 2, "swap"), ("swap", 1, "recompute"), ("recompute", 2, "recompute")],
)
def test_preempt(way: str, num_host_blocks: int, expected: str) -> None:
    scheduler, request, batch = preempt(way, num_host_blocks, 3, 2)
    case = f'preemption="{way}", a request with 2 blocks, {num_host_blocks} free host blocks:'
    hows = [how for each, how in batch.preempted if each is request]
    assert hows == [expected], f'{case} batch.preempted must have it once, with "{expected}"; it has {hows}.'
    assert len(batch.preempted) == 2, f"{case} batch.preempted loses the request that was in it before."
    assert batch.moves.swap_out[:1] == [(7, 7)], (
        f"{case} batch.moves.swap_out already has the moves of another request, which must stay; it is "
        f"{batch.moves.swap_out}."
    )
    moved = sorted(source for source, _ in batch.moves.swap_out[1:])
    assert moved == ([0, 1] if expected == "swap" else []), (
        f"{case} batch.moves.swap_out must get the moves of "
        f"{'blocks 0 and 1' if expected == 'swap' else 'none'}, but it gets {batch.moves.swap_out[1:]}."
    )
    assert scheduler.block_manager.references() == {}, (
        f"{case} it gives up all its blocks, but references remain: {scheduler.block_manager.references()}."
    )
    computed = [seq.num_computed_tokens for seq in request.live]
    assert computed == ([3, 2] if expected == "swap" else [0, 0]), (
        f"{case} its sequences had computed 3 and 2 tokens; now they have {computed}."
    )
    has_candidates = [seq.candidates is not None for seq in request.live]
    assert has_candidates == [expected == "swap"] * 2, (
        f"{case} beams that are computed again propose their candidates again, so these are set to None; "
        f"swapped beams keep theirs. Here has each beam candidates: {has_candidates}."
    )
    assert request.is_swapped == (expected == "swap"), (
        f"{case} afterwards it is {'not ' * (expected == 'swap')}swapped, by its host tables "
        f"{host_tables(request)}."
    )
    assert request.num_preemptions == 1, f"{case} num_preemptions is {request.num_preemptions}, and not 1."
    waiting = [each.request_id for each in scheduler.waiting]
    assert waiting == ["early", "a", "new"], (
        f"{case} early, of rank 1, and new, of rank 2, wait, and `self.rank` of this request, a, is 2: it "
        f"waits between them. Waiting are {waiting}."
    )
    assert request.rank == 2, f"{case} `self.rank` gives 2, but its `rank` is {request.rank}."


def test_nothing_computed_is_nothing_to_swap() -> None:
    _, request, batch = preempt("swap", 8, 0, 0)
    hows = [how for each, how in batch.preempted if each is request]
    assert hows == ["recompute"], (
        'preemption="swap", but the request has no computed token: there is nothing to move, so it is '
        f'preempted by "recompute". batch.preempted says {hows}.'
    )


def test_each_preemption_is_decided_anew() -> None:
    """A full host pool is no reason never to swap again."""
    scheduler, request, _ = preempt("swap", 1, 3, 2)
    scheduler.swapper = Swapper(scheduler.block_manager, 2)
    for seq, block_id in zip(request.live, (0, 1), strict=True):
        scheduler.block_manager.blocks[block_id].ref_count = 1
        seq.block_table, seq.num_computed_tokens = [block_id], 2
    scheduler.waiting.remove(request)
    batch = ScheduledBatch()
    scheduler._preempt(request, batch)
    hows = [how for _, how in batch.preempted]
    assert (hows, scheduler.preemption) == (["swap"], "swap"), (
        'preemption="swap", and the host pool was too full once. At the next preemption it has room, so the '
        f"request is swapped; batch.preempted says {hows}, and `preemption` is {scheduler.preemption!r}: no "
        "decision may stay for the next call."
    )


# ── random round trips ────────────────────────────────────────────────────────────────────────────


def draw_family(world: World, rng: random.Random) -> Request | None:
    """A request whose sequences share the blocks of a prefix; None if the pool has too few blocks."""
    num_shared = rng.randint(0, 2)
    width = rng.randint(1, 3)
    lengths = [rng.randint(num_shared * SIZE + 1, num_shared * SIZE + 7) for _ in range(width)]
    own = [-(-length // SIZE) - num_shared for length in lengths]
    free = [block.block_id for block in world.pool.blocks if block.ref_count == 0]
    if num_shared + sum(own) > len(free):
        return None
    rng.shuffle(free)
    shared = [free.pop() for _ in range(num_shared)]
    sequences = []
    for length, num_own in zip(lengths, own, strict=True):
        computed = rng.choice([length - 1, length, rng.randint(num_shared * SIZE, length)])
        sequences.append((length, computed, shared + [free.pop() for _ in range(num_own)]))
    if rng.random() < 0.2:  # as after a recomputation: the first has still to compute what all share
        sequences[0] = (lengths[0], rng.randint(0, lengths[0] - 1), sequences[0][2])
    return world.request(*sequences)


def test_random_round_trips() -> None:
    """Blocks hold names; after any number of round trips each sequence must find its own names again."""
    num_swapped = 0
    for seed in range(120):
        rng = random.Random(seed)
        world = World(rng.randint(6, 20), rng.randint(2, 20))
        device: dict[int, str] = {}
        host: dict[int, str] = {}
        expected: dict[Request, list[list[str]]] = {}  # the names in the blocks of each sequence
        for number in range(30):
            where = f"Random run {seed}, operation {number} (blocks of 4 slots)."
            action = rng.random()
            swapped = [request for request in expected if request.is_swapped]
            running = [request for request in expected if not request.is_swapped]
            if action < 0.35 or not expected:
                request = draw_family(world, rng)
                if request is not None:
                    for block_id in {b for table in tables(request) for b in table}:
                        device[block_id] = f"{number}/{block_id}"
                    expected[request] = [[device[b] for b in table] for table in tables(request)]
            elif action < 0.65 and running:
                request = rng.choice(running)
                computed = {
                    b for s in request.live for b in s.block_table[: -(-s.num_computed_tokens // SIZE)]
                }
                before, fits = world.state(request), 0 < len(computed) <= len(world.swapper.free_ids)
                old = [list(table) for table in tables(request)]
                live = list(request.live)
                moves = world.swapper.swap_out(request)
                assert request.live == live, f"{where} `swap_out` has changed `request.live`."
                assert (moves is not None) == fits, (
                    f"{where} A request with the tables {old} has {len(computed)} computed blocks, and "
                    f"{len(before[3])} host blocks are free, but `swap_out` returns {moves}."
                )
                for source, destination in moves or []:
                    host[destination] = device[source]
                num_swapped += fits
                if fits:
                    expected[request] = [
                        [name for name, b in zip(names, table, strict=True) if b in computed]
                        for names, table in zip(expected[request], old, strict=True)
                    ]
            elif action < 0.9 and swapped:
                request = rng.choice(swapped)
                num_free, old = world.pool.num_free_blocks, [list(table) for table in host_tables(request)]
                newest = [(s.num_tokens - 1) // SIZE for s in request.live]
                written = [table[i] for i, table in zip(newest, old, strict=True) if i < len(table)]
                needed = len({h for table in old for h in table}) + len(written) - len(set(written))
                needed += sum(-(-s.num_tokens // SIZE) - len(s.host_table) for s in request.live)
                moves = world.swapper.swap_in(request)
                assert (moves is not None) == (needed <= num_free), (
                    f"{where} A request with the host tables {old} and "
                    f"{[seq.num_tokens for seq in request.live]} tokens needs {needed} device blocks, and "
                    f"{num_free} are free, but `swap_in` returns {moves}."
                )
                for source, destination in moves or []:
                    device[destination] = host[source]
            else:
                request = rng.choice(list(expected))
                world.swapper.release(request)
                for seq in request.live:
                    world.pool.free(seq)
                del expected[request]
            for request, names in expected.items():
                blocks, memory = (
                    (host_tables(request), host) if request.is_swapped else (tables(request), device)
                )
                got = [[memory[b] for b in table] for table in blocks]
                assert got == names, (
                    f"{where} A request has the {'host ' * request.is_swapped}tables {blocks}. Its blocks "
                    f"should hold {names}, and hold {got}."
                )
            counts: dict[int, int] = {}
            for b in [b for request in expected for table in tables(request) for b in table]:
                counts[b] = counts.get(b, 0) + 1
            counts = dict(sorted(counts.items()))
            assert world.pool.references() == counts, (
                f"{where} By the tables, the device blocks have the references {counts}, but they have "
                f"{world.pool.references()}."
            )
            used = {b for request in expected for table in host_tables(request) for b in table}
            free = sorted(set(range(world.num_host_blocks)) - used)
            assert sorted(world.swapper.free_ids) == free, (
                f"{where} By the host tables, the host blocks {free} are free, but `free_ids` has "
                f"{sorted(world.swapper.free_ids)}."
            )
    assert num_swapped > 300, f"Only {num_swapped} requests were swapped out, too few to judge."
