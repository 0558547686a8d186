"""Structured output: a text that a JSON schema or a regular expression allows.

The library's matcher reads a text, and makes a mask of the tokens that may follow. It reads the whole output
anew for each token. So no state is lost when a request is preempted or starts over, and none is shared by n
outputs.
"""

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

import nanopaged
from nanopaged.config import Params, SamplingParams
from nanopaged.engine import LLMEngine
from nanopaged.outputs import CompletionOutput
from nanopaged.prompts import Prompt, PromptProcessor
from nanopaged.sequence import Request, Sequence

NO_SPACES = {"whitespace_flexible": False}  # a small model may repeat them without end
FUEL = 50_000  # expressions that a grammar may need at its start; the library would take seconds for more


@dataclass(frozen=True, kw_only=True)
class GrammarParams(SamplingParams):
    """`SamplingParams` with a grammar, or without one.

    Fields:
        json_schema: the output is JSON that this schema (a dict, or JSON) allows, without spaces.
        regex: the whole output matches this regular expression, in the syntax of Rust's regex crate.
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


@dataclass(eq=False)
class GrammarSequence(Sequence):
    """A sequence whose output is a text of a grammar."""

    start: Any = None  # the matcher before the first token
    never: tuple[int, ...] = ()  # end-of-sequence tokens that the request ignores

    @classmethod
    def of(cls, seq: Sequence, start: Any, never: tuple[int, ...]) -> Sequence:
        """A sequence with a grammar in place of one without."""
        values = {field.name: getattr(seq, field.name) for field in fields(Sequence)}
        return cls(**values, start=start, never=never)

    def copy_tokens(self, index: int) -> Sequence:
        return GrammarSequence.of(super().copy_tokens(index), start=self.start, never=self.never)

    def follow(self) -> Any:
        """A matcher that has read the output."""
        matcher = self.start.deep_copy()
        matcher.consume_tokens(self.token_ids[self.request.num_prompt_tokens :])
        return matcher

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """As `Sequence`; and the tokens outside the mask, which are all tokens if the library gave up."""
        matcher = self.follow()
        mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
        if matcher.is_error():
            mask = np.zeros_like(mask)
        return super().banned_token_ids.union(self.never, np.flatnonzero(mask == 0).tolist())

    def check_stop(self) -> bool:
        """As `Sequence.check_stop`; a complete text that nothing can follow ends without another token."""
        super().check_stop()
        if self.finish_reason != "stop":
            matcher = self.follow()
            if matcher.is_stopped() and not matcher.is_error():
                self.finish_reason = "stop"
        return self.finish_reason is not None

    def output(self) -> CompletionOutput:
        """As `Sequence.output`. The last token of a text that ended by itself belongs to the text."""
        output = super().output()
        if self.finish_reason == "stop" and output.token_ids[-1] not in self.request.stop_rules.token_ids:
            assert self.detokenizer is not None
            output.text = self.detokenizer.visible(output.token_ids, finished=True)
        return output


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


class GrammarEngine(LLMEngine):
    make_prompts = GrammarPrompts


class LLM(nanopaged.LLM):
    engine_class = GrammarEngine
