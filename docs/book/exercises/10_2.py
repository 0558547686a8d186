"""Exercise 10.2, the bias of the second matrix: see docs/book/10-parallel.md."""

import torch
from torch import Tensor


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor, size: int) -> list[Tensor]:
    """What each of `size` ranks contributes to relu(x upᵀ) downᵀ + bias: their sum is the whole.

    `x` [num_tokens, in], `up` [inner, in], `down` [out, inner], `bias` [out]; each part is [num_tokens, out].
    A rank has inner / size rows of `up`, and the same columns of `down`.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def weights(num_tokens: int, inner: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens + inner)
    return torch.randn(num_tokens, 6), torch.randn(inner, 6), torch.randn(5, inner), torch.randn(5)


def test_the_parts_add_up() -> None:
    for num_tokens, inner, size in ((3, 8, 1), (3, 8, 2), (1, 12, 3), (4, 8, 4), (2, 8, 8)):
        x, up, down, bias = weights(num_tokens, inner)
        parts = parallel_mlp(x, up, down, bias, size)
        call = f"parallel_mlp with {size} rank{'s' * (size > 1)}"
        assert len(parts) == size, f"{call} returns {len(parts)} parts."
        product = torch.relu(x @ up.T) @ down.T
        given = sum(parts)
        assert given.shape == product.shape, (
            f"{call}: a part is {list(parts[0].shape)}, not {list(product.shape)}."
        )
        for times in (0, *range(2, size + 1)):
            assert not torch.allclose(given, product + times * bias, atol=1e-4), (
                f"{call}: the sum of the parts has the bias {times} times."
            )
        difference = (given - product - bias).abs().max().item()
        assert difference < 1e-4, (
            f"{call}: the sum of the parts differs from the whole by up to {difference:.2f}."
        )


def test_each_rank_has_its_share() -> None:
    """A changed weight of the first matrix, or of the second, changes the part of one rank alone."""
    x, up, down, bias = weights(3, 8)
    x, up, down = x.abs(), up.abs(), down.abs()  # nothing is cut off by relu
    before = parallel_mlp(x, up, down, bias, 4)
    owners = []
    for i in range(8):
        changed = up.clone()
        changed[i] += 1
        owners.append(changed_parts(before, parallel_mlp(x, changed, down, bias, 4)))
        changed = down.clone()
        changed[:, i] += 1
        same = changed_parts(before, parallel_mlp(x, up, changed, bias, 4))
        assert len(owners[i]) == 1, f"Row {i} of up changes the parts of ranks {owners[i]}, not of one alone."
        assert same == owners[i], (
            f"Row {i} of up is on rank {owners[i][0]}, but column {i} of down on {same}."
        )
    held = [owners.count([rank]) for rank in range(4)]
    assert held == [2, 2, 2, 2], f"Of 8 rows of up the ranks have {held}, which are not equal shares."


def changed_parts(before: list[Tensor], after: list[Tensor]) -> list[int]:
    return [rank for rank in range(len(before)) if not torch.allclose(before[rank], after[rank], atol=1e-5)]
