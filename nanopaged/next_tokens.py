"""Who gets a token in this step, and which.

Only sequences that catch up do: the hidden state of their last token is turned into scores for all tokens,
and from those one is drawn, or several (a prompt about to fork), or the most likely are proposed (a beam).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nanopaged.device import send
from nanopaged.sampler import Draws, SampleRow, most_likely, sample, send_banned
from nanopaged.sequence import ScheduledBatch, Sequence
from nanopaged.text.outputs import Sample


def draw_next_tokens(
    batch: ScheduledBatch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> list[list[Sample]]:
    """For each sequence of the batch what may follow it; nothing for those that have not caught up.

    Three sequences with 1, 4 and 1 new tokens, of which the second has not caught up:

        hidden states     0 │ 1 2 3 4 │ 5         rows of those that catch up: 0, 5

    A GPU is still computing `hidden` when this begins. Whatever is to be sent to it is sent before anything
    is fetched from it.

    Args:
        hidden: [num_tokens, hidden_size], of all tokens of the batch.
        logits_of: hidden states [n, hidden_size] → float32 scores [n, vocab_size].

    Raises:
        FloatingPointError: the model's scores are not finite.
    """
    samples: list[list[Sample]] = [[] for _ in batch.sequences]
    ready = [i for i, seq in enumerate(batch.sequences) if seq.needs_sample]
    if not ready:
        return samples
    ends = list(accumulate(seq.num_scheduled_tokens for seq in batch.sequences))
    logits = logits_of(_take(hidden, [ends[i] - 1 for i in ready]))  # [ready, vocab_size]
    sequences = [batch.sequences[i] for i in ready]
    beams: list[int] = []  # their rows of `logits`
    drawers: list[int] = []  # for each token to draw, whose row it is drawn from
    to_draw: list[SampleRow] = []
    for row, seq in enumerate(sequences):
        if seq.request.is_beam_search:
            beams.append(row)
        else:
            wanted = _sample_rows(seq)
            to_draw += wanted
            drawers += [row] * len(wanted)
    draws, drawn_logits = Draws(to_draw, hidden.device), _take(logits, drawers)
    if beams:
        for row, proposals in zip(beams, _propose(logits, sequences, beams), strict=True):
            samples[ready[row]] = proposals
    if drawers:
        for row, drawn in zip(drawers, sample(drawn_logits, draws), strict=True):
            samples[ready[row]].append(drawn)
    _check_finite(sequences, [samples[i][0].logprob for i in ready], hidden.dtype)
    return samples


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """Those rows of a tensor; nothing is sent or copied if they are the first ones, in order."""
    if rows == list(range(len(rows))):
        return tensor[: len(rows)]
    return tensor[send(np.array(rows), tensor.device)]


def _propose(logits: Tensor, sequences: list[Sequence], beams: list[int]) -> list[list[Sample]]:
    """What each beam, a row of `logits` and of `sequences`, proposes to be followed by."""
    num = [sequences[row].request.num_candidates for row in beams]
    banned = send_banned([sequences[row].banned_token_ids for row in beams], logits.device)
    return most_likely(_take(logits, beams), num, banned)


def _check_finite(sequences: list[Sequence], logprobs: list[float], dtype: torch.dtype) -> None:
    if math.isfinite(sum(logprobs)):
        return
    seq = next(seq for seq, value in zip(sequences, logprobs, strict=True) if not math.isfinite(value))
    raise FloatingPointError(
        f"the model's scores for request {seq.request.request_id!r} at position {seq.num_tokens} are "
        f"not finite in {dtype}: abort the request, or use a dtype with a wider range"
    )


def _sample_rows(seq: Sequence) -> list[SampleRow]:
    """The draws to make after `seq`: one, or one for each output if the request is about to fork."""
    request, position, banned = seq.request, seq.num_tokens, seq.banned_token_ids
    if not request.prompt_phase:
        return [SampleRow(request.params, request.seed, seq.index, position, banned)]
    indices = range(request.params.num_sequences)
    return [SampleRow(request.params, request.seed, i, position, banned) for i in indices]
