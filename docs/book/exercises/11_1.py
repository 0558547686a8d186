"""Exercise 11.1, where does decode become compute-bound: see docs/book/11-measuring.md."""

import random


def bend(bandwidth: float, speed: float, context: int) -> int | None:
    """The fewest sequences of `context` keys with which a decode step of the tiny model is compute-bound.

    `bandwidth` is in bytes a second, `speed` in FLOP a second. None if no number of sequences is enough.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

WEIGHTS, KEY_BYTES, KEY_FLOP = 2_883_584, 2_048, 4_096  # a weight has 4 bytes


def times(num_seqs: int, bandwidth: float, speed: float, context: int) -> tuple[float, float]:
    """Seconds to read and to compute a decode step."""
    read = (4 * WEIGHTS + num_seqs * context * KEY_BYTES) / bandwidth
    return read, num_seqs * (2 * WEIGHTS + context * KEY_FLOP) / speed


def test_one_sequence_fewer_is_memory_bound() -> None:
    rng = random.Random(0)
    cases = [(25e9, 200e9, context) for context in (0, 64, 256, 400, 1000)]
    cases += [(40e9, 40e9, 100), (100e9, 200e9, 0), (20e9, 900e9, 0), (20e9, 900e9, 50), (30e9, 45e9, 30000)]
    cases += [
        (rng.uniform(1e10, 1e11), rng.uniform(5e10, 2e12), rng.choice((0, 10, 50, 100, 500)))
        for _ in range(60)
    ]
    for bandwidth, speed, context in cases:
        n = bend(bandwidth, speed, context)
        call = f"bend({bandwidth:.3g}, {speed:.3g}, {context})"
        if n is None:
            read, compute = times(10**9, bandwidth, speed, context)
            assert compute < read, f"{call} is None, but a step of many sequences is compute-bound."
            continue
        assert n in range(1, 10**9), f"{call} is {n}, which is no number of sequences."
        read, compute = (1e3 * seconds for seconds in times(int(n), bandwidth, speed, context))
        assert compute >= 0.999999 * read, (
            f"{call} is {n}, but these take {compute:.4g} ms to compute and {read:.4g} ms to read."
        )
        if n > 1:
            read, compute = (1e3 * seconds for seconds in times(int(n) - 1, bandwidth, speed, context))
            assert compute < 1.000001 * read, (
                f"{call} is {n}, but {n - 1} already take {compute:.4g} ms to compute and {read:.4g} to read."
            )
