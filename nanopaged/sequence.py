"""The data that passes through the engine: sequences, requests, the batch of a step and its result.

A `Sequence` is one output being generated. A `Request` has a prompt, its parameters and one or more
sequences. The scheduler gives the model runner a `ScheduledBatch`; the runner returns a
`StepResult`, or raises a failure of one request.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from nanopaged.config import BeamSearchParams, Params
from nanopaged.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from nanopaged.text import Detokenizer, StopRules


@dataclass(slots=True)
class Sample:
    """A sampled token with the model's own log-probability, before temperature and filters."""

    token_id: int
    logprob: float
    logprobs: Logprobs = field(default_factory=dict)  # with the most likely tokens, if wanted


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a prompt and of one output, and the state of their K/V.

    The K/V of tokens [0, num_computed_tokens) is in the KV cache (of a swapped request, in host
    memory). A prompt, a chunk of it, a recomputation and a decode step differ only in how many
    tokens are left to compute.

        token_ids            a b c d e f g h i        num_tokens = 9
        K/V in the cache     ─────────┘               num_computed_tokens = 4
        still to compute               └───────       5 of a prompt; a decode step has 1

    When the step computes i (token 8), token 9 is sampled from its logits.
    """

    request: Request
    token_ids: list[int]
    index: int = 0  # of this output among the outputs of the request
    samples: list[Sample] = field(default_factory=list)  # one for each generated token
    detokenizer: Detokenizer | None = None

    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # to compute in this step, from num_computed_tokens on

    block_table: list[int] = field(default_factory=list)  # logical block i → physical block
    host_table: list[int] = field(default_factory=list)  # the same, while swapped out
    block_keys: list[bytes] = field(default_factory=list)  # see `BlockManager.keys_of`

    candidates: list[Sample] | None = None  # a beam's, kept until the other beams have theirs
    score: float | None = None  # of a beam search's hypothesis
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and the generated ones."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the log-probabilities of the generated tokens."""
        return sum(sample.logprob for sample in self.samples)

    @property
    def needs_sample(self) -> bool:
        """Whether this step computes the last known token, whose logits give the next one."""
        return self.num_computed_tokens + self.num_scheduled_tokens == len(self.token_ids)

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be drawn next: before min_tokens nothing may end the sequence."""
        rules = self.request.stop_rules
        return rules.token_ids if self.num_tokens < rules.min_length else frozenset()

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def copy_tokens(self, index: int) -> Sequence:
        """A sequence with the same tokens and no blocks; `BlockManager.fork` shares the blocks."""
        return Sequence(
            request=self.request,
            token_ids=list(self.token_ids),
            index=index,
            samples=list(self.samples),
            detokenizer=copy(self.detokenizer),
            block_keys=list(self.block_keys),
        )

    def append(self, sample: Sample) -> bool:
        """Add a generated token, whose K/V the next step computes. Returns whether it ends the
        sequence.
        """
        self.samples.append(sample)
        # Last: if the step fails before it, `start_over` drops the sample that has no token.
        self.token_ids.append(sample.token_id)
        return self.check_stop()

    def check_stop(self) -> bool:
        """Finish the sequence if its last generated token ends it. Returns whether it does."""
        rules = self.request.stop_rules
        token_id = self.token_ids[-1]
        if token_id in rules.token_ids:
            self.finish_reason = "stop"
            if token_id in self.request.params.stop_token_ids:
                self.stop_reason = token_id
        elif (stop_string := self._find_stop_string()) is not None:
            self.finish_reason = "stop"
            self.stop_reason = stop_string
        elif self.num_tokens >= rules.max_length:
            self.finish_reason = "length"
        return self.finished

    def _find_stop_string(self) -> str | None:
        """The stop string that the last generated token completes, if it may end the sequence."""
        may_end = self.num_tokens >= self.request.stop_rules.min_length
        if may_end and self.detokenizer is not None and self.detokenizer.stop:
            return self.detokenizer.find_stop(self.output_token_ids)
        return None

    def start_over(self) -> None:
        """Rebuild all state from the tokens, because a step failed and may have half changed it."""
        del self.samples[self.num_output_tokens :]
        if self.detokenizer is not None:
            self.detokenizer = Detokenizer(self.detokenizer.tokenizer, self.detokenizer.stop)
        self.block_table = []
        self.host_table = []
        self.block_keys = []
        self.candidates = None
        self.num_computed_tokens = 0
        if self.samples:
            self.check_stop()

    def output(self) -> CompletionOutput:
        """The output so far, as a user gets it. A stop token is not part of the text."""
        token_ids = self.output_token_ids
        text = ""
        if self.detokenizer is not None:
            # Without the stop token. After a stop string the text is known, whatever the tokens.
            visible_ids = token_ids[:-1] if self.finish_reason == "stop" else token_ids
            text = self.detokenizer.visible(visible_ids, self.finished)
        wants_logprobs = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=[sample.logprobs for sample in self.samples] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            score=self.score,
        )


@dataclass(eq=False)
class Request:
    """A prompt with its parameters, its sequences, and the figures that are reported about it."""

    request_id: str
    prompt: str | None  # the text; None if the user gave token ids
    prompt_token_ids: list[int]  # returned to the user; the engine reads `Sequence.token_ids`
    params: Params
    stop_rules: StopRules
    seed: int  # of the params, or drawn for this request
    cache_salt: bytes = b""  # the prefix cache shares blocks only among requests with the same one

    hypotheses: list[Sequence] = field(default_factory=list)  # a beam search's best finished texts
    prompt_logprobs: list[Logprobs | None] | None = None  # if wanted; grows with each chunk
    rank: Any = None  # its place in the order of service, see `Scheduler.rank`
    error: Exception | None = None  # why it was aborted, for the call that waits for it

    arrival_time: float = 0.0  # when it was queued, in `time.monotonic()` seconds as the others
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int = 0  # in the prefix cache, when it was admitted
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.width = self.params.width  # sequences once the prompt is computed
        self.is_beam_search = isinstance(self.params, BeamSearchParams)
        # One sequence until the prompt is computed, then all of them.
        self.sequences = [Sequence(request=self, token_ids=list(self.prompt_token_ids))]
        self.live = list(self.sequences)  # the unfinished ones
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has no log-probability

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return not self.live

    @property
    def is_swapped(self) -> bool:
        """Whether its K/V is in host memory."""
        return any(seq.host_table for seq in self.live)

    @property
    def awaits_fork(self) -> bool:
        """Whether the other sequences are still to be forked from the first one."""
        return len(self.sequences) < self.width

    @property
    def num_seqs(self) -> int:
        """Sequences that count for `max_num_seqs`: all that it will have, then the live ones."""
        return self.width if self.awaits_fork else len(self.live)

    @property
    def num_candidates(self) -> int:
        """Tokens that each beam proposes at least: enough for `beam_width` that end no text."""
        return self.width + len(self.stop_rules.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some prompt tokens still need a log-probability."""
        known = self.prompt_logprobs
        return known is not None and len(known) < self.num_prompt_tokens

    def start_over(self) -> None:
        """Keep the tokens of every sequence and forget their K/V, because a step failed."""
        for seq in self.sequences:
            seq.start_over()
        self.live = [seq for seq in self.sequences if not seq.finished]

    def output(self) -> RequestOutput:
        """The output so far, as plain data that the engine does not change again."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=copy(self.prompt_logprobs),
            outputs=[seq.output() for seq in self.sequences],
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finish_time=self.finish_time,
                num_cached_tokens=self.num_cached_tokens,
                num_preemptions=self.num_preemptions,
            ),
        )


Move = tuple[int, int]
"""(source block, destination block)."""


@dataclass
class Moves:
    """The blocks that a step moves before it computes anything, in the order of the fields.

    Fields:
        swap_out: from a device block to a host block.
        swap_in: from a host block to a device block.
        copies: from a device block to another one (copy-on-write). No block is both a source and a
            destination.
    """

    swap_out: list[Move] = field(default_factory=list)
    swap_in: list[Move] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)


@dataclass
class ScheduledBatch:
    """The work of one step, which computes `seq.num_scheduled_tokens` tokens of each sequence.

    Fields:
        sequences: the decodes come first; they are the sequences with one scheduled token.
        admitted: requests that left the waiting queue.
        preempted: requests with the mode of preemption, "swap" or "recompute".
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    moves: Moves = field(default_factory=Moves)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[tuple[Request, str]] = field(default_factory=list)


@dataclass
class StepResult:
    """What the runner computed.

    Fields:
        samples: for each sequence of the batch, the tokens that may follow it. There are none if
            its last token was not computed, n if a prompt for n outputs was just finished, the
            candidates of a beam, and one in all other cases.
        prompt_logprobs: for each request that wants them, of the prompt tokens computed in this
            step.
    """

    samples: list[list[Sample]]
    prompt_logprobs: dict[Request, list[Logprobs]] = field(default_factory=dict)


class NonFiniteLogits(FloatingPointError):
    """No token can be sampled for a request. The engine can go on without it.

    The model's logits are not finite, or all tokens are banned, which makes their logits -inf.

    Args:
        request_id: of the request, for `LLMEngine.abort_request`.
    """

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id
