"""A model runner without a model, whose K/V remembers which tokens wrote it.

A slot holds the number of a prefix: the token written there and all tokens before it, as real K/V depends on
all of them, and the request's salt. Every read is compared with what the sequence should find, so a wrong
block, a wrong slot, a slot never written or a block shared too early is caught in the step where it happens.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path

from harness import tokenizer

from nanopaged import EngineConfig, LLMEngine
from nanopaged.block_manager import BlockManager
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.outputs import Logprob, Logprobs
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult

VOCAB_SIZE = 97
GARBAGE = -1
# The fake model says tokens 0, 1 and 2. Their texts are "a", "b" with the first byte of "é", and its second
# byte with "a": characters and stop strings begin in one token and end in another.
TEXTS = ("a", "bÃ", "©a", *(f"<{i}>" for i in range(3, VOCAB_SIZE)))  # in GPT-2's byte alphabet
SCRATCH = tempfile.TemporaryDirectory()


@cache
def fake_model() -> Path:
    """A folder with the tiny model's config, without its weights and tokenizer."""
    shutil.copy(TINY_MODEL / "config.json", SCRATCH.name)
    return Path(SCRATCH.name)


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    num_host_blocks: int = 0,
    has_texts: bool = False,
    **config: object,
) -> LLMEngine:
    """An engine over a fake runner, with or without a tokenizer."""
    runner = FakeRunner(num_blocks, block_size, num_host_blocks)
    engine = LLMEngine(EngineConfig(model=fake_model(), block_size=block_size, **config), runner)
    if has_texts:
        engine.prompts.tokenizer = tokenizer(TEXTS)
    return engine


def next_token(token_ids: list[int], noise: int = 0, banned: Collection[int] = ()) -> int:
    """The next token after `token_ids`, one of only three, so that texts coincide and share blocks."""
    allowed = [token_id for token_id in range(3) if token_id not in banned]
    return allowed[hash((*token_ids, noise)) % len(allowed)]


def logprobs_after(token_ids: list[int], of: Collection[int]) -> list[float]:
    """Made-up log-probabilities of the tokens `of`, which depend on all `token_ids` before them."""
    before = hash(tuple(token_ids))
    return [-1.0 - hash((before, token_id)) % 1000 / 500 for token_id in of]


def proposals(token_ids: list[int], k: int, banned: Collection[int] = ()) -> list[Sample]:
    """The k most likely tokens after `token_ids`, without the banned ones."""
    scored = map(Sample, range(VOCAB_SIZE), logprobs_after(token_ids, range(VOCAB_SIZE)))
    allowed = [sample for sample in scored if sample.token_id not in banned]
    return sorted(allowed, key=lambda sample: sample.logprob, reverse=True)[:k]


class FakeRunner:
    """Checks every read of K/V. With `fail_next` set, the next step writes garbage into blocks and raises.

    The sequences of a batch may come in any order, but decodes come first.
    """

    cheaper_preemption = "swap"  # with preemption="auto"

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.fail_next = False
        self.most_tokens = 0  # seen in one step
        self.steps: list[dict[str, int]] = []  # request id → number of tokens that the step computed
        FakeRunner.forget(self)

    def forget(self) -> None:
        """Lose all K/V: a failed step may leave anything in the cache."""
        self.slots: dict[tuple[int, int], int] = {}  # (block, offset) → number of the prefix stored there
        self.host_slots: dict[tuple[int, int], int] = {}
        # (number of a prefix, next token) → number of the longer prefix. A salt comes before all tokens.
        self.prefixes: dict[tuple[int, int | bytes], int] = {}
        self.numbers: dict[Sequence, list[int]] = {}  # of the prefixes that end with each of its tokens
        self.ends: dict[int, tuple[Sequence, int]] = {}  # prefix → a sequence with it, and its length
        self.full_blocks: dict[int, tuple[list[int], bytes]] = {}  # prefix → its last block, and its key

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.most_tokens = max(self.most_tokens, sum(seq.num_scheduled_tokens for seq in batch.sequences))
        assert all(seq.num_scheduled_tokens == 1 for seq in batch.sequences[: batch.num_decodes])
        assert all(seq.num_scheduled_tokens > 1 for seq in batch.sequences[batch.num_decodes :])
        self.steps.append({seq.request.request_id: seq.num_scheduled_tokens for seq in batch.sequences})
        if self.fail_next:
            self.fail_next = False
            for seq in batch.sequences:
                self.store(seq, [GARBAGE] * seq.num_tokens)
            raise RuntimeError("the device is on fire")
        if batch.moves.swap_out or batch.moves.swap_in:
            self.swap(batch)
        if batch.moves.copies:
            self.copy_on_write(batch)
        for seq in batch.sequences:  # every layer stores the whole batch, …
            self.store(seq, self._numbers(seq))
        for seq in batch.sequences:  # … and then reads
            self._read(seq)
        samples = [self.sample(seq) for seq in batch.sequences]
        scored = {seq.request: self._score_prompt(seq) for seq in batch.sequences}
        return StepResult(samples, {r: logprobs for r, logprobs in scored.items() if logprobs is not None})

    def swap(self, batch: ScheduledBatch) -> None:
        """Blocks go out, then in, as the batch's docstring says."""
        for device_block, host_block in batch.moves.swap_out:
            self._copy(self.slots, device_block, self.host_slots, host_block)
        for host_block, device_block in batch.moves.swap_in:
            self._copy(self.host_slots, host_block, self.slots, device_block)

    def copy_on_write(self, batch: ScheduledBatch) -> None:
        """The copies come after the swaps, in any order."""
        for src, dst in batch.moves.copies:
            self._copy(self.slots, src, self.slots, dst)
        destinations = [dst for _, dst in batch.moves.copies]
        assert len(set(destinations)) == len(destinations), "a block is copied to twice"
        assert not set(destinations) & {src for src, _ in batch.moves.copies}, "a copy of a copy"

    def _copy(self, from_slots: dict, src: int, to_slots: dict, dst: int) -> None:
        for offset in range(self.block_size):
            to_slots[dst, offset] = from_slots.get((src, offset), GARBAGE)

    def _slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size

    def store(self, seq: Sequence, values: list[int]) -> None:
        """Write the slots of the scheduled tokens."""
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
            self.slots[self._slot(seq, position)] = values[position]

    def _numbers(self, seq: Sequence) -> list[int]:
        """The numbers of its prefixes, remembered from step to step: tokens are only appended."""
        numbers = self.numbers.setdefault(seq, [])
        prefix = numbers[-1] if numbers else self._extend(0, seq.request.cache_salt)
        for token_id in seq.token_ids[len(numbers) :]:
            prefix = self._extend(prefix, token_id)
            numbers.append(prefix)
            self.ends.setdefault(prefix, (seq, len(numbers)))
        return numbers

    def _extend(self, prefix: int, token_id: int | bytes) -> int:
        return self.prefixes.setdefault((prefix, token_id), len(self.prefixes) + 1)

    def _read(self, seq: Sequence) -> None:
        """Attention reads all slots up to the last scheduled token."""
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        found = [self.slots.get((b, i), GARBAGE) for b in seq.block_table for i in range(self.block_size)]
        if found[:end] != self._numbers(seq)[:end]:
            position = next(i for i, number in enumerate(self._numbers(seq)) if found[i] != number)
            raise AssertionError(f"position {position} reads a wrong slot {self._slot(seq, position)}")

    def sample(self, seq: Sequence) -> list[Sample]:
        """As the sampler: greedy outputs are all the same, others depend on the seed and on their index."""
        request, token_ids, banned = seq.request, seq.token_ids, seq.banned_token_ids
        if not seq.needs_sample:
            return []
        if request.is_beam_search:
            return proposals(token_ids, request.num_candidates, banned)
        samples = []
        for index in range(request.params.n) if request.awaits_fork else (seq.index,):
            noise = 0 if request.params.temperature == 0 else index + 100 * (request.params.seed or 0)
            token_id = next_token(token_ids, noise, banned)
            (logprob,) = logprobs_after(token_ids, [token_id])
            wanted = request.params.logprobs is not None
            samples.append(Sample(token_id, logprob, {token_id: Logprob(logprob, 1)} if wanted else {}))
        return samples

    def _score_prompt(self, seq: Sequence) -> list[Logprobs] | None:
        """As `ModelRunner`: of the scheduled prompt tokens, if wanted, except those that have theirs."""
        request: Request = seq.request
        if not request.wants_prompt_logprobs:
            return None
        first = max(seq.num_computed_tokens + 1, len(request.prompt_logprobs))
        end = min(seq.num_computed_tokens + seq.num_scheduled_tokens + 1, request.num_prompt_tokens)
        prompt = seq.token_ids
        return [
            {prompt[i]: Logprob(*logprobs_after(prompt[:i], prompt[i : i + 1]))} for i in range(first, end)
        ]

    def check_findable_blocks(self, manager: BlockManager) -> None:
        """Every findable block holds the K/V of exactly the tokens that its key stands for."""
        for key, block in manager.prefix_index.items():
            numbers = [self.slots.get((block.block_id, i), GARBAGE) for i in range(self.block_size)]
            prefix = numbers[-1]
            assert prefix in self.ends, f"block {block.block_id} can be found, but its K/V was never computed"
            if prefix not in self.full_blocks:
                seq, end = self.ends[prefix]
                without_keys = Sequence(seq.request, seq.token_ids[:end])
                right_key = manager.keys_of(without_keys, end // self.block_size)[-1]
                self.full_blocks[prefix] = self.numbers[seq][end - self.block_size : end], right_key
            right_numbers, right_key = self.full_blocks[prefix]
            assert right_numbers == numbers, "a block of mixed contents"
            assert right_key == key, f"block {block.block_id} can be found under other tokens"
