"""Who gets a token in this step, and which.

Only sequences that catch up do: the hidden state of their last token is turned into scores for all tokens,
and from those one is drawn, or several (a prompt about to fork), or the most likely are proposed (a beam).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from nanopaged.batch import ScheduledBatch
from nanopaged.device import send
from nanopaged.outputs import Sample
from nanopaged.sampler import Draws, SampleRow, most_likely, sample, send_banned
from nanopaged.sequence import Sequence


class NextTokens:
    """What is to be drawn after a batch: made before the model runs, asked for the tokens afterwards.

    Three sequences with 1, 4 and 1 new tokens, of which the second has not caught up:

        hidden states     0 │ 1 2 3 4 │ 5         rows of those that catch up: 0, 5
    """

    def __init__(self, batch: ScheduledBatch, device: torch.device) -> None:
        sequences = batch.sequences
        self.num_sequences = len(sequences)
        self.ready = [i for i, seq in enumerate(sequences) if seq.catches_up]
        self.sequences = [sequences[i] for i in self.ready]
        last_rows = np.cumsum([seq.num_new_tokens for seq in sequences]) - 1
        self.hidden_rows = send(last_rows[self.ready], device)
        self.beams: list[int] = []  # which of the ready ones are beams
        drawers: list[int] = []  # for each token to draw, which of them it is for
        rows: list[SampleRow] = []
        for i, seq in enumerate(self.sequences):
            if seq.request.beam_search is not None:
                self.beams.append(i)
            else:
                wanted = _sample_rows(seq)
                rows += wanted
                drawers += [i] * len(wanted)
        self.drawers = drawers
        one_each = drawers == list(range(len(self.ready)))
        self.logit_rows = None if one_each else send(np.array(drawers, dtype=np.int64), device)
        self.draws = Draws(rows, device)
        beams = [self.sequences[i] for i in self.beams]
        self.num_candidates = [beam.request.beam_search.num_candidates for beam in beams]
        self.beams_banned = send_banned([banned_token_ids(beam) for beam in beams], device)
        self.beam_rows = send(np.array(self.beams, dtype=np.int64), device)

    def draw(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> list[list[Sample]]:
        """For each sequence of the batch what may follow it; nothing for those that have not caught up.

        Raises:
            FloatingPointError: the model's scores are not finite.
        """
        samples: list[list[Sample]] = [[] for _ in range(self.num_sequences)]
        if not self.ready:
            return samples
        logits = logits_of(hidden[self.hidden_rows])  # [ready, vocab_size]
        if self.beams:
            proposed = most_likely(logits[self.beam_rows], self.num_candidates, self.beams_banned)
            for i, proposals in zip(self.beams, proposed, strict=True):
                samples[self.ready[i]] = proposals
        if self.drawers:
            chosen = logits if self.logit_rows is None else logits[self.logit_rows]
            for i, drawn in zip(self.drawers, sample(chosen, self.draws), strict=True):
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
