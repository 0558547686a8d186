"""From scores to tokens.

Temperature, top-k, top-p and min-p in transformers' order, then one draw a row. A row's randomness is a
function of (seed, output index, position) alone: what else is in the batch, how the prompt was cut into
chunks and whether the request was preempted cannot change it. (They can change the logits by a rounding
error, and a draw that falls within it.)

This module knows rows of logits, not requests.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from nanopaged.config import SamplingParams
from nanopaged.device import send
from nanopaged.text.outputs import Logprob, Sample

LOGITS_TILE = 256  # positions of a prompt that are projected to the vocabulary at once
RUN = 256  # tokens of the vocabulary whose probabilities are added up first when one is drawn


@dataclass(slots=True)
class SampleRow:
    """What to do with one row of logits: draw output `index`'s token at `position` of its sequence."""

    params: SamplingParams
    seed: int
    index: int
    position: int
    banned_token_ids: Collection[int]


class Draws:
    """The rows of a step, and what they ask for as tensors.

    All is sent in pinned memory, so it can be made while the device still computes the logits: a tensor made
    from a list would wait for them, and the device then for Python.
    """

    def __init__(self, rows: list[SampleRow], device: torch.device) -> None:
        params = [row.params for row in rows]
        self.num_logprobs = [p.logprobs for p in params]
        self.banned = send_banned([row.banned_token_ids for row in rows], device)
        greedy = [p.is_greedy for p in params]
        self.all_greedy, self.any_greedy = all(greedy), any(greedy)
        if self.all_greedy:
            return
        filters = np.array([p.filters for p in params], dtype=np.float32).T
        _, self.ks, self.top_ps, self.min_ps = filters  # on the host, to know what is to be done
        draws = [uniform(row.seed, row.index, row.position) for row in rows]
        columns = np.concatenate((filters, np.array([draws, greedy], dtype=np.float32)))
        numbers = send(columns[:, :, None], device)  # each [rows, 1]
        self.temperature, self.top_k, self.top_p, self.min_p, self.uniform, self.is_greedy = numbers


def send_banned(token_ids: list[Collection[int]], device: torch.device) -> Tensor | None:
    """The tokens banned in each row as [2, ...], rows and token ids; None if there are none."""
    pairs = [(row, token_id) for row, ids in enumerate(token_ids) for token_id in ids]
    return send(np.array(pairs).T, device) if pairs else None


def sample(logits: Tensor, draws: Draws) -> list[Sample]:
    """Draw one token for each row of `logits` [rows, vocab_size] (float32)."""
    logprobs = logits.log_softmax(-1)
    return describe(logprobs, choose(logprobs, draws), draws.num_logprobs)


def choose(logprobs: Tensor, draws: Draws) -> Tensor:
    """Token ids [rows]: the most likely for greedy rows, a random draw for the others."""
    if draws.banned is not None:
        logprobs = logprobs.index_put(tuple(draws.banned), logprobs.new_full((), -math.inf))
    if draws.all_greedy:
        return logprobs.argmax(-1)
    drawn = _draw(filtered_probs(logprobs, draws), draws.uniform)
    return torch.where(draws.is_greedy[:, 0] > 0, logprobs.argmax(-1), drawn) if draws.any_greedy else drawn


def filtered_probs(logits: Tensor, draws: Draws) -> Tensor:
    """Probabilities [rows, vocab_size] at the rows' temperatures, 0 for what top-k, top-p and min-p drop.

    Each filter runs only if a row asks for it; the other rows pass through unchanged. What is left of a row
    is not scaled up again to a sum of 1. Tokens as likely as the last one kept are kept, too.
    Log-probabilities will do for logits, and cannot overflow to +inf.
    """
    logits = logits / draws.temperature
    vocab_size = logits.shape[-1]
    has_top_k = draws.ks < vocab_size
    if has_top_k.any():
        best = logits.topk(int(draws.ks.max(where=has_top_k, initial=0)))  # [rows, largest k], falling
        last = draws.top_k.clamp(max=best.values.shape[-1]).long() - 1
        threshold = best.values.gather(1, last).masked_fill(draws.top_k >= vocab_size, -math.inf)
        logits.masked_fill_(logits < threshold, -math.inf)
    probs = logits.softmax(-1)
    has_top_p = draws.top_ps < 1.0
    if has_top_p.any():
        all_have_k = has_top_k[has_top_p].all()  # then the likeliest are at hand, and nothing else is left
        rising = probs.gather(1, best.indices).flip(-1) if all_have_k else _sort(probs)
        # A token is dropped if it and all that are less likely come to 1 - top_p at most, but never the last.
        # top_p = 0.8    rising 0.1 0.4 0.5    sums 0.1 0.5 1.0    one is dropped: the threshold is 0.4
        sums = rising.cumsum(-1)
        sums += 1.0 - sums[:, -1:]  # tokens as likely as the k-th, which are kept, but not at hand
        num_dropped = (sums <= 1.0 - draws.top_p).sum(-1, keepdim=True)
        threshold = rising.gather(1, num_dropped.clamp(max=rising.shape[-1] - 1))
        probs.masked_fill_((probs < threshold) & (draws.top_p < 1.0), 0.0)
    if draws.min_ps.any():
        probs.masked_fill_(probs < draws.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def _sort(probs: Tensor) -> Tensor:
    """Each row in rising order. On a CPU numpy is ten times as fast as PyTorch, which sorts indices, too."""
    if probs.device.type == "cpu":
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1))
    return probs.sort(-1).values


def _draw(probs: Tensor, u: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution at the row's uniform number u [rows, 1].

    A running sum over a whole vocabulary is slow, so first a run of tokens is found, then one of them.

        RUN = 2    probabilities .1 .2 | .3 .0 | .4    runs .3 .3 .4    u = .5: 2/3 of the second, token 2

    Running sums are in float64, which adds up float32 numbers next to exactly: what has no probability is not
    drawn by a rounding error.
    """
    vocab_size = probs.shape[-1]
    length = min(RUN, vocab_size)
    whole = vocab_size // length * length
    rest = probs[:, whole:].sum(-1, keepdim=True)  # what is left over, if anything
    runs = torch.cat((probs[:, :whole].unflatten(1, (-1, length)).sum(-1), rest), dim=1).double()
    ends = runs.cumsum(-1)
    target = u * ends[:, -1:]
    run = torch.searchsorted(ends, target, right=True).clamp(max=runs.shape[-1] - 1)  # NaN is beyond all
    weight = runs.gather(1, run)
    share = ((target - ends.gather(1, run) + weight) / weight).clamp(0.0, 1.0 - 2.0**-53)
    tokens = run * length + torch.arange(length, device=run.device)  # [rows, length]
    inside = probs.gather(1, tokens.clamp(max=vocab_size - 1)).masked_fill(tokens >= vocab_size, 0.0)
    ends = inside.double().cumsum(-1)
    drawn = tokens[:, :1] + torch.searchsorted(ends, share * ends[:, -1:], right=True)
    return drawn[:, 0].clamp(max=vocab_size - 1)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments: 24 bits of a hash, exact in float32."""
    message = struct.pack("<QQQ", seed % 2**64, index, position)
    return (xxhash.xxh3_64_intdigest(message) >> 40) / 2**24


def most_likely(logits: Tensor, num: list[int], banned: Tensor | None) -> list[list[Sample]]:
    """For each row of `logits` [rows, vocab_size] its `num` most likely tokens, in falling order.

    Args:
        banned: [2, ...]: rows and token ids that must not be among them.
    """
    logprobs = logits.log_softmax(-1)
    if banned is not None:
        logprobs.index_put_(tuple(banned), logprobs.new_full((), -math.inf))
    best = logprobs.topk(min(max(num), logits.shape[-1]))
    ids, values = torch.stack((best.indices.double(), best.values.double())).tolist()
    return [
        list(map(Sample, map(int, row_ids[:n]), row_values[:n]))
        for row_ids, row_values, n in zip(ids, values, num, strict=True)
    ]


def describe(logprobs: Tensor, token_ids: Tensor, num_logprobs: list[int | None]) -> list[Sample]:
    """Each row's token with its log-probability, and beside it the most likely ones where a row asks.

    Args:
        logprobs: [rows, vocab_size], of all tokens.
        token_ids: [rows], the drawn (or, in a prompt, the actual) tokens.
        num_logprobs: how many of the most likely each row wants; None wants no table at all.
    """
    chosen = logprobs.gather(1, token_ids[:, None])
    columns = [token_ids[:, None], chosen]
    most = max((k for k in num_logprobs if k is not None), default=None)
    if most is not None:
        ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
        columns += [ranks, *logprobs.topk(most)]
    # All comes to the host in one piece, so that it waits once; float64 holds ids and scores exactly.
    fetched = torch.cat([column.double() for column in columns], dim=1).T.tolist()
    samples = list(map(Sample, map(int, fetched[0]), fetched[1]))
    if most is not None:
        values, ids = fetched[3 : 3 + most], fetched[3 + most :]
        for row, (sample, k) in enumerate(zip(samples, num_logprobs, strict=True)):
            if k is not None:
                sample.logprobs = {int(ids[i][row]): Logprob(values[i][row], i + 1) for i in range(k)}
                chosen_one = Logprob(sample.logprob, int(fetched[2][row]))
                sample.logprobs.setdefault(sample.token_id, chosen_one)
    return samples
