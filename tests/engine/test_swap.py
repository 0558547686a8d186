"""Preemption by swapping: host blocks, order, the choice of "auto", and the bytes that are moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import tokens
from fake_runner import FakeRunner

from nanopaged import LLM, EngineConfig, EngineStats, LLMEngine, RequestOutput, SamplingParams

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def make(config_only: Path) -> MakeEngine:
    def make_engine(num_blocks: int = 8, num_host_blocks: int = 40, **config: object) -> LLMEngine:
        options = {"block_size": 4, "preemption": "swap", "enable_prefix_caching": False} | config
        runner = FakeRunner(num_blocks, options["block_size"], num_host_blocks)
        return LLMEngine(EngineConfig(model=config_only, **options), runner)

    return make_engine


def params(max_tokens: int, **extra: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **extra)


EARLY_AND_LATE = (("early", tokens(1, 8), 20), ("late", tokens(2, 8), 20))


def add(engine: LLMEngine, *requests: tuple[str, list[int], int]) -> LLMEngine:
    """Requests of name, prompt and output tokens; usually two that outgrow the pool together."""
    for name, prompt, max_tokens in requests or EARLY_AND_LATE:
        engine.add_request(name, prompt, params(max_tokens))
    return engine


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


def finish(engine: LLMEngine, done: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
    """To the end; the outputs in the order in which they finished, after those already in `done`."""
    done = {} if done is None else done
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.check_invariants()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_host_blocks == stats.num_host_blocks
    return done


def test_a_victim_is_moved_and_comes_back(make: MakeEngine) -> None:
    """Two requests outgrow the pool: the later goes to host memory, and returns when the earlier is done."""
    engine = swapped(add(make()))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    moved = stats.num_host_blocks - stats.num_free_host_blocks
    assert moved == stats.num_blocks_swapped_out > 0
    done, stats = finish(engine), engine.stats()
    assert stats.num_blocks_swapped_in == stats.num_blocks_swapped_out == moved
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (1, 0)
    assert [(name, done[name].metrics.num_preemptions) for name in done] == [("early", 0), ("late", 1)]


def test_no_new_request_is_admitted_while_a_swapped_one_waits(make: MakeEngine) -> None:
    engine = swapped(add(make()))
    add(engine, ("new", tokens(3, 1), 1))  # would fit at once
    while engine.requests["late"] not in engine.scheduler.running:
        assert "new" not in [request.request_id for request in engine.scheduler.running]
        engine.step()
    finish(engine)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_full_host_pool_falls_back_to_recompute(make: MakeEngine, missing: int) -> None:
    """As many host blocks as the victim needs suffice; with one less it is recomputed."""

    def preempted(num_host_blocks: int) -> EngineStats:
        engine = add(make(num_host_blocks=num_host_blocks))
        assert len(finish(engine)) == 2
        return engine.stats()

    stats = preempted(preempted(40).num_blocks_swapped_out - missing)
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (1 - missing, missing)


def test_a_victim_that_needs_every_block_comes_back(make: MakeEngine) -> None:
    """Three blocks are on the host, and the newest token needs a fourth, of four."""
    engine = swapped(add(make(num_blocks=4), ("early", tokens(1, 1), 4), ("late", tokens(2, 11), 5)))
    assert engine.stats().num_blocks_swapped_out == 3
    step_until(engine, lambda: engine.stats().num_swapped == 0)
    assert engine.stats().num_used_blocks == 4
    finish(engine)


def test_shared_blocks_move_once_and_stay_shared(make: MakeEngine) -> None:
    """Three samples share five full blocks of their prompt: five blocks are moved out, and five back."""
    engine = add(make(num_blocks=17), ("early", tokens(1, 30), 28))
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


def test_a_request_whose_prompt_another_one_uses_is_swapped_whole(make: MakeEngine) -> None:
    """It comes back to blocks of its own; the other request keeps the blocks that were shared."""
    engine, prompt = make(num_blocks=14, enable_prefix_caching=True), tokens(1, 17)
    add(engine, ("early", prompt, 28), ("late", [*prompt[:16], 50, 51], 24))
    assert len(finish(engine)) == 2
    stats = engine.stats()
    assert stats.num_preemptions_swap > 0
    assert stats.num_blocks_swapped_in == stats.num_blocks_swapped_out


def test_a_half_prefilled_victim(make: MakeEngine) -> None:
    """Only what is computed is moved; the rest of the prompt goes on from there, not from the start."""
    engine = add(make(num_blocks=11, max_num_batched_tokens=5), ("early", tokens(1, 4), 30))
    engine.step()
    late = swapped(add(engine, ("late", tokens(2, 33), 2))).requests["late"].sequences[0]
    assert 0 < late.num_computed_tokens < 33
    assert len(late.host_table) == -(-late.num_computed_tokens // 4)
    finish(engine)
    assert engine.stats().num_preemptions_swap == 1


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_auto_takes_the_way_that_was_measured_to_be_cheaper(
    make: MakeEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRunner, "cheaper_preemption", lambda self: way)
    engine = add(make(preemption="auto"))
    finish(engine)
    stats = engine.stats()
    assert stats.preemption == way
    counts = {"swap": stats.num_preemptions_swap, "recompute": stats.num_preemptions_recompute}
    assert {name for name, num in counts.items() if num} == {way}


def test_auto_measures_and_says_what_it_chose() -> None:
    assert LLM(num_blocks=64).engine.stats().preemption in ("swap", "recompute")
    assert LLM(num_blocks=64, num_host_blocks=0).engine.stats().preemption == "recompute"


# ── the bytes ─────────────────────────────────────────────────────────────────────────────────────
