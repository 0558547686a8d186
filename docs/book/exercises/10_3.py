"""Exercise 10.3, a greedy token without all logits: see docs/book/10-parallel.md."""

import random

import torch
from torch import Tensor


def message(share: Tensor, rank: int, vocab_size: int) -> list[float]:
    """The two numbers that a rank sends.

    `share` [num_rows] are its logits: those of tokens rank · num_rows and following. All ranks have as many
    rows; rows of tokens from `vocab_size` on are padding.
    """
    raise NotImplementedError


def choose(messages: list[list[float]]) -> int:
    """The token with the largest logit of all, the first of several; `messages` in the order of the ranks."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def check(logits: list[float], num_rows: int, what: str) -> None:
    vocab_size = len(logits)
    size = -(-vocab_size // num_rows)
    padded = torch.tensor(logits + [0.0] * (size * num_rows - vocab_size))
    messages = []
    for rank, share in enumerate(padded.split(num_rows)):
        sent = message(share, rank, vocab_size)
        numbers = list(sent) if isinstance(sent, (list, tuple)) else [sent]
        plain = all(isinstance(number, (int, float)) for number in numbers)
        assert plain, f"A message is a list of numbers, but rank {rank} sends {type(numbers[0]).__name__}s."
        assert len(numbers) <= 2, (
            f"Rank {rank} sends {len(numbers)} numbers of {num_rows} logits: 2 are enough."
        )
        messages.append(sent)
    token, right = choose(messages), max(range(vocab_size), key=lambda i: (logits[i], -i))
    assert token == right, (
        f"{what}: {size} ranks with {num_rows} of {vocab_size} tokens choose {token}, but it is {right}."
    )


def test_the_largest_logit_wins() -> None:
    rng = random.Random(0)
    for _ in range(40):
        vocab_size, num_rows = rng.randrange(5, 40), rng.randrange(2, 6)
        logits = [rng.uniform(-3, 3) for _ in range(vocab_size)]
        check(logits, num_rows, "Random logits")


def test_padding_is_no_token() -> None:
    rng = random.Random(1)
    for vocab_size, num_rows in ((10, 4), (9, 4), (13, 5), (11, 3)):
        check([rng.uniform(-5, -1) for _ in range(vocab_size)], num_rows, "All logits are below 0")


def test_of_equal_logits_the_first_wins() -> None:
    for first, second in ((2, 7), (2, 3), (0, 9), (5, 6)):
        logits = [-1.0 - i / 10 for i in range(10)]
        logits[first] = logits[second] = 5.0
        check(logits, 4, f"Tokens {first} and {second} have the largest logit")
        check([-3.0] * 10, 4, "All logits are equal")


def test_a_share_of_padding_alone() -> None:
    """9 tokens on 4 ranks, in shares of 3: the last rank has no token."""
    logits = [-2.0, -1.0, -3.0] * 3
    padded = torch.tensor(logits + [0.0] * 3)
    messages = [message(share, rank, 9) for rank, share in enumerate(padded.split(3))]
    token = choose(messages)
    assert token == 1, f"With a rank that has padding alone, the ranks choose {token}, but it is 1."
