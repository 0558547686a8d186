"""Exercise 5.1, combine splits, some of them empty: see docs/book/05-attention.md."""

import math

import torch
from torch import Tensor


def combine(outs: Tensor, lses: Tensor) -> Tensor:
    """outs [splits, heads, head_dim], lses [splits, heads] → the output over all keys [heads, head_dim]."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def split(scores: Tensor, values: Tensor, ends: list[int]) -> tuple[Tensor, Tensor]:
    """The partial results of scores [heads, keys], with a split up to each of `ends`; empty ones are NaN."""
    outs = torch.full((len(ends), len(scores), values.shape[1]), math.nan)
    lses = torch.full((len(ends), len(scores)), -math.inf)
    for i, end in enumerate(ends):
        first = ends[i - 1] if i else 0
        if end > first:
            part = scores[:, first:end]
            outs[i], lses[i] = part.softmax(-1) @ values[first:end], part.logsumexp(-1)
    return outs, lses


def wrong_by(scores: Tensor, values: Tensor, ends: list[int]) -> str:
    """Empty if `combine` gives the softmax over all keys."""
    given = split(scores, values, ends)
    before = [x.clone() for x in given]
    got, want = combine(*given), scores.softmax(-1) @ values
    if not all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(given, before, strict=True)):
        return "overwrites the outputs or the LSEs that it was given"
    if got.shape != want.shape:
        return f"gives a tensor {list(got.shape)} instead of {list(want.shape)}"
    if got.isnan().any():
        return "gives NaN"
    error = (got - want).abs().max()
    return "" if error < 1e-4 else f"differs by {error:.2g} from the softmax over all keys"


def test_splits_of_any_size() -> None:
    torch.manual_seed(0)
    for ends in ([5, 10], [1, 3, 60], [60], [20, 40, 60]):
        wrong = wrong_by(torch.randn(3, ends[-1]), torch.randn(ends[-1], 8), ends)
        assert not wrong, f"combine {wrong}, for splits that end at the keys {ends}."


def test_large_scores() -> None:
    torch.manual_seed(0)
    for shift in (0, 300, -300):  # exp(89) is infinite in float32, and exp(-104) is 0
        wrong = wrong_by(60 * torch.randn(3, 40) + shift, torch.randn(40, 8), [7, 8, 40])
        assert not wrong, f"combine {wrong} if scores are near {shift} and differ by 60 and more."


def test_empty_splits_do_not_count() -> None:
    torch.manual_seed(0)
    for ends in ([10, 10], [0, 10, 10, 30], [0, 0, 1]):
        wrong = wrong_by(torch.randn(2, ends[-1]), torch.randn(ends[-1], 8), ends)
        assert not wrong, f"combine {wrong}, for splits that end at the keys {ends}: some are empty."


def test_a_head_without_keys_gives_zero() -> None:
    torch.manual_seed(0)
    outs, lses = split(torch.randn(2, 9), torch.randn(9, 8), [4, 9])
    outs[:, 1], lses[:, 1] = math.nan, -math.inf
    head = combine(outs, lses)[1].tolist()
    assert not any(head), f"All splits of a head are empty, and combine gives it {head} instead of zeros."
