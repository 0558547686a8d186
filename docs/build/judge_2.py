"""Stage 2: blocks without the prefix cache. Small cases by hand, then random ones, counted anew."""

from __future__ import annotations

import operator
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanopaged.block_manager import BlockManager
from nanopaged.config import SamplingParams
from nanopaged.sequence import Request, Sequence
from nanopaged.text import StopRules


@contextmanager
def saying(what: object) -> Iterator[None]:
    """An exception in the block says what raised it."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise AssertionError(f"{what} raises {type(error).__name__}: {error} ({place}).") from error


def pool(num_blocks: int, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=False)


def sequence(num_tokens: int) -> Sequence:
    rules = StopRules(frozenset(), frozenset(), 0, 1000)
    request = Request("r", None, list(range(num_tokens)), SamplingParams(), rules, 0)
    return request.sequences[0]


def refs(manager: BlockManager) -> list[int]:
    return [block.ref_count for block in manager.blocks]


def admitted(manager: BlockManager, num_tokens: int) -> Sequence:
    seq, free = sequence(num_tokens), manager.num_free_blocks
    call = f"`allocate` of {num_tokens} tokens, blocks of {manager.block_size}, {free} of them free,"
    given = [seq]
    with saying(call):
        done = manager.allocate(given)
    assert done is True, f"{call} gives {done}, not True."
    check_argument("allocate", given, [seq])
    return seq


def check_argument(function: str, given: list[Sequence], before: list[Sequence]) -> None:
    """The list belongs to the request: `request.live` is passed."""
    is_as_before = len(given) == len(before) and all(map(operator.is_, given, before))
    assert is_as_before, (
        f"`{function}` has changed the list of sequences that it was given, which is the request's own: it "
        f"had {len(before)} and now has {len(given)}."
    )


# ── take, share, release ──────────────────────────────────────────────────────────────────────────


def test_take() -> None:
    manager = pool(3)
    taken = [manager.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2], (
        f"three times `take` in a pool of 3 gives the blocks {taken}, and not each block once."
    )
    assert refs(manager) == [1, 1, 1], f"a taken block has one reference, but the counts are {refs(manager)}."
    assert manager.num_free_blocks == 0, (
        f"all 3 blocks are taken, but `num_free_blocks` is {manager.num_free_blocks}, not 0."
    )


def test_free_ids_is_a_stack() -> None:
    manager = pool(3)
    first = manager.take()
    assert first == 0, f"`take` in a new pool gives block {first}: `free_ids` is a stack with block 0 on top."
    manager.take()
    manager.release(0)
    again = manager.take()
    assert again == 0, f"block 0 was released last, but the next `take` gives block {again}."
    manager.take()
    for block_id in (0, 2):  # the one released last is on top, and not the one with the smallest id
        manager.release(block_id)
    again = manager.take()
    assert again == 2, f"blocks 0 and then 2 were released, but the next `take` gives block {again}, not 2."


def test_take_and_release_change_the_pool_in_place() -> None:
    manager = pool(3)
    free_ids, cached = manager.free_ids, manager.cached
    manager.release(manager.take())
    publish(manager, block_id := manager.take())
    manager.release(block_id)
    manager.share(block_id)
    assert manager.free_ids is free_ids, (
        "`take` or `release` has put another list in the place of `free_ids`: a copy takes as many steps as "
        "the pool has blocks, and `pop` and `append` take one."
    )
    assert manager.cached is cached, (
        "`share` or `release` has put another dictionary in the place of `cached`: change this one."
    )


def test_share_and_release() -> None:
    manager = pool(2)
    block_id = manager.take()
    manager.share(block_id)
    count = manager.blocks[block_id].ref_count
    assert count == 2, f"after `take` and `share` a block has {count} references, not 2."
    manager.release(block_id)
    count = manager.blocks[block_id].ref_count
    assert count == 1, f"after `take`, `share` and `release` a block has {count} references, not 1."
    assert block_id not in manager.free_ids, "a block with one reference left stands in `free_ids`."
    manager.release(block_id)
    count = manager.blocks[block_id].ref_count
    assert count == 0, f"after its last `release` a block has {count} references, not 0."
    assert manager.free_ids.count(block_id) == 1, (
        f"after its last `release` block {block_id} must stand once in `free_ids`: {manager.free_ids}."
    )
    assert manager.num_free_blocks == 2, (
        f"both blocks are free again, but `num_free_blocks` is {manager.num_free_blocks}, not 2."
    )


def test_one_release_too_many_is_an_error() -> None:
    manager = pool(2)
    block_id = manager.take()
    manager.release(block_id)
    before = refs(manager), sorted(manager.free_ids)
    try:
        manager.release(block_id)
    except RuntimeError:
        pass
    else:
        pytest.fail("`release` of a block without references must raise RuntimeError, and it returned.")
    other = manager.take(), manager.take()
    for free in other:  # the first of them does not lie on top of the stack
        manager.release(free)
    try:
        manager.release(other[0])
    except RuntimeError:
        pass
    else:
        pytest.fail("two blocks are free; `release` of the one released first must raise RuntimeError, too.")
    after = refs(manager), sorted(manager.free_ids)
    assert after == before, (
        f"the refused `release` has changed the pool: counts and `free_ids` were {before}, and are {after}."
    )


def publish(manager: BlockManager, block_id: int) -> None:
    """Chapter 6 does this: a block with a key stands in the index."""
    block = manager.blocks[block_id]
    block.key = b"key %d" % block_id
    manager.index[block.key] = block


def test_a_block_with_a_key_is_cached_and_used_again() -> None:
    manager = pool(3)
    block_id = manager.take()
    publish(manager, block_id)
    manager.share(block_id)
    manager.release(block_id)
    assert not manager.cached, "a block with a key and one reference left is in use, and stands in `cached`."
    manager.release(block_id)
    assert block_id not in manager.free_ids, (
        "a block with a key went to `free_ids` at its last `release`: its place is `cached`."
    )
    assert list(manager.cached) == [block_id], (
        f"after the last `release` of block {block_id}, which has a key, `cached` has {list(manager.cached)}."
    )
    assert manager.cached[block_id] is manager.blocks[block_id], "`cached` maps a block's id to its `Block`."
    manager.share(block_id)
    count = manager.blocks[block_id].ref_count
    assert count == 1, f"`share` of a cached block gives it {count} references, not 1."
    assert not manager.cached, "`share` of a cached block must remove it from `cached`: it is in use again."
    manager.release(block_id)
    assert list(manager.cached) == [block_id], (
        "a cached block was shared and released again, and is not in `cached`: `share` leaves its key alone."
    )


def test_several_blocks_are_cached() -> None:
    """`cached` has the longest unused one first; `share` takes out just the one that it is given."""
    for used in range(3):
        manager = pool(4)
        taken = [manager.take() for _ in range(3)]
        for block_id in taken:
            publish(manager, block_id)
        for block_id in (order := [taken[1], taken[0], taken[2]]):
            manager.release(block_id)
        assert list(manager.cached) == order, (
            f"three blocks with keys were released in the order {order}, but `cached` has "
            f"{list(manager.cached)}."
        )
        manager.share(order[used])
        left = [block_id for block_id in order if block_id != order[used]]
        assert list(manager.cached) == left, (
            f"of the cached blocks {order} `share` was called for {order[used]}, so {left} stay in `cached`, "
            f"but it has {list(manager.cached)}."
        )


class Evicting(BlockManager):
    """Its `take` also takes cached blocks, as that of chapter 6 does."""

    def take(self) -> int:
        if not self.free_ids:
            block_id, block = self.cached.popitem(last=False)
            block.key, block.ref_count = None, 0
            self.index.clear()
            self.free_ids.append(block_id)
        return super().take()


def test_cached_blocks_count_as_free() -> None:
    """Three of four blocks are cached, so `num_free_blocks` is 4 and `free_ids` has one."""
    for num_tokens in (4, 16):
        manager = Evicting(4, 4, enable_prefix_caching=False)
        for block_id in [manager.take() for _ in range(3)]:
            publish(manager, block_id)
            manager.release(block_id)
        case = "Of 4 blocks 1 is free and 3 are cached, which can be evicted: `num_free_blocks` is 4."
        seq = sequence(num_tokens)
        with saying(f"{case} `allocate` of {num_tokens} tokens in blocks of 4"):
            done = manager.allocate([seq])
        assert done is True, (
            f"{case} `allocate` of {num_tokens} tokens in blocks of 4 gives {done}, not True: compare with "
            "`num_free_blocks`, and not with the length of `free_ids`."
        )
        if num_tokens == 4:
            copies = grow(manager, seq, 9)
            assert copies == [], (
                f"{case} After one is taken, `append_slots` for 3 more blocks gives {copies}, not []: "
                "compare with `num_free_blocks`, and not with the length of `free_ids`."
            )


# ── allocate ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocate(num_tokens: int, num_blocks: int) -> None:
    manager = pool(6)
    seq = admitted(manager, num_tokens)
    call = f"`allocate` of {num_tokens} tokens in blocks of 4"
    table = seq.block_table
    assert len(table) == num_blocks, f"{call} makes the table {table}: {num_blocks} blocks were expected."
    assert len(set(table)) == num_blocks, f"{call} makes the table {table}: a block stands in it twice."
    expected = [int(block_id in table) for block_id in range(6)]
    assert refs(manager) == expected, (
        f"{call} makes the table {table}, and the reference counts {refs(manager)}: {expected} were expected."
    )
    free = sorted({*range(6)} - {*table})
    assert sorted(manager.free_ids) == free, (
        f"{call} makes the table {table}, and {sorted(manager.free_ids)} are free: {free} were expected."
    )
    assert seq.num_computed_tokens == 0, (
        f"{call} sets `num_computed_tokens` to {seq.num_computed_tokens}: nothing is computed yet."
    )


def test_two_sequences_have_no_block_in_common() -> None:
    manager = pool(4)
    a, b = admitted(manager, 6), admitted(manager, 6)
    assert not {*a.block_table} & {*b.block_table}, (
        f"two requests of 6 tokens have the tables {a.block_table} and {b.block_table}: a block is in both."
    )


def test_allocate_counts_before_it_takes() -> None:
    manager = pool(3)
    seq = sequence(13)
    before = refs(manager), sorted(manager.free_ids)
    with saying("`allocate` of 13 tokens, blocks of 4, 3 of them free,"):
        done = manager.allocate([seq])
    assert done is False, f"13 tokens need 4 blocks of 4, the pool has 3: `allocate` gives {done}, not False."
    assert seq.block_table == [], f"`allocate` gave False, but the table is {seq.block_table}, not empty."
    after = refs(manager), sorted(manager.free_ids)
    assert after == before, (
        f"`allocate` gave False, but counts and `free_ids` were {before}, and are {after}."
    )
    seq = sequence(12)
    done = manager.allocate([seq])
    assert done is True, f"12 tokens need 3 blocks of 4, the pool has 3: `allocate` gives {done}, not True."


# ── append_slots ──────────────────────────────────────────────────────────────────────────────────


def grow(manager: BlockManager, seq: Sequence, num_tokens: int = 1) -> list[tuple[int, int]] | None:
    """Tokens are appended, and asked for slots."""
    seq.num_computed_tokens = seq.num_tokens
    seq.token_ids.extend([9] * num_tokens)
    free = manager.num_free_blocks
    given = [seq]
    with saying(f"`append_slots` for {seq.num_tokens} tokens, table {seq.block_table}, {free} free blocks,"):
        copies = manager.append_slots(given)
    check_argument("append_slots", given, [seq])
    return copies


def test_append_slots() -> None:
    manager = pool(4)
    seq = admitted(manager, 7)
    table = list(seq.block_table)
    copies = grow(manager, seq)
    assert copies == [], f"`append_slots` for token 8 of a single sequence gives {copies}, not []: no copies."
    assert seq.block_table == table, (
        f"token 8 has a slot in the table {table}, but `append_slots` changed it to {seq.block_table}."
    )
    copies = grow(manager, seq)
    assert copies == [], f"`append_slots` for token 9 of a single sequence gives {copies}, not []: no copies."
    is_longer = seq.block_table[:2] == table and len(seq.block_table) == 3
    assert is_longer, (
        f"token 9 needs a third block after {table}, but `append_slots` makes the table {seq.block_table}."
    )
    new = seq.block_table[2]
    assert new not in table, f"`append_slots` appends block {new}, which is in the table {table} already."
    assert manager.blocks[new].ref_count == 1, (
        f"the new block {new} has {manager.blocks[new].ref_count} references, not 1."
    )
    assert manager.num_free_blocks == 1, (
        f"3 of 4 blocks are in use, but `num_free_blocks` is {manager.num_free_blocks}, not 1."
    )


def test_append_slots_needs_no_free_block_for_a_free_slot() -> None:
    manager = pool(2)
    seq = admitted(manager, 7)
    copies = grow(manager, seq)
    assert copies == [], (
        f"token 8 has a slot, so no free block is needed, but `append_slots` gives {copies}, not []."
    )


def test_append_slots_without_a_block_changes_nothing() -> None:
    manager = pool(2)
    seq = admitted(manager, 8)
    table = list(seq.block_table)
    copies = grow(manager, seq)
    assert copies is None, (
        f"token 9 needs a block, and none is free: `append_slots` gives {copies}, not None."
    )
    assert seq.block_table == table, f"`append_slots` gave None, but the table {table} is {seq.block_table}."
    assert seq.num_tokens == 9, f"`append_slots` gave None, but of 9 tokens {seq.num_tokens} are left."


@pytest.mark.parametrize(("num_blocks", "fits"), [(4, True), (3, False)])
def test_append_slots_for_several_blocks(num_blocks: int, fits: bool) -> None:
    manager = pool(num_blocks)
    seq = admitted(manager, 4)
    table = list(seq.block_table)
    copies = grow(manager, seq, num_tokens=9)
    call = f"`append_slots` for 13 tokens with the table {table} and {num_blocks - 1} free blocks"
    assert copies == ([] if fits else None), f"{call} gives {copies}, not {[] if fits else None}."
    length = 4 if fits else 1
    assert len(seq.block_table) == length, f"{call} leaves the table {seq.block_table}: {length} expected."
    assert manager.num_free_blocks == num_blocks - length, (
        f"{call} leaves {manager.num_free_blocks} blocks free: {num_blocks - length} were expected."
    )


# ── trim and free ─────────────────────────────────────────────────────────────────────────────────


def test_trim() -> None:
    manager = pool(4)
    seq = admitted(manager, 6)
    table = list(seq.block_table)
    seq.block_table.append(manager.take())
    manager.trim(seq)
    assert seq.block_table == table, (
        f"6 tokens need 2 blocks of 4: `trim` makes the table {seq.block_table}, not {table}."
    )
    assert manager.num_free_blocks == 2, (
        f"`trim` must release the third block: {manager.num_free_blocks} blocks are free, not 2."
    )
    for num_tokens, length in ((9, 2), (5, 2), (4, 1), (1, 1), (0, 0)):
        manager.trim(seq, num_tokens)
        assert seq.block_table == table[:length], (
            f"`trim(seq, {num_tokens})` leaves the table {seq.block_table}, not {table[:length]}."
        )
    assert manager.num_free_blocks == 4, (
        f"after `trim(seq, 0)` all 4 blocks are free, but `num_free_blocks` is {manager.num_free_blocks}."
    )


def test_a_long_table() -> None:
    manager = pool(200)
    seq = admitted(manager, 790)
    table = list(seq.block_table)
    manager.trim(seq, 10)
    assert (seq.block_table, manager.num_free_blocks) == (table[:3], 197), (
        f"`trim(seq, 10)` of a table of 198 blocks of 4 leaves {len(seq.block_table)} blocks in it and "
        f"{manager.num_free_blocks} of 200 free, not 3 and 197."
    )


def test_trim_gives_back_one_reference() -> None:
    manager = pool(2)
    seq = admitted(manager, 4)
    (block_id,) = seq.block_table
    manager.share(block_id)
    manager.trim(seq, 0)
    count = manager.blocks[block_id].ref_count
    assert count == 1, f"`trim` of a block with 2 references leaves it {count}, not 1: another table has it."
    assert block_id not in manager.free_ids, "`trim` freed a block that another table still has."


def test_the_last_block_goes_first() -> None:
    manager = pool(3)
    seq = admitted(manager, 12)
    table = list(seq.block_table)
    for block_id in table:
        publish(manager, block_id)
    manager.free(seq)
    order = list(manager.cached)
    assert order == table[::-1], (
        f"`trim` releases the blocks of the table {table} in the order {order}: the last must go first."
    )


# ── random ────────────────────────────────────────────────────────────────────────────────────────


class Pool:
    """A pool, its sequences and references that no table has; `check` counts them anew."""

    def __init__(self, seed: int) -> None:
        self.rng, self.seed = random.Random(seed), seed
        self.size = self.rng.randint(1, 4)
        self.manager = pool(self.rng.randint(4, 12), self.size)
        self.sequences: list[Sequence] = []
        self.held: list[int] = []
        self.last = "nothing"

    def __str__(self) -> str:
        return f"random run {self.seed}, {len(self.manager.blocks)} blocks of {self.size}, after {self.last}"

    def check(self) -> None:
        counts = Counter(self.held)
        for seq in self.sequences:
            counts.update(seq.block_table)
            needed = -(-seq.num_tokens // self.size)
            assert len(seq.block_table) == needed, (
                f"{self}: {seq.num_tokens} tokens, table {seq.block_table}: {needed} blocks expected."
            )
        for block in self.manager.blocks:
            count = counts[block.block_id]
            assert block.ref_count == count, (
                f"{self}: block {block.block_id} has {block.ref_count} references, not {count}."
            )
        free = sorted({*range(self.manager.num_blocks)} - {*counts})
        assert sorted(self.manager.free_ids) == free, (
            f"{self}: {sorted(self.manager.free_ids)} are in `free_ids`, not {free}."
        )

    def allocate(self) -> None:
        seq = sequence(self.rng.randint(1, 5 * self.size))
        fits = -(-seq.num_tokens // self.size) <= len(self.manager.free_ids)
        self.last = f"`allocate` of {seq.num_tokens} tokens with {len(self.manager.free_ids)} free blocks"
        done = self.manager.allocate([seq])
        assert done is fits, f"{self}: it gives {done}, not {fits}."
        self.sequences += [seq] if fits else []

    def grow(self) -> None:
        seq = self.rng.choice(self.sequences)
        free, table, more = len(self.manager.free_ids), list(seq.block_table), self.rng.choice([1, 1, 1, 5])
        fits = -(-(seq.num_tokens + more) // self.size) - len(table) <= free
        self.last = (
            f"`append_slots` for {seq.num_tokens + more} tokens, table {table}, with {free} free blocks"
        )
        copies = grow(self.manager, seq, more)
        assert copies == ([] if fits else None), f"{self}: it gives {copies}."
        assert seq.block_table[: len(table)] == table, f"{self}: the table is {seq.block_table}."
        if not fits:
            del seq.token_ids[-more:]

    def trim(self) -> None:
        seq = self.rng.choice(self.sequences)
        num_tokens, table = self.rng.randint(0, seq.num_tokens), list(seq.block_table)
        self.last = f"`trim` of the table {table} to {num_tokens} tokens"
        self.manager.trim(seq, num_tokens)
        kept = table[: -(-num_tokens // self.size)]
        assert seq.block_table == kept, f"{self}: the table is {seq.block_table}, not {kept}."
        del seq.token_ids[num_tokens:]

    def hold(self) -> None:
        block_id = self.rng.choice([b for seq in self.sequences for b in seq.block_table] or [None])
        if block_id is not None:
            self.last = f"`share` of block {block_id}"
            self.manager.share(block_id)
            self.held.append(block_id)

    def give_back(self) -> None:
        if self.held:
            block_id = self.held.pop(self.rng.randrange(len(self.held)))
            self.last = f"`release` of block {block_id}"
            self.manager.release(block_id)


def test_random_operations() -> None:
    for seed in range(20):
        here = Pool(seed)
        for _ in range(100):
            operations = [here.allocate]
            if here.sequences:
                operations += [here.grow, here.grow, here.grow, here.trim, here.hold, here.give_back]
            with saying(here):
                here.rng.choice(operations)()
            here.check()
