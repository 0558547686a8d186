"""Exercise 1.1, predict the waste: see docs/book/01-why-paging.md."""

from nanopaged import LLM, SamplingParams


def last_blocks(lengths: list[int], size: int) -> tuple[int, int, int]:
    """The blocks of `size` slots that sequences of these lengths take, W, and the bound of W."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def test_the_engine_agrees() -> None:
    for lengths, size in (([23, 67, 15, 41], 16), ([16, 32, 1], 16), ([5, 8], 4), ([3], 1)):
        engine = LLM(block_size=size, num_blocks=32).engine
        for i, length in enumerate(lengths):
            engine.add_request(str(i), [i + 5] * length, SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
        blocks, waste, bound = last_blocks(lengths, size)
        stats, call = engine.stats(), f"last_blocks({lengths}, {size})"
        used = stats.num_used_blocks
        empty = round(used * size * (1 - stats.slot_utilization))
        assert blocks == used, f"{call} counts {blocks} blocks, but the engine takes {used}."
        assert waste == empty, f"{call} says W = {waste}, but {empty} slots are empty."
        assert bound == len(lengths) * (size - 1), f"{call}: {bound} is not the bound of W."
