"""A model runner without a model, whose K/V remembers which tokens wrote it.

A slot holds a fingerprint of the token written there and of everything before it, as real K/V does. Every
read is compared with what the sequence should find, so a wrong block, a wrong slot, a slot never written or
a block handed on too early is caught in the step in which it happens.
"""

from __future__ import annotations

from nanopaged.scheduler import Scheduled, ScheduledBatch, StepResult

VOCAB_SIZE = 97
SEED = 17


def fingerprints(token_ids: list[int]) -> list[int]:
    """One for each position, covering the tokens up to and including it."""
    chain, out = SEED, []
    for token_id in token_ids:
        chain = hash((chain, token_id))
        out.append(chain)
    return out


def next_token(token_ids: list[int]) -> int:
    """What the fake model says after `token_ids`; few values, so that texts meet and share blocks."""
    return fingerprints(token_ids)[-1] % 3


class FakeRunner:
    """Set `fail_next` and the next step breaks half way, after it has scribbled on the blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.fail_next = False
        self.most_tokens = 0  # seen in one step

    def execute(self, batch: ScheduledBatch) -> list[StepResult]:
        self.most_tokens = max(self.most_tokens, sum(e.num_new_tokens for e in batch.entries))
        assert all(e.num_new_tokens == 1 for e in batch.entries[: batch.num_decodes])
        assert all(e.num_new_tokens > 1 for e in batch.entries[batch.num_decodes :])
        if self.fail_next:
            self.fail_next = False
            for entry in batch.entries:
                self._store(entry, [-1] * entry.seq.num_tokens)
            raise RuntimeError("the device is on fire")
        for entry in batch.entries:  # every layer stores the whole batch, …
            self._store(entry, fingerprints(entry.seq.token_ids))
        return [self._read(entry) for entry in batch.entries]  # … and then reads

    def _slot(self, entry: Scheduled, position: int) -> tuple[int, int]:
        table = entry.seq.block_table
        return table[position // self.block_size], position % self.block_size

    def _store(self, entry: Scheduled, values: list[int]) -> None:
        start = entry.seq.num_computed_tokens
        for position in range(start, start + entry.num_new_tokens):
            self.slots[self._slot(entry, position)] = values[position]

    def _read(self, entry: Scheduled) -> StepResult:
        seq = entry.seq
        end = seq.num_computed_tokens + entry.num_new_tokens
        for position, expected in enumerate(fingerprints(seq.token_ids)[:end]):
            slot = self._slot(entry, position)
            assert self.slots.get(slot) == expected, f"position {position} reads a wrong slot {slot}"
        if not entry.catches_up:
            return StepResult()
        return StepResult(token_id=next_token(seq.token_ids), logprob=-1.0)
