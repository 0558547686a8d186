"""Who owns which block.

The block manager is the page table of the engine. It hands out physical blocks of K/V memory, lets
sequences share them, and remembers full ones so that a later prompt finds them again
(PagedAttention, §4.2 to §4.4).

It knows only ids: it has never seen a tensor, a model or a GPU. The states a block goes through are
drawn in `block_pool.py`; here are the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nanopaged.block_pool import Block, BlockPool
from nanopaged.sequence import Sequence


class OutOfBlocks(Exception):
    """The pool cannot give what was asked for now. Nothing has been changed."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: ceil division, e.g. 17 tokens in blocks of 16 need 2."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Block tables over one pool of `num_blocks` blocks of `block_size` token slots."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        # Published in this step, before their K/V is there: see `promise`.
        self._promised: list[Block] = []

    # ── a sequence comes, grows and goes ──────────────────────────────────────────────────────────

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The longest run of published blocks that starts the sequence, without its last token.

        The last token is always left to compute, since its logits are what we are after:

            block_size = 4, 8 tokens, both blocks in the cache: only (8 - 1) // 4 = 1 block is
            looked up, tokens 4 to 7 are computed again into a block of the sequence's own.

        The hash only finds the candidate. It is taken if its tokens *and* the block before it are
        the right ones, so a collision of hashes costs a miss and never gives another prefix's K/V.
        """
        prefix: list[Block] = []
        if not self.enable_prefix_caching:
            return prefix
        parent = None
        for i in range((seq.num_tokens - 1) // self.block_size):
            key, tokens = seq.block_key(i, self.block_size)
            block = self.pool.index.get(key)
            if block is None or not block.holds(tokens, parent):
                break
            prefix.append(block)
            parent = block
        return prefix

    def allocate(self, seq: Sequence, prefix: list[Block]) -> None:
        """Give a sequence without blocks a table for all its tokens, beginning with the shared `prefix`.

        Raises OutOfBlocks, and changes nothing, if the pool cannot hold the sequence now.
        """
        assert not seq.block_table, "allocate is for a sequence without blocks"
        num_new = blocks_needed(seq.num_tokens, self.block_size) - len(prefix)
        num_revived = sum(1 for block in prefix if block.ref_count == 0)  # cached, so free until now
        if num_new + num_revived > self.pool.num_free:
            raise OutOfBlocks
        for block in prefix:
            self.pool.share(block)
        seq.block_table = [block.block_id for block in prefix]
        self._extend(seq, num_new)
        seq.num_computed_tokens = seq.num_closed_tokens = len(prefix) * self.block_size

    def append_slots(self, seq: Sequence) -> None:
        """Make room for all tokens of `seq` that are not computed yet.

            block_size = 4, table [7, 2], 8 tokens computed, a ninth just sampled:

            block 7: a b c d   block 2: e f g h          token 8 needs a new block: table [7, 2, 5]

        Raises OutOfBlocks, and changes nothing, if the pool cannot give what is needed.
        """
        num_new = blocks_needed(seq.num_tokens - seq.num_slots, self.block_size)
        if num_new > self.pool.num_free:
            raise OutOfBlocks
        self._extend(seq, num_new)

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        seq.block_table += [self.pool.take().block_id for _ in range(num_blocks)]
        seq.num_slots = len(seq.block_table) * self.block_size

    def free(self, seq: Sequence) -> None:
        """Take the sequence's blocks away; what was published stays findable until it is evicted.

        Tail first: the end of a prefix then is older in the cache than its beginning, and a chain is
        eaten from its end. A beginning without its end is still useful, an end without its beginning
        could never be found.
        """
        for block_id in reversed(seq.block_table):
            self.pool.release(self.pool.blocks[block_id])
        seq.block_table = []
        seq.num_slots = seq.num_computed_tokens = seq.num_closed_tokens = 0

    # ── the prefix cache ──────────────────────────────────────────────────────────────────────────

    def close_blocks(self, seq: Sequence) -> None:
        """Make the blocks findable that have become full and whose K/V is there.

        If a twin published the same block first, its copy is adopted and ours goes back to the pool:
        the table then names the same block as the twin's. So whoever owns a published block owns the
        published block before it, and a chain in the cache never has a hole.
        """
        first, end = seq.num_closed_tokens // self.block_size, seq.num_computed_tokens // self.block_size
        seq.num_closed_tokens = end * self.block_size
        if not self.enable_prefix_caching:
            return
        for i in range(first, end):
            block = self.pool.blocks[seq.block_table[i]]
            if block.hash is None:  # a promised one is published already
                published = self._publish(seq, i, block)
                if published is not None and published is not block:
                    self.pool.share(published)
                    self.pool.release(block)
                    seq.block_table[i] = published.block_id

    def promise(self, seq: Sequence) -> None:
        """Make the blocks that this step will fill findable already, one forward pass early.

        A twin admitted in the same step can then share them. That is sound because every layer
        stores the K/V of the whole batch before any of its sequences attends. `keep_promises` or
        `break_promises` must follow when the step has ended.
        """
        if not self.enable_prefix_caching:
            return
        num_tokens = seq.num_computed_tokens + seq.num_new_tokens
        for i in range(seq.num_closed_tokens // self.block_size, num_tokens // self.block_size):
            block = self.pool.blocks[seq.block_table[i]]
            if self._publish(seq, i, block) is block:
                self._promised.append(block)

    def keep_promises(self) -> None:
        self._promised.clear()

    def break_promises(self) -> None:
        """The step failed: what it was to fill must not be found. Comes before those blocks are freed."""
        for block in self._promised:
            self.pool.unpublish(block)
        self._promised.clear()

    def _publish(self, seq: Sequence, i: int, block: Block) -> Block | None:
        """Publish `block`, the i-th of `seq`, unless its like is published; return the one that now is.

        None if it cannot be: a block with the same hash and other contents is there already, or was
        when the block before this one came up, and what follows a hole would never be found.
        """
        parent = self.pool.blocks[seq.block_table[i - 1]] if i else None
        if parent is not None and parent.hash is None:
            return None
        key, tokens = seq.block_key(i, self.block_size)
        published = self.pool.index.get(key)
        if published is None:
            self.pool.publish(block, key, parent, tokens)
            return block
        return published if published.holds(tokens, parent) else None

    # ── accounts ──────────────────────────────────────────────────────────────────────────────────

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return len(self.pool.cached)

    def slot_utilization(self, sequences: Iterable[Sequence]) -> float:
        """Share of the slots in allocated blocks that hold K/V; a shared block counts once.

        Waste is the end of each last block and what is allocated ahead of a prompt being computed.
        """
        filled: dict[int, int] = {}
        for seq in sequences:
            for i, block_id in enumerate(seq.block_table):
                here = min(self.block_size, max(0, seq.num_computed_tokens - i * self.block_size))
                filled[block_id] = max(filled.get(block_id, 0), here)
        return sum(filled.values()) / (len(filled) * self.block_size) if filled else 0.0

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the books agree with the tables of all live `sequences`."""
        pool = self.pool
        sequences = list(sequences)
        owners = Counter(block_id for seq in sequences for block_id in seq.block_table)
        empty = {block.block_id for block in pool.empty}
        assert len(empty) == len(pool.empty), "a block is in the empty list twice"
        assert not empty & pool.cached.keys(), "a block is both empty and cached"
        assert not owners.keys() & (empty | pool.cached.keys()), "a block in a table is free"
        assert len(owners) + pool.num_free == self.num_blocks, (
            f"{len(owners)} blocks in use + {pool.num_free} free != {self.num_blocks}"
        )
        for block in pool.blocks:
            assert block.ref_count == owners[block.block_id], (
                f"block {block.block_id} has {block.ref_count} references, "
                f"but stands {owners[block.block_id]} times in tables"
            )
            assert (block.hash is None) == (block.tokens is None)
            assert block.hash is None or pool.index[block.hash] is block, "a stale hash"
        assert not self._promised, "a promise outlived its step"
        ages = {block_id: age for age, block_id in enumerate(pool.cached)}
        for key, block in pool.index.items():
            assert block.hash == key, "the index names a block under a hash it does not carry"
            parent = block.parent
            assert parent is None or pool.index.get(parent.hash) is parent, "a hole in a chain"
            if parent is not None and block.block_id in ages and parent.block_id in ages:
                assert ages[block.block_id] < ages[parent.block_id], "a chain would lose its head first"
        for seq in sequences:
            self._check_table(seq)

    def _check_table(self, seq: Sequence) -> None:
        """A table holds what is computed, and no more than the tokens need; only closed blocks are shared."""
        num_blocks, size = len(seq.block_table), self.block_size
        assert len(set(seq.block_table)) == num_blocks, "a block stands twice in one table"
        assert seq.num_computed_tokens <= min(seq.num_tokens, num_blocks * size)
        assert num_blocks <= blocks_needed(seq.num_tokens, size)
        assert seq.num_slots == num_blocks * size
        assert seq.num_closed_tokens == seq.num_computed_tokens // size * size
        assert seq.num_tokens == len(seq.token_ids)
        for i, block_id in enumerate(seq.block_table):
            block = self.pool.blocks[block_id]
            if block.tokens is not None:
                assert block.tokens == seq.block_key(i, size)[1], "a block with other tokens in a table"
            if (i + 1) * size > seq.num_computed_tokens:
                assert block.ref_count == 1, "a block being written is shared"
