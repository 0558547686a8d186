"""Structured output: a text that a JSON schema or a regular expression allows.

    llm = LLM()  # of this file
    llm.generate("Age? ", GrammarParams(regex="[0-9]{1,3}"))

Before a token is drawn, a mask leaves out those with which the text could no longer become allowed:

    regex yes|no, output so far "y"        may follow:  e es        may not:  a ye no end-of-sequence

A matcher's state is a function of the output's tokens. So a preempted request keeps it, and a request that
starts over makes it again. Each of n outputs has its own: they begin where nothing is consumed.
"""

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

import nanopaged
from nanopaged.config import Params, SamplingParams
from nanopaged.engine import LLMEngine
from nanopaged.kv_cache import take_rows, to_device
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import CompletionOutput
from nanopaged.prompts import Prompt, PromptProcessor
from nanopaged.sampler import SamplingMetadata, draws_of, sample, sample_next_tokens
from nanopaged.sequence import NonFiniteLogits, NoTokenAllowed, Request, Sample, ScheduledBatch, Sequence

NO_SPACES = {"whitespace_flexible": False}  # a small model may repeat them without end
FUEL = 50_000  # expressions that a grammar may need at its start; the library would take seconds for more


@dataclass(frozen=True, kw_only=True)
class GrammarParams(SamplingParams):
    """`SamplingParams` with a grammar, or without one.

    Fields:
        json_schema: the output is JSON that this schema (a dict, or JSON) allows, without spaces.
        regex: the whole output matches this regular expression, in the syntax of Rust's regex crate.

    Raises ValueError if both are given.
    """

    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.json_schema, dict):  # params must be hashable
            self.keep("json_schema", json.dumps(self.json_schema))
        self.check_types("json_schema", "regex", types=str | None, description="a str")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("give json_schema or regex, not both")


# ── grammars ──────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=8)
def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> Any:
    """The bytes of each token, as llguidance's `LLTokenizer`."""
    from llguidance.hf import from_tokenizer  # only if a request needs it

    return from_tokenizer(tokenizer, vocab_size, sorted(eos_token_ids) or None)


@lru_cache(maxsize=128)
def compile_grammar(name: str, text: str, vocabulary: Any) -> Any:
    """An `LLMatcher` for a "json_schema" or a "regex", before the first token.

    Raises ValueError if the grammar is not valid, allows no text, or is too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        options = {"defaults": NO_SPACES} if name == "json_schema" else {}
        grammar = getattr(LLMatcher, f"grammar_from_{name}")(text, **options)
        limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        error = matcher.get_error()
        if not error:  # one token further the library knows how large the grammar is
            ahead = matcher.deep_copy()
            allowed = np.flatnonzero(np.frombuffer(ahead.compute_logit_bias(), np.uint8))
            texts = [int(token_id) for token_id in allowed if token_id not in vocabulary.eos_tokens]
            ahead.consume_tokens(texts[:1])
            error = "it is too large" if ahead.is_error() else ""
            error = error if texts else "it allows no text"
    except ValueError as not_json:
        error = str(not_json)
    if error:
        raise ValueError(f"{name} {text[:200]!r} cannot be used: {error}")
    return matcher


# ── sequences ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class GrammarSequence(Sequence):
    """A sequence whose output is a text of a grammar."""

    start: Any = None  # the matcher before the first token
    never: tuple[int, ...] = ()  # end-of-sequence tokens that the request ignores
    matcher: Any = None  # after `num_read` tokens of the output
    num_read: int = 0

    @classmethod
    def of(cls, seq: Sequence, start: Any, never: tuple[int, ...]) -> Sequence:
        """A sequence with a grammar in place of one without."""
        values = {field.name: getattr(seq, field.name) for field in fields(Sequence)}
        return cls(**values, start=start, never=never)

    def copy_tokens(self, index: int) -> Sequence:
        return GrammarSequence.of(super().copy_tokens(index), start=self.start, never=self.never)

    def follow(self) -> Any:
        """The matcher after all tokens of the output."""
        if self.matcher is None:
            self.matcher, self.num_read = self.start.deep_copy(), 0
        self.matcher.consume_tokens(self.token_ids[self.request.num_prompt_tokens + self.num_read :])
        self.num_read = self.num_output_tokens
        return self.matcher

    def barred(self) -> np.ndarray:
        """bool [vocab_size]: the tokens that must not come next; all of them if the library gave up."""
        matcher = self.follow()
        barred = np.frombuffer(matcher.compute_logit_bias(), np.uint8) == 0
        barred[[*self.never, *self.banned_token_ids]] = True
        return barred | bool(matcher.is_error())

    def check_stop(self) -> bool:
        """As `Sequence.check_stop`; a complete text that nothing can follow ends without another token."""
        super().check_stop()
        if self.finish_reason != "stop":
            matcher = self.follow()
            if matcher.is_stopped() and not matcher.is_error():
                self.finish_reason = "stop"
        return self.finish_reason is not None

    def start_over(self) -> None:
        self.matcher = None  # it may have consumed a token that is not counted
        super().start_over()

    def output(self) -> CompletionOutput:
        """As `Sequence.output`. The last token of a text that ended by itself belongs to the text."""
        output = super().output()
        if self.finish_reason == "stop" and output.token_ids[-1] not in self.request.stop_rules.token_ids:
            assert self.detokenizer is not None
            output.text = self.detokenizer.visible(output.token_ids, finished=True)
        return output


# ── the engine ────────────────────────────────────────────────────────────────────────────────────


class GrammarPrompts(PromptProcessor):
    def make_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> Request:
        """As `PromptProcessor.make_request`. Raises ValueError for a bad grammar, see `compile_grammar`."""
        request = super().make_request(request_id, prompt, params)
        for name in ("json_schema", "regex"):
            if (text := getattr(params, name, None)) is not None:
                if self.tokenizer is None:
                    raise ValueError(f"{name} needs a tokenizer, and this model has none")
                vocabulary = read_vocabulary(self.tokenizer, self.vocab_size, self.eos_token_ids)
                never = tuple(set(vocabulary.eos_tokens) - request.stop_rules.token_ids)
                start = compile_grammar(name, text, vocabulary)
                seq = GrammarSequence.of(request.live[0], start=start, never=never)
                request.live, request.sequences = [seq], [seq]
        return request


class GrammarRunner(ModelRunner):
    """A `ModelRunner` that draws under masks."""

    @staticmethod
    def sample(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
        """As `sample_next_tokens`, with a mask for each sequence that has a grammar."""
        ready = [seq for seq in batch.sequences if seq.needs_sample]
        kinds = [isinstance(seq, GrammarSequence) for seq in ready]
        samples: dict[Sequence, list[Sample]] = {}
        for has_grammar, draw in ((False, sample_next_tokens), (True, draw_masked)):
            rows = [row for row, kind in enumerate(kinds) if kind == has_grammar]
            seqs = [ready[row] for row in rows]
            if seqs:
                drawn = draw(ScheduledBatch(sequences=seqs), take_rows(logits, rows))
                samples |= zip(seqs, drawn, strict=True)
        return [samples.get(seq, []) for seq in batch.sequences]


def draw_masked(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
    """The samples of sequences with a grammar, a row of logits for each. The library reads the text first.

    A mask comes after penalties and before temperature. Log-probabilities are the model's own.
    """
    draws, rows, barred = [], [], []
    for row, seq in enumerate(batch.sequences):
        draws_of_seq = draws_of(seq, vocab_size=logits.shape[-1])
        draws += draws_of_seq
        rows += [row] * len(draws_of_seq)
        barred += [seq.barred()] * len(draws_of_seq)
    metadata = SamplingMetadata(draws, logits.device)
    metadata.banned = to_device(np.stack(barred), logits.device)[None]  # a mask is an index, too
    samples: list[list[Sample]] = [[] for _ in batch.sequences]
    for row, token in zip(rows, sample(take_rows(logits, rows), metadata), strict=True):
        if not math.isfinite(token.logprob):
            error = NoTokenAllowed if token.logprob == -math.inf else NonFiniteLogits
            raise error(batch.sequences[row].request.request_id, batch.sequences[row].num_tokens)
        samples[row].append(token)
    return samples


class GrammarEngine(LLMEngine):
    make_prompts, make_runner = GrammarPrompts, GrammarRunner


class LLM(nanopaged.LLM):
    engine_class = GrammarEngine
