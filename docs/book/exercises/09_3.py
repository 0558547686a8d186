"""Exercise 9.3, how even the work is: see docs/book/09-gpu.md."""

import random


def idle_share(context_lens: list[int], num_kv_heads: int, num_processors: int, split: int) -> float:
    """The share of the processors' time in which they have nothing to do, until the last program ends.

    A program reads at most `split` keys of a context for one KV head, and takes as long as it has keys.
    Programs start in the order of contexts, splits, KV heads, each on the processor that is free first.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def slowly(context_lens: list[int], num_kv_heads: int, num_processors: int, split: int) -> float:
    """The same, key by key: in each round every processor reads one."""
    programs = []
    for n in context_lens:
        while n > 0:
            programs += [min(split, n)] * num_kv_heads
            n -= split
    left, rounds, read = [0] * num_processors, 0, sum(programs)
    while programs or any(left):
        for i in range(num_processors):
            if left[i] == 0 and programs:
                left[i] = programs.pop(0)
        left = [max(0, n - 1) for n in left]
        rounds += 1
    return 1 - read / (rounds * num_processors)


def check(context_lens: list[int], num_kv_heads: int, num_processors: int, split: int) -> None:
    got = idle_share(list(context_lens), num_kv_heads, num_processors, split)
    right = slowly(context_lens, num_kv_heads, num_processors, split)
    call = f"idle_share({context_lens}, {num_kv_heads}, {num_processors}, {split})"
    assert abs(got - right) < 1e-9, f"{call} gives {got:.4f}; key by key, {right:.4f} of the time is idle."


def test_one_program() -> None:
    check([10], 1, 1, 10)
    check([10], 1, 4, 10)
    check([10], 2, 4, 3)


def test_a_long_context_beside_short_ones() -> None:
    for split in (64, 16, 5):
        check([8, 8, 8, 64], 2, 4, split)


def test_random_batches() -> None:
    rng = random.Random(0)
    for _ in range(100):
        lens = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 9))]
        check(lens, rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(1, 41))
