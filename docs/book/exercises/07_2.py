"""Exercise 7.2, find the leak: see docs/book/07-sharing.md."""

import random

from lib.no_model import make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Sequence


def leaked(manager: BlockManager, sequences: list[Sequence]) -> list[int]:
    """The ids of the blocks whose reference count is not the number of block tables that name them."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def allocate(manager: BlockManager, num_tokens: int) -> Sequence:
    seq = make_request("", list(range(num_tokens)), SamplingParams()).sequences[0]
    manager.allocate([seq])
    return seq


def expect(manager: BlockManager, sequences: list[Sequence], want: list[int], when: str) -> None:
    got = sorted(leaked(manager, sequences))
    assert got == want, f"leaked returns {got} instead of {want} {when}."


def test_a_parent_that_is_forgotten() -> None:
    manager = BlockManager(8, 4)
    parent = allocate(manager, 6)
    children = [manager.fork(parent, 0), manager.fork(parent, 1)]
    expect(manager, children, [0, 1], "if a parent with the blocks 0 and 1 was forgotten instead of freed")
    manager.free(parent)
    expect(manager, children, [], "if two children share the blocks 0 and 1 and the parent was freed")
    expect(manager, [], [0, 1], "if no table names the blocks 0 and 1, and they have references")


def test_a_count_that_is_too_small() -> None:
    manager = BlockManager(8, 4)
    parent = allocate(manager, 10)
    child = manager.fork(parent, 1)
    manager.blocks[1].ref_count = 1
    expect(manager, [parent, child], [1], "if two tables name block 1, and its count is 1")
    manager.blocks[2].ref_count = 0
    expect(
        manager, [parent, child], [1, 2], "if two tables name the blocks 1 and 2, and the counts are 1 and 0"
    )


def test_wrong_counts_anywhere() -> None:
    rng = random.Random(0)
    for _ in range(20):
        manager, sequences = BlockManager(40, 4), []
        for _ in range(5):
            sequences.append(allocate(manager, rng.randint(1, 12)))
            sequences += [manager.fork(sequences[-1], i) for i in range(rng.randint(0, 2))]
        manager.free(sequences.pop(rng.randrange(len(sequences))))
        expect(manager, sequences, [], "if all counts are right")
        wrong = sorted(rng.sample(range(40), 3))
        for block_id in wrong:
            manager.blocks[block_id].ref_count += rng.choice([1, 2])
        expect(manager, sequences, wrong, "if the counts of three blocks are too large")
