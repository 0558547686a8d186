"""Exercise 0.1, a pool without preemption: see docs/book/00-map.md."""

from nanopaged import LLM, SamplingParams


def enough(lengths: list[int], max_tokens: int, block_size: int) -> int:
    """The blocks that a pool needs so that no request is preempted.

    Args:
        lengths: tokens of the prompts; all requests arrive together, and each generates `max_tokens` tokens.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def preemptions(lengths: list[int], max_tokens: int, block_size: int, num_blocks: int) -> int:
    engine = LLM(block_size=block_size, num_blocks=num_blocks, watermark=0.0).engine
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, length in enumerate(lengths):
        engine.add_request(str(i), [i + 3] * length, params)
    engine.step()
    num_waiting = engine.stats().num_waiting
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    return stats.num_preemptions_swap + stats.num_preemptions_recompute + num_waiting


def test_no_block_more_and_no_block_less() -> None:
    several = ([8, 8, 12], 8, 4), ([5, 5], 4, 4), ([3, 3], 9, 1), ([6, 6, 6], 2, 3)
    for lengths, max_tokens, size in (*several, ([8, 5], 1, 4), ([6, 7, 3], 1, 3)):
        num_blocks = enough(lengths, max_tokens, size)
        call = f"enough({lengths}, {max_tokens}, {size}) is {num_blocks}"
        largest = (max(lengths) + max_tokens - 1) // size + 1
        assert num_blocks >= largest, f"{call}: not even the longest request fits in so few blocks alone."
        assert preemptions(lengths, max_tokens, size, num_blocks) == 0, (
            f"{call}: with so few blocks a request waits or is preempted."
        )
        assert preemptions(lengths, max_tokens, size, num_blocks - 1) > 0, (
            f"{call}: one block less is enough, too."
        )
