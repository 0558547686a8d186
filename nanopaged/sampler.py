"""Sampling: which sequences get a token in a step, and which token.

A sequence gets a token if the step computes its last known token. From the logits of that token one token is
drawn; n tokens, if a request for n outputs has just finished its prompt; for a beam, the most likely tokens.
A draw's random number is a hash of (seed, output index, position): the rest of the batch does not matter.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import xxhash
from torch import Tensor

from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.kv_cache import take_rows, to_device
from nanopaged.outputs import Logprob
from nanopaged.sequence import NonFiniteLogits, NoTokenAllowed, Sample, ScheduledBatch, Sequence

LOGITS_TILE = (
    256  # positions of a prompt whose logits are computed at once: [256, vocab_size] in float32
)
VOCAB_CHUNK = 256  # tokens in a chunk of the vocabulary, see `draw_tokens`
GREEDY = SamplingParams(temperature=0)


@dataclass(slots=True)
class Draw:
    """The parameters of one draw: the token at `position` of output `index` of a request."""

    params: SamplingParams
    seed: int
    index: int
    position: int
    banned_token_ids: Collection[int]
    token_counts: dict[int, int] | None = None  # see `token_counts`; if the params have penalties
    num_candidates: int = 0  # of a beam: return the log-probabilities of so many most likely tokens


class SamplingMetadata:
    """The parameters of all draws of a step, as tensors on the device; row i is for row i of the logits.

    Bans and penalties change logits of single tokens, so they are sent as lists of (row, token id).
    """

    def __init__(self, draws: list[Draw], device: torch.device) -> None:
        self.num_logprobs = [draw.num_candidates or draw.params.logprobs for draw in draws]
        # Nothing is banned in row 0, tokens 3 and 5 in row 1: (1, 3), (1, 5)
        banned = [
            (row, token_id) for row, draw in enumerate(draws) for token_id in draw.banned_token_ids
        ]
        self.banned = to_device(np.array(banned).T, device) if banned else None  # [2, num_banned]
        self.penalties, counted = None, [draw.token_counts or {} for draw in draws]
        if any(counted):
            rows = np.repeat(np.arange(len(draws)), list(map(len, counted)))
            ids, counts = list(chain(*counted)), list(chain(*map(dict.values, counted)))
            penalties = np.array([draw.params.penalties or (1, 0, 0) for draw in draws])[rows].T
            where, numbers = (
                np.stack((rows, ids)),
                np.vstack((counts, penalties)).astype(np.float32),
            )
            self.penalties = to_device(where, device), to_device(numbers, device)
        is_greedy = [draw.params.temperature == 0 for draw in draws]
        self.all_greedy, self.any_greedy = all(is_greedy), any(is_greedy)
        if self.all_greedy:
            return
        noise = [uniform(draw.seed, draw.index, draw.position) for draw in draws]
        filters = zip(*[draw.params.filters for draw in draws], strict=True)
        numbers = np.array((*filters, noise, is_greedy), dtype=np.float32)  # [6, num_draws]
        self.top_ks, self.top_ps, self.min_ps = numbers[
            1:4
        ]  # on the host, to decide which filters to run
        numbers = to_device(numbers[:, :, None], device)  # each [num_draws, 1]
        self.temperature, self.top_k, self.top_p, self.min_p, self.uniform, self.is_greedy = numbers


def uniform(seed: int, index: int, position: int) -> float:
    """A pseudo-random number in [0, 1): 24 bits, which float32 holds exactly."""
    return (
        xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed % 2**64, index, position)) >> 40
    ) / 2**24


def sample_next_tokens(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
    """The samples of a `StepResult`: for each sequence of the batch, the tokens that may follow it.

    Args:
        logits: float32 [num_ready, vocab_size], a row for each sequence that needs a sample.
    """
    samples: list[list[Sample]] = [[] for _ in batch.sequences]
    ready = [pair for pair in zip(batch.sequences, samples, strict=True) if pair[0].needs_sample]
    draws, rows = [], []  # rows: of each draw, in the logits
    for row, (seq, _) in enumerate(ready):
        request, params, banned = seq.request, seq.request.params, seq.banned_token_ids
        if isinstance(
            params, BeamSearchParams
        ):  # the most likely token, with the next ones in likelihood
            num = min(request.num_candidates + len(banned), logits.shape[-1])
            draws.append(Draw(GREEDY, 0, 0, seq.num_tokens, banned, num_candidates=num))
        else:  # n outputs at the end of a prompt, else the next token of one
            counts = token_counts(seq) if params.penalties else None
            for index in range(params.n) if request.awaits_fork else (seq.index,):
                draws.append(Draw(params, request.seed, index, seq.num_tokens, banned, counts))
        rows += [row] * (len(draws) - len(rows))
    tokens = sample(take_rows(logits, rows), SamplingMetadata(draws, logits.device))
    for (seq, its_samples), token in zip([ready[row] for row in rows], tokens, strict=True):
        if not math.isfinite(token.logprob):
            error = NoTokenAllowed if token.logprob == -math.inf else NonFiniteLogits
            raise error(seq.request.request_id, seq.num_tokens)
        its_samples += candidates(seq, token) if seq.request.is_beam_search else (token,)
    return samples


def token_counts(seq: Sequence) -> dict[int, int]:
    """Each token that penalties change → how often it was generated: 0 for those of the prompt alone."""
    end, params = seq.request.num_prompt_tokens, seq.request.params
    assert isinstance(params, SamplingParams)  # beams have no penalties
    prompt = seq.token_ids[:end] if params.repetition_penalty != 1 else ()
    return dict.fromkeys(prompt, 0) | Counter(seq.token_ids[end:])


def candidates(beam: Sequence, token: Sample) -> list[Sample]:
    """The most likely next tokens of a beam that may be drawn, in falling order, of `token.logprobs`."""
    allowed = []
    for token_id, logprob in (token.logprobs or {}).items():
        if token_id not in beam.banned_token_ids and logprob.logprob != -math.inf:
            allowed.append(Sample(token_id, logprob.logprob))
    return allowed[: beam.request.num_candidates]


def sample(logits: Tensor, metadata: SamplingMetadata) -> list[Sample]:
    """One token for each row of `logits` [num_rows, vocab_size] (float32): the most likely one, or a draw.
    If none is allowed, it is any token, with a log-probability of -inf."""
    logprobs = allowed = logits.log_softmax(-1)
    if metadata.penalties is not None:
        allowed = penalize(logits, *metadata.penalties)
    if metadata.banned is not None:
        allowed = allowed.index_put(tuple(metadata.banned), logprobs.new_full((), -math.inf))
    if metadata.all_greedy:
        token_ids = allowed.argmax(-1)
    else:
        token_ids = draw_tokens(filtered_probs(allowed, metadata), metadata.uniform)
        if metadata.any_greedy:
            token_ids = torch.where(metadata.is_greedy[:, 0] > 0, allowed.argmax(-1), token_ids)
    return gather_logprobs(logprobs, token_ids, metadata.num_logprobs, allowed)


def penalize(logits: Tensor, where: Tensor, numbers: Tensor) -> Tensor:
    """A copy of the logits with penalties applied, as vLLM defines them; see `SamplingParams`.

        repetition 2, frequency 0.5, presence 1; logits 3 and -3 of a token generated 4 times:
        3 / 2 - 4 · 0.5 - 1 = -1.5 and -3 · 2 - 4 · 0.5 - 1 = -9

    Args:
        logits: [num_rows, vocab_size].
        where: [2 (row, token id), num], the logits to change.
        numbers: for each of them [4 (times generated, repetition, frequency, presence penalty), num].
    """
    count, repetition, frequency, presence = numbers
    values = logits[tuple(where)]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count + presence * (count > 0)
    return logits.index_put(tuple(where), values)


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """[num_rows, vocab_size] probabilities at each row's temperature; 0 for the tokens that filters drop.

    The remaining probabilities are not rescaled to a sum of 1. Ties with the last kept token are kept, too.
    """
    logits = logits / metadata.temperature
    vocab_size = logits.shape[-1]
    has_top_k = metadata.top_ks < vocab_size
    if has_top_k.any():
        best = logits.topk(
            int(metadata.top_ks.max(where=has_top_k, initial=0))
        )  # [num_rows, largest k]
        last = metadata.top_k.clamp(max=best.values.shape[-1]).long() - 1
        threshold = best.values.gather(1, last).masked_fill(metadata.top_k >= vocab_size, -math.inf)
        logits.masked_fill_(logits < threshold, -math.inf)
    probs = logits.softmax(-1)
    has_top_p = metadata.top_ps < 1.0
    if has_top_p.any():
        if has_top_k[has_top_p].all():  # `best` is sorted, and has all tokens left but ties
            rising = probs.gather(1, best.indices).flip(-1)
        elif probs.device.type == "cpu":  # ten times as fast as torch, which sorts indices as well
            rising = torch.from_numpy(np.sort(probs.numpy(), axis=-1))
        else:
            rising = probs.sort(-1).values
        # A token is dropped if it and all less likely ones sum up to at most 1 - top_p. The most likely one
        # is always kept. top_p = 0.8: rising 0.1 0.4 0.5, sums 0.1 0.5 1.0, one dropped, threshold 0.4
        sums = rising.cumsum(-1)
        sums += 1.0 - sums[:, -1:]  # add the ties with the k-th token, which are not in `best`
        num_dropped = (sums <= 1.0 - metadata.top_p).sum(-1, keepdim=True)
        threshold = rising.gather(1, num_dropped.clamp(max=rising.shape[-1] - 1))
        probs.masked_fill_((probs < threshold) & (metadata.top_p < 1.0), 0.0)
    if metadata.min_ps.any():
        probs.masked_fill_(probs < metadata.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def draw_tokens(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token id for each row, by inverting the cumulative distribution at u:

        torch.searchsorted(probs.cumsum(-1), u * probs.sum(-1, keepdim=True), right=True)

    That sum over the whole vocabulary is slow, so it is taken over the sums of chunks first, then over the
    tokens of one chunk.

        VOCAB_CHUNK = 2    probs .1 .2 | .3 .0 | .4    sums of chunks .3 .3 .4, cumulative .3 .6 1.
        u = .5: the second chunk, at (.5 - .3) / .3 = 2/3 of it: token 2

    Sums are in float64, which adds float32 numbers almost exactly: no token of probability 0 is drawn.

    Args:
        probs: [num_rows, vocab_size]; their sum need not be 1.
        u: [num_rows, 1], in [0, 1).
    """
    vocab_size = probs.shape[-1]
    length = min(VOCAB_CHUNK, vocab_size)
    whole = vocab_size // length * length
    rest = probs[:, whole:].sum(
        -1, keepdim=True
    )  # the shorter chunk at the end, 0 if there is none
    chunks = torch.cat((probs[:, :whole].unflatten(1, (-1, length)).sum(-1), rest), dim=1).double()
    ends = chunks.cumsum(-1)
    target = u * ends[:, -1:]
    chunk = torch.searchsorted(ends, target, right=True).clamp(
        max=chunks.shape[-1] - 1
    )  # NaN: past the end
    weight = chunks.gather(1, chunk)
    share = ((target - ends.gather(1, chunk) + weight) / weight).clamp(0.0, 1.0 - 2.0**-53)
    tokens = chunk * length + torch.arange(length, device=chunk.device)  # [num_rows, length]
    inside = probs.gather(1, tokens.clamp(max=vocab_size - 1)).masked_fill(
        tokens >= vocab_size, 0.0
    )
    ends = inside.double().cumsum(-1)
    drawn = tokens[:, :1] + torch.searchsorted(ends, share * ends[:, -1:], right=True)
    return drawn[:, 0].clamp(max=vocab_size - 1)


def gather_logprobs(
    logprobs: Tensor, token_ids: Tensor, num_logprobs: list[int | None], allowed: Tensor
) -> list[Sample]:
    """Each row's token and its log-probability; if wanted, the most likely tokens and theirs as well.

    Args:
        logprobs: [num_rows, vocab_size].
        token_ids: [num_rows], the drawn tokens (or the actual ones, in a prompt).
        num_logprobs: for each row, how many of the most likely tokens to return; None for no `logprobs`.
        allowed: scores like `logprobs`, -inf where a token is not allowed; so is then its log-probability.
    """
    token_ids = token_ids[:, None]
    chosen = logprobs.gather(1, token_ids)
    if allowed is not logprobs:
        chosen = chosen.masked_fill(allowed.gather(1, token_ids) == -math.inf, -math.inf)
    columns = [token_ids, chosen.double()]
    wanted = [(row, num) for row, num in enumerate(num_logprobs) if num is not None]
    most = max([num for _, num in wanted], default=0)
    if wanted:
        ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
        columns += [ranks, *logprobs.topk(most)]
    # One tensor, so that the host waits once. float64 holds token ids and log-probabilities exactly.
    fetched = torch.cat(columns, dim=1).T.tolist()
    samples = list(map(Sample, map(int, fetched[0]), fetched[1]))
    for row, num in wanted:
        token, values, ids = (
            samples[row],
            fetched[3 : 3 + num],
            fetched[3 + most :],
        )  # by falling likelihood
        token.logprobs = {int(ids[i][row]): Logprob(values[i][row], i + 1) for i in range(num)}
        token.logprobs.setdefault(token.token_id, Logprob(token.logprob, int(fetched[2][row])))
    return samples
