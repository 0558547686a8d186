"""Invariants: what must hold between two steps.

The tests check them after every step. They take time that grows with the pool, so the engine never does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nanopaged.block_manager import BlockManager, blocks_needed
from nanopaged.sequence import Request, Sequence
from nanopaged.swap import Swapper


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Raise AssertionError unless pool, prefix index and block tables agree. Call it between steps.

    Args:
        sequences: all sequences that have device blocks.
    """
    sequences = list(sequences)
    references = Counter(block_id for seq in sequences for block_id in seq.block_table)
    free = set(manager.free_ids)
    assert len(free) == len(manager.free_ids), "a block is in the free list twice"
    assert not free & manager.cached.keys(), "a block is both free and cached"
    assert not references.keys() & (free | manager.cached.keys()), "a block in a table is free"
    assert len(references) + manager.num_free_blocks == manager.num_blocks, (
        f"{len(references)} blocks in use + {manager.num_free_blocks} free != {manager.num_blocks}"
    )
    for block in manager.blocks:
        assert block.ref_count == references[block.block_id], (
            f"block {block.block_id} has {block.ref_count} references, "
            f"but stands {references[block.block_id]} times in tables"
        )
        assert block.key is None or manager.index[block.key] is block, "a stale key"
    assert all(block.key == key for key, block in manager.index.items()), "the index names another block"
    holders: dict[int, tuple[int, Sequence]] = {}  # block → its position in the first table that has it
    computed: set[tuple[Request, int]] = set()
    for seq in sequences:
        _check_table(manager, seq)
        for i, block_id in enumerate(seq.block_table):
            place, other = holders.setdefault(block_id, (i, seq))
            if other is not seq:
                assert place == i, "a block stands at different places of two tables"
                published = manager.blocks[block_id].key is not None
                assert published or seq.request is other.request, "requests share a private block"
                end = min((i + 1) * manager.block_size, seq.num_computed_tokens, other.num_computed_tokens)
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
        assert key is None or [key] == keys[i : i + 1], f"block {block_id} is found under other tokens"


def check_host_blocks(swapper: Swapper, requests: Iterable[Request]) -> None:
    """Raise AssertionError unless every host block is free or in one request's tables."""
    in_use: list[int] = []
    for request in requests:
        in_use += {host_id for seq in request.live for host_id in seq.host_table}
        for seq in request.live:
            size = swapper.block_manager.block_size
            assert not (seq.host_table and seq.block_table), "a swapped sequence has device blocks"
            assert not seq.host_table or seq.num_computed_tokens <= len(seq.host_table) * size
    everything = sorted(swapper.free_ids + in_use)
    assert everything == list(range(swapper.num_host_blocks)), "a host block is lost or used twice"
