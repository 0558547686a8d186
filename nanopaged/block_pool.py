"""The blocks that can be had, and those worth remembering.

A block goes through these states:

    free ──▶ open ──▶ closed ──▶ cached ──▶ closed again (a hit)
     ▲      one owner  full,      no owner,     │
     │      writes it  shareable  contents kept └─▶ or evicted, oldest first
     └───────────────────────────────────────────────────────┘

Every operation here takes constant time, however large the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: ceil division, e.g. 17 tokens in blocks of 16 need 2."""
    return -(-num_tokens // block_size)


@dataclass(slots=True, eq=False)
class Block:
    """A physical block. `hash`, `parent` and `tokens` are set while the prefix index names it."""

    block_id: int
    ref_count: int = 0
    hash: int | None = None
    parent: Block | None = None  # the block before it in the prefix; None for a first block
    tokens: bytes | None = None

    def holds(self, tokens: bytes, parent: Block | None) -> bool:
        """Whether this published block really has these tokens, after that block."""
        return self.parent is parent and self.tokens == tokens


class BlockPool:
    """The blocks that can be had: those without contents, and those with contents nobody owns.

    `cached` is kept in the order in which blocks lost their last owner, so its first is the least
    recently used. A cached block counts as free: it can be had at once, at the price of its contents.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.empty = self.blocks[::-1]  # a stack: block 0 is handed out first
        self.cached: OrderedDict[int, Block] = OrderedDict()
        self.index: dict[int, Block] = {}  # hash → the one block published under it

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self.empty) + len(self.cached)

    def take(self) -> Block:
        """An owner's first reference to a block without contents, evicting the oldest if need be."""
        if self.empty:
            block = self.empty.pop()
        else:
            _, block = self.cached.popitem(last=False)
            self.unpublish(block)
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more owner; a cached block is in use again."""
        if block.ref_count == 0:
            del self.cached[block.block_id]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One owner less. The last one leaves a published block in the cache, any other empty."""
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.hash is None:
                self.empty.append(block)
            else:
                self.cached[block.block_id] = block

    def publish(self, block: Block, key: int, parent: Block | None, tokens: bytes) -> None:
        """Make a full block findable under the hash `key`."""
        block.hash, block.parent, block.tokens = key, parent, tokens
        self.index[key] = block

    def unpublish(self, block: Block) -> None:
        """Forget what is in the block."""
        del self.index[block.hash]
        block.hash = block.parent = block.tokens = None
