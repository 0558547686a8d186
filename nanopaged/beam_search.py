"""Which beams go on, and which have ended.

Beam search keeps the `beam_width` most likely beginnings. At each step every beam proposes its most likely
next tokens; the best of all proposals become the next beams, wherever they come from, so that one beam may
have several heirs and another none. A proposal that ends a text is put aside as a hypothesis, with the
score that transformers gives it:

    score = sum of the log-probabilities of the generated tokens / (their number ** length_penalty)

This file sees tokens and scores. That heirs share the K/V of their common past is `branching.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanopaged.config import BeamSearchParams
from nanopaged.text.outputs import Sample
from nanopaged.text.stopping import StopRules


@dataclass(frozen=True, slots=True)
class Heir:
    """A beam's continuation by one token."""

    parent: int  # which of the beams
    sample: Sample
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended. `token_ids` are the generated ones, the last one included."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | None


class BeamSearch:
    """The state of one request's search: its best hypotheses so far, in falling order of score."""

    def __init__(self, params: BeamSearchParams, stop_rules: StopRules, num_prompt_tokens: int) -> None:
        self.width = params.beam_width
        self.length_penalty = params.length_penalty
        self.early_stopping = params.early_stopping
        self.stop_rules = stop_rules
        self.num_prompt_tokens = num_prompt_tokens
        self.hypotheses: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Proposals that a beam must make: were all its best ones ends of texts, `width` others are left."""
        return self.width * max(2, 1 + len(self.stop_rules.token_ids))

    def advance(
        self, outputs: list[list[int]], scores: list[float], candidates: list[list[Sample]]
    ) -> list[Heir]:
        """The next beams, best first; none when the search is over.

        Args:
            outputs: what each beam has generated so far, all equally long.
            scores: sum of the log-probabilities of each.
            candidates: proposals of each, at least `num_candidates` (or the whole vocabulary).
        """
        proposals = [
            Heir(parent, sample, scores[parent] + sample.logprob)
            for parent, samples in enumerate(candidates)
            for sample in samples
        ]
        proposals.sort(key=lambda heir: heir.cumulative_logprob, reverse=True)
        length = len(outputs[0]) + 1
        at_limit = self.num_prompt_tokens + length >= self.stop_rules.max_length
        for heir in proposals[: self.width]:  # a worse one that ends is no hypothesis: it is forgotten
            if at_limit or self._is_stop(heir):
                self._put_aside(outputs[heir.parent], heir)
        heirs = [heir for heir in proposals if not self._is_stop(heir)][: self.width]
        if at_limit or self._is_over(heirs[0].cumulative_logprob, length):
            return []
        return heirs

    def _is_stop(self, heir: Heir) -> bool:
        return heir.sample.token_id in self.stop_rules.token_ids

    def _put_aside(self, output: list[int], heir: Heir) -> None:
        """Keep a finished text if it is among the `width` best."""
        token_id = heir.sample.token_id
        score = self._score(heir.cumulative_logprob, len(output) + 1)
        reason, stop_reason = self.stop_rules.check_token(token_id) or ("length", None)
        ended = Hypothesis([*output, token_id], heir.cumulative_logprob, score, reason, stop_reason)
        self.hypotheses = sorted([*self.hypotheses, ended], key=lambda h: h.score, reverse=True)[: self.width]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / length**self.length_penalty

    def _is_over(self, best: float, length: int) -> bool:
        """Whether the hypotheses are complete and, by the rule asked for, no beam can improve them.

        True ends with the first `width` hypotheses. False asks whether the best beam, were it to end
        now, would beat the worst hypothesis. "never" asks for the best it could still reach: its
        log-probability only falls, but a positive length penalty favours long texts, so it is taken
        at full length.
        """
        if len(self.hypotheses) < self.width:
            return False
        if self.early_stopping is True or self.width == 1:  # a width of 1 is greedy decoding
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.stop_rules.max_length - self.num_prompt_tokens
        return self._score(best, length) <= self.hypotheses[-1].score
