"""Exercise 6.2, what a radix tree would find: see docs/book/06-prefix-cache.md."""

import random

from lib.no_model import make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager


def found_by_tree(prompts: list[list[int]]) -> int:
    """Tokens that a radix tree with pages of one token finds for these prompts, one after another."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def found_by_blocks(prompts: list[list[int]], block_size: int) -> int:
    """The same by the prefix cache, which nothing is evicted from."""
    num_blocks = sum(-(-len(prompt) // block_size) for prompt in prompts)
    manager, total = BlockManager(num_blocks, block_size), 0
    for prompt in prompts:
        seq = make_request("", prompt, SamplingParams()).sequences[0]
        total += len(manager.find_prefix(seq)) * block_size
        manager.allocate([seq])
        seq.num_scheduled_tokens = seq.num_tokens - seq.num_computed_tokens
        manager.publish(seq)
    return total


def make_prompts(seed: int, longest: int) -> list[list[int]]:
    """Forty prompts, ten with each of four prefixes, in any order."""
    rng, prompts = random.Random(seed), []
    for _ in range(4):
        prefix = rng.choices(range(1000), k=rng.randint(longest // 6, longest))
        prompts += [prefix + rng.choices(range(1000), k=rng.randint(10, longest // 3)) for _ in range(10)]
    rng.shuffle(prompts)
    return prompts


def test_few_prompts() -> None:
    for prompts in (
        [[1, 2, 3], [4, 5, 6]],
        [[1, 2, 3, 4], [1, 2, 5, 4]],
        [[1, 2], [3, 4], [1, 2, 6]],
        [[1, 2, 3], [3, 2, 1], [2, 3, 1]],
        [[1, 2, 3], [1, 2, 3]],
        [[1, 2, 3, 4], [1, 2]],
    ):
        got, found = found_by_tree(prompts), found_by_blocks(prompts, 1)
        assert got == found, f"found_by_tree({prompts}) is {got}, but blocks of one token find {found}."


def test_many_prompts() -> None:
    prompts = make_prompts(0, 60)
    got, found = found_by_tree(prompts), found_by_blocks(prompts, 1)
    assert got == found, f"For 40 prompts found_by_tree says {got}, but blocks of one token find {found}."
