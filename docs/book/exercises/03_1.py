"""Exercise 3.1, count the free blocks: see docs/book/03-blocks.md."""

from lib.no_model import make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager

free: list[int] = []  # six numbers: the free blocks after each event
share: float | None = None  # percent of the blocks that are in use in the end


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


EVENTS = {  # what happens → the request, and its tokens from then on
    "A arrives": ("A", 20),
    "B arrives": ("B", 50),
    "C arrives": ("C", 100),
    "A has grown": ("A", 80),
    "B has left": ("B", 0),
    "D arrives": ("D", 200),
}


def counted() -> list[int]:
    """The same by the engine's block manager."""
    pool, counts, sequences = BlockManager(100, 8, enable_prefix_caching=False), [], {}
    for name, num_tokens in EVENTS.values():
        if name not in sequences:
            sequences[name] = make_request(name, [0] * num_tokens, SamplingParams()).sequences[0]
            pool.allocate([sequences[name]])
        elif num_tokens > 0:
            sequences[name].token_ids += [0] * (num_tokens - sequences[name].num_tokens)
            pool.append_slots([sequences[name]])
        else:
            pool.free(sequences.pop(name))
        counts.append(pool.num_free_blocks)
    return counts


def test_the_block_manager_agrees() -> None:
    if not free:
        raise NotImplementedError("free is empty.")
    assert len(free) == len(EVENTS), f"free has {len(free)} numbers, but there are {len(EVENTS)} events."
    for event, mine, real in zip(EVENTS, free, counted(), strict=True):
        assert mine == real, f"When {event}, the block manager has {real} free blocks, and you say {mine}."


def test_the_share_in_use() -> None:
    if share is None:
        raise NotImplementedError("share is None.")
    used = 100 - counted()[-1]
    assert abs(share - used) < 0.01, f"share is {share}, but {used} of the 100 blocks are in use."
