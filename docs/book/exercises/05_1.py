"""Exercise 5.1, when do rows lose: see docs/book/05-attention.md."""

import random

import torch

from nanopaged.kv_cache import KVCache, KVShape


def keys_gathered(context_lens: list[int]) -> tuple[int, int]:
    """The keys gathered for contexts in blocks of 16: in the rectangle, and in rows of 64."""
    raise NotImplementedError


batch: list[int] = []  # context lengths for which the rows gather more keys than the rectangle


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def gather(context_lens: list[int]) -> tuple[int, int]:
    """Gather both; the last row of a table is filled up with its last block."""
    tables = [list(range(-(-n // 16))) for n in context_lens]
    longest = max(map(len, tables))
    cache = KVCache(KVShape(1, 1, 1, torch.float32), longest, 16, torch.device("cpu"))
    padded = torch.tensor([table + [0] * (longest - len(table)) for table in tables])
    rows = [table[i : i + 4] for table in tables for i in range(0, len(table), 4)]
    filled = torch.tensor([(row + row[-1:] * 3)[:4] for row in rows])
    keys = cache.layer(0)[0]
    return keys[padded].numel(), keys[filled].numel()


def test_both_numbers_are_those_of_the_memory_that_is_gathered() -> None:
    rng = random.Random(0)
    batches = [[4000] + [100] * 31, [64, 64], [1], [65, 16], [rng.randint(1, 300) for _ in range(9)]]
    for context_lens in batches:
        got, (rectangle, rows) = keys_gathered(context_lens), gather(context_lens)
        call = (
            f"keys_gathered({context_lens})"
            if len(context_lens) < 10
            else "keys_gathered([4000] + [100] * 31)"
        )
        assert got[0] == rectangle, f"{call} counts {got[0]} keys in the rectangle, but it has {rectangle}."
        assert got[1] == rows, f"{call} counts {got[1]} keys in rows, but {rows} are gathered."


def test_rows_lose_for_the_batch() -> None:
    if not batch:
        raise NotImplementedError("batch is empty.")
    rectangle, rows = gather(list(batch))
    assert rows > rectangle, (
        f"For your batch the rows gather {rows} keys, the rectangle {rectangle}: not more."
    )
