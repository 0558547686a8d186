"""Stage 7: sampling. Filters and draws by hand with five tokens, then against a model in float64."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from nanopaged import SamplingParams
from nanopaged.sampler import Draw, SamplingMetadata, draw_tokens, filtered_probs, sample

torch.set_num_threads(1)
CPU = torch.device("cpu")
LAST_U = 1 - 2**-24  # the largest number that `uniform` gives
FIVE = [0.1, 0.4, 0.05, 0.3, 0.15]  # the probabilities of tokens 0 to 4
GREEDY = SamplingParams(temperature=0)


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def metadata_of(*params: SamplingParams, u: float | None = None, **fields: Any) -> SamplingMetadata:
    """A row for each params. With `u`, all rows draw with this number."""
    draws = [Draw(each, 0, 0, 0, **({"banned_token_ids": []} | fields)) for each in params]
    metadata = SamplingMetadata(draws, CPU)
    if u is not None:
        metadata.uniform = torch.full((len(params), 1), u)
    return metadata


def log(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def shown(x: Tensor) -> str:
    """The numbers of a small tensor: 0.4 0.25 nan."""
    return " ".join(f"{each:.4f}".rstrip("0").rstrip(".") for each in x.double().flatten().tolist())


def distribution(logits: Tensor, params: SamplingParams) -> tuple[list[float], bool]:
    """The filtered distribution of one row, with sum 1, and whether a token lies on the edge of a filter."""
    scores = [x / max(params.temperature, 1e-6) for x in logits.tolist()]
    close = False
    if 0 < params.top_k < len(scores):
        kth = sorted(scores, reverse=True)[params.top_k - 1]
        close |= any(0 < abs(x - kth) < 1e-5 for x in scores)
        scores = [x if x >= kth else -math.inf for x in scores]
    weights = [math.exp(x - max(scores)) for x in scores]
    probs = [w / sum(weights) for w in weights]
    kept = [True] * len(probs)
    if params.top_p < 1:
        for i, p in enumerate(probs):
            at_most = sum(q for q in probs if q <= p)  # it, its ties and all less likely tokens
            close |= abs(at_most - (1 - params.top_p)) < 1e-4
            kept[i] = at_most > 1 - params.top_p or p == max(probs)
    for i, p in enumerate(probs):
        close |= abs(p - params.min_p * max(probs)) < 1e-5 and p < max(probs)
        kept[i] &= p >= params.min_p * max(probs)
    probs = [p if keep else 0.0 for p, keep in zip(probs, kept, strict=True)]
    return [p / sum(probs) for p in probs], close


def check_filters(probs: list[float], expected: list[float], **options: float) -> None:
    """One row, by hand. `expected` may have any sum."""
    logits = log(probs)
    before = logits.clone()
    got = filtered_probs(logits, metadata_of(SamplingParams(**options)))
    call = f"filtered_probs of the probabilities {shown(torch.tensor(probs))} with " + ", ".join(
        f"{name}={value}" for name, value in options.items()
    )
    assert got.shape == (1, len(probs)), (
        f"{call} has the shape {list(got.shape)} instead of [1, {len(probs)}]."
    )
    kept, wanted = ([i for i, p in enumerate(row) if p != 0] for row in (got[0].tolist(), expected))
    assert kept == wanted, f"{call} keeps the tokens {kept} instead of {wanted}."
    target = torch.tensor(expected) / sum(expected)
    share = got[0] / got[0].sum()
    assert torch.allclose(share, target, atol=1e-5), (
        f"{call} gives {shown(got)}, so tokens are drawn with the shares {shown(share)} instead of "
        f"{shown(target)}."
    )
    assert torch.equal(logits, before), f"{call} changed the logits that it was given."


# ── filtered_probs ────────────────────────────────────────────────────────────────────────────────


def test_temperature() -> None:
    check_filters([0.04, 0.16, 0.36, 0.36, 0.08], [0.04, 0.16, 0.36, 0.36, 0.08], temperature=1.0)
    check_filters([1 / 55, 4 / 55, 9 / 55, 16 / 55, 25 / 55], [1, 2, 3, 4, 5], temperature=2.0)
    check_filters([0.1, 0.2, 0.3, 0.2, 0.2], [1, 4, 9, 4, 4], temperature=0.5)


def test_top_k() -> None:
    check_filters(FIVE, [0, 0.4, 0, 0, 0], top_k=1)
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0], top_k=2)
    check_filters(FIVE, [0.1, 0.4, 0, 0.3, 0.15], top_k=4)
    for k in (-1, 0, 5, 6, 1000):  # 0 and -1 keep all tokens
        check_filters(FIVE, FIVE, top_k=k)


def test_top_p() -> None:
    """The most likely tokens that together reach top_p: 0.4, 0.7, 0.85, 0.95, 1."""
    check_filters(FIVE, [0, 0.4, 0, 0, 0], top_p=0.01)
    check_filters(FIVE, [0, 0.4, 0, 0, 0], top_p=0.39)
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0], top_p=0.41)
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0], top_p=0.69)
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0.15], top_p=0.71)
    check_filters(FIVE, FIVE, top_p=0.96)
    check_filters(FIVE, FIVE, top_p=1.0)


def test_the_most_likely_token_is_always_kept() -> None:
    for options in (
        {"top_p": 1e-9},
        {"top_p": 1e-50},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 1e-50, "min_p": 1.0},
    ):
        check_filters(FIVE, [0, 0.4, 0, 0, 0], **options)


def test_the_edge_of_top_p() -> None:
    """Powers of two, so that sums are exact: what sums up to exactly 1 - top_p is dropped."""
    probs = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    check_filters(probs, [0.5, 0, 0, 0, 0], top_p=0.5)
    check_filters(probs, [0.5, 0.25, 0, 0, 0], top_p=0.75)
    check_filters(probs, [0.5, 0.25, 0.125, 0, 0], top_p=0.875)


def test_min_p() -> None:
    """Relative to the most likely token, of 0.4."""
    check_filters(FIVE, FIVE, min_p=0.12)  # 0.048
    check_filters(FIVE, [0.1, 0.4, 0, 0.3, 0.15], min_p=0.2)  # 0.08
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0], min_p=0.5)  # 0.2
    check_filters(FIVE, [0, 0.4, 0, 0, 0], min_p=0.8)  # 0.32
    check_filters([0.5, 0.25, 0.125, 0.0625, 0.0625], [0.5, 0.25, 0, 0, 0], min_p=0.5)  # exactly the edge


def test_ties_are_kept_together() -> None:
    probs = [0.4, 0.19, 0.19, 0.19, 0.03]
    together = [0.4, 0.19, 0.19, 0.19, 0]
    check_filters(probs, together, top_k=2)
    check_filters(probs, together, top_k=3)
    check_filters(probs, together, top_p=0.5)
    check_filters(probs, together, top_p=0.7)
    check_filters(probs, together, top_k=2, top_p=0.5)
    check_filters(probs, [0.4, 0, 0, 0, 0], top_p=0.35)
    check_filters([0.2] * 5, [0.2] * 5, top_k=1)
    check_filters([0.2] * 5, [0.2] * 5, top_p=0.1)
    check_filters([0.2] * 5, [0.2] * 5, top_k=3, top_p=0.5, min_p=1.0)


def test_the_order_of_the_filters() -> None:
    """Temperature, top-k, top-p, min-p: each sees the probabilities that the filters before it have left."""
    # Top-k leaves 0.4 0.3 0.15, that is 0.47 0.35 0.18 of their sum: the first two reach 0.8.
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0], top_k=3, top_p=0.8)
    # At temperature 0.5 they are 0.16 0.09 0.0225 0.01 0.0025, of 0.285: the first two reach 0.85.
    check_filters(FIVE, [0, 0.16, 0, 0.09, 0], temperature=0.5, top_p=0.85)
    # At temperature 2 they are in the ratio of the roots: 0.632 0.548 0.387 0.316 0.224.
    check_filters(FIVE, [0, 0.632456, 0, 0.547723, 0.387298], temperature=2.0, min_p=0.55)
    check_filters(FIVE, [0, 0.4, 0, 0.3, 0], top_k=4, top_p=0.9, min_p=0.5)


def test_each_row_has_its_own_filters() -> None:
    cases = [
        (SamplingParams(), FIVE),
        (SamplingParams(top_k=1), [0, 1, 0, 0, 0]),
        (SamplingParams(top_p=0.5), [0, 0.4, 0, 0.3, 0]),
        (SamplingParams(min_p=0.3), [0, 0.4, 0, 0.3, 0.15]),
        (SamplingParams(top_k=4, top_p=0.999), [0.1, 0.4, 0, 0.3, 0.15]),
        (SamplingParams(temperature=0.5), [0.01, 0.16, 0.0025, 0.09, 0.0225]),
        (GREEDY, FIVE),
        (SamplingParams(top_k=3, top_p=0.8), [0, 0.4, 0, 0.3, 0]),
    ]
    for rows in (cases, cases[::-1], cases[2:], [cases[0], cases[1], cases[7]], [cases[0], cases[2]]):
        got = filtered_probs(log(*[FIVE] * len(rows)), metadata_of(*[params for params, _ in rows]))
        for i, (params, expected) in enumerate(rows):
            share = got[i] / got[i].sum()
            target = torch.tensor(expected) / sum(expected)
            assert torch.allclose(share, target, atol=1e-5), (
                f"In a batch of {len(rows)} rows with different filters, row {i} "
                f"(temperature={params.temperature}, top_k={params.top_k}, top_p={params.top_p}, "
                f"min_p={params.min_p}) has the shares {shown(share)} instead of {shown(target)}."
            )


def test_a_large_vocabulary() -> None:
    logits = torch.arange(40000.0)[None].flip(1) / 1e4  # token 0 is the most likely one
    for k in (100, 3000, 35000):
        got = int((filtered_probs(logits, metadata_of(SamplingParams(top_k=k))) > 0).sum())
        assert got == k, f"filtered_probs of 40,000 tokens with top_k={k} keeps {got} tokens."


def test_random_filters() -> None:
    """Against a model in Python numbers. Rows with a token on the edge of a filter are left out."""
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    for _ in range(60):
        vocab_size = rng.choice([1, 2, 5, 30])
        logits = torch.randn(rng.randint(1, 5), vocab_size, generator=generator) * 2
        params = [
            SamplingParams(
                temperature=rng.choice([0.3, 1.0, 3.0]),
                top_k=rng.choice([0, 0, 1, 3, 29]),
                top_p=rng.choice([1.0, 1.0, 0.2, 0.7, 0.97]),
                min_p=rng.choice([0.0, 0.0, 0.05, 0.4]),
            )
            for _ in logits
        ]
        got = filtered_probs(logits, metadata_of(*params))
        for row, each in enumerate(params):
            expected, close = distribution(logits[row], each)
            share = got[row] / got[row].sum()
            assert close or torch.allclose(share, torch.tensor(expected), atol=1e-4), (
                f"filtered_probs of {vocab_size} tokens with temperature={each.temperature}, "
                f"top_k={each.top_k}, top_p={each.top_p}, min_p={each.min_p} (row {row} of {len(params)}): "
                f"of the logits {shown(logits[row])} it keeps {int((share > 0).sum())} tokens instead of "
                f"{sum(p > 0 for p in expected)}, or other shares."
            )


# ── draw_tokens ───────────────────────────────────────────────────────────────────────────────────


def drawn(probs: list[list[float]], us: list[float]) -> list[int]:
    got = draw_tokens(torch.tensor(probs), torch.tensor(us)[:, None])
    assert got.shape == (len(probs),), (
        f"draw_tokens of {len(probs)} rows has the shape {list(got.shape)} instead of [{len(probs)}]."
    )
    return [int(token) for token in got]


def test_a_draw_by_hand() -> None:
    """Cumulative: 0.1 0.3 0.6 0.6 1. The token is the first whose sum is greater than u."""
    probs = [0.1, 0.2, 0.3, 0.0, 0.4]
    for u, expected in (
        (0.0, 0),
        (0.09, 0),
        (0.11, 1),
        (0.29, 1),
        (0.5, 2),
        (0.59, 2),
        (0.61, 4),
        (LAST_U, 4),
    ):
        (got,) = drawn([probs], [u])
        assert got == expected, (
            f"draw_tokens of the probabilities 0.1 0.2 0.3 0 0.4 with u = {u:.7g} gives token {got} instead "
            f"of {expected}: the cumulative sums are 0.1 0.3 0.6 0.6 1."
        )
    for u, expected in ((0.25, 1), (0.5, 2), (0.75, 4)):  # sums are exact
        (got,) = drawn([[0.25, 0.25, 0.25, 0.0, 0.25]], [u])
        assert got == expected, (
            f"draw_tokens of 0.25 0.25 0.25 0 0.25 with u = {u} gives token {got} instead of {expected}: a "
            "token takes the range from the sum before it, included, to its own sum, excluded."
        )


def test_the_sum_need_not_be_one() -> None:
    for factor in (0.5, 0.001, 8.0):
        for u, expected in ((0.0, 1), (0.7, 1), (0.76, 3), (LAST_U, 3)):
            (got,) = drawn([[0.0, 0.75 * factor, 0.0, 0.25 * factor, 0.0]], [u])
            assert got == expected, (
                f"draw_tokens of 0 0.75 0 0.25 0, all times {factor}, with u = {u:.7g} gives token {got} "
                f"instead of {expected}: u is a share of the sum of the row."
            )


def test_each_row_has_its_own_number() -> None:
    got = drawn([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [0.0, 0.0, 2.0]], [0.9, 0.1, 0.1, 0.5])
    assert got == [1, 1, 0, 2], (
        f"draw_tokens of four rows with their own u gives the tokens {got} instead of [1, 1, 0, 2]."
    )


def test_a_token_of_probability_0_is_never_drawn() -> None:
    """At both ends of the vocabulary, and for both ends of u."""
    for vocab_size in (5, 255, 256, 257, 600, 1000):
        for first, last in ((1, vocab_size - 2), (vocab_size // 2, vocab_size // 2), (0, vocab_size - 1)):
            probs = torch.zeros(1, vocab_size)
            probs[0, [first, last]] = 0.5
            for u, expected in ((0.0, first), (LAST_U, last)):
                (got,) = drawn(probs.tolist(), [u])
                assert got == expected, (
                    f"Of {vocab_size} tokens only {first} and {last} have a probability above 0; draw_tokens "
                    f"with u = {u:.8g} gives token {got} instead of {expected}."
                )


def test_draws_invert_the_cumulative_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    for vocab_size in (1, 2, 7, 255, 256, 257, 512, 1000, 5000, 40000):
        rows = 60
        probs = (torch.randn(rows, vocab_size, generator=generator) * 3).exp()
        probs[torch.rand(rows, vocab_size, generator=generator) < 0.5] = 0.0
        probs[:, vocab_size // 2] = 1.0
        us = torch.rand(rows, generator=generator)
        us[:20], us[20:30] = LAST_U, 0.0
        before = probs.clone()
        tokens = draw_tokens(probs, us[:, None])
        assert torch.equal(probs, before), "draw_tokens changed the probabilities that it was given."
        for row, (u, token) in enumerate(zip(us.tolist(), tokens.tolist(), strict=True)):
            case = f"draw_tokens of {vocab_size} random probabilities with u = {u:.8g} gives token {token}"
            assert 0 <= token < vocab_size, f"{case}, which does not exist."
            assert probs[row, token] > 0, f"{case}, which has probability 0."
            ends = probs[row].double().cumsum(0)
            end, begin = float(ends[token] / ends[-1]), float((ends[token] - probs[row, token]) / ends[-1])
            assert begin - 1e-6 <= u <= end + 1e-6, (
                f"{case}, whose range of the cumulative distribution is {begin:.6f} to {end:.6f}."
            )


# ── sample ────────────────────────────────────────────────────────────────────────────────────────


def test_greedy_rows_take_the_most_likely_token() -> None:
    logits = log(FIVE, [0.3, 0.1, 0.2, 0.05, 0.35])
    got = [each.token_id for each in sample(logits, metadata_of(GREEDY, GREEDY))]
    assert got == [1, 4], f"Two greedy rows give the tokens {got} instead of [1, 4], the most likely ones."
    hot = SamplingParams(temperature=1.0)
    for params, expected in (((GREEDY, hot), [1, 0]), ((hot, GREEDY), [0, 4]), ((hot, hot), [0, 0])):
        got = [each.token_id for each in sample(logits, metadata_of(*params, u=0.0))]
        temperatures = " and ".join(f"{each.temperature:g}" for each in params)
        assert got == expected, (
            f"Rows of temperature {temperatures}, whose most likely tokens are 1 and 4, give {got} instead "
            f"of {expected}: temperature 0 takes the most likely token, and u = 0 draws token 0."
        )


def test_rows_are_drawn_after_their_filters() -> None:
    params = SamplingParams(top_k=2), SamplingParams(), GREEDY, SamplingParams(temperature=0.01)
    for u, expected in (
        (0.0, [1, 0, 1, 1]),
        (0.56, [1, 3, 1, 1]),
        (0.6, [3, 3, 1, 1]),
        (LAST_U, [3, 4, 1, 1]),
    ):
        got = [each.token_id for each in sample(log(*[FIVE] * 4), metadata_of(*params, u=u))]
        assert got == expected, (
            f"With u = {u:.7g}, rows with top_k=2, no filter, temperature=0 and temperature=0.01 give the "
            f"tokens {got} instead of {expected}; the probabilities are {shown(torch.tensor(FIVE))}."
        )


def test_log_probabilities_are_the_models_own() -> None:
    """Of the logits as they come, at temperature 1, without filters, penalties and bans."""
    for params in (
        GREEDY,
        SamplingParams(temperature=0.1, top_k=2),
        SamplingParams(temperature=0.1, min_p=0.9),
    ):
        (got,) = sample(log(FIVE) + 5, metadata_of(params, u=0.0))
        assert (got.token_id, round(math.exp(got.logprob), 4)) == (1, 0.4), (
            f"With temperature={params.temperature}, top_k={params.top_k}, min_p={params.min_p} the sample "
            f"is token {got.token_id} with probability {math.exp(got.logprob):.4f} instead of token 1 with "
            "0.4: the model's own, before temperature and filters."
        )
    wanted = SamplingParams(temperature=0.1, top_k=1, logprobs=2), GREEDY
    first, second = sample(log(FIVE, FIVE), metadata_of(*wanted, u=0.0))
    got = {token: round(math.exp(each.logprob), 4) for token, each in (first.logprobs or {}).items()}
    assert got == {1: 0.4, 3: 0.3}, (
        f"With logprobs=2 the most likely tokens have the probabilities {got} instead of {{1: 0.4, 3: 0.3}}."
    )
    assert second.logprobs is None, f"A row without `logprobs` gets {second.logprobs} instead of None."


def test_banned_tokens() -> None:
    for params, u, expected in (
        (GREEDY, 0.0, 3),
        (SamplingParams(), 0.0, 2),
        (SamplingParams(), LAST_U, 4),
        (SamplingParams(top_k=1), 0.5, 3),
        (SamplingParams(top_k=2), LAST_U, 4),
    ):
        (got,) = sample(log(FIVE), metadata_of(params, u=u, banned_token_ids=[0, 1]))
        assert (got.token_id, round(math.exp(got.logprob), 4)) == (expected, FIVE[expected]), (
            f"With the tokens 0 and 1 banned, temperature={params.temperature}, top_k={params.top_k} and "
            f"u = {u:.7g} the sample is token {got.token_id} with probability {math.exp(got.logprob):.4f} "
            f"instead of token {expected} with {FIVE[expected]}, the model's own."
        )
    draws = [Draw(GREEDY, 0, 0, 0, banned) for banned in ([], [1], [1, 3], [])]
    got = [each.token_id for each in sample(log(*[FIVE] * 4), SamplingMetadata(draws, CPU))]
    assert got == [1, 3, 4, 1], (
        f"Four rows with the bans [], [1], [1, 3], [] take {got} instead of [1, 3, 4, 1]: each has its own."
    )


def test_penalties() -> None:
    """A presence penalty of 1 divides the weight of a token that was generated by e."""
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    (got,) = sample(log(FIVE), metadata_of(params, token_counts={1: 2}))
    assert (got.token_id, round(math.exp(got.logprob), 4)) == (3, 0.3), (
        "Token 1 was generated and its logit is lowered by presence_penalty=1, from ln 0.4 to ln 0.147: the "
        f"sample is token {got.token_id} with probability {math.exp(got.logprob):.4f} instead of 3 with 0.3, "
        "the model's own."
    )
    params = SamplingParams(presence_penalty=1.0)
    (got,) = sample(log(FIVE), metadata_of(params, u=0.35, token_counts={1: 2}))
    assert got.token_id == 2, (
        "With presence_penalty=1 token 1 counts 0.147 instead of 0.4, so with u = 0.35 (of 0.747) the draw "
        f"is token {got.token_id} instead of 2: penalties come before the draw."
    )
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    (got,) = sample(
        torch.tensor([[1.0, 9.0, 8.0]]), metadata_of(params, token_counts={1: 1}, banned_token_ids=[2])
    )
    assert got.token_id == 1, (
        f"Logits 1 9 8, token 1 halved by repetition_penalty=2, token 2 banned: the sample is {got.token_id} "
        "instead of 1."
    )


def test_a_row_without_an_allowed_token() -> None:
    """It gets some token with a log-probability of -inf, and disturbs no other row."""
    options = (
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3, top_p=0.9, min_p=0.1),
    )
    for params in options:
        draws = [Draw(params, 0, 0, 0, banned) for banned in ([], range(5), [])]
        before, stuck, after = sample(log(*[FIVE] * 3), SamplingMetadata(draws, CPU))
        alone = sample(log(FIVE), SamplingMetadata(draws[:1], CPU))[0]
        case = (
            f"All tokens of row 1 are banned (temperature={params.temperature}, top_k={params.top_k}, top_p="
        )
        case += f"{params.top_p}):"
        assert stuck.logprob == -math.inf, f"{case} its log-probability is {stuck.logprob} instead of -inf."
        assert 0 <= stuck.token_id < 5, f"{case} its token is {stuck.token_id}, which does not exist."
        assert before == after == alone, (
            f"{case} the other rows give {before} and {after}, and alone {alone}."
        )
    for params in options:
        bad, good = sample(
            torch.stack([torch.full((5,), math.nan), log(FIVE)[0]]), metadata_of(params, params, u=0.0)
        )
        assert math.isnan(bad.logprob), (
            f"A row of NaN has the log-probability {bad.logprob} instead of NaN, which `sample_next_tokens` "
            "reports."
        )
        assert 0 <= bad.token_id < 5, f"A row of NaN gives token {bad.token_id}, which does not exist."
        alone = sample(log(FIVE), metadata_of(params, u=0.0))[0]
        assert good == alone, f"Beside a row of NaN a row gives {good}, and alone {alone}."


def test_sample_keeps_its_logits() -> None:
    logits = log(FIVE, FIVE)
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, presence_penalty=1.0)
    metadata = metadata_of(params, GREEDY, u=0.5, token_counts={1: 1}, banned_token_ids=[3])
    given = {name: x.clone() for name, x in vars(metadata).items() if isinstance(x, Tensor)}
    first = sample(logits, metadata)
    assert torch.equal(logits, before), "sample changed the logits that it was given."
    for name, x in given.items():
        assert torch.equal(x, getattr(metadata, name)), (
            f"sample changed `metadata.{name}`, which is the batch's: work on a copy."
        )
    again = sample(logits, metadata)
    assert again == first, f"sample of the same logits and metadata gives {first}, and then {again}."
