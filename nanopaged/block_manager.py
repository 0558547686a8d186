"""Block tables, reference counts, copy-on-write and the prefix cache.

The block manager hands out physical blocks of the KV cache, lets sequences share them, replaces a
shared block before it is written, and keeps full blocks for later prompts (PagedAttention, §4.2 to
§4.4; the prefix cache is not in the paper). It knows block ids only. The model runner copies the
contents.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from nanopaged.sequence import Move, Sequence

NO_TOKEN = array("q", [-1]).tobytes()


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens, rounded up: 17 tokens in blocks of 16 need 2."""
    return -(-num_tokens // block_size)


def blocks_to_grow(sequences: list[Sequence], block_size: int) -> int:
    """Free blocks that a request's sequences need to store their newest tokens.

    These are the new blocks after the end of a table, and the copies of a block that several
    sequences are about to write, of which each writer but the last needs one.

        block_size = 4, tables [7, 2] and [7, 2], 7 tokens each: one copy of block 2
        the same with 9 tokens each:                             two new blocks, nothing to copy

    The number is the same for a request that is swapped out, whose host tables point to the same
    shared blocks. `append_slots` takes exactly that many, because only the request's own sequences
    share a block that is not full.
    """
    num_new = 0
    written = []
    for seq in sequences:
        table = seq.host_table or seq.block_table  # a swapped sequence has only a host table
        newest = (seq.num_tokens - 1) // block_size  # logical block of the newest token
        if newest < len(table):
            written.append(table[newest])
        else:
            num_new += newest + 1 - len(table)
    return num_new + len(written) - len(set(written))  # the last writer of a block needs no copy


@dataclass(slots=True, eq=False)
class Block:
    """A physical block and its state.

        free → partial      `take` hands it out
        partial → full      its last slot is written
        full → cached       the last `release`, if it is published; its contents are kept
        cached → full       a hit: `share`
        cached → partial    `take` evicts it, the least recently used first
        any → free          the last `release`, if it is not published
        cached → free       `reset_prefix_cache`

    `key` is set while the prefix index points to this block. With ref_count 0 a block is cached if
    it has a key, else free.
    """

    block_id: int
    ref_count: int = 0
    key: bytes | None = None


class BlockManager:
    """Block tables over one pool of `num_blocks` blocks of `block_size` token slots."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Make all blocks free, and empty the prefix index."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]
        self.free_ids = list(reversed(range(self.num_blocks)))  # a stack: block 0 is taken first
        # Blocks without references whose contents are kept, the least recently used first.
        self.cached = OrderedDict[int, Block]()
        self.prefix_index: dict[bytes, Block] = {}  # key → the block published under it

    @property
    def num_free_blocks(self) -> int:
        """Blocks without references: free ones, and cached ones, which can be evicted."""
        return len(self.free_ids) + len(self.cached)

    # ── references to one block ───────────────────────────────────────────────────────────────────

    def take(self) -> int:
        """Hand out a free block, or evict the least recently used cached one. Returns its id."""
        if not self.free_ids:
            self.evict()
        block_id = self.free_ids.pop()
        self.blocks[block_id].ref_count = 1
        return block_id

    def evict(self) -> None:
        """Make the least recently used cached block free: its contents can no longer be found."""
        block_id, block = self.cached.popitem(last=False)
        assert block.key is not None
        del self.prefix_index[block.key]
        block.key = None
        self.free_ids.append(block_id)

    def share(self, block_id: int) -> None:
        """Add a reference to a block; a cached block is in use again."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.cached[block_id]
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """Give a reference back. When the last one goes, the block is cached if published, else
        free.

        Raises:
            RuntimeError: the block has no references.
        """
        block = self.blocks[block_id]
        if block.ref_count == 0:
            raise RuntimeError(
                f"block {block_id} was released more often than it was taken and shared"
            )
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.key is None:
                self.free_ids.append(block_id)
            else:
                self.cached[block_id] = block

    # ── block tables: allocate, grow, fork, free ──────────────────────────────────────────────────

    def allocate(self, sequences: list[Sequence], num_reserved: int = 0) -> bool:
        """Give the sequences of one request, which have no blocks yet, tables for all their tokens.

        A sequence's table begins with the blocks found in the prefix cache; the others are taken.

            block_size = 2, a b c d e, the cache has (a b) in block 7:   table [7 0 1], 2 computed
            2 free blocks are needed, or 3 if block 7 is only cached, because a cached block counts
            as a free one.

        Several sequences, of a preempted request, also share the full blocks of their common
        prefixes. Such a block counts as computed for all but the first of them.

            abcde  abcdf  abxyz      tables [0 1 2] [0 1 3] [0 4 5]: 3 keys and 3 last blocks

        Args:
            num_reserved: blocks that must stay free, see `Scheduler._admit`.

        Returns:
            False, and nothing is changed, if the pool has too few blocks.
        """
        size = self.block_size
        prefixes = {}  # sequence → blocks of the cache
        missing = {}  # sequence → keys of the full blocks that the cache does not have
        for seq in sequences:
            prefix = self.find_prefix(seq)
            prefixes[seq] = prefix
            # The last block of a sequence is its own, even if it is full, because the last token is
            # always computed.
            keys = self.keys_of(seq, (seq.num_tokens - 1) // size)
            missing[seq] = keys[len(prefix) :]
        # A block for each missing key, and a last block for each sequence. A hit that is only
        # cached counts as free until it is shared.
        num_new = len(set().union(*missing.values())) + len(sequences)
        num_revived = len(set().union(*prefixes.values()) & self.cached.keys())
        if num_new + num_revived > self.num_free_blocks - num_reserved:
            return False
        for seq, prefix in prefixes.items():  # share all hits first: `take` may evict them
            seq.block_table = prefix
            seq.num_computed_tokens = size * len(prefix)
            for block_id in prefix:
                self.share(block_id)
        block_of = {}  # missing key → block
        for seq, keys in missing.items():
            for key in keys:
                if key not in block_of:
                    block_of[key] = self.take()
                else:  # a sibling before `seq` computes this block
                    self.share(block_of[key])
                    seq.num_computed_tokens += size
                seq.block_table.append(block_of[key])
            seq.block_table.append(self.take())
        return True

    def append_slots(self, sequences: list[Sequence]) -> list[Move] | None:
        """Make room for the newest tokens of all sequences of a request, or of none.

            block_size = 4, table [7, 2], 6 tokens computed, a seventh just sampled:

            block 7: a b c d   block 2: e f . .    ref_count of block 2 is 1: write into it
                                        └─         ref_count is 2: copy 2 → 9, table [7, 9]

        Returns:
            the copies (source, destination) to make before the slots are written (copy-on-write,
            §4.4). None, and nothing is changed, if the pool has too few blocks.
        """
        size = self.block_size
        if len(sequences) == 1 and sequences[0].num_tokens <= len(sequences[0].block_table) * size:
            return []  # the usual case: a free slot, and no sibling that could share the block
        if blocks_to_grow(sequences, size) > self.num_free_blocks:
            return None
        copies = []
        for seq in sequences:
            newest = (seq.num_tokens - 1) // size
            # A beam that waits for its siblings has nothing to write.
            is_written = seq.num_computed_tokens < seq.num_tokens
            if is_written and newest < len(seq.block_table):
                src = seq.block_table[newest]
                if self.blocks[src].ref_count > 1:
                    dst = self.take()
                    self.release(src)
                    seq.block_table[newest] = dst
                    copies.append((src, dst))
            while len(seq.block_table) < blocks_needed(seq.num_tokens, size):
                seq.block_table.append(self.take())
        return copies

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A copy of `parent` for output `index` that shares all its blocks (§4.4)."""
        child = parent.copy_tokens(index)
        for block_id in parent.block_table:
            self.share(block_id)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        return child

    def free(self, seq: Sequence) -> None:
        """Give the sequence's blocks back, the last first, so that a prefix is evicted from its
        end.
        """
        self.trim(seq, 0)
        seq.num_computed_tokens = 0

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Give back the blocks beyond the first `num_tokens` tokens.

        block_size = 4, table [7, 2, 5], 6 tokens: block 5 is given back
        """
        num_kept = blocks_needed(num_tokens, self.block_size)
        while len(seq.block_table) > num_kept:
            self.release(seq.block_table.pop())

    # ── the prefix cache ──────────────────────────────────────────────────────────────────────────

    def keys_of(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks of a sequence, which must be full.

        K/V depends on the whole prefix, so a key identifies the whole prefix. It has two parts,
        sha256(previous key) and the block's own tokens as they are.

            block_size = 2    tokens  a b │ c d │ e      k0 = (a b)    k1 = sha256(k0) + (c d)
            with a salt                                  k0 = sha256(-1 salt) + (a b)

        Equal keys mean equal tokens, all the way back. A fast hash is not enough, because two
        blocks with equal xxh3 hashes can be found in seconds. No salt looks like a block, because
        -1 is not a token. A sequence keeps its keys, so each is computed once.
        """
        keys = seq.block_keys
        size = self.block_size
        for i in range(len(keys), num_blocks):
            parent = b""
            if keys:
                parent = sha256(keys[-1]).digest()
            elif seq.request.cache_salt:
                parent = sha256(NO_TOKEN + seq.request.cache_salt).digest()
            keys.append(parent + array("q", seq.token_ids[i * size : (i + 1) * size]).tobytes())
        return keys[:num_blocks]

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The published blocks of the longest prefix of the sequence that the cache has.

        The block of the last token is not looked up, because that token must be computed for its
        logits.

            block_size = 4, 8 tokens: (8 - 1) // 4 = 1 block is looked up, tokens 4 to 7 are
            computed

        A prompt to be scored is not looked up at all, because each of its tokens must be computed.
        """
        if seq.request.wants_prompt_logprobs:
            return []
        prefix = []
        for key in self.keys_of(seq, (seq.num_tokens - 1) // self.block_size):
            if key not in self.prefix_index:
                break
            prefix.append(self.prefix_index[key].block_id)
        return prefix

    def publish(self, seq: Sequence) -> None:
        """Add the blocks that this step will fill to the prefix index, unless equal ones are in it.

        No other function adds to the prefix index. Requests with the same prompt can share blocks
        within one step, because every layer stores the K/V of the whole batch before any sequence
        attends.

            block_size = 4, 6 tokens computed, 7 scheduled: tokens 6 to 12 fill blocks 1 and 2
        """
        first = seq.num_computed_tokens // self.block_size
        end = (seq.num_computed_tokens + seq.num_scheduled_tokens) // self.block_size
        if first == end or not self.enable_prefix_caching:
            return
        keys = self.keys_of(seq, end)
        for i in range(first, end):
            if keys[i] not in self.prefix_index:
                block = self.blocks[seq.block_table[i]]
                block.key = keys[i]
                self.prefix_index[keys[i]] = block

    def reset_prefix_cache(self) -> None:
        """Make all cached blocks free. Blocks in use can still be found."""
        while self.cached:
            self.evict()
