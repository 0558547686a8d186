"""Sinks and a window beside transformers with the mask written out, and over slots that know their tokens."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_random_runs
import torch
from conftest import Oracle, memory_that_was_never_written, oracle, qwen3, random_prompts, tokens
from fake_runner import FakeRunner
from faults import STAGES
from random_workloads import LONGEST, Workload, forked, mixed, siblings, tiny
from serving import serve
from sinks import HOLE, LLM, SinkBlocks, SinkConfig, SinkEngine, SinkScheduler, SinkSwapper
from test_random_runs import Run, fake_model, fake_tokenizer, large_engine, serve_random

import nanopaged
from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.sequence import Sequence

FIXTURES = memory_that_was_never_written, oracle, qwen3  # the first fills small KV caches with NaN
SINKS, WINDOW, BLOCK, BUDGET = 3, 21, 8, 11
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def sees(query: int, key: int, sinks: int = SINKS, window: int = WINDOW) -> bool:
    """The definition."""
    return key <= query and (key < sinks or key > query - window)


def most_blocks(sinks: int, window: int, block_size: int, budget: int) -> int:
    """Blocks of the sinks, and blocks that window and budget can touch, counted."""
    spans = [{p // block_size for p in range(c, c + window - 1 + budget)} for c in range(block_size)]
    return len({p // block_size for p in range(sinks)}) + max(map(len, spans))


MOST = most_blocks(SINKS, WINDOW, BLOCK, BUDGET)


def make_llm(oracle: Oracle, **options: object) -> LLM:
    defaults = {"window": WINDOW, "num_sink_tokens": SINKS, "block_size": BLOCK, "num_blocks": 64}
    return LLM(oracle.folder, **defaults | {"max_num_batched_tokens": BUDGET} | options)


def check_held(llm: LLM) -> None:
    """After a step, a sequence holds the blocks that a later token sees, and those begun for one step."""
    for seq in llm.engine.scheduler.running_sequences:
        held = [row for row, block_id in enumerate(seq.block_table) if block_id != HOLE]
        later = range(seq.num_computed_tokens, seq.num_computed_tokens + 200)
        seen = {p // BLOCK for p in range(later[0]) for query in later if sees(query, p)}
        sinks = {p // BLOCK for p in range(SINKS)}
        assert {row for row in held if row * BLOCK < later[0]} == seen | sinks
        assert len(held) <= most_blocks(SINKS, WINDOW, BLOCK, llm.engine.config.max_num_batched_tokens)


def check_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """The same tokens, and the same log-probabilities of outputs."""
    for one, other in zip(ours, theirs, strict=True):
        for got, right in zip(one.outputs, other.outputs, strict=True):
            assert got.token_ids == right.token_ids
            assert got.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)


@torch.inference_mode()
def check_right(oracle: Oracle, prompt: list[int], output: RequestOutput) -> None:
    """Transformers says the same in one pass without a cache, with the mask written out."""
    generated = output.outputs[0].token_ids
    ids, positions = prompt + generated, range(len(prompt) + len(generated))
    seen = torch.tensor([[sees(query, key) for key in positions] for query in positions])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    right = oracle.model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0].log_softmax(-1)
    assert right[len(prompt) - 1 : -1].argmax(-1).tolist() == generated
    rows = [*(output.prompt_logprobs or [None] * len(prompt)), *output.outputs[0].logprobs]
    for position, row in enumerate(rows):
        if row is not None:  # of the first token, or of a prompt that was not to be scored
            expected = right[position - 1, ids[position]].item()
            assert row[ids[position]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("options", [{"num_blocks": MOST}, {"attention_backend": "reference"}])
def test_a_text_longer_than_the_pool(oracle: Oracle, options: dict[str, object]) -> None:
    """120 tokens, 90 of them a prompt. A window as long as the text says something else."""
    llm, prompt = make_llm(oracle, **options), tokens(5, 90)
    (output,) = serve(llm, [prompt], GREEDY, check_held)
    check_right(oracle, prompt, output)
    for other in ({"window": 150}, {"num_sink_tokens": 0}):
        assert make_llm(oracle, **other).generate(prompt, GREEDY)[0].outputs != output.outputs


@pytest.mark.parametrize("options", [{}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 160}])
def test_a_batch(qwen3: Oracle, options: dict[str, object]) -> None:
    prompts = random_prompts(6, seed=1, longest=100)
    outputs = serve(make_llm(qwen3, num_blocks=100, **options), prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_right(qwen3, prompt, output)
    whole = nanopaged.LLM(qwen3.folder, num_blocks=100).generate(prompts, GREEDY)
    check_same(make_llm(qwen3, window=160, num_blocks=100).generate(prompts, GREEDY), whole)


def test_prompts_from_the_prefix_cache(qwen3: Oracle) -> None:
    """Blocks behind the window are cached, and found as long as all of a prefix are there."""
    llm, params = make_llm(qwen3, max_num_batched_tokens=96), replace(GREEDY, prompt_logprobs=None)
    for prompt, num_found in ((tokens(3, 90), 0), (tokens(3, 90) + [1, 2], 88), (tokens(3, 42) + [9], 40)):
        (output,) = serve(llm, [prompt], params, check_held)
        assert output.metrics.num_cached_tokens == num_found
        check_right(qwen3, prompt, output)


ASKED = {
    "one": replace(GREEDY, max_tokens=40),
    "several": SamplingParams(n=3, seed=1, max_tokens=24, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True),
}


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("asked", ASKED)
def test_preempted_is_as_alone(qwen3: Oracle, asked: str, way: str) -> None:
    params, prompts = ASKED[asked], [tokens(6, 9), tokens(5, 60), tokens(7, 30)]
    alone = [serve(make_llm(qwen3), [prompt], params, check_held)[0] for prompt in prompts]
    options = {"num_blocks": MOST * params.width + 1, "num_host_blocks": 60, "preemption": way}
    for caching in (True, False):
        llm = make_llm(qwen3, **options, enable_prefix_caching=caching, watermark=0.0)
        check_same(serve(llm, prompts, params, check_held), alone)
        stats = llm.engine.stats()
        assert getattr(stats, f"num_preemptions_{way}") > 0
        assert way == "swap" or stats.num_preemptions_swap == 0


class SinkFakeRunner(FakeRunner):
    """Each query must find what it sees, and no sequence may hold more than the most blocks."""

    sinks: int
    window: int
    most: int

    def _read(self, seq: Sequence) -> None:
        numbers, size = self._numbers(seq), self.block_size
        assert sum(block_id != HOLE for block_id in seq.block_table) <= self.most
        for query in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
            for key in filter(lambda key: sees(query, key, self.sinks, self.window), range(query + 1)):
                block_id = seq.block_table[key // size]
                assert block_id != HOLE, f"{query} sees {key}, which was given back"
                assert self.slots.get((block_id, key % size)) == numbers[key], f"{query} reads {key} wrongly"


def with_window(workload: Workload, sinks: int, window: int) -> Workload:
    """The same requests in a pool that is just large enough for the largest, or a little larger."""
    config, largest = workload.config(), 0
    for asked in workload.requests:
        most = most_blocks(sinks, window, workload.block_size, config.max_num_batched_tokens)
        whole = -(-(len(asked.prompt) + asked.params.max_tokens - 1) // workload.block_size)
        largest = max(largest, asked.params.width * min(most, whole))
    return replace(workload, num_blocks=largest + workload.seed % 4)


def engine_maker(sinks: int, window: int) -> Callable[[str, EngineConfig], LLMEngine]:
    """The `make_engine` of the random runs, with a window."""

    def make(model: str, config: EngineConfig) -> LLMEngine:
        options = vars(config) | {"num_sink_tokens": sinks, "window": window}
        if model == "tiny":
            return SinkEngine(SinkConfig(**options | {"dtype": "float32"}))
        runner = SinkFakeRunner(config.num_blocks, config.block_size, config.num_host_blocks)
        runner.sinks, runner.window = sinks, window
        runner.most = most_blocks(sinks, window, config.block_size, config.max_num_batched_tokens or LONGEST)
        engine = SinkEngine(SinkConfig(**options | {"model": fake_model()}), runner)
        engine.prompts.tokenizer = fake_tokenizer()
        return engine

    return make


@pytest.mark.parametrize(("make_workload", "num"), [(mixed, 60), (forked, 40), (siblings, 40), (tiny, 6)])
def test_random_workloads(make_workload: Any, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With aborts, faults in every stage and tiny pools, each request says what it says alone."""
    mine = SinkBlocks.append_slots, SinkBlocks.allocate, SinkBlocks.on_heads, SinkSwapper.swap_in
    mine += SinkSwapper.swap_out, SinkBlocks.head, SinkBlocks.share, SinkBlocks.release, SinkBlocks.slide
    for stage in "schedule", "update":
        monkeypatch.setitem(STAGES, stage, (*STAGES[stage], *mine, SinkScheduler.update))

    def make_run(workload: Workload) -> Run:
        rng = random.Random(workload.seed)
        sinks, window = rng.choice([0, 1, 3, 6]), rng.choice([2, 3, 5, 8, 13])
        monkeypatch.setattr(test_random_runs, "make_engine", engine_maker(sinks, window))
        large_engine.cache_clear()
        return Run(with_window(workload, sinks, window))

    events = ["swap", "recompute", "copy on write", "cache hit", "finished"]
    serve_random(make_workload, num, events, make_run)
    large_engine.cache_clear()


def test_statistics(qwen3: Oracle) -> None:
    """A hole is no block, is not shared and saves nothing."""
    llm = make_llm(qwen3, enable_prefix_caching=False)
    llm.engine.add_request("r", tokens(1, 90), GREEDY)
    while llm.engine.stats().num_generated_tokens < 7:  # 96 tokens are computed; 76 and later ones are seen
        llm.engine.step()
        llm.engine.check_invariants()
    stats = llm.engine.stats()
    assert (stats.num_used_blocks, stats.num_shared_blocks, stats.num_blocks_saved) == (1 + 3, 0, 0)
    assert stats.slot_utilization == 1.0


def test_the_watermark(qwen3: Oracle) -> None:
    """Of 16 blocks four stay free for the requests that run: of five that need three each, one waits."""
    llm = make_llm(qwen3, num_blocks=16, watermark=0.3, max_num_batched_tokens=160)
    for i in range(5):
        llm.engine.add_request(str(i), tokens(i, 20), GREEDY)
    llm.engine.step()
    assert llm.engine.stats().num_free_blocks == 16 - 4 * 3


def test_what_is_refused(qwen3: Oracle) -> None:
    llm = make_llm(qwen3, num_blocks=2 * MOST)
    several = replace(GREEDY, n=2, temperature=1.0, max_tokens=60)
    llm.generate(tokens(1, 90), several, use_tqdm=False)
    with pytest.raises(ValueError, match=f"may need {3 * MOST} blocks, but the whole pool has {2 * MOST}"):
        llm.generate(tokens(1, 90), replace(several, n=3))
    llm.generate(tokens(1, 9), replace(several, n=5, max_tokens=5), use_tqdm=False)  # 5 short ones need 10
    for options, message in (
        ({"window": 1}, "window is 1, but must be at least 2"),
        ({"num_sink_tokens": -1}, "num_sink_tokens is -1, but must be at least 0"),
        ({"attention_backend": "cpp"}, "attention_backend is 'cpp', but must be one of auto, torch"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but with a window it must be 1"),
        ({"trace": "run.html"}, "trace is 'run.html', but with a window it must be None"),
    ):
        with pytest.raises(ValueError, match=message):
            SinkConfig(**options)
