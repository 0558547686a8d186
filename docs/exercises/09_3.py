"""Exercise 9.3, the splits of a shorter context in a graph: see docs/09-gpu.md.

python -m pytest docs/exercises/09_3.py
"""

import random


def used_splits(num_keys: int, num_splits: int, tile: int) -> tuple[int, int]:
    """How many of `num_splits` splits have keys, and how many keys the first one has.

    A split is a whole number of tiles of `tile` keys, the same for all splits, and as small as possible. The
    last split with keys may have fewer.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def handed_out(num_keys: int, num_splits: int, tile: int) -> list[int]:
    """The keys of each split, empty ones left out: with the shortest splits that take all keys."""
    length = tile
    while length * num_splits < num_keys:
        length += tile
    return [min(length, num_keys - first) for first in range(0, num_keys, length)]


def test_the_keys_are_handed_out_in_whole_tiles() -> None:
    rng = random.Random(0)
    cases = [
        (1000, 64, 64),
        (5000, 64, 64),
        (40960, 64, 64),
        (40, 64, 64),
        (300, 4, 64),
        (64, 2, 64),
        (65, 2, 64),
    ]
    cases += [
        (rng.randrange(1, 5000), rng.randrange(1, 65), rng.choice((16, 32, 64, 128))) for _ in range(200)
    ]
    for num_keys, num_splits, tile in cases:
        used, first = used_splits(num_keys, num_splits, tile)
        keys = handed_out(num_keys, num_splits, tile)
        call = f"used_splits({num_keys}, {num_splits}, {tile})"
        given = f"{call} gives {used} and {first}"
        assert used <= num_splits, f"{given}, but there are only {num_splits} splits."
        assert first % tile == 0 or first == num_keys, f"{given}, but a split is a whole number of tiles."
        assert used * first >= num_keys, (
            f"{given}, which leaves {num_keys - used * first} keys without a split."
        )
        assert first <= keys[0], (
            f"{given}, but splits of {keys[0]} keys are enough, so {len(keys)} of them have keys."
        )
        assert (used, first) == (len(keys), keys[0]), (
            f"{given}, but {len(keys)} splits have keys, and the first has {keys[0]}."
        )


def test_the_kernel_hands_them_out_so() -> None:
    """The picture of docs/09-gpu.md, and docs/experiments/interpreted.py: 5, 37 and 300 keys, tiles of 64."""
    for num_splits, with_keys in ((1, 6), (2, 8), (4, 10)):
        programs = sum(2 * used_splits(num_keys, num_splits, 64)[0] for num_keys in (5, 37, 300))
        assert programs == with_keys, (
            f"With {num_splits} splits {with_keys} of the picture's programs have keys, not {programs}."
        )
