"""Exercise 7.1, count the copies: see docs/book/07-sharing.md."""

from lib.no_model import make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Sample


def after_fork(num_tokens: int, n: int, block_size: int) -> tuple[int, int]:
    """The copies that the first step after the fork makes, and the blocks in use in that step."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def fork(num_tokens: int, n: int, block_size: int) -> tuple[int, int]:
    """The same by the block manager."""
    manager = BlockManager(64, block_size)
    parent = make_request("", list(range(num_tokens)), SamplingParams()).sequences[0]
    manager.allocate([parent])
    parent.num_computed_tokens = num_tokens
    siblings = [parent, *(manager.fork(parent, i) for i in range(1, n))]
    for seq in siblings:
        seq.append(Sample(token_id=7, logprob=-1.0))
    copies = manager.append_slots(siblings)
    return len(copies), 64 - manager.num_free_blocks


def test_the_block_manager_agrees() -> None:
    for block_size in (4, 16, 1):
        for num_tokens in range(1, 40):
            for n in (1, 2, 5):
                copies, blocks = after_fork(num_tokens, n, block_size)
                want = fork(num_tokens, n, block_size)
                call = f"after_fork({num_tokens}, n={n}, block_size={block_size})"
                assert copies == want[0], f"{call} says {int(copies)} copies, but {want[0]} are made."
                assert blocks == want[1], f"{call} says {blocks} blocks, but {want[1]} are in use."
