"""A block manager that notes what it does, for the trace.

`recorder.py` compares the state after a step with the state before. What a step does and undoes again, such
as a block that is taken and given back, leaves no difference there, but a note here. The block manager itself
knows nothing of the trace: an engine's own becomes one of this class when a trace begins.
"""

from __future__ import annotations

from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Request, Sequence


class RecordedBlockManager(BlockManager):
    """A block manager that notes what it does during a step."""

    def reset(self) -> None:
        """Notes of a failed step are forgotten, too."""
        super().reset()
        self.forget()

    def forget(self) -> None:
        """Begin new notes."""
        self.touched: dict[int, None] = {}  # blocks whose references or key changed, the latest change last
        self.taken: list[int] = []
        self.allocated: dict[Request, tuple[list[int], list[int]]] = {}  # → blocks that it found, and took
        self.publishers: dict[int, Request] = {}  # block → the request that published it
        self.copies: list[tuple[Sequence, list[Sequence], int, int]] = []  # writer, other users, src, dst
        self.evicted: list[int] = []

    def take(self) -> int:
        if not self.free_ids:
            self.evicted.append(next(iter(self.cached)))
        block_id = super().take()
        self.taken.append(block_id)
        self._touch(block_id)
        return block_id

    def share(self, block_id: int) -> None:
        super().share(block_id)
        self._touch(block_id)

    def release(self, block_id: int) -> None:
        super().release(block_id)
        self._touch(block_id)

    def _touch(self, block_id: int) -> None:
        self.touched.pop(block_id, None)
        self.touched[block_id] = None

    def allocate(self, sequences: list[Sequence], look_up: bool = True, num_reserved: int = 0) -> bool:
        num_taken = len(self.taken)
        done = super().allocate(sequences, look_up, num_reserved)
        if done:
            found = sequences[0].block_table[: sequences[0].num_computed_tokens // self.block_size]
            self.allocated[sequences[0].request] = found, self.taken[num_taken:]
        return done

    def append_slots(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        copies = super().append_slots(sequences)
        made = copies or []
        for i, (src, dst) in enumerate(made):
            later = [its_dst for its_src, its_dst in made[i + 1 :] if its_src == src]  # they still use it
            others = [seq for seq in sequences if {src, *later}.intersection(seq.block_table)]
            writer = next(seq for seq in sequences if dst in seq.block_table)
            self.copies.append((writer, others, src, dst))
        return copies

    def publish(self, seq: Sequence) -> None:
        super().publish(seq)
        first = seq.num_computed_tokens // self.block_size
        end = (seq.num_computed_tokens + seq.num_scheduled_tokens) // self.block_size
        for block_id in seq.block_table[first:end]:
            self.publishers[block_id] = seq.request
            self.touched.setdefault(block_id)

    def reset_prefix_cache(self) -> None:
        for block_id in self.cached:
            self._touch(block_id)
        super().reset_prefix_cache()
