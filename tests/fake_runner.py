"""A model runner without a model, whose K/V remembers which tokens wrote it.

A slot holds the number of a prefix: the token written there and all tokens before it, as real K/V depends on
all of them. Every read is compared with what the sequence should find, so a wrong block, a wrong slot, a slot
never written or a block shared too early is caught in the step in which it happens.
"""

from __future__ import annotations

from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Sample, ScheduledBatch, Sequence, StepResult

VOCAB_SIZE = 97
GARBAGE = -1


class Prefixes:
    """A trie that numbers token prefixes: equal numbers mean equal tokens from the first on.

    Prefix 0 is empty; `a b` is found by the steps 0 -a-> 1 -b-> 2.
    """

    def __init__(self) -> None:
        self.children: dict[tuple[int, int], int] = {}
        self.parents: list[tuple[int, int]] = [(0, -1)]  # (the prefix one token shorter, the last token)

    def extend(self, prefix: int, token_id: int) -> int:
        child = self.children.get((prefix, token_id))
        if child is None:
            child = self.children[prefix, token_id] = len(self.parents)
            self.parents.append((prefix, token_id))
        return child

    def numbers(self, token_ids: list[int]) -> list[int]:
        """For each position the number of the tokens up to and including it."""
        prefix, out = 0, []
        for token_id in token_ids:
            prefix = self.extend(prefix, token_id)
            out.append(prefix)
        return out

    def tokens(self, prefix: int) -> list[int]:
        token_ids: list[int] = []
        while prefix > 0:
            prefix, token_id = self.parents[prefix]
            token_ids.append(token_id)
        return token_ids[::-1]


PREFIXES = Prefixes()


def next_token(token_ids: list[int], index: int = 0) -> int:
    """The next token after `token_ids`, one of only three, so that texts coincide and share blocks."""
    return hash((*token_ids, index)) % 3


def proposals(token_ids: list[int], k: int) -> list[Sample]:
    """The k most likely tokens after `token_ids`, by made-up log-probabilities."""
    scored = [Sample(t, -1.0 - hash((*token_ids, t)) % 1000 / 500) for t in range(VOCAB_SIZE)]
    return sorted(scored, key=lambda sample: sample.logprob, reverse=True)[:k]


class FakeRunner:
    """Checks every read of K/V. With `fail_next` set, the next step writes garbage into blocks and raises."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}  # (block, offset) → number of the prefix stored there
        self.host_slots: dict[tuple[int, int], int] = {}
        self.fail_next = False
        self.most_tokens = 0  # seen in one step

    def cheaper_preemption(self) -> str:
        """The engine calls it with preemption="auto"."""
        return "swap"

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.most_tokens = max(self.most_tokens, sum(seq.num_scheduled_tokens for seq in batch.sequences))
        assert all(seq.num_scheduled_tokens == 1 for seq in batch.sequences[: batch.num_decodes])
        assert all(seq.num_scheduled_tokens > 1 for seq in batch.sequences[batch.num_decodes :])
        if self.fail_next:
            self.fail_next = False
            for seq in batch.sequences:
                self._store(seq, [GARBAGE] * seq.num_tokens)
            raise RuntimeError("the device is on fire")
        self._move(batch)
        for seq in batch.sequences:  # every layer stores the whole batch, …
            self._store(seq, PREFIXES.numbers(seq.token_ids))
        return StepResult([self._read(seq) for seq in batch.sequences])  # … and then reads

    def _move(self, batch: ScheduledBatch) -> None:
        """Blocks go out, then in, then copies are made, as the batch's docstring says."""
        for device_block, host_block in batch.swap_out:
            self._copy(self.slots, device_block, self.host_slots, host_block)
        for host_block, device_block in batch.swap_in:
            self._copy(self.host_slots, host_block, self.slots, device_block)
        copies = batch.copies
        for src, dst in copies:
            self._copy(self.slots, src, self.slots, dst)
        destinations = [dst for _, dst in copies]
        assert len(set(destinations)) == len(destinations), "a block is copied to twice"
        assert not set(destinations) & {src for src, _ in copies}, "a copy of a copy"

    def _copy(self, from_slots: dict, src: int, to_slots: dict, dst: int) -> None:
        for offset in range(self.block_size):
            to_slots[dst, offset] = from_slots.get((src, offset), GARBAGE)

    def _slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size

    def _store(self, seq: Sequence, values: list[int]) -> None:
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
            self.slots[self._slot(seq, position)] = values[position]

    def _read(self, seq: Sequence) -> list[Sample]:
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        for position, expected in enumerate(PREFIXES.numbers(seq.token_ids)[:end]):
            slot = self._slot(seq, position)
            assert self.slots.get(slot) == expected, f"position {position} reads a wrong slot {slot}"
        request = seq.request
        if not seq.needs_sample:
            return []
        if request.is_beam_search:
            return proposals(seq.token_ids, request.num_candidates)
        indices = range(request.params.n) if request.prompt_phase else (seq.index,)
        return [Sample(next_token(seq.token_ids, i), -1.0) for i in indices]

    def check_findable_blocks(self, manager: BlockManager) -> None:
        """Every findable block holds the K/V of exactly the tokens that its key stands for."""
        for key, block in manager.index.items():
            numbers = [self.slots.get((block.block_id, i), GARBAGE) for i in range(self.block_size)]
            token_ids = PREFIXES.tokens(max(numbers[-1], 0))
            assert token_ids, f"block {block.block_id} can be found, but its K/V was never computed"
            assert PREFIXES.numbers(token_ids)[-self.block_size :] == numbers, "a block of mixed contents"
            keys = manager.keys_of(Sequence(None, token_ids), len(token_ids) // self.block_size)
            assert keys[-1] == key, f"block {block.block_id} can be found under other tokens"
