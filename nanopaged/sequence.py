"""The data that passes through the engine: sequences, requests, the batch of a step and its result.

A `Sequence` is one output being generated. A `Request` has a prompt, its parameters and one or more
sequences. The scheduler gives the model runner a `ScheduledBatch`; the runner returns a `StepResult`, or
raises a failure of one request.
"""

from __future__ import annotations

import time
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
    logprobs: Logprobs | None = None  # with the most likely tokens, if wanted


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a prompt and of one output, and the state of their K/V.

    The K/V of tokens [0, num_computed_tokens) is in the KV cache (of a swapped request, in host memory). A
    prompt, a chunk of it, a recomputation and a decode step differ only in how many tokens are left:

        token_ids            a b c d e f g h i        num_tokens = 9
        K/V in the cache     ─────────┘               num_computed_tokens = 4
        still to compute               └───────       a prompt; a decode step has 1 token left

    When i (token 8) is computed, token 9 is sampled from its logits.
    """

    request: Request
    token_ids: list[int]
    index: int = 0  # of this output among the outputs of the request
    token_logprobs: list[float] = field(default_factory=list)  # one for each generated token
    logprobs: list[Logprobs] = field(default_factory=list)  # one for each generated token, or empty
    detokenizer: Detokenizer | None = None

    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # to compute in this step, from num_computed_tokens on

    # i-th logical block → physical block. Once used, it only grows, or is a new list (`BlockTables`).
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(
        default_factory=list
    )  # the same in host memory, while swapped out
    block_keys: list[bytes] = field(default_factory=list)  # see `BlockManager.keys_of`

    candidates: list[Sample] | None = None  # of a beam, until all beams of its request have theirs
    score: float | None = None  # of a beam search's hypothesis
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and the generated ones."""
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
        """Whether this step computes the last known token; the next one is sampled from its logits."""
        return self.num_computed_tokens + self.num_scheduled_tokens == len(self.token_ids)

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be drawn next: before min_tokens nothing may end the sequence."""
        rules = self.request.stop_rules
        return rules.token_ids if len(self.token_ids) < rules.min_length else frozenset()

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def copy_tokens(self, index: int) -> Sequence:
        """A sequence with the same tokens and no blocks; `BlockManager.fork` shares the blocks."""
        logprobs = list(self.token_logprobs), list(self.logprobs)
        copied = Sequence(
            self.request, list(self.token_ids), index, *logprobs, copy(self.detokenizer)
        )
        copied.block_keys = list(self.block_keys)
        return copied

    def append(self, sample: Sample) -> bool:
        """Add a generated token, whose K/V the next step computes. Returns whether it ends the sequence."""
        self.token_logprobs.append(sample.logprob)
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
        self.token_ids.append(
            sample.token_id
        )  # last, so `start_over` knows if the step got this far
        return self.check_stop()

    def check_stop(self) -> bool:
        """Finish the sequence if its last generated token ends it; returns whether it does."""
        rules, token_id, stop = self.request.stop_rules, self.token_ids[-1], None
        if (
            self.detokenizer is not None
            and self.detokenizer.stop
            and token_id not in rules.token_ids
        ):
            output = self.token_ids[self.request.num_prompt_tokens :]
            stop = self.detokenizer.find_stop(output, len(self.token_ids) >= rules.min_length)
        if token_id in rules.token_ids or stop is not None:
            self.finish_reason = "stop"
            self.stop_reason = (
                token_id if token_id in rules.token_ids - rules.eos_token_ids else stop
            )
        elif len(self.token_ids) >= rules.max_length:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def start_over(self) -> None:
        """Rebuild all state from the tokens: a step failed, perhaps while it was changing this sequence."""
        num_output_tokens = self.num_output_tokens
        del self.token_logprobs[num_output_tokens:], self.logprobs[num_output_tokens:]
        if self.detokenizer is not None:
            self.detokenizer = Detokenizer(self.detokenizer.tokenizer, self.detokenizer.stop)
        self.block_table, self.host_table, self.block_keys, self.candidates = [], [], [], None
        self.num_computed_tokens = 0
        if num_output_tokens > 0:
            self.check_stop()

    def output(self) -> CompletionOutput:
        """What a user gets of it so far. A stop token is not part of the text."""
        token_ids, text = self.token_ids[self.request.num_prompt_tokens :], ""
        if self.detokenizer is not None:
            end = len(token_ids) - (
                self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
            )
            text = self.detokenizer.visible(token_ids[:end], self.finish_reason is not None)
        logprobs = list(self.logprobs) if self.request.params.logprobs is not None else None
        ended = self.finish_reason, self.stop_reason, self.score
        return CompletionOutput(
            self.index, text, token_ids, self.cumulative_logprob, logprobs, *ended
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters, its sequences, and the figures that are reported about it."""

    request_id: str
    prompt: str | None  # the text; None if the user gave token ids
    prompt_token_ids: list[int]  # returned to the user; the engine reads `Sequence.token_ids`
    params: Params
    stop_rules: StopRules
    seed: int  # of the params, or drawn for this request
    cache_salt: bytes = b""  # the prefix cache shares blocks only among requests with the same one
    num_prompt_tokens: int = field(init=False)
    width: int = field(init=False)  # sequences once the prompt is computed: n, or the beam width
    is_beam_search: bool = field(init=False)

    sequences: list[Sequence] = field(
        default_factory=list
    )  # one until the prompt is computed, then all
    live: list[Sequence] = field(default_factory=list)  # the unfinished ones
    hypotheses: list[Sequence] = field(
        default_factory=list
    )  # of a beam search: the best finished texts
    prompt_logprobs: list[Logprobs | None] | None = (
        None  # filled as the prompt is computed, if wanted
    )
    rank: Any = None  # its place in the order of service, see `Scheduler.rank`
    error: Exception | None = None  # why it was aborted, for the call that waits for it

    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int | None = (
        None  # prompt tokens found in the prefix cache at the first admission
    )
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens, self.width = len(self.prompt_token_ids), self.params.width
        self.is_beam_search = isinstance(self.params, BeamSearchParams)
        self.live = [Sequence(self, list(self.prompt_token_ids))]
        self.sequences = self.live[:]
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has no log-probability

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return not self.live

    @property
    def is_swapped(self) -> bool:
        """Whether the request is swapped out: its K/V is in host memory."""
        return any(seq.host_table for seq in self.live)

    @property
    def awaits_fork(self) -> bool:
        """True until n outputs or beams are forked from the first sequence; always False for one output."""
        return len(self.sequences) < self.width

    @property
    def num_seqs(self) -> int:
        """Sequences that count for `max_num_seqs`: all that it will have, later the live ones."""
        return self.width if self.awaits_fork else len(self.live)

    @property
    def num_candidates(self) -> int:
        """Tokens that each beam proposes: `beam_width` remain even if all the best ones end a text."""
        return self.width * max(2, 1 + len(self.stop_rules.token_ids))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some prompt tokens still need a log-probability."""
        return (
            self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens
        )

    def start_over(self) -> None:
        """After a failed step, every sequence keeps its tokens and loses its K/V; some finish once more."""
        if self.first_token_time is None:
            self.num_cached_tokens = None  # it starts again
        for seq in self.sequences:
            seq.start_over()
        self.live = [seq for seq in self.sequences if not seq.finished]

    def output(self) -> RequestOutput:
        """What a user gets of it so far, as plain data that the engine does not change again."""
        times = self.arrival_time, self.first_token_time, self.finish_time
        metrics = RequestMetrics(*times, self.num_cached_tokens or 0, self.num_preemptions)
        prompt = (
            self.prompt,
            self.prompt_token_ids,
            self.prompt_logprobs and list(self.prompt_logprobs),
        )
        outputs = list(map(type(self.sequences[0]).output, self.sequences))
        return RequestOutput(self.request_id, *prompt, outputs, not self.live, metrics)


Move = tuple[int, int]
"""(source block, destination block)."""


@dataclass(slots=True)
class Moves:
    """The blocks that a step moves before it computes anything: swaps out, then swaps in, then copies.

    Fields:
        swap_out: from a device block to a host block.
        swap_in: from a host block to a device block.
        copies: from a device block to another (copy-on-write). No block is both a source and a destination.
    """

    swap_out: list[Move] = field(default_factory=list)
    swap_in: list[Move] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)


@dataclass(slots=True)
class ScheduledBatch:
    """The work of one step: `seq.num_scheduled_tokens` tokens of each sequence are computed.

    Sequences with one scheduled token, the decodes, come first. Before tokens are computed, blocks are moved:
    swaps out, swaps in, then copies on write. No block is both a source and a destination of copies.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    moves: Moves = field(default_factory=Moves)
    admitted: list[Request] = field(default_factory=list)  # requests that left the waiting queue
    preempted: list[tuple[Request, str]] = field(
        default_factory=list
    )  # and how: "swap" or "recompute"


@dataclass(slots=True)
class StepResult:
    """What the runner computed.

    Fields:
        samples: for each sequence of the batch, the tokens that may follow it: none if its last token was
            not computed; n if a prompt for n outputs was just finished; the candidates of a beam; else one.
        prompt_logprobs: for each request that wants them, of the prompt tokens computed in this step.
    """

    samples: list[list[Sample]]
    prompt_logprobs: dict[Request, list[Logprobs]] = field(default_factory=dict)


class NonFiniteLogits(FloatingPointError):
    """The model's logits for a request are not finite. The engine can go on without it.

    Attributes:
        request_id: of the request, for `LLMEngine.abort_request`.
    """

    what = "the model's logits for request {!r} at position {} are not finite"
    way_out = "abort the request, or use a dtype with a wider range"

    def __init__(self, request_id: str, position: int) -> None:
        super().__init__(request_id, position)  # so that it can be pickled
        self.request_id, self.position = request_id, position

    def __str__(self) -> str:
        return f"{self.what.format(self.request_id, self.position)}: {self.way_out}"


class NoTokenAllowed(NonFiniteLogits):
    """Every token of the vocabulary is banned for a request, or masked. The engine can go on without it."""

    what = "no token is allowed for request {!r} at position {}"
    way_out = (
        "its banned tokens or its mask leave none of the vocabulary; abort it, or allow a token"
    )
