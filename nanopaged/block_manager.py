"""Who owns which block.

The block manager is the page table of the engine. It hands out physical blocks of K/V memory, lets
sequences share them, and remembers full ones so that a later prompt finds them again
(PagedAttention, §4.2 to §4.4).

It knows only ids: it has never seen a tensor, a model or a GPU. The states a block goes through are
drawn in `block_pool.py`; here are the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanopaged import audit
from nanopaged.block_pool import Block, BlockPool, blocks_needed
from nanopaged.sequence import Sequence


class OutOfBlocks(Exception):
    """The pool cannot give what was asked for now. Nothing has been changed."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """K/V to be copied before the next forward pass: the i-th block of `seq` was src and is now dst."""

    seq: Sequence
    i: int
    src: int
    dst: int


class BlockManager:
    """Block tables over one pool of `num_blocks` blocks of `block_size` token slots."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """All blocks are free, and none can be found."""
        self.pool = BlockPool(self.num_blocks)
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

    def allocate(self, sequences: list[Sequence], prefixes: list[list[Block]]) -> None:
        """Give the sequences of one request, none of which has blocks, tables for all their tokens.

        Each begins with the blocks found for it in the prefix cache. Siblings that come back from a
        preemption also share among themselves, whether or not there is a prefix cache: every full
        block that several of them begin with is taken once. It counts as computed for all but the
        first, which is right because siblings are always served in order.

            block_size = 2    a b c d e │ a b c d f │ a b x y z      tables [0 1 2] [0 1 3] [0 4 5]

        Raises OutOfBlocks, and changes nothing, if the pool cannot hold them all now.
        """
        if self._num_blocks_to_take(sequences, prefixes) > self.pool.num_free:
            raise OutOfBlocks
        for seq, prefix in zip(sequences, prefixes, strict=True):
            assert not seq.block_table, "allocate is for sequences without blocks"
            for block in prefix:  # of all, before the first new block is taken: that may evict a cached one
                self.pool.share(block)
            seq.block_table = [block.block_id for block in prefix]
        taken: dict[tuple[int, bytes], Block] = {}  # (block before it, tokens) → a sibling's block
        for seq in sequences:
            if len(sequences) > 1:
                self._share_with_siblings(seq, taken)
            seq.num_computed_tokens = seq.num_closed_tokens = len(seq.block_table) * self.block_size
            self._extend(seq, blocks_needed(seq.num_tokens, self.block_size) - len(seq.block_table))
            if len(sequences) > 1:
                for i in range((seq.num_tokens - 1) // self.block_size):
                    taken[self._place(seq, i)] = self.pool.blocks[seq.block_table[i]]

    def _share_with_siblings(self, seq: Sequence, taken: dict[tuple[int, bytes], Block]) -> None:
        for i in range(len(seq.block_table), (seq.num_tokens - 1) // self.block_size):
            block = taken.get(self._place(seq, i))
            if block is None:
                break
            self.pool.share(block)
            seq.block_table.append(block.block_id)

    def _place(self, seq: Sequence, i: int) -> tuple[int, bytes]:
        """Where the i-th block of `seq` stands among its siblings': after which block, with which tokens."""
        before = seq.block_table[i - 1] if i else -1
        return before, seq.block_key(i, self.block_size)[1]

    def _num_blocks_to_take(self, sequences: list[Sequence], prefixes: list[list[Block]]) -> int:
        """Free blocks that `allocate` would use up, cached ones that are hit included."""
        revived = {block.block_id for prefix in prefixes for block in prefix if block.ref_count == 0}
        if len(sequences) == 1:
            num_needed = blocks_needed(sequences[0].num_tokens, self.block_size)
            return num_needed - len(prefixes[0]) + len(revived)
        nodes: dict[tuple[int, bytes], int] = {}  # a tree of the siblings' full blocks, each node numbered
        num_cached: set[int] = set()
        num_last = 0
        for seq, prefix in zip(sequences, prefixes, strict=True):
            node, num_full = -1, (seq.num_tokens - 1) // self.block_size
            for i in range(num_full):
                place = (node, seq.block_key(i, self.block_size)[1])
                node = nodes.setdefault(place, len(nodes))
                if i < len(prefix):
                    num_cached.add(node)
            num_last += blocks_needed(seq.num_tokens, self.block_size) - num_full
        return len(nodes) - len(num_cached) + num_last + len(revived)

    def append_slots(self, seq: Sequence) -> BlockCopy | None:
        """Make room for all tokens of `seq` that are not computed yet.

            block_size = 4, table [7, 2], 6 tokens computed, a seventh just sampled:

            block 7: a b c d   block 2: e f . .    the seventh goes to block 2, if nobody shares it.
                                        └ shared?  copy 2 → 9 and write there: table [7, 9]

        Returns the copy to make before the slots are written, if one is needed (copy-on-write, §4.4).
        Of several owners the last to come writes in place, for by then it is the only one.

        Raises OutOfBlocks, and changes nothing, if the pool cannot give what is needed.
        """
        copies = self.writes_into_shared_block(seq)
        num_new = max(0, blocks_needed(seq.num_tokens - seq.num_slots, self.block_size))
        if num_new + copies > self.pool.num_free:
            raise OutOfBlocks
        copy = self._copy_last_block(seq) if copies else None
        self._extend(seq, num_new)
        return copy

    def writes_into_shared_block(self, seq: Sequence) -> bool:
        """Whether the next token of `seq` would go into a block that has other owners."""
        i = (seq.num_tokens - 1) // self.block_size
        return i < len(seq.block_table) and self.pool.blocks[seq.block_table[i]].ref_count > 1

    def _copy_last_block(self, seq: Sequence) -> BlockCopy:
        i = len(seq.block_table) - 1
        src = self.pool.blocks[seq.block_table[i]]
        self.pool.release(src)
        dst = self.pool.take()
        seq.block_table[i] = dst.block_id
        return BlockCopy(seq, i, src.block_id, dst.block_id)

    def undo_copies(self, copies: list[BlockCopy]) -> None:
        """Let the tables name the sources again, before anything was copied."""
        for copy in reversed(copies):
            self.pool.share(self.pool.blocks[copy.src])
            self.pool.release(self.pool.blocks[copy.dst])
            copy.seq.block_table[copy.i] = copy.src

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has the parent's tokens, share all its blocks. Takes no memory (§4.4)."""
        for block_id in parent.block_table:
            self.pool.share(self.pool.blocks[block_id])
        child.block_table = list(parent.block_table)
        child.num_slots = parent.num_slots
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_closed_tokens = parent.num_closed_tokens

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

        If a twin published the same block first, its copy is adopted and our own goes back to the pool:
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
                if published is not None and published is not block and block.ref_count == 1:
                    self.pool.share(published)
                    self.pool.release(block)
                    seq.block_table[i] = published.block_id

    def promise(self, seq: Sequence, start: int, end: int) -> None:
        """Make the full blocks of tokens [start, end) findable, one forward pass before they are filled.

        A twin admitted in the same step can then share them. That is sound because every layer
        stores the K/V of the whole batch before any of its sequences attends, and what comes from
        host memory comes even earlier. `keep_promises` must follow when the step has ended.
        """
        if not self.enable_prefix_caching:
            return
        for i in range(start // self.block_size, end // self.block_size):
            block = self.pool.blocks[seq.block_table[i]]
            if block.hash is None and self._publish(seq, i, block) is block:
                self._promised.append(block)

    def keep_promises(self) -> None:
        """The step went well: what was promised is there."""
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
        """Blocks that can be had at once, the cached ones included."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without an owner whose contents can still be found."""
        return len(self.pool.cached)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the books agree with the tables of all running `sequences`."""
        audit.check_invariants(self, sequences)
