"""Who gets a token in this step, and which.

Only sequences that catch up do: the hidden state of their last token is turned into scores for all tokens,
and from those one is drawn, or several (a prompt about to fork), or the most likely are proposed (a beam).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import ScheduledBatch
from nanopaged.device import send
from nanopaged.outputs import Sample
from nanopaged.sampler import Draws, SampleRow, most_likely, sample, send_banned
from nanopaged.sequence import Sequence


class NextTokens:
    """What is to be drawn after a batch: made while the device runs the model, and then asked for tokens.

    Three sequences with 1, 4 and 1 new tokens, of which the second has not caught up:

        hidden states     0 │ 1 2 3 4 │ 5         rows of those that catch up: 0, 5
    """

    def __init__(self, batch: ScheduledBatch, device: torch.device) -> None:
        sequences = batch.sequences
        self.num_sequences = len(sequences)
        self.ready = [i for i, seq in enumerate(sequences) if seq.catches_up]
        self.sequences = [sequences[i] for i in self.ready]
        ends = list(accumulate(seq.num_new_tokens for seq in sequences))
        self.beams: list[int] = []  # which of the ready ones are beams
        self.drawers: list[int] = []  # for each token to draw, which of them it is for
        rows: list[SampleRow] = []
        for i, seq in enumerate(self.sequences):
            if seq.request.beam_search is not None:
                self.beams.append(i)
            else:
                wanted = _sample_rows(seq)
                rows += wanted
                self.drawers += [i] * len(wanted)
        self.hidden_rows = Rows([ends[i] - 1 for i in self.ready], max(ends, default=0), device)
        self.drawn_rows = Rows(self.drawers, len(self.ready), device)
        self.beam_rows = Rows(self.beams, len(self.ready), device)
        self.draws = Draws(rows, device)
        beams = [self.sequences[i] for i in self.beams]
        self.num_candidates = [beam.request.beam_search.num_candidates for beam in beams]
        self.beams_banned = send_banned([banned_token_ids(beam) for beam in beams], device)

    def draw(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> list[list[Sample]]:
        """For each sequence of the batch what may follow it; nothing for those that have not caught up.

        Raises:
            FloatingPointError: the model's scores are not finite.
        """
        samples: list[list[Sample]] = [[] for _ in range(self.num_sequences)]
        if not self.ready:
            return samples
        logits = logits_of(self.hidden_rows.of(hidden))  # [ready, vocab_size]
        if self.beams:
            proposed = most_likely(self.beam_rows.of(logits), self.num_candidates, self.beams_banned)
            for i, proposals in zip(self.beams, proposed, strict=True):
                samples[self.ready[i]] = proposals
        if self.drawers:
            drawn_each = sample(self.drawn_rows.of(logits), self.draws)
            for i, drawn in zip(self.drawers, drawn_each, strict=True):
                samples[self.ready[i]].append(drawn)
        self._check_finite([samples[i][0].logprob for i in self.ready], hidden.dtype)
        return samples

    def _check_finite(self, logprobs: list[float], dtype: torch.dtype) -> None:
        if math.isfinite(sum(logprobs)):
            return
        seq = next(
            seq for seq, value in zip(self.sequences, logprobs, strict=True) if not math.isfinite(value)
        )
        raise FloatingPointError(
            f"the model's scores for request {seq.request.request_id!r} at position {seq.num_tokens} are "
            f"not finite in {dtype}: abort the request, or use a dtype with a wider range"
        )


class Rows:
    """Some rows of a tensor, sent to its device in time; nothing is done if they are all, in order."""

    def __init__(self, rows: list[int], num_rows: int, device: torch.device) -> None:
        self.rows = None
        if rows and (len(rows) != num_rows or rows != list(range(num_rows))):
            self.rows = send(np.array(rows), device)

    def of(self, tensor: Tensor) -> Tensor:
        """Those rows of `tensor` [num_rows, ...]."""
        return tensor if self.rows is None else tensor[self.rows]


def _sample_rows(seq: Sequence) -> list[SampleRow]:
    """The draws to make after `seq`: one, or one for each output if the request is about to fork."""
    request, position, banned = seq.request, seq.num_tokens, banned_token_ids(seq)
    if not request.unforked:
        return [SampleRow(request.params, request.seed, seq.index, position, banned)]
    indices = range(request.params.num_sequences)
    return [SampleRow(request.params, request.seed, i, position, banned) for i in indices]


def banned_token_ids(seq: Sequence) -> Collection[int]:
    """What must not follow `seq` yet."""
    return seq.request.stop_rules.banned_token_ids(seq)
