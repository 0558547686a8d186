"""A prefix cache that is a tree over tokens, and finds full blocks also in part: texts share what is equal.

    from radix import LLM

    llm = LLM(min_partial=4)  # a part of a block is copied if it has at least 4 tokens

A block's key is a node of a tree with one edge for each block, and edges can be compared with a prompt:

    block_size = 4    cached   a b c d │ e f g h     root ─ (a b c d) ─┬─ (e f g h)
                               a b c d │ e x y z         in block 0    │  in block 1
                                                                       └─ (e x y z)
                      prompt   a b c d │ e f g q │ r                      in block 2

Block 0 is shared, as in the engine. No edge after it is (e f g q), but (e f g h) has three of its tokens.
So block 1 is copied to a new block 3, the table is [0 3 4], and 7 of 9 tokens are not computed. The step
computes q, which overwrites h in the copy.

The copies join those of copy-on-write, after the swaps. Until then a source has one reference more. Keys are
still bytes, for `snapshot`, `trace` and `check_invariants`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from os.path import commonprefix  # of any lists
from typing import Any
from weakref import WeakValueDictionary

import nanopaged
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.engine import LLMEngine
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import ScheduledBatch, Sequence


@dataclass(frozen=True, kw_only=True)
class RadixConfig(EngineConfig):
    """With `min_partial`: tokens of a block that are worth a copy of it; 0 shares full blocks only."""

    min_partial: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("min_partial", minimum=0)
        if self.min_partial > self.block_size:
            raise ValueError(
                f"min_partial is {self.min_partial}, but block_size is only {self.block_size}: lower it"
            )


class Node:
    """A prefix of full blocks: the prefix `parent`, then one block of tokens, its edge. It is made once.

    A node keeps its parent alive, and is kept by its keys and children. Without them it is forgotten.

    Attributes:
        number: of this node alone, also when it is forgotten.
        children: edge (block_size tokens) → child.
    """

    def __init__(self, number: int, parent: Node | None) -> None:
        self.number, self.parent = number, parent
        self.children: WeakValueDictionary[tuple[int, ...], Node] = WeakValueDictionary()


class Key(bytes):
    """A block's key: the number of its node in 8 bytes. A copy of it is plain bytes, without the tree."""

    node: Node

    def __new__(cls, node: Node) -> Key:
        key = super().__new__(cls, node.number.to_bytes(8, "big"))
        key.node = node
        return key

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


class RadixBlockManager(BlockManager):
    """A block manager with a tree.

    Attributes:
        min_partial: see `RadixConfig`.
        roots: salt → the node of its empty prefix.
        being_computed: blocks that the step writes, while it is scheduled.
        copies: (source, destination) of the blocks found in part, while the step is scheduled.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.min_partial, self.numbers = 1, count()
        self.roots: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        super().__init__(num_blocks, block_size, enable_prefix_caching)

    def reset(self) -> None:
        """As `BlockManager.reset`. The tree stays, since sequences have keys, but no block is found."""
        super().reset()
        self.being_computed, self.copies = set[int](), list[tuple[int, int]]()

    def node_before(self, seq: Sequence, i: int) -> Node:
        """The node of the sequence's first `i` blocks, which have keys; of no block, the root of its salt."""
        if i > 0:
            key: Any = seq.block_keys[i - 1]
            return key.node
        salt = seq.request.cache_salt
        root = self.roots[salt] = self.roots.get(salt) or Node(next(self.numbers), None)
        return root

    def keys_of(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """As `BlockManager.keys_of`: of a b │ c d │ e, the nodes (a b) and (c d) in root ─ (a b) ─ (c d)."""
        size = self.block_size
        for i in range(len(seq.block_keys), num_blocks):
            parent, edge = self.node_before(seq, i), tuple(seq.token_ids[i * size : (i + 1) * size])
            node = parent.children[edge] = parent.children.get(edge) or Node(next(self.numbers), parent)
            seq.block_keys.append(Key(node))
        return seq.block_keys[:num_blocks]

    def allocate(self, sequences: list[Sequence], look_up: bool = True, num_reserved: int = 0) -> bool:
        """As `BlockManager.allocate`; then each sequence's first block to compute is looked for in part."""
        fits = super().allocate(sequences, look_up, num_reserved)
        if fits and look_up and self.enable_prefix_caching and self.min_partial > 0:
            for seq in sequences:
                self.copy_part(seq)
        return fits

    def copy_part(self, seq: Sequence) -> None:
        """Have the block copied that begins with the most tokens of the first one that `seq` is to compute.

        That one was just taken, and no sibling before `seq` writes it. The sequence's last token is computed
        for its logits. A block of this step is no source: it is computed after the copies.
        """
        start = seq.num_computed_tokens  # a multiple of the block size
        wanted = tuple(seq.token_ids[start : min(start + self.block_size, seq.num_tokens - 1)])
        parent, source, most = self.node_before(seq, start // self.block_size), None, 0
        least = self.min_partial
        for edge, node in parent.children.items():
            # Most edges differ from the first token on: a root has one for each text.
            if edge[:least] == wanted[:least] and (num := len(commonprefix([wanted, edge]))) > most:
                block = self.index.get(Key(node))
                if block is not None and block.block_id not in self.being_computed:
                    source, most = block.block_id, num
        if source is not None:
            self.share(source)  # until `end_schedule`
            self.copies.append((source, seq.block_table[start // self.block_size]))
            seq.num_computed_tokens += most

    def publish(self, seq: Sequence) -> None:
        """As `BlockManager.publish`; and the blocks are no sources of copies in this step."""
        super().publish(seq)
        self.being_computed.update(seq.block_table[seq.num_computed_tokens // self.block_size :])

    def end_schedule(self) -> list[tuple[int, int]]:
        """The copies (source, destination) of this step. It takes no more blocks, so sources are released."""
        copies, self.copies = self.copies, []
        for source, _ in copies:
            self.release(source)
        self.being_computed.clear()
        return copies


class RadixScheduler(Scheduler):
    """Adds the copies of blocks found in part to a step."""

    block_manager: RadixBlockManager

    def schedule(self) -> ScheduledBatch:
        batch = super().schedule()
        batch.moves.copies += self.block_manager.end_schedule()
        return batch


class RadixEngine(LLMEngine):
    """An engine with a tree. With a plain `EngineConfig`, `min_partial` is 1."""

    make_config = RadixConfig
    make_block_manager = RadixBlockManager
    make_scheduler = RadixScheduler

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.block_manager.min_partial = getattr(self.config, "min_partial", 1)


class LLM(nanopaged.LLM):
    engine_class = RadixEngine
