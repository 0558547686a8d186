"""Preemption by swapping: host blocks, order, the choice of "auto", and the bytes that are moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Oracle, random_prompts, tokens
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


def step_until(engine: LLMEngine, condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        engine.step()
        engine.check_invariants()
    raise AssertionError("it never happened")


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
    engine = make()
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    moved = stats.num_host_blocks - stats.num_free_host_blocks
    assert moved == stats.num_blocks_swapped_out > 0
    done = finish(engine)
    stats = engine.stats()
    assert stats.num_blocks_swapped_in == stats.num_blocks_swapped_out == moved
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (1, 0)
    assert done["early"].metrics.num_preemptions == 0
    assert done["late"].metrics.num_preemptions == 1
    assert list(done) == ["early", "late"]


def test_no_new_request_is_admitted_while_a_swapped_one_waits(make: MakeEngine) -> None:
    engine = make()
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    engine.add_request("new", tokens(3, 1), params(1))  # would fit at once
    late = engine.requests["late"]
    while late not in engine.scheduler.running:
        assert "new" not in [request.request_id for request in engine.scheduler.running]
        engine.step()
    finish(engine)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_full_host_pool_falls_back_to_recompute(make: MakeEngine, missing: int) -> None:
    """As many host blocks as the victim needs suffice; with one less it is recomputed."""

    def preempted(num_host_blocks: int) -> EngineStats:
        engine = make(num_host_blocks=num_host_blocks)
        engine.add_request("early", tokens(1, 8), params(20))
        engine.add_request("late", tokens(2, 8), params(20))
        assert len(finish(engine)) == 2
        return engine.stats()

    stats = preempted(preempted(40).num_blocks_swapped_out - missing)
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (1 - missing, missing)


def test_a_victim_of_one_block_is_moved_as_well(make: MakeEngine) -> None:
    engine = make(num_blocks=3)
    engine.add_request("early", tokens(1, 4), params(8))
    engine.add_request("late", tokens(2, 2), params(6))
    finish(engine)
    stats = engine.stats()
    assert (stats.num_preemptions_swap, stats.num_blocks_swapped_out) == (1, 1)


def test_a_victim_that_needs_every_block_comes_back(make: MakeEngine) -> None:
    """Three blocks are on the host, and the newest token needs a fourth, of four."""
    engine = make(num_blocks=4)
    engine.add_request("early", tokens(1, 1), params(4))
    engine.add_request("late", tokens(2, 11), params(5))
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    assert engine.stats().num_blocks_swapped_out == 3
    step_until(engine, lambda: engine.stats().num_swapped == 0)
    assert engine.stats().num_used_blocks == 4
    finish(engine)


def test_shared_blocks_move_once_and_stay_shared(make: MakeEngine) -> None:
    """Three samples share five full blocks of their prompt: five blocks are moved out, and five back."""
    engine = make(num_blocks=17)
    engine.add_request("early", tokens(1, 30), params(28))
    engine.add_request("family", tokens(2, 21), params(8, n=3))
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    family = engine.requests["family"]
    host = [list(seq.host_table) for seq in family.live]
    assert len(host) == 3
    assert [table[:5] for table in host] == [host[0][:5]] * 3
    assert engine.stats().num_blocks_swapped_out == len({*host[0], *host[1], *host[2]})
    assert engine.stats().num_blocks_swapped_out == sum(map(len, host)) - 10
    step_until(engine, lambda: family in engine.scheduler.running)
    assert len({tuple(seq.block_table[:5]) for seq in family.live}) == 1
    counts = [engine.block_manager.blocks[b].ref_count for b in family.live[0].block_table]
    assert counts[:5] == [3] * 5
    finish(engine)


def test_a_request_whose_prompt_another_one_uses_is_swapped_whole(make: MakeEngine) -> None:
    """It comes back to blocks of its own; the other request keeps the blocks that were shared."""
    engine = make(num_blocks=14, enable_prefix_caching=True)
    prompt = tokens(1, 17)
    engine.add_request("early", prompt, params(28))
    engine.add_request("late", prompt[:16] + [50, 51], params(24))
    done = finish(engine)
    stats = engine.stats()
    assert stats.num_preemptions_swap > 0
    assert stats.num_blocks_swapped_in == stats.num_blocks_swapped_out
    assert len(done) == 2


def test_a_half_prefilled_victim(make: MakeEngine) -> None:
    """Only what is computed is moved; the rest of the prompt goes on from there, not from the start."""
    engine = make(num_blocks=11, max_num_batched_tokens=5)
    engine.add_request("early", tokens(1, 4), params(30))
    engine.step()
    engine.add_request("late", tokens(2, 33), params(2))
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    late = engine.requests["late"].sequences[0]
    assert 0 < late.num_computed_tokens < 33
    assert len(late.host_table) == -(-late.num_computed_tokens // 4)
    finish(engine)
    assert engine.stats().num_preemptions_swap == 1


def test_abort_while_swapped(make: MakeEngine) -> None:
    engine = make()
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    step_until(engine, lambda: engine.stats().num_swapped == 1)
    output = engine.abort_request("late")
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) > 0
    assert engine.stats().num_free_host_blocks == 40
    assert list(finish(engine)) == ["early"]


@pytest.mark.parametrize("failing", ["out", "in"])
def test_a_failed_step_with_a_swap_in_it(make: MakeEngine, failing: str) -> None:
    """Either way host copies are forgotten, the K/V is computed again, and the outputs are the same."""
    engine = make()
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    expected = finish(make_twin(engine, make))
    runner = engine.runner
    execute = runner.execute

    def fail_once(batch: object) -> object:
        if batch.swap_out if failing == "out" else batch.swap_in:
            runner.execute = execute
            runner.fail_next = True
        return execute(batch)

    runner.execute = fail_once
    done: dict[str, RequestOutput] = {}
    with pytest.raises(RuntimeError, match="on fire"):
        finish(engine, done)
    engine.check_invariants()
    finish(engine, done)
    for name in ("early", "late"):
        assert done[name].outputs[0].token_ids == expected[name].outputs[0].token_ids


def make_twin(engine: LLMEngine, make: MakeEngine) -> LLMEngine:
    """An engine with the same requests and an ample pool."""
    twin = make(num_blocks=100)
    for name, request in engine.requests.items():
        twin.add_request(name, request.prompt_token_ids, request.params)
    return twin


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_auto_takes_the_way_that_was_measured_to_be_cheaper(
    make: MakeEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRunner, "cheaper_preemption", lambda self: way)
    engine = make(preemption="auto")
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    finish(engine)
    stats = engine.stats()
    assert stats.preemption == way
    assert (stats.num_preemptions_swap > 0) == (way == "swap")
    assert (stats.num_preemptions_recompute > 0) == (way == "recompute")


def test_auto_measures_and_says_what_it_chose() -> None:
    assert LLM(num_blocks=64).engine.stats().preemption in ("swap", "recompute")
    assert LLM(num_blocks=64, num_host_blocks=0).engine.stats().preemption == "recompute"


# ── the bytes ─────────────────────────────────────────────────────────────────────────────────────


def test_kv_is_the_same_after_the_round_trip_in_other_blocks(qwen3: Oracle) -> None:
    """With the real model: the K/V in the victim's blocks is bit for bit the same as before."""
    llm = LLM(qwen3.folder, block_size=4, num_blocks=10, preemption="swap", enable_prefix_caching=False)
    engine, cache = llm.engine, llm.engine.runner.kv_cache
    prompts = random_prompts(2, seed=2, longest=10)
    engine.add_request("early", prompts[0], params(24))
    engine.add_request("late", prompts[1], params(24))
    late = engine.requests["late"].sequences[0]
    snapshot, table = None, None
    while not late.host_table:
        table, computed = list(late.block_table), late.num_computed_tokens
        snapshot = cache.data[table].clone()
        engine.step()
    assert late.num_computed_tokens == computed
    while not late.block_table:
        engine.step()
    back = late.block_table[: len(table)]
    assert back != table
    full, rest = divmod(computed, 4)
    assert torch.equal(cache.data[back[:full]], snapshot[:full])
    if rest:
        assert torch.equal(cache.data[back[full]][..., :rest, :], snapshot[full][..., :rest, :])
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()


def test_prompt_logprobs_survive_a_preemption_half_way(qwen3: Oracle) -> None:
    """Past bug elsewhere: chunks scored before the preemption were lost, or scored twice after it."""
    prompt = random_prompts(1, seed=3, longest=60)[0] * 3
    prompt = prompt[:45]
    for preemption in ("swap", "recompute"):
        llm = LLM(
            qwen3.folder,
            dtype="float32",
            block_size=4,
            num_blocks=14,
            max_num_batched_tokens=6,
            preemption=preemption,
        )
        engine = llm.engine
        engine.add_request("early", [1, 2, 3], params(40))
        engine.step()
        engine.add_request("late", prompt, params(2, prompt_logprobs=1))
        outputs = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
        late = outputs["late"]
        assert late.metrics.num_preemptions > 0
        expected = qwen3.logprobs(prompt)
        assert len(late.prompt_logprobs) == len(prompt)
        for p, row in enumerate(late.prompt_logprobs[1:]):
            assert row[prompt[p + 1]] == pytest.approx(expected[p, prompt[p + 1]].item(), abs=1e-4)
