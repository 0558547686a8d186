"""Sinks and a window beside transformers with the mask written out, and blocks counted by the definition."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import GREEDY, Oracle, Run, Workload, check_refused, serve, tokens
from sinks import HOLE, LLM, SinkConfig, SinkEngine

SINKS, WINDOW, BLOCK, BUDGET = 3, 21, 8, 11
SCORED = replace(GREEDY, max_tokens=30, prompt_logprobs=0)


def sees(query: int, key: int, sinks: int, window: int) -> bool:
    """The definition."""
    return key <= query and (key < sinks or key > query - window)


def most_blocks(sinks: int, window: int, block_size: int, budget: int) -> int:
    """Blocks of the sinks, and blocks that window and budget can touch, counted."""
    spans = [{p // block_size for p in range(c, c + window - 1 + budget)} for c in range(block_size)]
    return len({p // block_size for p in range(sinks)}) + max(map(len, spans))


MOST = most_blocks(SINKS, WINDOW, BLOCK, BUDGET)


def make_llm(oracle: Oracle, **options: Any) -> LLM:
    defaults = {"window": WINDOW, "num_sink_tokens": SINKS, "block_size": BLOCK, "num_blocks": 64}
    return LLM(oracle.folder, **defaults | {"max_num_batched_tokens": BUDGET} | options)


def check_held(engine: Any) -> None:
    """After a step, a sequence holds the blocks that a later token sees, and those begun for one step."""
    config, size = engine.config, engine.config.block_size
    sinks, window = config.num_sink_tokens, config.window
    for seq in engine.scheduler.running_sequences:
        held = {row for row, block_id in enumerate(seq.block_table) if block_id != HOLE}
        now = seq.num_computed_tokens
        seen = {p // size for p in range(now) if sees(now, p, sinks, window)}
        assert {row for row in held if row * size < now} == seen
        assert len(held) <= most_blocks(sinks, window, size, config.max_num_batched_tokens)


class SinkOracle(Oracle):
    """Transformers in one pass without a cache, with the mask written out."""

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
        positions = range(len(token_ids))
        seen = torch.tensor([[sees(query, key, SINKS, WINDOW) for key in positions] for query in positions])
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        logits = self.model(torch.tensor([token_ids]), attention_mask=mask[None, None]).logits[0]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module", params=harness.FAMILIES)
def masked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return SinkOracle(harness.make_model(request.param), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("options", [{"num_blocks": MOST}, {"attention_backend": "reference"}])
def test_a_text_longer_than_the_pool(masked: Oracle, options: dict[str, object]) -> None:
    """120 tokens, 90 of them a prompt."""
    masked.check(serve(make_llm(masked, **options), [tokens(5, 90)], SCORED))


WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 160}


@pytest.mark.parametrize(("options", "num_cached"), [({}, [8] * 6), (WHOLE, [8, 24, 40, 56, 72, 88])])
def test_a_batch(masked: Oracle, options: dict[str, Any], num_cached: list[int]) -> None:
    """Blocks behind the window are cached. As many as a step can compute are found."""
    prompts, params = [tokens(i, 9 + 16 * i) for i in range(6)], replace(SCORED, prompt_logprobs=None)
    llm = make_llm(masked, num_blocks=100, **options)
    masked.check(serve(llm, prompts, SCORED))
    again = serve(llm, prompts, params)
    masked.check(again)
    assert [output.metrics.num_cached_tokens for output in again] == num_cached


class SinkRun(Run):
    """The same requests in a pool that is just large enough for the largest, or a little larger."""

    engine_class = alone_class = SinkEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        rng, options = random.Random(workload.seed), workload.options
        sizes = {"num_sink_tokens": rng.choice([0, 1, 3, 6]), "window": rng.choice([2, 3, 5, 8, 13])}
        self.options, self.alone_options = sizes, sizes | {"block_size": 16, "num_blocks": 64}
        budget, size, largest = options["max_num_batched_tokens"], options["block_size"], 0
        most = most_blocks(*sizes.values(), size, budget)
        for asked in workload.requests:
            whole = -(-(len(asked.prompt) + asked.params.max_tokens - 1) // size)
            largest = max(largest, asked.params.width * min(most, whole))
        options["num_blocks"] = largest + workload.seed % 4
        super().__init__(folder, workload)

    def check(self) -> None:
        super().check()
        check_held(self.engine)


def test_random_workloads(qwen3: Oracle) -> None:
    """With aborts, faults in every stage and tiny pools, each request says what it says alone."""
    events = ["swap", "recompute", "copy on write", "cache hit", "fault: schedule", "fault: update"]
    harness.random_runs(SinkRun, qwen3.folder, 30, events)


def test_statistics(qwen3: Oracle) -> None:
    """A hole is no block, is not shared and saves nothing."""
    llm = make_llm(qwen3, enable_prefix_caching=False)
    llm.engine.add_request("r", tokens(1, 90), SCORED)
    while llm.engine.stats().num_generated_tokens < 7:  # 96 tokens are computed; 76 and later ones are seen
        llm.engine.step()
        llm.engine.check_invariants()
    stats = llm.engine.stats()
    assert (stats.num_used_blocks, stats.num_shared_blocks, stats.num_blocks_saved) == (1 + 3, 0, 0)
    assert stats.slot_utilization == 1.0


def test_what_is_refused(qwen3: Oracle) -> None:
    too_many = {"prompts": tokens(1, 90), "sampling_params": replace(GREEDY, n=3, max_tokens=60)}
    says = f"may need {3 * MOST} blocks, but the whole pool has {2 * MOST}"
    check_refused(make_llm(qwen3, num_blocks=2 * MOST).generate, [(too_many, says)])
    table = [
        ({"window": 1}, "window is 1, but must be at least 2"),
        ({"attention_backend": "cpp"}, "attention_backend is 'cpp', but must be one of auto, torch"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but with a window it must be 1"),
        ({"trace": "run.html"}, "trace is 'run.html', but with a window it must be None"),
    ]
    check_refused(SinkConfig, table)
