"""Exercise 6.2, pin a prefix: see docs/book/06-prefix-cache.md."""

import random

from nanopaged import LLM, LLMEngine, SamplingParams
from nanopaged.sequence import Sequence
from nanopaged.snapshot import check_blocks


def pin(engine: LLMEngine, prefix: list[int]) -> Sequence:
    """Keep the full blocks of a cached prefix; `BlockManager.free` of the result gives them back."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

SYSTEM = list(range(1, 27))  # 6 full blocks of 4, and 2 tokens


def ask(llm: LLM, prompt: list[int]) -> int:
    """Serve a prompt. Returns how many of its tokens were found in the prefix cache."""
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    return output.metrics.num_cached_tokens


def found_after_traffic(llm: LLM) -> int:
    """Tokens of the system prompt that are found after 12 other prompts, each of half the pool."""
    rng = random.Random(0)
    for _ in range(12):
        ask(llm, rng.choices(range(30, 1000), k=30))
    return ask(llm, [*SYSTEM, 7, 8])


def problem(llm: LLM, holders: list[Sequence]) -> str:
    """What the invariants of the block manager say. A pinned prefix counts as computed."""
    for holder in holders:
        holder.num_computed_tokens = 4 * len(holder.block_table)
    try:
        check_blocks(llm.engine.block_manager, holders)
    except AssertionError as error:
        return str(error).split("\n")[0]
    return ""


def test_a_pinned_prefix_stays_and_an_unpinned_one_goes() -> None:
    llm = LLM(block_size=4, num_blocks=16)
    manager = llm.engine.block_manager
    ask(llm, list(range(40, 50)))
    ask(llm, [*SYSTEM, 7])
    holder = pin(llm.engine, list(SYSTEM))
    held = manager.num_blocks - manager.num_free_blocks
    assert held == 6, f"After pin {held} blocks are in use, but 26 tokens have 6 full blocks of 4."
    wrong = problem(llm, [holder])
    assert not wrong, f"After pin the block manager is not sound: {wrong}."
    found = found_after_traffic(llm)
    assert found == 24, f"After other prompts, {found} of the prefix's 24 tokens in full blocks are found."
    wrong = problem(llm, [holder])
    assert not wrong, f"While the prefix is pinned, the block manager is not sound: {wrong}."
    manager.free(holder)
    held = manager.num_blocks - manager.num_free_blocks
    assert held == 0, f"BlockManager.free of the result leaves {held} blocks in use."
    found = found_after_traffic(llm)
    assert found == 0, f"It was unpinned and other prompts came, and yet {found} of its tokens are found."
    wrong = problem(llm, [])
    assert not wrong, f"After it was unpinned, the block manager is not sound: {wrong}."


def test_a_prefix_that_fills_its_last_block_is_pinned_whole() -> None:
    llm = LLM(block_size=4, num_blocks=16)
    ask(llm, [*SYSTEM[:8], 7])
    pin(llm.engine, SYSTEM[:8])
    held = 16 - llm.engine.block_manager.num_free_blocks
    assert held == 2, f"After pin of 8 tokens in blocks of 4, {held} blocks are in use instead of 2."
