"""Preemption by swapping: host blocks, order, and the choice of "auto"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from conftest import tokens
from fake_runner import FakeRunner, fake_engine

from nanopaged import LLM, EngineStats, LLMEngine, SamplingParams

make = partial(fake_engine, num_blocks=8, num_host_blocks=40, preemption="swap", enable_prefix_caching=False)


def params(max_tokens: int, **extra: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **extra)


def add(engine: LLMEngine, early: tuple[list[int], int], late: tuple[list[int], int]) -> LLMEngine:
    """Two requests of prompt and output tokens, which outgrow the pool together."""
    engine.add_request("early", early[0], params(early[1]))
    engine.add_request("late", late[0], params(late[1]))
    return engine


def add_two(engine: LLMEngine) -> LLMEngine:
    return add(engine, early=(tokens(1, 8), 20), late=(tokens(2, 8), 20))


def step_until(engine: LLMEngine, condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        engine.step()
        engine.check_invariants()
    raise AssertionError("it never happened")


def swapped(engine: LLMEngine) -> LLMEngine:
    """Until a request has left."""
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    return engine


def finish(engine: LLMEngine) -> EngineStats:
    """To the end. Then all blocks are free."""
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_host_blocks == stats.num_host_blocks
    return stats


def test_a_victim_is_moved_and_comes_back() -> None:
    """Two requests outgrow the pool: the later goes to host memory, and returns when the earlier is done."""
    engine = swapped(add_two(make()))
    early, late = engine.requests.values()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    moved = stats.num_host_blocks - stats.num_free_host_blocks
    assert moved == stats.num_blocks_swapped_out > 0
    stats = finish(engine)
    assert stats.num_blocks_swapped_in == stats.num_blocks_swapped_out == moved
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (1, 0)
    assert (early.num_preemptions, late.num_preemptions) == (0, 1)
    assert early.finish_time < late.finish_time


@pytest.mark.parametrize("missing", [0, 1])
def test_a_full_host_pool_falls_back_to_recompute(missing: int) -> None:
    """As many host blocks as the victim needs suffice; with one less it is recomputed."""
    needed = finish(add_two(make())).num_blocks_swapped_out
    stats = finish(add_two(make(num_host_blocks=needed - missing)))
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (1 - missing, missing)


def test_a_victim_that_needs_every_block_comes_back() -> None:
    """Three blocks are on the host, and the newest token needs a fourth, of four."""
    engine = swapped(add(make(num_blocks=4), early=(tokens(1, 1), 4), late=(tokens(2, 11), 5)))
    assert engine.stats().num_blocks_swapped_out == 3
    step_until(engine, lambda: engine.stats().num_swapped == 0)
    assert engine.stats().num_used_blocks == 4
    finish(engine)


def test_shared_blocks_move_once_and_stay_shared() -> None:
    """Three samples share five full blocks of their prompt: five blocks are moved out, and five back."""
    engine = make(num_blocks=17)
    engine.add_request("early", tokens(1, 30), params(28))
    engine.add_request("family", tokens(2, 21), params(8, n=3))
    swapped(engine)
    family = engine.requests["family"]
    host = [list(seq.host_table) for seq in family.live]
    assert [table[:5] for table in host] == [host[0][:5]] * 3
    moved = engine.stats().num_blocks_swapped_out
    assert moved == len({*host[0], *host[1], *host[2]}) == sum(map(len, host)) - 10
    step_until(engine, lambda: family in engine.scheduler.running)
    assert len({tuple(seq.block_table[:5]) for seq in family.live}) == 1
    counts = [engine.block_manager.blocks[b].ref_count for b in family.live[0].block_table]
    assert counts[:5] == [3] * 5
    finish(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_auto_takes_the_mode_that_was_measured_to_be_cheaper(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRunner, "cheaper_preemption", mode)
    stats = finish(add_two(make(preemption="auto")))
    assert stats.preemption == mode
    counts = {"swap": stats.num_preemptions_swap, "recompute": stats.num_preemptions_recompute}
    assert {name for name, num in counts.items() if num} == {mode}


def test_auto_measures_and_says_what_it_chose() -> None:
    assert LLM(num_blocks=64).engine.stats().preemption in ("swap", "recompute")
    assert LLM(num_blocks=64, num_host_blocks=0).engine.stats().preemption == "recompute"
