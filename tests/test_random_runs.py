"""Random workloads over a fake model, with tiny pools that force sharing, eviction and preemption at once."""

from __future__ import annotations

import pytest
from conftest import EOS, Oracle
from fake_runner import FakeRunner, next_token
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.block_pool import blocks_needed


@st.composite
def workloads(draw: st.DrawFn) -> dict:
    """Prompts that often begin alike, requests that come, fail and go at random steps."""
    block_size = draw(st.integers(1, 5))
    stems = draw(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=14), min_size=1, max_size=2))
    num_requests = draw(st.integers(1, 8))
    requests = []
    for _ in range(num_requests):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(st.integers(0, 2), max_size=6))
        requests.append(
            {
                "arrival": draw(st.integers(0, 8)),
                "prompt": prompt,
                "max_tokens": draw(st.integers(1, 14)),
                "aborted_after": draw(st.none() | st.integers(1, 12)),
                "kind": draw(st.sampled_from(["one", "one", "several", "beams"])),
                "width": draw(st.integers(2, 4)),
                "scored": draw(st.integers(0, 4)) == 4,  # such a prompt must not use the cache
            }
        )
    return {
        "block_size": block_size,
        "num_blocks": max(most_blocks(r, block_size) for r in requests) + draw(st.integers(0, 4)),
        "max_num_seqs": draw(st.integers(4, 10)),
        "chunked": draw(st.booleans()),
        "budget": draw(st.integers(1, 40)),
        "caching": draw(st.booleans()),
        "preemption": draw(st.sampled_from(["swap", "recompute", "auto"])),
        "num_host_blocks": draw(st.sampled_from([40, 40, 8, 3, 0])),
        "failing_steps": draw(st.sets(st.integers(0, 30), max_size=4)),
        "requests": requests,
    }


def width(asked: dict) -> int:
    return 1 if asked["kind"] == "one" else asked["width"]


def most_blocks(asked: dict, block_size: int) -> int:
    """What the request needs at the most: full blocks of the prompt are shared, the rest is not."""
    shared = len(asked["prompt"]) // block_size if width(asked) > 1 else 0
    longest = blocks_needed(len(asked["prompt"]) + asked["max_tokens"] - 1, block_size)
    return shared + width(asked) * (longest - shared)


def make_params(asked: dict) -> SamplingParams | BeamSearchParams:
    lengths = {"max_tokens": asked["max_tokens"], "ignore_eos": True}
    if asked["kind"] == "beams":
        return BeamSearchParams(beam_width=asked["width"], **lengths)
    scored = 0 if asked["scored"] else None
    return SamplingParams(n=width(asked), prompt_logprobs=scored, **lengths)


def expected_outputs(asked: dict, folder: object) -> list[list[int]]:
    """Each output by itself; beams from an engine that has the pool to itself and computes nothing twice."""
    prompt, max_tokens = asked["prompt"], asked["max_tokens"]
    if asked["kind"] == "beams":
        config = EngineConfig(model=folder, block_size=64, enable_prefix_caching=False)
        engine = LLMEngine(config, FakeRunner(64, 64))
        engine.add_request("alone", prompt, make_params(asked))
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        return [completion.token_ids for completion in output.outputs]
    outputs = []
    for index in range(width(asked)):
        token_ids = list(prompt)
        while len(token_ids) < len(prompt) + max_tokens:
            token_ids.append(next_token(token_ids, index))
        outputs.append(token_ids[len(prompt) :])
    return outputs


def build(workload: dict, folder: object) -> tuple[LLMEngine, FakeRunner]:
    runner = FakeRunner(workload["num_blocks"], workload["block_size"], workload["num_host_blocks"])
    longest = max(len(r["prompt"]) + r["max_tokens"] for r in workload["requests"])
    budget = workload["budget"] if workload["chunked"] else max(workload["budget"], longest)
    config = EngineConfig(
        model=folder,
        max_model_len=longest,
        block_size=workload["block_size"],
        max_num_seqs=workload["max_num_seqs"],
        max_num_batched_tokens=budget,
        enable_chunked_prefill=workload["chunked"],
        enable_prefix_caching=workload["caching"],
        preemption=workload["preemption"],
    )
    return LLMEngine(config, runner), runner


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=workloads())
def test_every_request_reads_its_own_kv_and_says_what_it_would_say_alone(
    workload: dict, qwen3: Oracle
) -> None:
    engine, runner = build(workload, qwen3.folder)
    pending = dict(enumerate(workload["requests"]))
    aborts: dict[int, list[str]] = {}
    outputs: dict[str, list[list[int]]] = {}
    step = 0
    while pending or engine.has_unfinished_requests():
        for i in [i for i, r in pending.items() if r["arrival"] <= step]:
            asked = pending.pop(i)
            engine.add_request(str(i), asked["prompt"], make_params(asked))
            if asked["aborted_after"] is not None:
                aborts.setdefault(step + asked["aborted_after"], []).append(str(i))
        for request_id in aborts.pop(step, []):
            if request_id in engine.requests:
                partial = engine.abort_request(request_id)
                outputs[request_id] = [completion.token_ids for completion in partial.outputs]
                assert partial.finished
                assert any(completion.finish_reason == "abort" for completion in partial.outputs)
        take_step(engine, runner, fails=step in workload["failing_steps"], outputs=outputs)
        stats = engine.stats()
        assert sum(r.num_seqs for r in engine.scheduler.running) <= workload["max_num_seqs"]
        assert stats.num_free_blocks + stats.num_used_blocks == workload["num_blocks"]
        step += 1
        assert step < 3000, "the engine makes no progress"
    check_outputs(workload, outputs, qwen3.folder)
    check_drained(engine, runner)
    event(f"recomputed: {engine.stats().num_preemptions_recompute > 0}")
    event(f"swapped: {engine.stats().num_preemptions_swap > 0}")
    event(f"prefix hits: {engine.stats().prefix_cache_hits > 0}")
    event(f"copies: {engine.stats().num_blocks_copied > 0}")


def take_step(
    engine: LLMEngine, runner: FakeRunner, fails: bool, outputs: dict[str, list[list[int]]]
) -> None:
    """One step, which may break; either way the books are in order after it."""
    if fails and engine.has_unfinished_requests():
        runner.fail_next = True
        before = {r.request_id: r.sequences[0].num_tokens for r in engine.requests.values()}
        with pytest.raises(RuntimeError, match="on fire"):
            engine.step()
        assert before == {r.request_id: r.sequences[0].num_tokens for r in engine.requests.values()}
    else:
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = [completion.token_ids for completion in output.outputs]
                assert all(completion.finish_reason == "length" for completion in output.outputs)
    engine.check_invariants()


def check_outputs(workload: dict, outputs: dict[str, list[list[int]]], folder: object) -> None:
    """Whole outputs, or beginnings of them where a request was aborted (of beams, those change yet)."""
    assert outputs.keys() == {str(i) for i in range(len(workload["requests"]))}
    for i, asked in enumerate(workload["requests"]):
        got, expected = outputs[str(i)], expected_outputs(asked, folder)
        if asked["aborted_after"] is None:
            assert got == expected
        elif asked["kind"] != "beams":
            assert got == [whole[: len(part)] for whole, part in zip(expected, got, strict=False)]


def check_drained(engine: LLMEngine, runner: FakeRunner) -> None:
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_host_blocks == stats.num_host_blocks
    assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
    assert runner.most_tokens <= engine.scheduler.max_num_batched_tokens
    if not engine.config.enable_prefix_caching:
        assert stats.num_cached_blocks == stats.prefix_cache_hits == 0


def test_the_fake_model_can_catch_a_wrong_block(qwen3: Oracle) -> None:
    """The guard of all tests above: hand a sequence a wrong block, and the fake runner must notice."""
    workload = {"num_blocks": 20, "block_size": 2, "chunked": True, "budget": 8, "max_num_seqs": 4}
    workload |= {"requests": [{"prompt": [0] * 20, "max_tokens": 20}]}
    workload |= {"caching": True, "num_host_blocks": 0, "preemption": "recompute"}
    engine, _ = build(workload, qwen3.folder)
    engine.add_request("a", [1, 2, 0, 1], SamplingParams(max_tokens=8, stop_token_ids=[EOS]))
    engine.step()
    table = engine.scheduler.running[0].sequences[0].block_table
    table[0], table[1] = table[1], table[0]
    with pytest.raises(AssertionError, match="reads a wrong slot"):
        engine.step()
