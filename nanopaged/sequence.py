"""What passes through the engine: sequences of tokens, their requests, and the batch of a step.

A `Sequence` is one line of text being written: its tokens, the blocks that hold their keys and values, and
how many of them have been computed. A `Request` is what the user asked for. A `ScheduledBatch` is what the
scheduler tells the model runner to do in a step, a `StepResult` what the runner answers.

Nothing here knows what a block contains, or on which device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.text.detokenizer import Detokenizer
from nanopaged.text.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput, Sample
from nanopaged.text.stopping import StopRules


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens, prompt first.

    The K/V of tokens [0, num_computed_tokens) are in the KV cache, those of the others are not yet. A new
    prompt, a later chunk of it, a prefix found in the cache, a recomputation after preemption and a decode
    step differ only in how many tokens are left to compute:

        token_ids            a b c d e f g h i        num_tokens = 9
        K/V in the cache     ─────────┘               num_computed_tokens = 4
        still to compute               └───────       a prompt; a decode step has 1 token left

    When the last token is computed, its logits say what token 9 is.
    """

    request: Request
    token_ids: list[int]
    index: int = 0  # which of the request's outputs this is
    token_logprobs: list[float] = field(default_factory=list)  # one for each generated token
    logprobs: list[Logprobs] = field(default_factory=list)  # one for each generated token, if asked for
    detokenizer: Detokenizer | None = None

    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # to compute in this step, from num_computed_tokens on

    block_table: list[int] = field(default_factory=list)  # i-th logical block → physical block
    host_table: list[int] = field(default_factory=list)  # the same in host memory, while swapped out
    block_keys: list[bytes] = field(default_factory=list)  # see `BlockManager.block_keys`

    candidates: list[Sample] | None = None  # of a beam that waits for the other beams of its request
    score: float | None = None  # of a beam search's hypothesis
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop token or string, if that was it

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the generated tokens' log-probabilities."""
        return sum(self.token_logprobs)

    @property
    def needs_sample(self) -> bool:
        """Whether this step computes the last known token, whose logits tell the next one."""
        return self.num_computed_tokens + self.num_scheduled_tokens == len(self.token_ids)

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be drawn next: before min_tokens nothing may end the sequence."""
        rules = self.request.stop_rules
        return rules.token_ids if len(self.token_ids) < rules.min_length else frozenset()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def fork(self, index: int) -> Sequence:
        """A copy with the same tokens and no blocks; `BlockManager.fork` shares those."""
        return Sequence(
            request=self.request,
            token_ids=list(self.token_ids),
            index=index,
            token_logprobs=list(self.token_logprobs),
            logprobs=list(self.logprobs),
            detokenizer=self._new_detokenizer(),
            block_keys=list(self.block_keys),
        )

    def append(self, sample: Sample) -> bool:
        """Add a generated token, whose K/V the next step computes. Returns whether it ends the sequence."""
        self.token_logprobs.append(sample.logprob)
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
        self.token_ids.append(sample.token_id)  # last: what was appended before it counts only with it
        return self.check_stop()

    def check_stop(self) -> bool:
        """Finish the sequence if its last generated token ends it; returns whether it does."""
        rules, token_id = self.request.stop_rules, self.token_ids[-1]
        if token_id in rules.token_ids:
            stop_reason = None if token_id in rules.eos_token_ids else token_id
            self.finish_reason, self.stop_reason = "stop", stop_reason
            return True
        if self.detokenizer is not None and self.detokenizer.stop:
            output = self.token_ids[self.request.num_prompt_tokens :]
            stop = self.detokenizer.find_stop(output, len(self.token_ids) >= rules.min_length)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
                return True
        if len(self.token_ids) >= rules.max_length:
            self.finish_reason = "length"
            return True
        return False

    def start_over(self) -> None:
        """A step failed, perhaps while it changed this sequence: rebuild everything from the tokens."""
        num_output_tokens = self.num_output_tokens
        del self.token_logprobs[num_output_tokens:], self.logprobs[num_output_tokens:]
        self.detokenizer = self._new_detokenizer()
        self.block_table, self.host_table, self.block_keys, self.candidates = [], [], [], None
        self.num_computed_tokens = 0
        if num_output_tokens > 0:
            self.check_stop()

    def _new_detokenizer(self) -> Detokenizer | None:
        old = self.detokenizer
        return Detokenizer(old.tokenizer, old.stop) if old is not None else None

    def output(self) -> CompletionOutput:
        """The sequence as it stands now; the lists are the user's own."""
        token_ids, text = self.token_ids[self.request.num_prompt_tokens :], ""
        if self.detokenizer is not None:
            stopped_by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
            shown = token_ids[:-1] if stopped_by_token else token_ids  # that token is no part of the text
            text = self.detokenizer.visible(shown, self.finish_reason is not None)
        with_logprobs = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=list(self.logprobs) if with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            score=self.score,
        )


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, the sequences that answer it, and what is reported about it."""

    request_id: str
    prompt: str | None  # the text, if it came as text
    prompt_token_ids: list[int]  # the user's copy: the engine reads those of the sequences
    params: SamplingParams | BeamSearchParams
    stop_rules: StopRules
    seed: int  # the params' own, or one drawn for the request
    num_prompt_tokens: int = field(init=False)
    num_sequences: int = field(init=False)  # that will answer it: n, or the beam width
    is_beam_search: bool = field(init=False)

    sequences: list[Sequence] = field(default_factory=list)  # one until the prompt is computed, then all
    live: list[Sequence] = field(default_factory=list)  # those that are not finished
    hypotheses: list[Sequence] = field(default_factory=list)  # of a beam search: the best texts that ended
    prompt_logprobs: list[Logprobs | None] | None = None  # filled as the prompt is computed, if asked for

    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int | None = None  # what the prefix cache gave at the first admission
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_sequences = self.params.num_sequences
        self.is_beam_search = isinstance(self.params, BeamSearchParams)
        self.sequences = [Sequence(self, list(self.prompt_token_ids))]
        self.live = list(self.sequences)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has no log-probability

    @property
    def finished(self) -> bool:
        return not self.live

    @property
    def is_swapped(self) -> bool:
        """Whether its K/V is in host memory."""
        return any(seq.host_table for seq in self.live)

    @property
    def prompt_phase(self) -> bool:
        """Whether one sequence still computes the prompt for all that will be forked from it."""
        return len(self.sequences) < self.num_sequences

    @property
    def num_seqs(self) -> int:
        """Sequences that the request counts for: those it will have once its prompt is computed."""
        return self.num_sequences if self.prompt_phase else len(self.live)

    @property
    def num_candidates(self) -> int:
        """Tokens that each beam proposes: enough that `beam_width` remain if all the best end a text."""
        return self.params.beam_width * max(2, 1 + len(self.stop_rules.token_ids))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def start_over(self) -> None:
        """A step failed: every sequence keeps its tokens and loses its K/V; finished ones finish again."""
        for seq in self.sequences:
            seq.start_over()
        self.live = [seq for seq in self.sequences if not seq.finished]

    def output(self) -> RequestOutput:
        """The request as it stands now; the lists are the user's own."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=[seq.output() for seq in self.sequences],
            finished=not self.live,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finish_time=self.finish_time,
                num_cached_tokens=self.num_cached_tokens or 0,
                num_preemptions=self.num_preemptions,
            ),
        )


@dataclass(slots=True)
class ScheduledBatch:
    """One step's work; `num_scheduled_tokens` of each sequence says how much of it is computed.

    Sequences with a single scheduled token, the decodes, come first: `sequences[:num_decodes]`. Blocks are
    moved before anything is computed: all swaps out, then all swaps in, then the copies on write. No block is
    the destination of two copies, or both a source and a destination.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination)
    admitted: list[Request] = field(default_factory=list)  # requests that left the waiting queue


@dataclass(slots=True)
class StepResult:
    """What the runner computed.

    Fields:
        samples: for each sequence of the batch the tokens drawn to follow it: none if its last token was not
            computed; else one; n if the prompt of a request for n outputs has just been computed, one for
            each; or the candidates that a beam proposes.
        prompt_logprobs: by request, of the prompt tokens that this step computed, where asked for.
    """

    samples: list[list[Sample]]
    prompt_logprobs: dict[Request, list[Logprobs]] = field(default_factory=dict)
