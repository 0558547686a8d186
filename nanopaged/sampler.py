"""Sampling: which sequences get a token in a step, and which token.

A sequence gets a token if the step computes its last known token. Usually one token is drawn from
the logits of that token. A request for n outputs draws n tokens when its prompt is computed, and a
beam takes the most likely ones. A draw's random number is a hash of (seed, output index, position),
so it does not depend on the rest of the batch.
"""

import math
import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from nanopaged.config import NO_PENALTIES, BeamSearchParams, SamplingParams
from nanopaged.kv_cache import take_rows, to_device
from nanopaged.outputs import Logprob
from nanopaged.sequence import NonFiniteLogits, Sample, ScheduledBatch, Sequence

LOGITS_TILE = 256  # positions of a prompt that are scored together: [256, vocab_size] logits
VOCAB_CHUNK = 256  # tokens in a chunk of the vocabulary, see `draw_tokens`
SOFTMAX_ROWS = 8  # whose log_softmax is computed together on a CPU: they fit into a cache


@dataclass(slots=True)
class Draw:
    """The parameters of one draw.

    Fields:
        uniform: a number in [0, 1) that chooses the token; see `draw_tokens`.
        token_counts: each token that penalties change → how often it was generated.
    """

    params: SamplingParams
    uniform: float
    banned_token_ids: Collection[int]
    token_counts: dict[int, int] = field(default_factory=dict)


class SamplingMetadata:
    """The parameters of all draws of a step, as tensors on the device. Row i is for logits[i].

    Bans and penalties change the logits of single tokens, so they are sent as lists of (row,
    token).
    """

    def __init__(self, draws: list[Draw], device: torch.device) -> None:
        banned_rows = []
        banned_ids = []
        penalties = []
        for row, draw in enumerate(draws):
            banned_rows += [row] * len(draw.banned_token_ids)
            banned_ids += draw.banned_token_ids
            for token_id, count in draw.token_counts.items():
                penalties.append((row, token_id, count, *draw.params.penalties))
        self.banned = None
        if banned_rows:
            # Nothing is banned in row 0, tokens 3 and 5 in row 1: [[1, 1], [3, 5]]
            self.banned = to_device((banned_rows, banned_ids), device)
        self.penalties = None
        if penalties:  # see `penalize`
            self.penalties = to_device(np.array(penalties, dtype=np.float32).T, device)
        self.num_logprobs = [draw.params.logprobs for draw in draws]
        self.all_greedy = all(draw.params.temperature == 0 for draw in draws)
        if self.all_greedy:
            return
        numbers = [(*draw.params.filters, draw.uniform) for draw in draws]
        table = np.array(numbers, dtype=np.float32)  # [num_draws, 5]
        # On the host as well, to decide which filters to run.
        _, self.host_top_k, self.host_top_p, self.host_min_p, _ = table.T
        columns = to_device(table, device).split(1, dim=1)  # each [num_draws, 1]
        self.temperature, self.top_k, self.top_p, self.min_p, self.uniform = columns


def random_number(seed: int, index: int, position: int) -> float:
    """A draw's number in [0, 1), pseudo-random: 24 bits, which float32 holds exactly."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed % 2**64, index, position))
    return (digest >> 40) / 2**24


def sample_next_tokens(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
    """The samples of a `StepResult`: for each sequence of the batch, the tokens that may follow it.

    Args:
        logits: [num_ready, vocab_size], a row for each sequence that needs a sample.
    """
    draws = []
    logits_rows = []  # one for each draw
    ready = [seq for seq in batch.sequences if seq.needs_sample]
    for row, seq in enumerate(ready):
        for draw in draws_of(seq):
            draws.append(draw)
            logits_rows.append(row)
    drawn = draw_samples(take_rows(logits, logits_rows), SamplingMetadata(draws, logits.device))
    samples = {seq: [] for seq in batch.sequences}
    for row, draw, sample in zip(logits_rows, draws, drawn, strict=True):
        seq = ready[row]
        request = seq.request
        if not math.isfinite(sample.logprob):
            raise NonFiniteLogits(
                f"the model's logits for request {request.request_id!r} at position "
                f"{seq.num_tokens} are not finite: abort the request, or use a dtype with a wider "
                "range",
                request.request_id,
            )
        if sample.token_id in draw.banned_token_ids:
            raise NonFiniteLogits(
                f"no token is allowed for request {request.request_id!r} at position "
                f"{seq.num_tokens}: its banned tokens are the whole vocabulary; abort it, or allow "
                "a token",
                request.request_id,
            )
        if request.is_beam_search:
            for token_id, logprob in sample.logprobs.items():  # the most likely first
                if token_id not in draw.banned_token_ids:
                    samples[seq].append(Sample(token_id, logprob))
        else:
            samples[seq].append(sample)
    return list(samples.values())


def draws_of(seq: Sequence) -> list[Draw]:
    """The draws for a sequence: n at the end of a prompt for n outputs, else one.

    For a beam it is a greedy draw, which returns the next most likely tokens as well. If other
    draws of the step are random, a greedy one is computed like them, with the number 0 and a
    temperature so low that only the most likely tokens keep a probability: 0 chooses the first.
    """
    request = seq.request
    params = request.params
    banned = seq.banned_token_ids
    if isinstance(params, BeamSearchParams):
        num_candidates = request.num_candidates + len(banned)
        greedy = SamplingParams(temperature=0, logprobs=num_candidates)
        return [Draw(greedy, uniform=0.0, banned_token_ids=banned)]
    counts = {}
    if params.penalties != NO_PENALTIES:
        counts = Counter(seq.output_token_ids)
        if params.repetition_penalty != 1:  # which changes the tokens of the prompt as well
            for token_id in seq.token_ids:
                counts.setdefault(token_id, 0)
    is_greedy = params.temperature == 0
    indices = range(params.n) if request.awaits_fork else [seq.index]
    return [
        Draw(
            params,
            uniform=0.0 if is_greedy else random_number(request.seed, index, seq.num_tokens),
            banned_token_ids=banned,
            token_counts=counts,
        )
        for index in indices
    ]


def draw_samples(logits: Tensor, metadata: SamplingMetadata) -> list[Sample]:
    """One token for each row of `logits` [num_rows, vocab_size]: the most likely, or a draw.

    If every token is banned, the returned one is banned as well. The caller raises the error.
    """
    allowed = logits
    if metadata.penalties is not None:
        allowed = penalize(logits, metadata.penalties)
    if metadata.banned is not None:
        allowed = allowed.index_put(tuple(metadata.banned), allowed.new_full((), -math.inf))
    if metadata.all_greedy:
        token_ids = allowed.max(-1).indices  # faster than argmax on a CPU in 16 bits
    else:
        token_ids = draw_tokens(filtered_probs(allowed, metadata), metadata.uniform)
    return gather_logprobs(logits, token_ids, metadata.num_logprobs)


def penalize(logits: Tensor, penalties: Tensor) -> Tensor:
    """The logits with penalties, in float32, as vLLM defines them; see `SamplingParams`.

        repetition 2, frequency 0.5, presence 1; logits 3 and -3 of a token generated 4 times:
        3 / 2 - 4 · 0.5 - 1 = -1.5 and -3 · 2 - 4 · 0.5 - 1 = -9

    Args:
        logits: [num_rows, vocab_size].
        penalties: [6, num]: row and token id of each logit to change, times generated, and the
            repetition, frequency and presence penalty. Float32 holds the integers exactly.
    """
    places = tuple(penalties[:2].long())
    count, repetition, frequency, presence = penalties[2:]
    logits = logits.to(torch.float32, copy=True)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count + presence * (count > 0)
    return logits.index_put_(places, values)


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """The probabilities at each row's temperature [num_rows, vocab_size], in float32; 0 for dropped
    tokens.

    Their sum need not be 1. Ties with the last kept token are kept.
    """
    logits = logits / metadata.temperature
    vocab_size = logits.shape[-1]
    has_top_k = metadata.host_top_k < vocab_size
    has_top_p = metadata.host_top_p < 1.0
    if has_top_k.any():
        largest_k = int(metadata.host_top_k[has_top_k].max())
        best = logits.topk(largest_k)  # [num_rows, largest_k]
        last = metadata.top_k.clamp(max=largest_k).long() - 1
        threshold = best.values.gather(1, last)
        threshold.masked_fill_(metadata.top_k >= vocab_size, -math.inf)
        logits.masked_fill_(logits < threshold, -math.inf)
    if has_top_p.any():
        if has_top_k[has_top_p].all():
            falling = logits.gather(1, best.indices)  # all tokens that are left, but for some ties
        else:
            falling = sort_falling(logits)
        # A token is kept if all more likely ones sum up to less than top_p. top_p = 0.8: falling
        # 0.5 0.4 0.1, sums before them 0.0 0.5 0.9, two are kept. In float32, a sum of 100,000
        # probabilities is off by more than some of them are, so the sums are in float64.
        weights = (falling - falling[:, :1]).exp().double()  # the probabilities, but for a factor
        # The sum over `logits`, which have the ties that `falling` may lack.
        total = (logits - falling[:, :1]).exp().sum(-1, keepdim=True, dtype=torch.float64)
        is_kept = weights.cumsum(-1) - weights < metadata.top_p * total
        threshold = falling.where(is_kept, math.inf).amin(-1, keepdim=True)
        threshold.masked_fill_(metadata.top_p >= 1.0, -math.inf)
        logits.masked_fill_(logits < threshold, -math.inf)
    probs = logits.softmax(-1)
    if metadata.host_min_p.any():
        probs.masked_fill_(probs < metadata.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def sort_falling(logits: Tensor) -> Tensor:
    """Each row's logits, the largest first."""
    if logits.is_cpu:  # ten times as fast as torch, which sorts indices as well
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(-1, descending=True).values


def draw_tokens(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token id for each row, by inverting its cumulative distribution at u.

    `locate(probs, u)` would do it, but cumulative sums over the whole vocabulary are slow. So a
    chunk of the vocabulary is drawn first, then one of its tokens.

        VOCAB_CHUNK = 2    probs .1 .2 | .3 .0 | .4    sums of chunks .3 .3 .4
        u = .5 ends in the second chunk, after (.5 - .3) / .3 = 2/3 of it; 2/3 of .3 .0: token 2

    Args:
        probs: [num_rows, vocab_size]; their sum need not be 1.
        u: [num_rows, 1], in [0, 1).
    """
    padded = F.pad(probs, (0, -probs.shape[-1] % VOCAB_CHUNK))
    chunks = padded.unflatten(1, (-1, VOCAB_CHUNK))  # [num_rows, num_chunks, VOCAB_CHUNK]
    chunk, part = locate(chunks.sum(-1), u)
    tokens = chunks.take_along_dim(chunk[:, :, None], dim=1)[:, 0]  # [num_rows, VOCAB_CHUNK]
    token, _ = locate(tokens, part)
    return (chunk * VOCAB_CHUNK + token)[:, 0]


def locate(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Find the weight in which a row's running sum passes u times its total, and how far into it.

        weights 2 0 4, u = .5: running sums 2 2 6; half of 6 lies in weight 2, (3 - 2) / 4 into it

    The cumulative sums are in float64, which adds float32 numbers almost exactly, so that no weight
    of 0 is found. In a row of NaN, whose error the caller raises, any weight will do.

    Args:
        weights: [num_rows, num_weights].
        u: [num_rows, 1], in [0, 1).

    Returns:
        indices and parts, each [num_rows, 1]. The parts are in [0, 1) as well.
    """
    weights = weights.double().nan_to_num(1.0)
    ends = weights.cumsum(-1)
    target = u * ends[:, -1:]
    index = torch.searchsorted(ends, target, right=True)
    start = (ends - weights).gather(1, index)
    part = (target - start) / weights.gather(1, index)
    return index, part.clamp(0.0, 1.0 - 2.0**-53)


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: list[int | None]
) -> list[Sample]:
    """Each row's token and its log-probability; if wanted, also those of the most likely tokens.

    Args:
        logits: [num_rows, vocab_size].
        token_ids: [num_rows], the drawn tokens (or the actual ones, in a prompt).
        num_logprobs: for each row, how many of the most likely tokens to return; None for no
            `logprobs`.
    """
    wanted = [num for num in num_logprobs if num is not None]
    num_best = min(max(wanted, default=0), logits.shape[-1])  # a beam may want more than there are
    tile = SOFTMAX_ROWS if logits.is_cpu else LOGITS_TILE
    tables = []
    for some_logits, ids in zip(logits.split(tile), token_ids[:, None].split(tile), strict=True):
        logprobs = some_logits.float().log_softmax(-1)
        chosen = logprobs.gather(1, ids)
        columns = [ids, chosen.double()]
        if wanted:
            ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
            best = logprobs.topk(num_best)
            columns += [ranks, best.values, best.indices]
        tables.append(torch.cat(columns, dim=1))
    # One tensor, so that the host waits once. float64 holds ids and log-probabilities exactly.
    rows = torch.cat(tables).tolist()
    samples = []
    for row, num in zip(rows, num_logprobs, strict=True):
        token_id, logprob, *rest = row
        sample = Sample(int(token_id), logprob)
        if num is not None:
            own_rank, *best = rest  # the values of the most likely tokens, then their ids
            for i in range(min(num, num_best)):
                best_id = int(best[num_best + i])
                sample.logprobs[best_id] = Logprob(best[i], rank=i + 1)
            own = Logprob(logprob, rank=int(own_rank))
            sample.logprobs.setdefault(sample.token_id, own)
        samples.append(sample)
    return samples
