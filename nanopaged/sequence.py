"""A sequence of tokens and how far its K/V has got; a request and the sequences it asked for.

A `Sequence` is one line of text being written: its tokens, the blocks that hold their keys and
values, and how many of them have been computed. A `Request` is what the user asked for.

Nothing here knows what a block contains, or on which device.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from nanopaged.beam_search import BeamSearch
    from nanopaged.block_manager import BlockCopy
    from nanopaged.config import BeamSearchParams, SamplingParams
    from nanopaged.swap import Move
    from nanopaged.text.detokenizer import Detokenizer
    from nanopaged.text.outputs import Logprobs, Sample
    from nanopaged.text.stopping import StopRules


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens, prompt first.

    Everything the engine does with it is catching up: tokens [0, num_computed_tokens) have their
    K/V in the cache, the rest do not yet. A new prompt, a later chunk of it, a prefix found in the
    cache, a recompute after preemption and a decode step differ only in how large the gap is:

        token_ids            a b c d e f g h i        num_tokens = 9
        K/V in the cache     ─────────┘               num_computed_tokens = 4
        still to compute               └───────       a prompt; a decode step has a gap of 1

    When the gap closes, the logits of the last token say what token 9 is.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    index: int = 0  # which of the request's outputs this is
    detokenizer: Detokenizer | None = None
    request: Request | None = None  # whose it is; set by the request

    num_tokens: int = field(init=False)  # len(token_ids)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # this step's share: tokens [num_computed, num_computed + num_new)

    block_table: list[int] = field(default_factory=list)  # i-th logical block → physical block
    host_table: list[int] = field(default_factory=list)  # the same in host memory, while swapped out
    num_slots: int = 0  # of the blocks in the table
    num_closed_tokens: int = 0  # those in full blocks whose K/V is there
    block_keys: list[tuple[int, bytes]] = field(default_factory=list)  # see `block_key`

    logprobs: list[Logprobs] = field(default_factory=list)  # one for each generated token, if asked
    cumulative_logprob: float = 0.0
    candidates: list[Sample] | None = None  # of a beam that waits for the others of its request
    score: float | None = None  # of a finished beam
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop token or string, if that was it

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def needs_sample(self) -> bool:
        """Whether its last known token is in this step, so that the logits tell the next one."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.num_tokens

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be drawn next: before min_tokens nothing may end the sequence."""
        rules = self.request.stop_rules
        return rules.token_ids if self.num_tokens < rules.min_length else frozenset()

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a list of their own."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def fork(self, index: int) -> Sequence:
        """A sibling with the same past, but without blocks: sharing those is the block manager's business."""
        return Sequence(
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            index=index,
            detokenizer=self.detokenizer.fork() if self.detokenizer is not None else None,
            request=self.request,
            block_keys=list(self.block_keys),
            logprobs=list(self.logprobs),
            cumulative_logprob=self.cumulative_logprob,
        )

    def append(self, sample: Sample) -> bool:
        """Add a generated token; True if it ends the sequence. Its K/V is the next step's gap."""
        request = self.request
        stop = request.stop_rules.check(self, sample.token_id)
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        self.token_ids.append(sample.token_id)
        self.num_tokens += 1
        self.cumulative_logprob += sample.logprob
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
        if stop is None:
            return False
        request.finish(self, *stop)
        return True

    def block_key(self, i: int, block_size: int) -> tuple[int, bytes]:
        """(hash, packed tokens) of the i-th block, which must be full. Worked out once, in order.

        The hash covers the block's tokens and, through its parent's hash, everything before them: K/V
        depends on the whole prefix, so two blocks may be shared only if their prefixes agree.

            block_size = 2    tokens  a b │ c d │ e       hashes  h0 = H(a b)   h1 = H(h0, c d)
        """
        keys = self.block_keys
        for j in range(len(keys), i + 1):
            parent = keys[j - 1][0].to_bytes(8, "little") if j else b""
            tokens = struct.pack(f"<{block_size}q", *self.token_ids[j * block_size : (j + 1) * block_size])
            keys.append((xxhash.xxh3_64_intdigest(parent + tokens), tokens))
        return keys[i]


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, the sequences that answer it, and what is reported about it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]  # the user's copy: the engine reads those of the sequences
    params: SamplingParams | BeamSearchParams
    stop_rules: StopRules
    seed: int  # the params' own, or one drawn for it: no request is without
    sequences: list[Sequence]  # one until the prompt is computed, then all that were asked for
    beam_search: BeamSearch | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # filled as the prompt is computed
    final_only: bool = False  # whether nobody looks at its outputs before the last

    live: list[Sequence] = field(init=False)  # the sequences that still grow
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int | None = None  # what the prefix cache gave at the first admission
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.live = list(self.sequences)
        for seq in self.sequences:
            seq.request = self

    @property
    def finished(self) -> bool:
        return not self.live

    @property
    def prompt_phase(self) -> bool:
        """Whether its prompt is still being computed, for several sequences at once."""
        return len(self.sequences) < self.params.num_sequences

    @property
    def is_beam_search(self) -> bool:
        return self.beam_search is not None

    @property
    def num_candidates(self) -> int:
        """Tokens that each beam proposes: enough that `beam_width` remain if all the best end a text."""
        return self.beam_search.num_candidates

    @property
    def num_seqs(self) -> int:
        """How many sequences it counts for: those it will have, as long as it has one for all."""
        return self.params.num_sequences if self.prompt_phase else len(self.live)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still owed (the first token has none)."""
        recorded = self.prompt_logprobs
        return recorded is not None and len(recorded) < self.sequences[0].num_prompt_tokens

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None) -> None:
        """One of its sequences has ended; with the last one the request has."""
        seq.finish_reason, seq.stop_reason = finish_reason, stop_reason
        self.live.remove(seq)
        if self.finished:
            self.finish_time = time.monotonic()
            if seq.num_output_tokens and self.first_token_time is None:  # a beam search of one step
                self.first_token_time = self.finish_time


@dataclass(slots=True)
class ScheduledBatch:
    """One step's work; `num_scheduled_tokens` of each sequence says how much of it.

    Those with a single new token stand first: `sequences[:num_decodes]`. Before anything is computed, blocks
    are moved: out, then in, then the copies on write. No block is the destination of two copies, or both
    a source and a destination.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    swap_out: list[Move] = field(default_factory=list)  # (device block, host block)
    swap_in: list[Move] = field(default_factory=list)  # (host block, device block)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # left the waiting queue for this step
    swapped_out: list[Request] = field(default_factory=list)  # went to it, and to host memory


@dataclass(slots=True)
class StepResult:
    """What the runner found out.

    Fields:
        samples: for each sequence of the batch the tokens drawn to follow it: none if it has not
            caught up; else one; or, when the prompt of a request for n outputs has just been computed,
            n, one for each; or a beam's proposals.
        prompt_logprobs: by request, of the prompt tokens whose turn it was, where asked for.
    """

    samples: list[list[Sample]]
    prompt_logprobs: dict[Request, list[Logprobs]] = field(default_factory=dict)
