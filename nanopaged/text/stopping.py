"""Stop rules: the tokens and lengths that end a sequence. Stop strings are in `detokenizer.py`."""

from __future__ import annotations

from dataclasses import dataclass

from nanopaged.config import BeamSearchParams, SamplingParams


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends the sequences of one request. Lengths are in tokens and include the prompt.

    Fields:
        token_ids: a sequence ends with any of these.
        eos_token_ids: the end-of-sequence tokens among them, which give no `stop_reason`.
        min_length: below this length only `max_length` ends a sequence.
        max_length: at this length a sequence ends.
    """

    token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    min_length: int
    max_length: int

    @classmethod
    def of(
        cls,
        params: SamplingParams | BeamSearchParams,
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> StopRules:
        """The rules for `params`, a prompt of this length, and a model with these end-of-sequence ids."""
        eos = frozenset() if params.ignore_eos else eos_token_ids
        return cls(
            token_ids=eos | frozenset(params.stop_token_ids),
            eos_token_ids=eos - frozenset(params.stop_token_ids),
            min_length=num_prompt_tokens + params.min_tokens,
            max_length=min(num_prompt_tokens + (params.max_tokens or max_model_len), max_model_len),
        )
