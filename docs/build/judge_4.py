"""Stage 4: the prefix cache. Small cases by hand, then random ones against a model that knows no keys."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import sha256

import pytest
from judge_2 import check_argument, saying

from nanopaged import block_manager
from nanopaged.block_manager import NO_TOKEN, BlockManager
from nanopaged.config import SamplingParams
from nanopaged.sequence import Request, Sequence
from nanopaged.text import StopRules


def family(*token_ids: list[int], salt: bytes = b"") -> list[Sequence]:
    """The sequences of one request, without blocks."""
    rules = StopRules(frozenset(), frozenset(), 0, 1000)
    request = Request("r", None, list(token_ids[0]), SamplingParams(), rules, 0, salt)
    request.sequences = [Sequence(request, list(its_ids)) for its_ids in token_ids]
    request.live = list(request.sequences)
    return request.sequences


def sequence(*token_ids: int, salt: bytes = b"") -> Sequence:
    return family(list(token_ids), salt=salt)[0]


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """A step schedules and computes the sequence's next tokens: all that are left, or so many."""
    left = seq.num_tokens - seq.num_computed_tokens
    seq.num_scheduled_tokens = left if num_tokens is None else num_tokens
    manager.publish(seq)
    seq.num_computed_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0


def allocate(manager: BlockManager, *sequences: Sequence, **options: int) -> bool:
    with saying(f"`allocate` of {[seq.token_ids for seq in sequences]} with {options or 'no options'}"):
        given, tokens = list(sequences), [list(seq.token_ids) for seq in sequences]
        done = manager.allocate(given, **options)
    check_argument("allocate", given, list(sequences))
    assert [seq.token_ids for seq in sequences] == tokens, "`allocate` has changed the tokens of a sequence."
    return done


def admitted(manager: BlockManager, *token_ids: int, computed: bool = True) -> Sequence:
    seq = sequence(*token_ids)
    done = allocate(manager, seq)
    assert done is True, (
        f"`allocate` of the tokens {list(token_ids)} gives {done}, not True: there are blocks enough."
    )
    if computed:
        compute(manager, seq)
    return seq


def state(manager: BlockManager) -> tuple[object, ...]:
    """All that a refused call must leave as it is."""
    counts = [block.ref_count for block in manager.blocks]
    return counts, sorted(manager.free_ids), list(manager.cached), sorted(manager.index)


# ── keys_of ───────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_the_hash_of_the_one_before_and_the_blocks_own_tokens() -> None:
    manager = BlockManager(8, 2)
    keys = manager.keys_of(sequence(1, 2, 3, 4, 5), 2)
    assert len(keys) == 2, f"`keys_of(seq, 2)` gives {len(keys)} keys, not 2."
    for i, (key, tokens) in enumerate(zip(keys, ([1, 2], [3, 4]), strict=True)):
        assert type(key) is bytes, f"key {i} is {key!r}: keys are bytes."
        (own,) = manager.keys_of(sequence(*tokens), 1)
        expected = sha256(keys[0]).digest() + own if i else own
        assert key == expected, (
            f"key {i} of 1 2 | 3 4 is {key.hex()}, not {expected.hex()}: the hash of key 0, then 3 4 "
            "as in the key of a first block."
        )


def test_equal_keys_mean_equal_prefixes() -> None:
    manager = BlockManager(8, 2)
    keys: dict[bytes, tuple[int, ...]] = {}
    for tokens in ([1, 2, 5, 6], [3, 4, 5, 6], [1, 258], [258, 1], [12, 3], [1, 23], [0, 0], [2, 1, 5, 6]):
        for i, key in enumerate(manager.keys_of(sequence(*tokens), len(tokens) // 2)):
            prefix = tuple(tokens[: 2 * i + 2])
            other = keys.setdefault(key, prefix)
            assert other == prefix, f"the prefixes {other} and {prefix} have the same key."
        again = manager.keys_of(sequence(*tokens), 1)[0]
        assert keys.get(again) == tuple(tokens[:2]), f"the tokens {tokens[:2]} have two different keys."


def test_a_salt_makes_other_keys() -> None:
    manager = BlockManager(8, 2)
    own = manager.keys_of(sequence(1, 2), 1)[0]
    for salt in (b"x", b"y"):
        keys = manager.keys_of(sequence(1, 2, 3, 4, salt=salt), 2)
        expected = sha256(NO_TOKEN + salt).digest() + own
        assert keys[0] == expected, (
            f"with the salt {salt} the first key is {keys[0].hex()}, not SHA-256(-1 salt)·(1 2), which is "
            f"{expected.hex()}."
        )
        rest = keys[1][:32]
        assert rest == sha256(keys[0]).digest(), (
            f"with the salt {salt} the second key begins with {rest.hex()}, not with the hash of the first: "
            "the salt is in the first key only."
        )


def test_each_key_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(8, 2)
    calls: list[bytes] = []

    def counted(data: bytes) -> object:
        calls.append(data)
        return sha256(data)

    monkeypatch.setattr(block_manager, "sha256", counted)
    seq = sequence(1, 2, 3, 4, 5, 6, salt=b"x")
    first = list(manager.keys_of(seq, 2))
    num_calls = len(calls)
    second = list(manager.keys_of(seq, 2))
    assert second == first, "`keys_of(seq, 2)` gives other keys when it is called again."
    assert len(calls) == num_calls, (
        f"the second `keys_of(seq, 2)` calls sha256 {len(calls) - num_calls} times: keys are kept in "
        "`seq.block_keys`, and computed once."
    )
    third = list(manager.keys_of(seq, 3))
    assert third[:2] == first, "`keys_of(seq, 3)` does not begin with the keys of `keys_of(seq, 2)`."
    shorter = list(manager.keys_of(seq, 1))
    assert shorter == first[:1], (
        f"`keys_of(seq, 1)` after `keys_of(seq, 3)` gives {len(shorter)} keys, not 1."
    )
    assert seq.block_keys == third, f"`seq.block_keys` keeps {len(seq.block_keys)} keys, not the 3 computed."


def test_a_long_chain() -> None:
    """Also the hundredth key follows from the one before it, and its block is found."""
    manager = BlockManager(210, 2)
    first = admitted(manager, *range(200))
    keys = manager.keys_of(first, 100)
    assert len({*keys}) == 100, (
        f"200 tokens fill 100 blocks of 2, but `keys_of` gives {len({*keys})} different keys."
    )
    parents = [key[:32] for key in keys[1:]]
    assert parents == [sha256(key).digest() for key in keys[:-1]], (
        "each of 100 keys begins with the hash of the one before it, but not all of `keys_of` do."
    )
    found = manager.find_prefix(sequence(*range(200), 7))
    assert found == first.block_table, (
        f"all 100 blocks of 200 tokens are published, but `find_prefix` finds {len(found)} of them."
    )


# ── publish and find_prefix ───────────────────────────────────────────────────────────────────────


def test_publish_names_the_blocks_that_the_step_fills() -> None:
    """The example of its docstring: 6 tokens computed, 7 scheduled."""
    manager = BlockManager(8, 4)
    seq = admitted(manager, *range(20), computed=False)
    seq.num_computed_tokens, seq.num_scheduled_tokens = 6, 7
    manager.publish(seq)
    published = [i for i, block_id in enumerate(seq.block_table) if manager.blocks[block_id].key is not None]
    assert published == [1, 2], (
        f"6 tokens computed and 7 scheduled fill the logical blocks 1 and 2 of 4 slots, but `publish` gave "
        f"keys to {published}."
    )
    keys = manager.keys_of(seq, 3)
    for i in (1, 2):
        block = manager.blocks[seq.block_table[i]]
        assert block.key == keys[i], f"logical block {i} has another key than `keys_of` gives for it."
        assert manager.index.get(keys[i]) is block, (
            f"`index` does not lead from its key to logical block {i}."
        )
    assert len(manager.index) == 2, f"`index` has {len(manager.index)} entries, not 2."


def test_publish_keeps_the_first_of_two_equal_blocks() -> None:
    manager = BlockManager(8, 2)
    first = admitted(manager, 1, 2, 3)
    second = sequence(1, 2, 4)
    allocate(manager, second, look_up=False)
    compute(manager, second)
    block = manager.blocks[first.block_table[0]]
    assert manager.index.get(block.key) is block, (
        "the block `1 2` was published first, but another block with equal tokens took its place in `index`."
    )
    twin = manager.blocks[second.block_table[0]]
    assert twin.key is None, "a second block `1 2` is in use; it must not be published, and has a key."


def test_nothing_is_published_or_found_without_prefix_caching() -> None:
    manager = BlockManager(8, 2, enable_prefix_caching=False)
    seq = admitted(manager, 1, 2, 3)
    assert not manager.index, "without prefix caching `publish` must do nothing, but `index` has an entry."
    key = manager.keys_of(seq, 1)[0]
    manager.index[key] = manager.blocks[seq.block_table[0]]
    found = manager.find_prefix(sequence(1, 2, 3))
    assert found == [], f"without prefix caching `find_prefix` gives {found}, not []."


def test_find_prefix() -> None:
    manager = BlockManager(16, 2)
    seq = admitted(manager, 1, 2, 3, 4, 5, 6, 7)
    table = seq.block_table
    for tokens, num_found in (
        ([1, 2, 3, 4, 5, 6, 7], 3),
        ([1, 2, 3, 4, 5, 6], 2),  # the last token, 6, must be computed
        ([1, 2, 3, 4, 9, 6, 7], 2),
        ([1, 2, 9, 4, 5, 6, 7], 1),
        ([1, 9, 3, 4, 5, 6, 7], 0),
        ([3, 4, 5, 6, 7], 0),
        ([1, 2], 0),
        ([1, 2, 3], 1),
        ([1], 0),
    ):
        found = manager.find_prefix(sequence(*tokens))
        assert found == table[:num_found], (
            f"1 2 | 3 4 | 5 6 are published in the blocks {table[:3]}: `find_prefix` of {tokens} gives "
            f"{found}, not {table[:num_found]}."
        )
    counts = [manager.blocks[block_id].ref_count for block_id in table]
    assert counts == [1] * 4, f"`find_prefix` only looks, but the reference counts of the table are {counts}."


# ── allocate: one sequence ────────────────────────────────────────────────────────────────────────


def test_a_prefix_in_use_is_shared() -> None:
    manager = BlockManager(5, 2)
    first = admitted(manager, 1, 2, 3, 4, 5)
    second = admitted(manager, 1, 2, 3, 4, 6, 7, computed=False)
    assert second.block_table[:2] == first.block_table[:2], (
        f"1 2 | 3 4 are in the blocks {first.block_table[:2]}, but the table of 1 2 3 4 6 7 is "
        f"{second.block_table}."
    )
    assert second.num_computed_tokens == 4, (
        f"two blocks of 2 are found: `num_computed_tokens` is {second.num_computed_tokens}, not 4."
    )
    counts = [manager.blocks[block_id].ref_count for block_id in second.block_table]
    assert counts == [2, 2, 1], f"two blocks are shared, but the table's reference counts are {counts}."
    assert manager.num_free_blocks == 1, (
        f"4 of 5 blocks are in use, but {manager.num_free_blocks} count as free."
    )


def test_a_cached_block_is_used_again() -> None:
    manager = BlockManager(4, 2)
    first = admitted(manager, 1, 2, 3)
    block_id = first.block_table[0]
    manager.free(first)
    second = admitted(manager, 1, 2, 9, computed=False)
    assert second.block_table[:1] == [block_id], (
        f"the block `1 2`, {block_id}, is cached: `allocate` of 1 2 9 makes the table {second.block_table}."
    )
    assert block_id not in manager.cached, "a block that was found again is in use, and still in `cached`."


def test_cached_blocks_that_are_found_are_no_longer_free() -> None:
    """Three free blocks, all cached; two are the prompt's own prefix."""
    manager = BlockManager(3, 1)
    manager.free(admitted(manager, 1, 2, 3))
    before = state(manager)
    seq = sequence(1, 2, 8, 9)
    done = allocate(manager, seq)
    assert done is False, (
        f"3 blocks are free, all cached, and 1 | 2 are two of them: 1 2 8 9 needs two more, but `allocate` "
        f"gives {done}, not False."
    )
    assert state(manager) == before, (
        f"`allocate` gave False, but the pool has changed from {before} to {state(manager)}."
    )
    assert seq.block_table == [], f"`allocate` gave False, but the table is {seq.block_table}, not empty."
    admitted(manager, 1, 2, 8)


def test_a_found_block_in_use_costs_nothing() -> None:
    manager = BlockManager(3, 2)
    admitted(manager, 1, 2, 3)
    second = sequence(1, 2, 4)
    done = allocate(manager, second)
    assert done is True, (
        f"`1 2` is in use by another request and 1 block is free: 1 2 4 needs just this one, but `allocate` "
        f"gives {done}, not True."
    )


def test_what_is_found_is_not_evicted_for_the_rest() -> None:
    """All three blocks are cached, and the oldest of them is the prefix."""
    manager = BlockManager(3, 1)
    for token_id in (1, 7, 8):
        manager.free(admitted(manager, token_id))
    seq = admitted(manager, 1, 5, computed=False)
    assert len({*seq.block_table}) == 2, (
        f"`1` was found in block {seq.block_table[0]}, and evicted for the rest of the same table: share all "
        "that is found before you take."
    )


def test_look_up_false_finds_nothing() -> None:
    manager = BlockManager(6, 2)
    first = admitted(manager, 1, 2, 3)
    second = sequence(1, 2, 3)
    allocate(manager, second, look_up=False)
    assert not {*first.block_table} & {*second.block_table}, (
        f"`allocate` with `look_up=False` makes the table {second.block_table}, and shares a block of "
        f"{first.block_table}."
    )
    assert second.num_computed_tokens == 0, (
        f"`allocate` with `look_up=False` sets `num_computed_tokens` to {second.num_computed_tokens}, not 0."
    )


@pytest.mark.parametrize(("num_reserved", "fits"), [(2, True), (3, False)])
def test_reserved_blocks_stay_free(num_reserved: int, fits: bool) -> None:
    manager = BlockManager(4, 2)
    done = allocate(manager, sequence(1, 2, 3), num_reserved=num_reserved)
    assert done is fits, (
        f"2 of 4 free blocks are needed, {num_reserved} must stay free: `allocate` gives {done}, not {fits}."
    )


# ── take ──────────────────────────────────────────────────────────────────────────────────────────


def test_free_blocks_go_before_cached_ones() -> None:
    manager = BlockManager(3, 1)
    manager.free(admitted(manager, 1, 2))
    (cached,) = (manager.index[key].block_id for key in manager.keys_of(sequence(1), 1))
    manager.take()
    assert list(manager.cached).count(cached) == 1, (
        f"one block is free, but `take` evicts a cached one: `cached` has {list(manager.cached)}."
    )


def test_the_least_recently_used_block_is_evicted() -> None:
    manager = BlockManager(3, 1)
    for token_id in (1, 2, 3):
        manager.free(admitted(manager, token_id))
    seq = admitted(manager, 1, 9)  # finds `1`, evicts `2`
    manager.free(seq)
    left = [token_id for token_id in (1, 2, 3) if manager.find_prefix(sequence(token_id, 0))]
    assert left == [1, 3], (
        f"1, 2 and 3 were released in this order, 1 was used again, one block was taken: {left} can be "
        "found, not [1, 3]."
    )


def test_an_evicted_block_cannot_be_found() -> None:
    manager = BlockManager(1, 1)
    manager.free(admitted(manager, 1))
    block_id = manager.take()
    block = manager.blocks[block_id]
    assert block.ref_count == 1, f"a taken block has {block.ref_count} references, not 1."
    assert not manager.cached, f"the evicted block is taken, and stands in `cached`: {list(manager.cached)}."
    assert not manager.index, "the evicted block is taken, but its old key still leads to it in `index`."
    assert block.key is None, "the evicted block has new contents to come, but still its old key."


def test_growth_evicts() -> None:
    """`append_slots` of stage 2 counts cached blocks, too."""
    manager = BlockManager(2, 1)
    manager.free(admitted(manager, 1))
    seq = admitted(manager, 2)
    seq.token_ids.append(3)
    copies = manager.append_slots([seq])
    assert copies == [], (
        f"no block is free, but a cached one can be evicted: `append_slots` gives {copies}, not []. It must "
        "compare with `num_free_blocks`, not with the length of `free_ids`."
    )


# ── allocate: several sequences of a request that was preempted ───────────────────────────────────


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_share_the_full_blocks_of_common_prefixes(prefix_caching: bool) -> None:
    """The example of the docstring, with and without a prefix cache."""
    manager = BlockManager(6, 2, prefix_caching)
    siblings = family([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8, 9])
    done = allocate(manager, *siblings)
    tables = [seq.block_table for seq in siblings]
    with_or_without = "with" if prefix_caching else "without"
    call = f"`allocate` of 1 2|3 4|5, 1 2|3 4|6 and 1 2|7 8|9, {with_or_without} prefix caching,"
    assert done is True, f"{call} needs 6 blocks and has 6: it gives {done}, not True."
    lengths = [len(table) for table in tables]
    assert lengths == [3, 3, 3], f"{call} makes the tables {tables}: three of length 3 were expected."
    a, b, c = tables
    is_shared = a[0] == b[0] == c[0] and a[1] == b[1]
    assert is_shared, f"{call} makes the tables {tables}: `1 2` is common to all, `3 4` to the first two."
    num_blocks = len({*a, *b, *c})
    assert num_blocks == 6, f"{call} makes the tables {tables}, of {num_blocks} different blocks, not 6."
    counts = [[manager.blocks[block_id].ref_count for block_id in table] for table in tables]
    assert counts == [[3, 2, 1], [3, 2, 1], [3, 1, 1]], (
        f"{call} makes the tables {tables}, and their reference counts are {counts}."
    )
    computed = [seq.num_computed_tokens for seq in siblings]
    assert computed == [0, 4, 2], (
        f"{call} sets `num_computed_tokens` to {computed}, not [0, 4, 2]: a shared block counts as computed "
        "for all but the first sequence."
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_later_siblings_share_with_each_other(prefix_caching: bool) -> None:
    """What the second has in common with the third, and the first has not; also of four and of five."""
    for width in (3, 4, 5):
        manager = BlockManager(4 + width, 2, prefix_caching)
        siblings = family([1, 2, 3, 4, 5], *([1, 2, 7, 8, 10 + i] for i in range(width - 2)), [1, 2, 7, 8, 5])
        manager.take()  # exactly the blocks that are needed are left
        call = f"`allocate` of 1 2|3 4|5 and {width - 1} siblings 1 2|7 8|…, {3 + width} free blocks,"
        with saying(call):
            done = allocate(manager, *siblings)
        assert done is True, (
            f"{call} gives {done}, not True: `1 2`, `3 4` and `7 8` are one block each, and each of the "
            f"{width} siblings has a last one."
        )
        tables = [seq.block_table for seq in siblings]
        is_shared = len({table[1] for table in tables[1:]}) == 1 and len({table[0] for table in tables}) == 1
        assert is_shared, (
            f"{call} makes the tables {tables}: `7 8` is common to all but the first, which share its block."
        )
        computed = [seq.num_computed_tokens for seq in siblings]
        assert computed == [0, 2] + [4] * (width - 2), (
            f"{call} sets `num_computed_tokens` to {computed}: a shared block counts as computed for all "
            "but the first that has it."
        )


def test_siblings_keep_their_last_block_even_if_it_is_full() -> None:
    manager = BlockManager(6, 2)
    siblings = family([1, 2, 3, 4], [1, 2, 3, 4])
    allocate(manager, *siblings)
    a, b = (seq.block_table for seq in siblings)
    is_right = a[0] == b[0] and a[1] != b[1]
    assert is_right, f"two siblings 1 2|3 4 have the tables {a} and {b}: only the first block may be shared."


def test_siblings_that_do_not_fit_change_nothing() -> None:
    manager = BlockManager(6, 2)
    manager.free(admitted(manager, 1, 2, 3))
    admitted(manager, 9)
    before = state(manager)
    siblings = family([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8, 9])
    done = allocate(manager, *siblings)
    assert done is False, (
        f"three siblings need 6 blocks, one of them is cached, and 5 are free or cached: `allocate` gives "
        f"{done}, not False."
    )
    assert state(manager) == before, (
        f"`allocate` gave False, but the pool has changed from {before} to {state(manager)}."
    )
    tables = [seq.block_table for seq in siblings]
    assert tables == [[], [], []], f"`allocate` gave False, but the tables are {tables}, not empty."


@pytest.mark.parametrize("more_cached", [[], [7, 8]])
def test_a_sibling_does_not_evict_what_another_has_found(more_cached: list[int]) -> None:
    manager = BlockManager(5, 1)
    sequences = [admitted(manager, 1, 2, 3), *(admitted(manager, token_id) for token_id in more_cached)]
    for seq in sequences:  # `1`, `2` and `3` would be evicted first
        manager.free(seq)
    siblings = family([1, 8], [1, 2, 3, 9])
    done = allocate(manager, *siblings)
    assert done is True, (
        f"three blocks are cached and found, two are free or cached, too: `allocate` gives {done}, not True."
    )
    a, b = (seq.block_table for seq in siblings)
    assert len({*a, *b}) == 5, (
        f"1|8 and 1|2|3|9 have the tables {a} and {b}: the first sibling took a block that the second found."
    )


# ── random ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Cell:
    """A block of the model: its references and, once it is published, (salt, all tokens up to its end)."""

    refs: int = 1
    prefix: tuple[bytes, tuple[int, ...]] | None = None


@dataclass
class Model:
    """What a pool is for its users. It knows no block ids; `cached` has the least recently used first."""

    num_free: int
    size: int
    cached: list[Cell] = field(default_factory=list)
    published: dict[tuple[bytes, tuple[int, ...]], Cell] = field(default_factory=dict)
    tables: dict[Sequence, list[Cell]] = field(default_factory=dict)

    def prefixes(self, seq: Sequence, end: int) -> list[tuple[bytes, tuple[int, ...]]]:
        """Of the first `end` blocks."""
        ends = range(self.size, end * self.size + 1, self.size)
        return [(seq.request.cache_salt, tuple(seq.token_ids[:i])) for i in ends]

    def before_last(self, seq: Sequence) -> list[tuple[bytes, tuple[int, ...]]]:
        """Of the full blocks before the one of the last token."""
        return self.prefixes(seq, (seq.num_tokens - 1) // self.size)

    def find(self, seq: Sequence) -> list[Cell]:
        found = []
        for prefix in self.before_last(seq):
            if prefix not in self.published:
                return found
            found.append(self.published[prefix])
        return found

    def take(self) -> Cell:
        if self.num_free:
            self.num_free -= 1
        else:
            del self.published[self.cached.pop(0).prefix]
        return Cell()

    def allocate(self, sequences: list[Sequence], look_up: bool, num_reserved: int) -> list[int] | None:
        """The computed tokens of each sequence; None if they do not fit."""
        hits = [self.find(seq) if look_up else [] for seq in sequences]
        found = {cell for hit in hits for cell in hit}
        new = {p for seq, hit in zip(sequences, hits, strict=True) for p in self.before_last(seq)[len(hit) :]}
        revived = [cell for cell in found if cell.refs == 0]
        room = self.num_free + len(self.cached) - num_reserved
        if len(revived) + len(new) + len(sequences) > room:
            return None
        for cell in revived:
            self.cached.remove(cell)
        cells = {prefix: self.take() for prefix in sorted(new)}
        for cell in cells.values():
            cell.refs = 0
        computed, seen = [], set()
        for seq, hit in zip(sequences, hits, strict=True):
            rest = self.before_last(seq)[len(hit) :]
            table = hit + [cells[prefix] for prefix in rest]
            for cell in table:
                cell.refs += 1
            computed.append((len(hit) + sum(prefix in seen for prefix in rest)) * self.size)
            seen.update(rest)
            self.tables[seq] = [*table, self.take()]
        return computed

    def free(self, seq: Sequence) -> None:
        for cell in reversed(self.tables.pop(seq)):
            cell.refs -= 1
            if cell.refs == 0 and cell.prefix is None:
                self.num_free += 1
            elif cell.refs == 0:
                self.cached.append(cell)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        first, end = seq.num_computed_tokens // self.size, (seq.num_computed_tokens + num_tokens) // self.size
        for i, prefix in list(enumerate(self.prefixes(seq, end)))[first:]:
            if prefix not in self.published:
                self.published[prefix] = self.tables[seq][i]
                self.published[prefix].prefix = prefix


class Pool:
    """A pool and its model, with the same requests."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        size = self.rng.randint(1, 3)
        num_blocks = self.rng.randint(4, 14)
        self.manager, self.model = BlockManager(num_blocks, size), Model(num_blocks, size)
        self.requests: list[list[Sequence]] = []
        self.last = "nothing"

    def draw_tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(2), k=num_tokens)

    def allocate(self) -> None:
        size, rng = self.model.size, self.rng
        stem = self.draw_tokens(rng.randint(1, 4 * size))
        siblings = [
            stem[: rng.randint(1, len(stem))] + self.draw_tokens(rng.randint(0, 2 * size))
            for _ in range(rng.choice([1, 1, 1, 2, 3, 4]))
        ]
        sequences = family(*siblings, salt=rng.choice([b"", b"", b"", b"x"]))
        look_up, num_reserved = rng.random() < 0.9, rng.choice([0, 0, 0, 1, 2])
        self.last = (
            f"`allocate` of {siblings} with look_up={look_up}, num_reserved={num_reserved}, "
            f"{len(self.manager.free_ids)} free and {len(self.manager.cached)} cached blocks"
        )
        before = state(self.manager)
        expected = self.model.allocate(sequences, look_up, num_reserved)
        done = self.manager.allocate(sequences, look_up, num_reserved)
        assert done is (expected is not None), f"{self}: it gives {done}, not {expected is not None}."
        if expected is None:
            assert state(self.manager) == before, f"{self}: it gives False, but the pool has changed."
            return
        computed = [seq.num_computed_tokens for seq in sequences]
        assert computed == expected, f"{self}: `num_computed_tokens` are {computed}, not {expected}."
        self.requests.append(sequences)
        if len(sequences) > 1:  # what one computes for its siblings is computed in the same step
            self.compute(sequences)

    def compute(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            left = seq.num_tokens - seq.num_computed_tokens
            num_tokens = self.rng.randint(0, left) if len(sequences) == 1 else left
            self.last += f", then `publish` of {num_tokens} tokens of {seq.token_ids}"
            self.model.publish(seq, num_tokens)
            compute(self.manager, seq, num_tokens)

    def step(self) -> None:
        self.last = "a step"
        self.compute(self.rng.choice(self.requests))

    def free(self) -> None:
        sequences = self.requests.pop(self.rng.randrange(len(self.requests)))
        self.last = f"`free` of {[seq.token_ids for seq in sequences]}"
        for seq in sequences:
            self.model.free(seq)
            self.manager.free(seq)

    def check(self) -> None:
        blocks: dict[Cell, int] = {}
        for seq, cells in self.model.tables.items():
            table = seq.block_table
            assert len(table) == len(cells), f"{self}: {seq.token_ids} have the table {table}."
            for i, (block_id, cell) in enumerate(zip(table, cells, strict=True)):
                self.check_block(blocks, cell, block_id, f"block {i} of {seq.token_ids}")
        free = self.model.num_free, len(self.model.cached)
        ours = len(self.manager.free_ids), len(self.manager.cached)
        assert ours == free, f"{self}: free and cached blocks are {ours}, not {free}."
        for prefix, cell in self.model.published.items():
            probe = sequence(*prefix[1], 0, salt=prefix[0])
            found, expected = self.manager.find_prefix(probe), self.model.find(probe)
            assert len(found) == len(expected), (
                f"{self}: of {probe.token_ids} with the salt {prefix[0]} `find_prefix` finds {found}, "
                f"and not {len(expected)} blocks."
            )
            for i, cell in enumerate(expected):
                self.check_block(blocks, cell, found[i], f"block {i} that is found of {probe.token_ids}")
        num_keys = len(self.manager.index), sum(block.key is not None for block in self.manager.blocks)
        assert num_keys == (len(self.model.published),) * 2, (
            f"{self}: `index` has {num_keys[0]} keys and {num_keys[1]} blocks have one, not "
            f"{len(self.model.published)}."
        )

    def check_block(self, blocks: dict[Cell, int], cell: Cell, block_id: int, what: str) -> None:
        """One cell is one block, wherever it stands."""
        expected = blocks.setdefault(cell, block_id)
        assert block_id == expected, f"{self}: {what} is {block_id}, but elsewhere the same is in {expected}."
        assert len({*blocks.values()}) == len(blocks), (
            f"{self}: {what} is {block_id}, a block that has other contents elsewhere."
        )
        count = self.manager.blocks[block_id].ref_count
        assert count == cell.refs, f"{self}: {what} is {block_id}, with {count} references, not {cell.refs}."

    def __str__(self) -> str:
        blocks = f"{len(self.manager.blocks)} blocks of {self.model.size}"
        return f"random run {self.seed}, {blocks}, after {self.last}"


def test_random_operations() -> None:
    for seed in range(30):
        here = Pool(seed)
        for _ in range(60):
            operations = [here.allocate, here.allocate]
            if here.requests:
                operations += [here.step, here.step, here.free]
            with saying(here):
                here.rng.choice(operations)()
                here.check()
