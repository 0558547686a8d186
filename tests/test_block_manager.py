"""Tables, reference counts and the prefix cache, without a model."""

from __future__ import annotations

import pytest

from nanopaged.block_manager import BlockManager, OutOfBlocks, blocks_needed
from nanopaged.config import SamplingParams
from nanopaged.outputs import Sample
from nanopaged.sequence import Request, Sequence
from nanopaged.stopping import StopRules


def sequence(*token_ids: int) -> Sequence:
    seq = Sequence(list(token_ids), len(token_ids))
    rules = StopRules(frozenset(), frozenset(), 0, 1000)
    Request("r", None, list(token_ids), SamplingParams(), rules, 0, [seq])
    return seq


def admit(manager: BlockManager, *token_ids: int, computed: bool = True) -> Sequence:
    """A sequence with its blocks, its K/V computed unless said otherwise."""
    seq = sequence(*token_ids)
    manager.allocate([seq], [manager.find_prefix(seq)])
    if computed:
        compute(manager, seq)
    return seq


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """The K/V of the sequence (up to `num_tokens`) is there."""
    seq.num_computed_tokens = seq.num_tokens if num_tokens is None else num_tokens
    manager.close_blocks(seq)


def promise(manager: BlockManager, seq: Sequence) -> None:
    """The whole sequence will be computed in this step."""
    seq.num_new_tokens = seq.num_tokens - seq.num_computed_tokens
    manager.promise(seq)


def append(manager: BlockManager, seq: Sequence, token_id: int) -> None:
    """What a decode step does: a token is known, gets a slot, and is computed."""
    seq.append(Sample(token_id, 0.0))
    manager.append_slots(seq)
    compute(manager, seq)


@pytest.mark.parametrize(
    ("tokens", "size", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)]
)
def test_blocks_needed_rounds_up(tokens: int, size: int, blocks: int) -> None:
    assert blocks_needed(tokens, size) == blocks


def test_a_block_is_taken_only_when_a_token_needs_it() -> None:
    """7 tokens in blocks of 4: the eighth fits, the ninth needs a third block (paper, Fig. 6)."""
    manager = BlockManager(8, 4)
    seq = admit(manager, 1, 2, 3, 4, 5, 6, 7)
    assert len(seq.block_table) == 2
    append(manager, seq, 8)
    assert len(seq.block_table) == 2
    append(manager, seq, 9)
    assert len(seq.block_table) == 3
    assert manager.slot_utilization([seq]) == 9 / 12
    manager.check_invariants([seq])


def test_a_prefix_is_shared_up_to_the_first_block_that_differs() -> None:
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4, 5, 6, 7)
    second = admit(manager, 1, 2, 3, 4, 9, 6, 7, computed=False)
    assert second.block_table[:2] == first.block_table[:2]
    assert not set(second.block_table[2:]) & set(first.block_table)
    assert second.num_computed_tokens == 4
    manager.check_invariants([first, second])


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    """K/V depends on everything before it: `5 6` after `1 2` is not `5 6` after `3 4`."""
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 5, 6, 7)
    second = admit(manager, 3, 4, 5, 6, 7, computed=False)
    assert second.num_computed_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached to the end still needs logits, so its last block is computed again."""
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4)
    second = admit(manager, 1, 2, 3, 4, computed=False)
    assert second.num_computed_tokens == 2
    compute(manager, second, 4)
    assert second.block_table == first.block_table, "the copy of the last block is given up for the twin's"
    manager.check_invariants([first, second])
    assert manager.num_free_blocks == 14


def test_freed_blocks_are_found_again() -> None:
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4, 5)
    table = list(first.block_table)
    manager.free(first)
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (16, 2)
    second = admit(manager, 1, 2, 3, 4, 6)
    assert second.block_table[:2] == table[:2]
    manager.check_invariants([second])


def test_a_chain_is_evicted_from_its_end() -> None:
    """Six cached blocks, four of them wanted for something else: the two left are the beginning."""
    manager = BlockManager(6, 1)
    seq = admit(manager, 1, 2, 3, 4, 5, 6)
    manager.free(seq)
    other = admit(manager, 11, 12, 13, 14)
    again = sequence(1, 2, 3, 4, 5, 6)
    kept = [block.tokens for block in manager.find_prefix(again)]
    assert kept == [again.block_key(i, 1)[1] for i in (0, 1)]
    manager.check_invariants([other])


def test_the_least_recently_used_chain_goes_first() -> None:
    manager = BlockManager(4, 1)
    for tokens in ((1, 2), (3, 4)):
        manager.free(admit(manager, *tokens))
    manager.free(admit(manager, 1, 2))  # used again
    other = admit(manager, 5, 6)
    assert len(manager.find_prefix(sequence(1, 2, 0))) == 2
    assert not manager.find_prefix(sequence(3, 4, 0))
    manager.check_invariants([other])


def test_an_evicted_block_leaves_the_index() -> None:
    """Its next owner's tokens must not be found under the old hash."""
    manager = BlockManager(2, 2)
    manager.free(admit(manager, 1, 2, 3))
    seq = admit(manager, 7, 8, 9)
    assert not manager.find_prefix(sequence(1, 2, 3))
    manager.check_invariants([seq])


def test_refused_admission_changes_nothing() -> None:
    """The prompt finds two cached blocks, needs two more, and only one is left."""
    manager = BlockManager(4, 2)
    manager.free(admit(manager, 1, 2, 3, 4, 5))
    holder = admit(manager, 9)
    before = (manager.num_free_blocks, list(manager.pool.cached), dict(manager.pool.index))
    seq = sequence(1, 2, 3, 4, 5, 6, 7, 8)
    with pytest.raises(OutOfBlocks):
        manager.allocate([seq], [manager.find_prefix(seq)])
    assert seq.block_table == []
    assert seq.num_computed_tokens == 0
    assert before == (manager.num_free_blocks, list(manager.pool.cached), dict(manager.pool.index))
    manager.check_invariants([holder])


def test_cached_blocks_that_are_hit_do_not_count_as_free_for_the_rest() -> None:
    """Three free blocks, all cached; two are the prompt's own prefix: it can have one more, not three."""
    manager = BlockManager(3, 1)
    manager.free(admit(manager, 1, 2, 3))
    seq = sequence(1, 2, 8, 9)
    with pytest.raises(OutOfBlocks):
        manager.allocate([seq], [manager.find_prefix(seq)])
    shorter = admit(manager, 1, 2, 8)
    manager.check_invariants([shorter])


def test_a_collision_of_hashes_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that gives every block the same value, no sequence ever gets another's K/V."""
    monkeypatch.setattr("nanopaged.sequence.xxhash.xxh3_64_intdigest", lambda _: 42)
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4, 5)
    second = admit(manager, 6, 7, 8, 9, 5, computed=False)
    assert second.num_computed_tokens == 0
    compute(manager, second, 5)
    twin = admit(manager, 1, 2, 3, 4, 5, computed=False)
    assert twin.num_computed_tokens == 2, "the one block that is in the index is still found"
    manager.check_invariants([first, second, twin])


def test_the_right_tokens_after_the_wrong_parent_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of the block alone, blind to what came before it: the comparison of parents must catch that.

    Tokens `5 6` are published as the second block of `1 2 5 6`. For `3 4 5 6` the hash and the tokens of
    the second block agree, and its K/V would be wrong.
    """
    manager = BlockManager(16, 2)
    monkeypatch.setattr(
        "nanopaged.sequence.xxhash.xxh3_64_intdigest",
        lambda data: int.from_bytes(data[-16:], "little") % 2**63,
    )
    first = admit(manager, 1, 2, 5, 6, 7)
    other = admit(manager, 3, 4, 8, 8, 7)
    third = admit(manager, 3, 4, 5, 6, 7, computed=False)
    assert third.num_computed_tokens == 2
    manager.check_invariants([first, other, third])


def test_a_promised_block_can_be_shared_at_once() -> None:
    """Twins of one step: the second shares what the first is still to compute."""
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4, 5, computed=False)
    promise(manager, first)
    second = admit(manager, 1, 2, 3, 4, 5, computed=False)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.num_computed_tokens == 4
    manager.keep_promises()
    compute(manager, first, 5)
    compute(manager, second, 5)
    manager.check_invariants([first, second])


def test_a_broken_promise_is_forgotten() -> None:
    """The step failed: nobody may find blocks that were never filled."""
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4, 5, computed=False)
    promise(manager, first)
    manager.break_promises()
    assert not manager.find_prefix(sequence(1, 2, 3, 4, 5))
    manager.free(first)
    assert manager.num_cached_blocks == 0
    manager.check_invariants([])


def test_nothing_is_published_before_it_is_computed() -> None:
    manager = BlockManager(16, 2)
    first = admit(manager, 1, 2, 3, 4, 5, computed=False)
    compute(manager, first, 3)
    assert len(manager.find_prefix(sequence(1, 2, 3, 4, 5))) == 1
    compute(manager, first, 5)
    assert len(manager.find_prefix(sequence(1, 2, 3, 4, 5))) == 2


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    manager.free(admit(manager, 1, 2, 3))
    assert manager.num_cached_blocks == 0
    assert not manager.find_prefix(sequence(1, 2, 3))


def test_the_invariants_notice_a_wrong_reference_count() -> None:
    """The checker itself is checked: a leak, a block in two places, a stale hash."""
    manager = BlockManager(4, 2)
    seq = admit(manager, 1, 2, 3)
    manager.pool.blocks[seq.block_table[0]].ref_count += 1
    with pytest.raises(AssertionError, match="references"):
        manager.check_invariants([seq])
    manager.pool.blocks[seq.block_table[0]].ref_count -= 1
    manager.pool.empty.append(manager.pool.blocks[seq.block_table[1]])
    with pytest.raises(AssertionError, match="free"):
        manager.check_invariants([seq])
    manager.pool.empty.pop()
    manager.check_invariants([seq])
    with pytest.raises(AssertionError):
        manager.check_invariants([])
