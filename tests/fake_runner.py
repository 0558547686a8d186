"""A model runner without a model, whose K/V remembers which tokens wrote it.

A slot holds a fingerprint of the token written there and of everything before it, as real K/V does. Every
read is compared with what the sequence should find, so a wrong block, a wrong slot, a slot never written or
a block handed on too early is caught in the step in which it happens.
"""

from __future__ import annotations

from nanopaged.sequence import ScheduledBatch, Sequence, StepResult
from nanopaged.swap import SwapCosts
from nanopaged.text.outputs import Sample

VOCAB_SIZE = 97
SEED = 17


def fingerprints(token_ids: list[int]) -> list[int]:
    """One for each position, covering the tokens up to and including it."""
    chain, out = SEED, []
    for token_id in token_ids:
        chain = hash((chain, token_id))
        out.append(chain)
    return out


def next_token(token_ids: list[int], index: int = 0) -> int:
    """What the fake model says after `token_ids`; few values, so that texts meet and share blocks."""
    return hash((fingerprints(token_ids)[-1], index)) % 3


def proposals(token_ids: list[int], k: int) -> list[Sample]:
    """The k most likely tokens after `token_ids`, by made-up log-probabilities."""
    chain = fingerprints(token_ids)[-1]
    scored = [Sample(t, -1.0 - hash((chain, t)) % 1000 / 500) for t in range(VOCAB_SIZE)]
    return sorted(scored, key=lambda sample: sample.logprob, reverse=True)[:k]


class FakeRunner:
    """Set `fail_next` and the next step breaks half way, after it has scribbled on the blocks."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.swap_costs = SwapCosts(seconds_per_block=1.0, prefill_tokens_per_second=1.0)
        self.host_slots: dict[tuple[int, int], int] = {}
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.fail_next = False
        self.most_tokens = 0  # seen in one step

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.most_tokens = max(self.most_tokens, sum(seq.num_scheduled_tokens for seq in batch.sequences))
        assert all(seq.num_scheduled_tokens == 1 for seq in batch.sequences[: batch.num_decodes])
        assert all(seq.num_scheduled_tokens > 1 for seq in batch.sequences[batch.num_decodes :])
        if self.fail_next:
            self.fail_next = False
            for seq in batch.sequences:
                self._store(seq, [-1] * seq.num_tokens)
            raise RuntimeError("the device is on fire")
        for device_block, host_block in batch.swap_out:
            for offset in range(self.block_size):
                self.host_slots[host_block, offset] = self.slots.get((device_block, offset), -1)
        for host_block, device_block in batch.swap_in:
            for offset in range(self.block_size):
                self.slots[device_block, offset] = self.host_slots[host_block, offset]
        assert not batch.swap_out or not batch.swap_in, "in and out in one step"
        for copy in batch.copies:
            for offset in range(self.block_size):
                self.slots[copy.dst, offset] = self.slots.get((copy.src, offset), -1)
        destinations = [copy.dst for copy in batch.copies]
        assert len(set(destinations)) == len(destinations), "a block is copied to twice"
        assert not set(destinations) & {copy.src for copy in batch.copies}, "a copy of a copy"
        for seq in batch.sequences:  # every layer stores the whole batch, …
            self._store(seq, fingerprints(seq.token_ids))
        return StepResult([self._read(seq) for seq in batch.sequences])  # … and then reads

    def _slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size

    def _store(self, seq: Sequence, values: list[int]) -> None:
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
            self.slots[self._slot(seq, position)] = values[position]

    def _read(self, seq: Sequence) -> list[Sample]:
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        for position, expected in enumerate(fingerprints(seq.token_ids)[:end]):
            slot = self._slot(seq, position)
            assert self.slots.get(slot) == expected, f"position {position} reads a wrong slot {slot}"
        request = seq.request
        if not seq.needs_sample:
            return []
        if request.is_beam_search:
            return proposals(seq.token_ids, request.num_candidates)
        indices = range(request.params.n) if request.prompt_phase else (seq.index,)
        return [Sample(next_token(seq.token_ids, i), -1.0) for i in indices]
