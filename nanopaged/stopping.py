"""When a sequence ends, and why."""

from __future__ import annotations

from dataclasses import dataclass

from nanopaged.config import SamplingParams
from nanopaged.sequence import Sequence


@dataclass(frozen=True)
class StopRules:
    """What ends a sequence whoever asked for it: the model's end-of-sequence ids and its length."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def banned_token_ids(self, seq: Sequence, params: SamplingParams) -> list[int]:
        """Tokens that must not be drawn next: those that would end it before `min_tokens`."""
        if seq.num_output_tokens >= params.min_tokens:
            return []
        eos = () if params.ignore_eos else self.eos_token_ids
        return sorted({*eos, *params.stop_token_ids})

    def check(self, seq: Sequence, params: SamplingParams) -> tuple[str, int | str | None] | None:
        """(finish_reason, stop_reason) if the token just appended ends `seq`, else None.

        That token is also turned into text here, unless it is what stops the sequence.
        """
        token_id = seq.token_ids[-1]
        if token_id in params.stop_token_ids:
            return "stop", token_id
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if seq.detokenizer is not None:
            may_stop = seq.num_output_tokens >= params.min_tokens
            stop = seq.detokenizer.push(token_id, look_for_stop=may_stop)
            if stop is not None:
                return "stop", stop
        if seq.num_output_tokens >= params.max_tokens or seq.num_tokens >= self.max_model_len:
            return "length", None
        return None
