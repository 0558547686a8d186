"""Tables, reference counts and the prefix cache, without a model."""

from __future__ import annotations

from array import array

import pytest
import xxhash

from nanopaged.block_manager import BlockManager
from nanopaged.config import SamplingParams
from nanopaged.sequence import Request, Sample, Sequence
from nanopaged.snapshot import check_blocks, filled_slots
from nanopaged.text import StopRules


def sequence(*token_ids: int) -> Sequence:
    rules = StopRules(frozenset(), 0, 1000)
    return Request("r", None, list(token_ids), SamplingParams(), rules, 0).sequences[0]


def family(*token_ids: list[int]) -> list[Sequence]:
    """Several sequences of one request, without blocks."""
    sequences = [sequence(*its_ids) for its_ids in token_ids]
    for seq in sequences:
        seq.request = sequences[0].request
    sequences[0].request.live = sequences
    return sequences


def admit(manager: BlockManager, *token_ids: int, computed: bool = True) -> Sequence:
    """A sequence with its blocks, its K/V computed unless said otherwise."""
    seq = sequence(*token_ids)
    assert manager.allocate([seq])
    if computed:
        compute(manager, seq)
    return seq


def schedule(manager: BlockManager, seq: Sequence, end: int | None = None) -> int:
    """This step computes the sequence up to `end`, or all of it; full blocks are published."""
    end = seq.num_tokens if end is None else end
    seq.num_scheduled_tokens = end - seq.num_computed_tokens
    manager.publish(seq)
    return end


def compute(manager: BlockManager, seq: Sequence, end: int | None = None) -> None:
    """A step schedules and computes it."""
    seq.num_computed_tokens = schedule(manager, seq, end)


def found(manager: BlockManager, *token_ids: int) -> int:
    """Blocks of a prompt that are in the prefix cache."""
    return len(manager.find_prefix(sequence(*token_ids)))


def draw(seq: Sequence, token_id: int) -> None:
    """A token is sampled; it has no slot and no K/V yet."""
    seq.append(Sample(token_id, 0.0))


def append(manager: BlockManager, seq: Sequence, token_id: int) -> None:
    """A decode step: a token is appended, gets a slot, and its K/V is computed."""
    draw(seq, token_id)
    assert manager.append_slots([seq]) == []
    compute(manager, seq)


def test_a_block_is_taken_only_when_a_token_needs_it() -> None:
    """7 tokens in blocks of 4: the eighth fits, the ninth needs a third block (paper, Fig. 6)."""
    manager = BlockManager(8, 4)
    seq = admit(manager, 1, 2, 3, 4, 5, 6, 7)
    assert len(seq.block_table) == 2
    append(manager, seq, 8)
    assert len(seq.block_table) == 2
    append(manager, seq, 9)
    assert len(seq.block_table) == 3
    assert filled_slots(manager, [seq]) == dict(zip(seq.block_table, (4, 4, 1), strict=True))
    check_blocks(manager, [seq])


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    """K/V depends on everything before it: `5 6` after `1 2` is not `5 6` after `3 4`.

    It takes three prompts to show a key without its prefix: the third finds `3 4`, and then must not find
    the `5 6` of the first.
    """
    manager = BlockManager(16, 2)
    first, second = admit(manager, 1, 2, 5, 6, 7), admit(manager, 3, 4, 8)
    third = admit(manager, 3, 4, 5, 6, 7, computed=False)
    assert third.block_table[0] == second.block_table[0]
    assert third.num_computed_tokens == 2
    assert not set(first.block_table) & set(third.block_table)


def test_a_chain_is_evicted_from_its_end() -> None:
    """Six cached blocks, of which another sequence takes four: the two left are the beginning."""
    manager = BlockManager(6, 1)
    seq = admit(manager, 1, 2, 3, 4, 5, 6)
    manager.free(seq)
    other = admit(manager, 11, 12, 13, 14)
    assert found(manager, 1, 2, 3, 4, 5, 6) == 2
    check_blocks(manager, [other])


def test_the_least_recently_used_chain_goes_first() -> None:
    manager = BlockManager(4, 1)
    for tokens in ((1, 2), (3, 4)):
        manager.free(admit(manager, *tokens))
    manager.free(admit(manager, 1, 2))  # a hit
    other = admit(manager, 5, 6)
    assert found(manager, 1, 2, 0) == 2
    assert not found(manager, 3, 4, 0)
    check_blocks(manager, [other])


def test_refused_admission_changes_nothing() -> None:
    """The prompt finds two cached blocks, needs two more, and only one is left."""
    manager = BlockManager(4, 2)
    manager.free(admit(manager, 1, 2, 3, 4, 5))
    holder = admit(manager, 9)
    before = (manager.num_free_blocks, list(manager.cached), dict(manager.prefix_index))
    seq = sequence(1, 2, 3, 4, 5, 6, 7, 8)
    assert not manager.allocate([seq])
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
    assert before == (manager.num_free_blocks, list(manager.cached), dict(manager.prefix_index))
    check_blocks(manager, [holder])


def test_blocks_whose_fast_hashes_collide_are_told_apart() -> None:
    """A and C have the same xxh3 hash behind any salt; the K/V of X after A is not that of X after C.

    With xxh3 in the keys the third prompt found the block of X that had been computed after A.
    """
    a = [7, 8, 33484, 116515, 0, 0, 76841, 73158, 0, 0, 36, 149963, 11, 12, 13, 14]
    c = [7, 8, 141793, 8206, 0, 0, 39089, 110910, 0, 0, 12, 149987, 11, 12, 13, 14]
    x = list(range(16))
    salt = b"any 16 byte salt"
    hashes = {xxhash.xxh3_128_digest(salt + array("q", block).tobytes()) for block in (a, c)}
    assert len(hashes) == 1
    manager = BlockManager(16, 16)
    sequences = [admit(manager, *a, *x, 1), admit(manager, *c, 5), admit(manager, *c, *x, 1, computed=False)]
    assert sequences[2].block_table[0] == sequences[1].block_table[0]
    assert sequences[2].num_computed_tokens == 16
    check_blocks(manager, sequences)


def test_blocks_are_shared_among_equal_salts_only() -> None:
    """Nor is a salt a block: one that spells the contents of a first block finds nothing behind it."""
    manager, others = BlockManager(num_blocks=20, block_size=2), []
    first = array("q", [1, 2]).tobytes()
    for salt in (b"", b"x", b"y", first):
        seq, again = (sequence(*([1, 2, 3, 4, 5] if salt != first else [3, 4, 5])) for _ in range(2))
        seq.request.cache_salt = again.request.cache_salt = salt
        assert manager.find_prefix(seq) == []
        assert manager.allocate([seq])
        compute(manager, seq)
        assert manager.find_prefix(again) == seq.block_table[:-1]
        others.append(seq)
    check_blocks(manager, others)


def test_trimming_gives_back_the_blocks_beyond_the_tokens() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = admit(manager, 1, 2, 3)
    table = list(seq.block_table)
    seq.block_table += [manager.take(), manager.take()]  # room for guesses, of which none was right
    for num_tokens, num_blocks in ((3, 2), (2, 1), (0, 0)):
        manager.trim(seq, num_tokens)
        assert seq.block_table == table[:num_blocks]
    assert manager.num_free_blocks == 4
    with pytest.raises(RuntimeError, match=f"block {table[0]} was released more often"):
        manager.release(table[0])


def test_an_emptied_prefix_cache_keeps_what_is_in_use() -> None:
    manager = BlockManager(4, 2)
    manager.free(admit(manager, 1, 2, 3))
    holder = admit(manager, 7, 8, 9)
    manager.reset_prefix_cache()
    check_blocks(manager, [holder])
    assert len(manager.cached) == 0
    assert (found(manager, 1, 2, 3), found(manager, 7, 8, 9)) == (0, 1)
    again = admit(manager, 1, 2, 3)
    check_blocks(manager, [holder, again])
    manager.reset()
    assert manager.num_free_blocks == 4
    assert not found(manager, 7, 8, 9)
    check_blocks(manager, [])


# ── forks and copy-on-write ───────────────────────────────────────────────────────────────────────


def refs(manager: BlockManager, *block_ids: int) -> list[int]:
    return [manager.blocks[block_id].ref_count for block_id in block_ids]


def test_parallel_sampling_as_in_figure_8_of_the_paper() -> None:
    """'Four score and seven years ago our', blocks of 4: samples A1 and A2 share both blocks of the prompt.

    The paper's physical blocks are 7 and 1, and A1's copy is block 3. Both samples write into logical block
    1. Its reference count is 2, so A1 gets a copy; the count falls to 1, and A2 writes in place.
    """
    manager = BlockManager(9, 4)
    manager.free_ids = [0, 2, 4, 5, 6, 8, 3, 1, 7]  # the last is taken first
    four, score, and_, seven, years, ago, our, fathers, mothers = range(9)
    a1 = admit(manager, four, score, and_, seven, years, ago, our)
    a2 = manager.fork(a1, 1)
    assert a1.block_table == a2.block_table == [7, 1]
    assert refs(manager, 7, 1) == [2, 2]
    draw(a1, fathers)
    draw(a2, mothers)
    assert manager.append_slots([a1, a2]) == [(1, 3)], "the last sequence writes in place"
    assert (a1.block_table, a2.block_table) == ([7, 3], [7, 1])
    assert refs(manager, 7, 1, 3) == [2, 1, 1]
    for seq in (a1, a2):
        compute(manager, seq)
    check_blocks(manager, [a1, a2])


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_that_come_back_share_their_common_past(prefix_caching: bool) -> None:
    """Three siblings, blocks of 2: `1 2` is common to all, `3 4` to two, so five blocks do for eight.

    Also without a prefix cache: otherwise a request that fitted before its preemption might not fit after it.
    """
    manager = BlockManager(7, 2, enable_prefix_caching=prefix_caching)
    siblings = family([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 8, 9])
    assert manager.allocate(siblings)
    first, second, third = (seq.block_table for seq in siblings)
    assert first[:2] == second[:2]
    assert third[0] == first[0]
    assert len({*first, *second, *third}) == 5
    assert [seq.num_computed_tokens for seq in siblings] == [0, 4, 2]
    check_blocks(manager, siblings)
