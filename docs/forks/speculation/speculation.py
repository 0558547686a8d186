"""Speculative decoding by prompt look-up: a step verifies several guesses of a text's next tokens at once.

README.md has an example. A draw depends on the logits, the seed, the output index and the position alone, so
the token after a draft is the one that the engine would draw there. An accepted draft is a step whose forward
pass is done: `Scheduler.update` runs once more for it, so stop rules and counters need no change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, cycle, islice
from os.path import commonprefix  # of any lists
from typing import Any

import torch

import nanopaged
from nanopaged.config import EngineConfig
from nanopaged.engine import LLMEngine
from nanopaged.model_runner import ModelRunner, logprobs_by_request, prepare
from nanopaged.sampler import LOGITS_TILE, sample_next_tokens
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(EngineConfig):
    """The options of an engine with drafts.

    Fields:
        num_speculative_tokens: drafts of a sequence in a step, at most; 0 makes none.
        ngram_size: the last tokens that are looked for. Fewer are found more often, and guess worse.
    """

    num_speculative_tokens: int = 4
    ngram_size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("num_speculative_tokens", minimum=0)
        self.check_ints("ngram_size", minimum=1)
        remedy = "or set num_speculative_tokens to 0"
        size = self.tensor_parallel_size
        if self.num_speculative_tokens > 0 and size > 1:
            raise ValueError(f"tensor_parallel_size is {size}, but drafts need 1: lower it, {remedy}")
        if self.num_speculative_tokens > 0 and self.trace is not None:
            raise ValueError(f"trace is {str(self.trace)!r}, but its page knows no drafts: drop it, {remedy}")


@dataclass(slots=True)
class DraftBatch(ScheduledBatch):
    """A batch with `drafts`: sequence → guesses of its next tokens, for this step only.

    Slots for them are in its table, but `num_scheduled_tokens` does not count them.
    """

    drafts: dict[Sequence, list[int]] = field(default_factory=dict)


def look_up(ngram_size: int, seq: Sequence, num_drafts: int) -> list[int]:
    """The tokens that followed the last `ngram_size` ones where they last stood before; [] if they never did.

    The copy may run into itself: ngram_size = 2, tokens 1 2 3 4 1 2, num_drafts = 5: 3 4 1 2 3.
    """
    token_ids, tail = seq.token_ids, seq.token_ids[-ngram_size:]
    for end in range(len(token_ids) - 1, ngram_size - 1, -1):  # behind each earlier place, the latest first
        if token_ids[end - 1] == tail[-1] and token_ids[end - ngram_size : end] == tail:
            return list(islice(cycle(token_ids[end:]), num_drafts))
    return []


def with_drafts(seq: Sequence, draft_ids: list[int]) -> Sequence:
    """The sequence if these drafts are its next tokens. It has the same table, not a copy."""
    num_scheduled_tokens = seq.num_scheduled_tokens + len(draft_ids)
    return replace(seq, token_ids=seq.token_ids + draft_ids, num_scheduled_tokens=num_scheduled_tokens)


class SpeculatingScheduler(Scheduler):
    """Adds drafts to the decodes of a step, and accepts those that are right.

    Attributes:
        propose: (sequence, n) → guesses of its next tokens, n at most; by default `look_up`.
        num_draft_tokens, num_accepted_tokens: since the engine was made.
    """

    def __init__(self, config: SpeculationConfig, *args: Any, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.num_speculative_tokens = config.num_speculative_tokens
        self.propose: Callable[[Sequence, int], list[int]] = partial(look_up, config.ngram_size)
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def schedule(self) -> DraftBatch:
        """As `Scheduler.schedule`. Drafts take what is left of the budget and of the blocks."""
        plain = super().schedule()
        batch = DraftBatch(**{item.name: getattr(plain, item.name) for item in fields(plain)})
        # Memory was set aside for the logits of so many rows (`memory.largest_step`).
        num_rows = max(self.max_num_seqs, LOGITS_TILE) - sum(request.num_seqs for request in self.running)
        budget = self.max_num_batched_tokens - sum(seq.num_scheduled_tokens for seq in batch.sequences)
        for seq in batch.sequences[: batch.num_decodes]:
            if draft_ids := self.find_drafts(seq, min(num_rows, budget)):
                batch.drafts[seq] = draft_ids
                num_rows, budget = num_rows - len(draft_ids), budget - len(draft_ids)
        return batch

    def find_drafts(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` drafts for a decode, with slots in its table; [] if it gets none.

        With 3 tokens left of `max_tokens`, 2 drafts are of use: so they need no more blocks than the text.
        """
        if seq.request.is_beam_search or seq.request.awaits_fork:
            return []
        most = min(most, self.num_speculative_tokens, seq.request.stop_rules.max_length - 1 - seq.num_tokens)
        draft_ids = self.propose(seq, most)[:most] if most > 0 else []
        fits = draft_ids and self.block_manager.append_slots([with_drafts(seq, draft_ids)]) is not None
        return draft_ids if fits else []

    def update(self, batch: DraftBatch, result: StepResult) -> list[Request]:
        """As `Scheduler.update`, and once more after each accepted draft, whose K/V is in the cache.

        tokens a b c, drafts x y z, samples x y w v: c x y count as computed, and x y w are appended.
        """
        drafts = batch.drafts
        samples = dict(zip(batch.sequences, result.samples, strict=True))
        rest: dict[Sequence, list[Sample]] = {}  # of each, the samples that follow right drafts: y w
        for seq, draft_ids in drafts.items():
            its = [sample.token_id for sample in samples[seq]]
            rest[seq] = samples[seq][1 : 1 + len(commonprefix([draft_ids, its]))]
        first = [its[:1] if seq in rest else its for seq, its in samples.items()]
        advanced = super().update(batch, StepResult(first, result.prompt_logprobs))
        while going := [seq for seq, its in rest.items() if its and not seq.finished]:
            for seq in going:  # one token is scheduled, which is known now; it may fill a block
                self.block_manager.publish(seq)
            its = [[rest[seq].pop(0)] for seq in going]
            advanced += super().update(ScheduledBatch(going), StepResult(its))
            self.num_accepted_tokens += len(going)
        for seq, draft_ids in drafts.items():
            self.block_manager.trim(seq, seq.num_tokens)
            self.num_draft_tokens += len(draft_ids)
        return list(dict.fromkeys(advanced))


class SpeculatingRunner(ModelRunner):
    """Computes drafts after the known tokens, and draws a token after each."""

    @torch.inference_mode()
    def execute(self, batch: DraftBatch) -> StepResult:
        """As `ModelRunner.execute`; of a sequence with k drafts, there are 1 + k samples."""
        if not batch.drafts:
            return super().execute(batch)
        drafts = batch.drafts
        # With drafts x y, a b x y is a prefill, behind the decodes; tokens follow a b, a b x and a b x y.
        order = sorted(batch.sequences, key=lambda seq: seq in drafts or seq.num_scheduled_tokens > 1)
        texts = {seq: [seq] for seq in order}
        for seq, draft_ids in drafts.items():
            texts[seq] += [with_drafts(seq, draft_ids[: i + 1]) for i in range(len(draft_ids))]
        longest = [text[-1] for text in texts.values()]
        num_decodes = batch.num_decodes - len(drafts)
        inputs = prepare(ScheduledBatch(longest, num_decodes, batch.moves), self.block_size)
        sampling = [its for seq, its in texts.items() if seq.needs_sample]
        ends = zip(inputs.sample_rows, sampling, strict=True)  # with two drafts, row 7 is: rows 5 6 7
        inputs.sample_rows = [end - i for end, its in ends for i in reversed(range(len(its)))]
        logits, prompt_logprobs = self.compute(inputs)
        draws = iter(sample_next_tokens(ScheduledBatch(list(chain(*texts.values()))), logits))
        samples = {seq: list(chain(*islice(draws, len(its)))) for seq, its in texts.items()}
        return StepResult(
            [samples[seq] for seq in batch.sequences], logprobs_by_request(longest, prompt_logprobs)
        )


class SpeculatingEngine(LLMEngine):
    make_config = SpeculationConfig
    make_runner = SpeculatingRunner

    def make_scheduler(self, *args: Any, **limits: Any) -> SpeculatingScheduler:
        return SpeculatingScheduler(self.config, *args, **limits)


class LLM(nanopaged.LLM):
    engine_class = SpeculatingEngine
