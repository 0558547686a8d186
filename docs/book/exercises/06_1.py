"""Exercise 6.1, predict the hit: see docs/book/06-prefix-cache.md."""

from lib.no_model import make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Sequence


def num_found(common: int, length: int, block_size: int) -> int:
    """Tokens found of a prompt of `length` tokens, of which `common` begin a longer, cached prompt."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def new_sequence(token_ids: list[int]) -> Sequence:
    return make_request("", token_ids, SamplingParams()).sequences[0]


def test_the_block_manager_agrees() -> None:
    for block_size in (4, 1, 2, 7):
        manager = BlockManager(64, block_size)
        earlier = new_sequence(list(range(30)))
        manager.allocate([earlier])
        earlier.num_scheduled_tokens = 30
        manager.publish(earlier)
        for common in range(1, 25):
            for own in range(5):
                prompt = [*range(common), *[99] * own]
                got = num_found(common, len(prompt), block_size)
                found = len(manager.find_prefix(new_sequence(prompt))) * block_size
                call = f"num_found(common={common}, length={len(prompt)}, block_size={block_size})"
                assert got == found, f"{call} says {got}, but {found} tokens are found."
