"""Stage 1: attention over a block table, by hand and with random numbers, beside the source's."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tensors import check
from torch import Tensor

from nanopaged.attention.reference_backend import reference_paged_attention
from nanopaged.attention.torch_backend import attend, gather_context

Case = tuple[str, str, tuple[Any, ...]]  # the function, the rule, and the arguments

FUNCTIONS = {f.__name__: f for f in (gather_context, attend, reference_paged_attention)}
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
MODS = {  # rule → score_mod
    "": None,
    " (a score_mod makes near keys count more)": lambda layer, s, q, k: s.tanh() - (q - k).to(s.dtype) / 10,
    " (a score_mod makes all scores 0)": lambda layer, s, q, k: 0 * s,
    " (a score_mod masks all but three keys)": lambda layer, s, q, k: s.masked_fill(k <= q - 3, -math.inf),
    " (a score_mod masks all but the first two keys)": lambda layer, s, q, k: s.masked_fill(k > 1, -math.inf),
}
NONE, NEAR, ZERO, LAST, FIRST = MODS
BY_HAND = (  # rule, scores, values, dtype, score_mod
    ("A query reads the keys up to its own position", [0, 0, 0], [3, 5, 10], FLOAT, NONE),
    ("The example of the page", [-1, 1, 0, 2], [4, 3, 2, 1], FLOAT, NONE),
    ("Subtract the maximum, because exp(89) is infinite", [1000, 990, 980], [4, 3, 1], FLOAT, NONE),
    ("The maximum may come in any block", [-1e4, 0, 1e4, 300], [1, 2, 3, 4], FLOAT, NONE),
    ("Scores may be far below 0", [-1000, -1010], [4, 3], FLOAT, NONE),
    ("Begin with the lowest finite number, mask with -inf", [-1e30, -3e30, -1e30], [4, 3, 9], FLOAT, NONE),
    ("A block may be masked wholly, and -inf - -inf is NaN", [0] * 7, range(7), FLOAT, LAST),
    ("A block may be masked wholly, also the last one", [0] * 7, range(7), FLOAT, FIRST),
    ("A masked key has no weight at all", [0] * 4, [1e9, 1, 1, 1], FLOAT, LAST),
    ("Mask the future after the score_mod", [0] * 5, [1, 2, 3, 4, 5], FLOAT, ZERO),
    ("float16 ends at 65504: add in float32, or divide first", [0] * 200, [1000] * 200, HALF, NONE),
    ("float16 ends at 65504: multiply in float32", [60000, 59000], [4, 3], HALF, NONE),
    ("In bfloat16 256 + 1 is 256: add in float32", [0] * 600, [0] * 300 + [1] * 300, BFLOAT, NONE),
)
SIZES = ((1, 1, 4, 1), (4, 1, 8, 32), (1, 2, 4, 70), (2, 2, 3, 33), (1, 4, 6, 700), (2, 3, 5, 17))


def inputs() -> Iterator[tuple[str, Tensor, Tensor, Tensor, Any]]:
    """Rule, q [KV heads, group, head_dim], k and v [KV heads, keys, head_dim], score_mod."""
    for rule, scores, values, dtype, mod in BY_HAND:
        k, v = (torch.tensor([*numbers], dtype=dtype).view(1, -1, 1) for numbers in (scores, values))
        few = f", scores {scores}, values {[*values]}" if len(scores) <= 8 else ""
        yield rule + mod + few, torch.ones(1, 1, 1, dtype=dtype), k, v, MODS[mod]
    torch.manual_seed(1)
    for number, (dtype, mod) in enumerate(product((FLOAT, HALF, BFLOAT), MODS)):
        heads, group, head_dim, num_keys = SIZES[number % len(SIZES)]
        q = torch.randn(heads, group, head_dim).to(dtype)
        k, v = torch.randn(2, heads, num_keys, head_dim).to(dtype)
        yield f"{heads} KV heads, {num_keys} keys{mod}", q, k, v, MODS[mod]


def gather_cases() -> Iterator[Case]:
    name = "gather_context"
    sizes = ((1, 2, 1, 2), (2, 1, 5, 70), (2, 4, 5, 3), (3, 16, 20, 45))
    for heads, block_size, head_dim, num_blocks in sizes:
        cache = torch.empty(num_blocks + 4, 3, heads, block_size, head_dim)[:, 1]  # one layer of three
        cache.copy_(torch.arange(cache.numel()).view(cache.shape))
        table = torch.tensor(random.Random(5).sample(range(num_blocks + 4), num_blocks))
        whole = num_blocks * block_size
        for num_keys in (1, block_size, block_size + 1, whole - block_size, whole):
            yield name, "A context is gathered from a cache that holds 0 1 2 …", (cache, table, num_keys)
            tables = table.repeat(2, 1)
            yield name, "Tables of several sequences give several contexts", (cache, tables, num_keys)


def attend_cases() -> Iterator[Case]:
    for rule, q, k, v, score_mod in inputs():
        last = k.shape[1] - 1
        for first in (0, last // 2):
            positions = torch.arange(first, last + 1).flip(0)
            queries = positions.repeat_interleave(q.shape[1])[:, None]
            yield "attend", rule, (q.repeat(1, len(positions), 1), k, v, queries, first + 1, score_mod, 0)
        two = (torch.stack([x, x.flip(1)]) for x in (q, k, v))
        queries = torch.tensor([last, last // 2]).view(2, 1, 1, 1)
        yield "attend", f"{rule}, two sequences", (*two, queries, 0, score_mod, 0)


def scatter(x: Tensor, block_size: int, table: list[int]) -> Tensor:
    """A cache, one layer of two, with x in the blocks of the table. All other slots hold NaN."""
    heads, num_keys, head_dim = x.shape
    cache = torch.full((max(table) + 2, 2, heads, block_size, head_dim), math.nan, dtype=x.dtype)[:, 1]
    positions = torch.arange(num_keys)
    cache[torch.tensor(table)[positions // block_size], :, positions % block_size] = x.transpose(0, 1)
    return cache


def reference_cases() -> Iterator[Case]:
    name = "reference_paged_attention"
    for (rule, q, k, v, score_mod), block_size in product(inputs(), (1, 2, 16)):
        for num_keys in (k.shape[1] // 2 + 1, k.shape[1]):
            num_blocks = num_keys // block_size + 2  # there is a block for tokens to come
            table = random.Random(6).sample(range(num_blocks + 3), num_blocks)
            caches = (scatter(x[:, :num_keys], block_size, table) for x in (k, v))
            yield name, rule, (2 * q.flatten(0, 1), *caches, table, num_keys, 0.5, score_mod, 0)
    cache = torch.randn(4, 1, 2, 1)
    rule = "Read block by block: a score_mod adds to a score how many keys of its block are before it"
    yield name, rule, (torch.ones(1, 1), cache, cache, [3, 0, 2], 5, 1.0, lambda _, s, q, k: s + k - k.min())


CASES = [*gather_cases(), *attend_cases(), *reference_cases()]


@pytest.mark.parametrize(("function", "rule", "arguments"), CASES)
def test_a_case(function: str, rule: str, arguments: tuple[Any, ...]) -> None:
    check(rule, FUNCTIONS[function], *arguments)
