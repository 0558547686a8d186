"""Stage 7: filters, draws and samples of five tokens by hand, then of random logits, beside the source's."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensors import check, shown
from torch import Tensor

from nanopaged import SamplingParams
from nanopaged.sampler import Draw, SamplingMetadata, draw_samples, filtered_probs, locate
from nanopaged.sequence import Sample

# Fields of SamplingParams; u; banned tokens; counts of generated ones; whether it has NaN
Row = dict[str, Any]
NO_PARAMS = ("u", "banned", "counts", "nan")
LAST_U = 1 - 2**-24  # the largest number that `random_number` gives
FIVE = [0.1, 0.4, 0.05, 0.3, 0.15]  # the probabilities of tokens 0 to 4
POWERS = [0.5, 0.25, 0.125, 0.0625, 0.0625]  # their sums are exact
TIES = [0.4, 0.19, 0.19, 0.19, 0.03]
GREEDY: Row = {"temperature": 0}
HOT: Row = {"temperature": 1}
MANY: Row = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
FILTERS: tuple[tuple[str, list[float], list[Row]], ...] = (
    ("Temperature divides the logits", FIVE, [{"temperature": t} for t in (1.0, 0.5, 2.0)]),
    ("top_k keeps the k most likely tokens", FIVE, [{"top_k": k} for k in (1, 2, 4, 5, 6, 1000, 0, -1)]),
    ("top_p keeps the tokens that reach it", FIVE, [{"top_p": p} for p in (0.39, 0.41, 0.69, 0.71, 0.96, 1)]),
    ("Tokens with the sum 1 - top_p are dropped", POWERS, [{"top_p": p} for p in (0.5, 0.75, 0.875)]),
    ("min_p is a share of the largest probability", FIVE, [{"min_p": p} for p in (0.12, 0.2, 0.5, 0.8)]),
    ("A token with exactly that share is kept", POWERS, [{"min_p": 0.5}]),
    ("One token is kept", FIVE, [{"top_p": 1e-9}, {"top_p": 1e-50}, {"min_p": 1}, MANY | {"top_k": 1}]),
    ("Ties are kept together", TIES, [{"top_k": 2}, {"top_k": 3}]),
    ("Ties are kept together", TIES, [{"top_p": 0.5}, {"top_p": 0.7}, {"top_p": 0.35}]),
    ("Ties are kept together", TIES, [{"top_k": 2, "top_p": 0.5}]),
    ("Ties are kept together", [0.2] * 5, [{"top_k": 1}, {"top_p": 0.1}, MANY]),
    ("top_p sees what top_k has left", FIVE, [{"top_k": 3, "top_p": 0.8}]),
    ("top_p sees the temperature", FIVE, [{"temperature": 0.5, "top_p": 0.85}]),
    ("min_p sees the temperature", FIVE, [{"temperature": 2.0, "min_p": 0.55}]),
    ("Each row has its own settings", FIVE, [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.3}, MANY]),
    ("Each row has its own settings", FIVE, [{"top_k": 3, "top_p": 0.8}, {}]),
)  # fmt: skip
RANDOM = {"temperature": (0.3, 1.0, 3.0), "top_k": (0, 0, 1, 3, 29)}
RANDOM |= {"top_p": (1.0, 1.0, 0.2, 0.7, 0.97), "min_p": (0, 0, 0.05)}
GREATER = "A draw is the first token whose cumulative sum is greater than u"
DRAWS: tuple[tuple[str, list[float], list[float]], ...] = (
    (GREATER, [0.1, 0.2, 0.3, 0.0, 0.4], [0.0, 0.09, 0.11, 0.29, 0.5, 0.61, LAST_U]),
    (f"{GREATER}, not equal to it", [1, 1, 1, 0, 1], [0.0, 0.25, 0.5, 0.75]),
    ("u is a share of the row's sum, which need not be 1", [0, 6e-4, 0, 2e-4, 0], [0.0, 0.7, 0.76, LAST_U]),
    ("A token of probability 0 is never drawn", [0] * 254 + [1, 1] + [0] * 254, [0.0, 0.7, LAST_U]),
    ("A row may have one token", [2], [0.0, LAST_U]),
)
BANNED: Row = {"banned": [0, 1]}
OWN = "The log-probability is the model's own, before temperature, filters and penalties"
STUCK = "A row without an allowed token gets any token, and disturbs no other"
BROKEN = "A row of NaN has the log-probability NaN, and disturbs no other"
SAMPLES: tuple[tuple[str, list[Row]], ...] = (
    ("Temperature 0 takes the most likely token", [GREEDY, GREEDY]),
    ("Temperature 0 takes the most likely token", [HOT | {"u": 0.0}, GREEDY, HOT | {"u": LAST_U}]),
    ("A row draws by u after its filters", [{"top_k": 2, "u": 0.56}, {"top_k": 2, "u": 0.6}, {"u": 0.56}]),
    (OWN, [MANY | {"logprobs": 2}, {"temperature": 0.1, "min_p": 0.9}, GREEDY]),
    ("A banned token is not drawn", [BANNED | {"top_k": 2, "u": LAST_U}, BANNED | {"u": 0.0}]),
    ("Each row has its own bans", [GREEDY, GREEDY | {"banned": [1]}, GREEDY | {"banned": [1, 3]}, GREEDY]),
    ("Penalties come before the draw", [{"presence_penalty": 1.0, "u": 0.35, "counts": {1: 2}}, HOT]),
    ("A greedy row has penalties", [GREEDY | {"repetition_penalty": 2.0, "counts": {1: 2}}]),
    ("Bans come after penalties", [GREEDY | {"presence_penalty": -2.0, "counts": {1: 2}, "banned": [1]}]),
    *((STUCK, [row, row | {"banned": range(5)}, row]) for row in (GREEDY, HOT, MANY)),
    *((BROKEN, [row, row | {"nan": True}, row]) for row in (GREEDY, HOT, MANY)),
)  # fmt: skip


def metadata_of(rows: list[Row]) -> SamplingMetadata:
    draws = []
    for row in rows:
        params = SamplingParams(**{name: value for name, value in row.items() if name not in NO_PARAMS})
        u = 0.0 if params.temperature == 0 else row.get("u", 0.5)
        draws.append(Draw(params, u, row.get("banned", ()), row.get("counts", {})))
    return SamplingMetadata(draws, torch.device("cpu"))


def filter_cases() -> Iterator[tuple[str, Tensor, list[Row]]]:
    for rule, probs, rows in FILTERS:
        yield rule, torch.tensor([probs] * len(rows)).log(), rows
    rng = random.Random(7)
    for number in range(60):
        torch.manual_seed(number)
        rows = [{name: rng.choice(values) for name, values in RANDOM.items()} for _ in range(1 + number % 4)]
        yield "Random logits", 2 * torch.randn(len(rows), (1, 2, 5, 30, 300)[number % 5]), rows
    falling = torch.arange(40000.0).flip(0) / 1e4
    yield "top_k may be large", falling.repeat(3, 1), [{"top_k": k} for k in (100, 3000, 35000)]


def kept(probs: Tensor) -> list[str]:
    """Which tokens of each row have a probability above 0, or how many."""
    ids = [row.nonzero().flatten().tolist() for row in probs]
    return [f"the tokens {row}" if len(row) <= 8 else f"{len(row)} tokens" for row in ids]


@pytest.mark.parametrize(("rule", "logits", "rows"), list(filter_cases()))
def test_filtered_probs(rule: str, logits: Tensor, rows: list[Row]) -> None:
    """The sum of the probabilities need not be 1."""
    case = f"{rule} (probabilities {shown(logits[0].softmax(-1)[:8])}, rows {rows})"
    for view in (kept, lambda probs: probs / probs.sum(-1, keepdim=True)):
        check(case, filtered_probs, logits, metadata_of(rows), view=view)


def draw_cases() -> Iterator[tuple[str, Tensor, Tensor]]:
    for rule, weights, numbers in DRAWS:
        yield rule, torch.tensor([weights] * len(numbers)).float(), torch.tensor(numbers)[:, None]
    for vocab_size in (2, 7, 255, 256, 257, 512, 1000, 5000, 40000):
        torch.manual_seed(vocab_size)
        probs = (3 * torch.randn(8, vocab_size)).exp() * (torch.rand(8, vocab_size) < 0.5)
        probs[:, vocab_size // 2] = 1.0
        u = torch.rand(8, 1)
        u[:2], u[2] = LAST_U, 0.0
        yield f"{vocab_size} tokens, some of probability 0", probs, u


@pytest.mark.parametrize(("rule", "probs", "u"), list(draw_cases()))
def test_locate(rule: str, probs: Tensor, u: Tensor) -> None:
    """Its results are indices and parts."""
    for view in (lambda found: found[0], lambda found: found[1].float()):
        check(f"{rule} (each row has {shown(probs[0, :8])} …)", locate, probs, u, view=view)


def in_words(samples: list[Sample], rows: list[Row]) -> list[str]:
    """Samples in words. In a row of NaN any token will do, and any banned one where all are banned."""
    words = []
    for token, row in zip(samples, rows, strict=True):
        if token.token_id in row.get("banned", ()):
            words.append("a banned token")
            continue
        is_any = not math.isfinite(token.logprob) and token.token_id in range(len(FIVE))
        name = "any" if is_any else token.token_id
        best = {token_id: round(logprob, 4) for token_id, logprob in token.logprobs.items()}
        words.append(f"token {name}, log-probability {token.logprob:.4f}, {best}")
    return words


@pytest.mark.parametrize(("rule", "rows"), SAMPLES)
def test_sample(rule: str, rows: list[Row]) -> None:
    logits = torch.tensor([FIVE] * len(rows)).log() + 5
    for number, row in enumerate(rows):
        logits[number] *= math.nan if row.get("nan") else 1
    view = partial(in_words, rows=rows)
    check(f"{rule} (probabilities {FIVE}, rows {rows})", draw_samples, logits, metadata_of(rows), view=view)
