"""A prefix cache that is a tree over tokens, and finds full blocks also in part: texts share what is equal.

The engine's key of a block is the hash of all tokens before the block, and then the block's own tokens. Keys
that begin alike are thus the branches of a tree, whose tokens can be compared with a prompt:

    block_size = 4    cached   a b c d │ e f g h     root ─ (a b c d) ─┬─ (e f g h)
                               a b c d │ e x y z         in block 0    │  in block 1
                                                                       └─ (e x y z)
                      prompt   a b c d │ e f g q │ r                      in block 2

Block 0 is shared, as in the engine. No branch after it is (e f g q), but (e f g h) has three of its tokens.
So block 1 is copied to a new block 3, the table is [0 3 4], and 7 of 9 tokens are not computed. The step
computes q, which overwrites h in the copy.
"""

from array import array
from dataclasses import dataclass
from hashlib import sha256
from os.path import commonprefix
from typing import Any

import nanopaged
from nanopaged.block_manager import NO_TOKEN, Block, BlockManager
from nanopaged.config import EngineConfig
from nanopaged.engine import LLMEngine
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import ScheduledBatch, Sequence

TOKEN_BYTES = 8  # of a token in a key


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


class Tree(dict[bytes, Block]):
    """The prefix index, key → block, with the blocks that follow each prefix.

    Attributes:
        children: hash of a prefix → tokens of a block, as in its key → the block.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.num_bytes = TOKEN_BYTES * block_size
        self.children: dict[bytes, dict[bytes, Block]] = {}

    def __setitem__(self, key: bytes, block: Block) -> None:
        super().__setitem__(key, block)
        siblings = self.children.setdefault(key[: -self.num_bytes], {})
        siblings[key[-self.num_bytes :]] = block

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(key)
        prefix = key[: -self.num_bytes]
        del self.children[prefix][key[-self.num_bytes :]]
        if not self.children[prefix]:
            del self.children[prefix]


class RadixBlockManager(BlockManager):
    """A block manager with a tree.

    Attributes:
        min_partial: see `RadixConfig`.
        being_computed: blocks that the step writes, while it is scheduled.
        copies: (source, destination) of the blocks found in part, while the step is scheduled.
    """

    def __init__(self, min_partial: int, **pool: Any) -> None:
        self.min_partial = min_partial
        super().__init__(**pool)

    def reset(self) -> None:
        super().reset()
        self.prefix_index = Tree(self.block_size)
        self.being_computed = set[int]()
        self.copies: list[tuple[int, int]] = []

    def allocate(self, sequences: list[Sequence], num_reserved: int = 0) -> bool:
        """As `BlockManager.allocate`; then each sequence's first block to compute is looked for in part."""
        fits = super().allocate(sequences, num_reserved)
        is_scored = sequences[0].request.wants_prompt_logprobs  # then each token must be computed
        if fits and not is_scored and self.enable_prefix_caching and self.min_partial > 0:
            for seq in sequences:
                self.copy_part(seq)
        return fits

    def copy_part(self, seq: Sequence) -> None:
        """Have the block copied that begins with the most tokens of the first one that `seq` is to compute.

        That one was just taken, and no sibling before `seq` writes it. The sequence's last token is computed
        for its logits. A block of this step is no source: it is computed after the copies.
        """
        start = seq.num_computed_tokens  # a multiple of the block size
        end = min(start + self.block_size, seq.num_tokens - 1)
        wanted = array("q", seq.token_ids[start:end]).tobytes()
        source = None
        most = self.min_partial - 1
        for tokens, block in self.prefix_index.children.get(self.prefix_of(seq, start), {}).items():
            num_equal = len(commonprefix([wanted, tokens])) // TOKEN_BYTES
            if num_equal > most and block.block_id not in self.being_computed:
                source = block.block_id
                most = num_equal
        if source is not None:
            self.share(source)  # until `end_schedule`
            self.copies.append((source, seq.block_table[start // self.block_size]))
            seq.num_computed_tokens += most

    def prefix_of(self, seq: Sequence, num_tokens: int) -> bytes:
        """The hash of the sequence's first blocks, with which the keys of the next block begin."""
        if num_tokens > 0:
            return sha256(seq.block_keys[num_tokens // self.block_size - 1]).digest()
        salt = seq.request.cache_salt
        return sha256(NO_TOKEN + salt).digest() if salt else b""

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
    make_config = RadixConfig
    make_scheduler = RadixScheduler

    def make_block_manager(self, **pool: Any) -> RadixBlockManager:
        return RadixBlockManager(self.config.min_partial, **pool)


class LLM(nanopaged.LLM):
    engine_class = RadixEngine
