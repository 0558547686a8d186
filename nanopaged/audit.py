"""The block manager's books, read: what is shared, what is filled, and whether everything agrees.

Nothing here changes anything. The tests call `check_invariants` after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanopaged.block_pool import blocks_needed
from nanopaged.sequence import Sequence

if TYPE_CHECKING:
    from nanopaged.block_manager import BlockManager


def num_shared_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> int:
    """Blocks that have several owners."""
    in_use = {block_id for seq in sequences for block_id in seq.block_table}
    return sum(1 for block_id in in_use if manager.pool.blocks[block_id].ref_count > 1)


def num_blocks_saved(manager: BlockManager, sequences: Iterable[Sequence]) -> int:
    """Blocks that would be needed without sharing, less those that are."""
    return sum(len(seq.block_table) for seq in sequences) - (manager.num_blocks - manager.pool.num_free)


def slot_utilization(manager: BlockManager, sequences: Iterable[Sequence]) -> float:
    """Share of the slots in allocated blocks that hold K/V; a shared block counts once.

    Waste is the end of each last block and what is allocated ahead of a prompt being computed.
    """
    filled: dict[int, int] = {}
    for seq in sequences:
        for i, block_id in enumerate(seq.block_table):
            here = min(manager.block_size, max(0, seq.num_computed_tokens - i * manager.block_size))
            filled[block_id] = max(filled.get(block_id, 0), here)
    return sum(filled.values()) / (len(filled) * manager.block_size) if filled else 0.0


def check_invariants(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Raise AssertionError unless the books agree with the tables of all live `sequences`."""
    pool = manager.pool
    sequences = list(sequences)
    owners = Counter(block_id for seq in sequences for block_id in seq.block_table)
    empty = {block.block_id for block in pool.empty}
    assert len(empty) == len(pool.empty), "a block is in the empty list twice"
    assert not empty & pool.cached.keys(), "a block is both empty and cached"
    assert not owners.keys() & (empty | pool.cached.keys()), "a block in a table is free"
    assert len(owners) + pool.num_free == manager.num_blocks, (
        f"{len(owners)} blocks in use + {pool.num_free} free != {manager.num_blocks}"
    )
    for block in pool.blocks:
        assert block.ref_count == owners[block.block_id], (
            f"block {block.block_id} has {block.ref_count} references, "
            f"but stands {owners[block.block_id]} times in tables"
        )
        assert (block.hash is None) == (block.tokens is None)
        assert block.hash is None or pool.index[block.hash] is block, "a stale hash"
    assert not manager._promised, "a promise outlived its step"
    ages = {block_id: age for age, block_id in enumerate(pool.cached)}
    for key, block in pool.index.items():
        assert block.hash == key, "the index names a block under a hash it does not carry"
        parent = block.parent
        assert parent is None or pool.index.get(parent.hash) is parent, "a hole in a chain"
        if parent is not None and block.block_id in ages and parent.block_id in ages:
            assert ages[block.block_id] < ages[parent.block_id], "a chain would lose its head first"
    places: dict[int, tuple[int, Sequence]] = {}  # block → where, and in whose table, it was seen first
    for seq in sequences:
        _check_table(manager, seq)
        for i, block_id in enumerate(seq.block_table):
            first_i, other = places.setdefault(block_id, (i, seq))
            assert first_i == i, "a block stands at different places of two tables"
            _check_sharing(manager, seq, other, i)


def _check_table(manager: BlockManager, seq: Sequence) -> None:
    """A table holds what is computed, and no more than the tokens need."""
    num_blocks, size = len(seq.block_table), manager.block_size
    assert len(set(seq.block_table)) == num_blocks, "a block stands twice in one table"
    assert seq.num_computed_tokens <= min(seq.num_tokens, num_blocks * size)
    assert num_blocks <= blocks_needed(seq.num_tokens, size)
    assert seq.num_slots == num_blocks * size
    assert seq.num_closed_tokens == seq.num_computed_tokens // size * size
    assert seq.num_tokens == len(seq.token_ids)
    for i, block_id in enumerate(seq.block_table):
        block = manager.pool.blocks[block_id]
        if block.tokens is not None:
            assert block.tokens == seq.block_key(i, size)[1], "a block with other tokens in a table"


def _check_sharing(manager: BlockManager, seq: Sequence, other: Sequence, i: int) -> None:
    """Strangers share published blocks only; siblings whatever they have in common."""
    if manager.pool.blocks[seq.block_table[i]].hash is None:
        assert seq.request is other.request, "strangers share a block that is not published"
    start = i * manager.block_size
    end = min(start + manager.block_size, seq.num_computed_tokens, other.num_computed_tokens)
    assert seq.token_ids[start:end] == other.token_ids[start:end], "a shared block with different tokens"
