"""Exercise 9.2, the worst batch for padding: see docs/book/09-gpu.md."""

import random


def worst_batch(sizes: list[int]) -> tuple[int, float]:
    """Which batch has the largest share of padding, and that share.

    `sizes`: the rows of each graph, ascending, e.g. 1 2 4 8 9. A batch of n sequences, from 1 to the largest
    size, takes the smallest graph that has n rows or more. Its rows without a sequence are padding.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def padding(n: int, sizes: list[int]) -> tuple[int, int]:
    """Rows without a sequence in the graph of a batch of n, and all its rows."""
    rows = next(size for size in sizes if size >= n)
    return rows - n, rows


def test_no_batch_is_worse() -> None:
    rng = random.Random(0)
    cases = [[1, 2, 4, *range(8, 257, 8)], [1, 2, 4, 8, 9], [1, 2, 4, 6], [1, 2, 4, 8, 12], [1, 2, 3]]
    cases += [[1, 2, 4, 8, 16, 20], [5], [1, 50], [3, 4]]
    cases += [sorted(rng.sample(range(1, 40), 4)) for _ in range(8)]
    for sizes in cases:
        n, share = worst_batch(list(sizes))
        shown = sizes if len(sizes) < 10 else f"[{', '.join(map(str, sizes[:6]))}, …, {sizes[-1]}]"
        call = f"worst_batch({shown})"
        assert n in range(1, sizes[-1] + 1), f"{call} says {n}, but batches have 1 to {sizes[-1]} sequences."
        empty, rows = padding(n, sizes)
        assert abs(share - empty / rows) < 1e-9, (
            f"{call} says that a batch of {n} has {share:.1%} padding, but it is {empty} of {rows} rows."
        )
        worst = max(range(1, sizes[-1] + 1), key=lambda n: padding(n, sizes)[0] / padding(n, sizes)[1])
        more, of = padding(worst, sizes)
        assert empty * of >= more * rows, (
            f"{call} says {n}, with {empty} of {rows} rows empty, but a batch of {worst} has {more} of {of}."
        )
