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

import torch
import xxhash
from torch import Tensor

from nanopaged.config import SamplingParams
from nanopaged.outputs import Logprob, Logprobs, Sample


@dataclass(slots=True)
class SampleRow:
    """What to do with one row of logits: draw output `index`'s token at `position` of its sequence."""

    params: SamplingParams
    seed: int
    index: int
    position: int
    banned_token_ids: Collection[int]


def sample(logits: Tensor, rows: list[SampleRow]) -> list[Sample]:
    """Draw one token for each row of `logits` [len(rows), vocab_size] (float32)."""
    token_ids = choose(logits, rows)
    num_logprobs = [row.params.logprobs for row in rows]
    logprobs = logits.log_softmax(-1)
    scores = logprobs.gather(1, token_ids[:, None])[:, 0]
    tables = top_logprobs(logprobs, token_ids, num_logprobs)
    return [Sample(*drawn) for drawn in zip(token_ids.tolist(), scores.tolist(), tables, strict=True)]


def choose(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Token ids [len(rows)]: the most likely for greedy rows, a random draw for the others."""
    logits = _ban(logits, rows)
    greedy = logits.argmax(-1)
    if all(row.params.is_greedy for row in rows):
        return greedy
    is_greedy = torch.tensor([row.params.is_greedy for row in rows], device=logits.device)
    drawn = _draw(torch.softmax(filter_logits(logits, [row.params for row in rows]), -1), rows)
    return torch.where(is_greedy, greedy, drawn)


def _ban(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    banned = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned_token_ids]
    if not banned:
        return logits
    row_ids, token_ids = torch.tensor(banned, device=logits.device).T
    return logits.index_put((row_ids, token_ids), logits.new_tensor(-math.inf))


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Scale by temperature, then set what top-k, top-p and min-p drop to -inf. Ties at the k-th are kept.

    Each filter runs only if a row asks for it; the other rows pass through unchanged.
    """
    logits = logits - logits.amax(-1, keepdim=True)  # so that no division can overflow to +inf
    temperature = [1.0 if p.is_greedy else max(p.temperature, 1e-6) for p in params]
    logits /= _column(temperature, logits)
    vocab_size = logits.shape[-1]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    if min(top_k) < vocab_size:
        best = logits.topk(max(k for k in top_k if k < vocab_size)).values  # [rows, largest k], falling
        last = torch.tensor([min(k, best.shape[1]) - 1 for k in top_k], device=logits.device)
        threshold = best.gather(1, last[:, None])
        threshold[[k == vocab_size for k in top_k]] = -math.inf
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if any(p.top_p < 1.0 for p in params):
        logits = _filter_top_p(logits, _column([p.top_p for p in params], logits))
    if any(p.min_p > 0.0 for p in params):
        lowest = _column([math.log(p.min_p) if p.min_p else -math.inf for p in params], logits)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + lowest, -math.inf)
    return logits


def _filter_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep a token if those more likely than it do not reach `top_p` together.

    top_p = 0.8    probabilities 0.5 0.4 0.1    before each 0 0.5 0.9    kept: the first two
    """
    falling, order = logits.sort(-1, descending=True)
    probs = falling.softmax(-1)
    before = probs.cumsum(-1) - probs
    drop = (before >= top_p) & (top_p < 1.0)
    return logits.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -math.inf)


def _draw(probs: Tensor, rows: list[SampleRow]) -> Tensor:
    """One token a row by inverting the cumulative distribution at the row's uniform number."""
    cumulative = probs.cumsum(-1)
    u = _column([uniform(row.seed, row.index, row.position) for row in rows], probs)
    token_ids = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    return token_ids[:, 0].clamp_max(probs.shape[-1] - 1)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments: 24 bits of a hash, exact in float32."""
    message = struct.pack("<QQQ", seed % 2**64, index, position)
    return (xxhash.xxh3_64_intdigest(message) >> 40) / 2**24


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def most_likely(logits: Tensor, k: int, banned_token_ids: Collection[int]) -> list[Sample]:
    """The k most likely tokens after one row of `logits` [vocab_size], in falling order."""
    logprobs = logits.log_softmax(-1)
    if banned_token_ids:
        logprobs[list(banned_token_ids)] = -math.inf
    values, ids = logprobs.topk(min(k, len(logprobs)))
    return [Sample(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]


def top_logprobs(
    logprobs: Tensor, token_ids: Tensor, num_logprobs: list[int | None]
) -> list[Logprobs | None]:
    """For each row that asks: the chosen token's log-probability and those of the most likely ones.

    Args:
        logprobs: [rows, vocab_size], of all tokens.
        token_ids: [rows], the chosen (or, in a prompt, the actual) tokens.
        num_logprobs: how many of the most likely each row wants; None wants nothing at all.
    """
    if all(k is None for k in num_logprobs):
        return [None] * len(num_logprobs)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(max(k for k in num_logprobs if k is not None))
    table: list[Logprobs | None] = []
    columns = (token_ids, chosen[:, 0], ranks, best.values, best.indices)
    for k, token_id, logprob, rank, values, ids in zip(
        num_logprobs, *(column.tolist() for column in columns), strict=True
    ):
        if k is None:
            table.append(None)
            continue
        row = {ids[i]: Logprob(values[i], i + 1) for i in range(k)}
        row.setdefault(token_id, Logprob(logprob, rank))
        table.append(row)
    return table
