"""Attention sinks and a sliding window. The oracle is transformers with an explicit mask."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_random_runs
import torch
from conftest import Oracle, random_prompts, tokens
from fake_runner import FakeRunner
from random_workloads import LONGEST, Workload, forked, mixed
from serving import serve
from test_random_runs import Run, fake_model, fake_tokenizer

from nanopaged import (
    LLM,
    BeamSearchParams,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    model_runner,
)
from nanopaged.attention.sink_backend import SinkAttention
from nanopaged.block_manager import BlockManager
from nanopaged.config import Ring
from nanopaged.model_runner import prepare
from nanopaged.sequence import ScheduledBatch, Sequence, StepResult
from nanopaged.views.invariants import check_blocks

SINKS, WINDOW, BLOCK = 3, 29, 8  # 32 tokens are 4 blocks
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def sees(query: int, key: int, sinks: int = SINKS, window: int = WINDOW) -> bool:
    """The definition."""
    return key <= query and (key < sinks or key > query - window)


@torch.inference_mode()
def oracle_logprobs(oracle: Oracle, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [num_tokens, vocab_size] of one forward pass without a cache, with a mask."""
    positions = range(len(token_ids))
    visible = torch.tensor([[sees(query, key) for key in positions] for query in positions])
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return oracle.model(torch.tensor([token_ids]), attention_mask=mask[None, None]).logits[0].log_softmax(-1)


def make_llm(oracle: Oracle, **options: object) -> LLM:
    """An engine with a window whose KV cache is full of old K/V, which must not be seen."""
    defaults = {"window": WINDOW, "num_sink_tokens": SINKS, "block_size": BLOCK, "num_blocks": 64}
    llm = LLM(oracle.folder, **defaults | {"enable_prefix_caching": False} | options)
    llm.engine.runner.kv_cache.data.fill_(1e4)
    return llm


def check_num_blocks(llm: LLM) -> None:
    """No sequence holds more blocks than sinks and window fill."""
    for seq in llm.engine.scheduler.running_sequences:
        assert len(seq.block_table) <= (SINKS + WINDOW) // BLOCK


def check_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """The same tokens, and the same log-probabilities of outputs and prompts."""
    for one, other in zip(ours, theirs, strict=True):
        for got, right in zip(one.outputs, other.outputs, strict=True):
            assert got.token_ids == right.token_ids
            assert got.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)
        for got, right in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert got is right or got.keys() == right.keys()
            assert got is right or all(abs(got[t].logprob - right[t].logprob) < 1e-4 for t in got)


# ── against transformers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("budget", [2048, 11])
def test_a_sequence_longer_than_the_pool_says_what_transformers_says_with_a_mask(
    oracle: Oracle, budget: int
) -> None:
    """120 tokens, 90 of them a prompt, in a pool of 5 blocks of 8; in chunks of 29 and of 11 tokens."""
    llm = make_llm(oracle, num_blocks=5, max_num_batched_tokens=budget)
    prompt = tokens(5, 80)
    (output,) = serve(llm, [prompt], GREEDY, check_num_blocks)
    generated = output.outputs[0].token_ids
    right = oracle_logprobs(oracle, prompt + generated)
    assert right[len(prompt) - 1 : -1].argmax(-1).tolist() == generated
    scored = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, token_id in enumerate(prompt[1:] + generated):
        assert scored[position][token_id].logprob == pytest.approx(right[position, token_id].item(), abs=1e-4)


def test_the_oracle_can_tell_the_window(qwen3: Oracle) -> None:
    """Without a window, and with one without sinks, the model says something else."""
    params = replace(GREEDY, max_tokens=10)
    (right,) = serve(make_llm(qwen3), [tokens(5, 80)], params, check_num_blocks)
    for options in ({"window": None, "num_sink_tokens": 0}, {"window": SINKS + WINDOW, "num_sink_tokens": 0}):
        llm = make_llm(qwen3, **options)
        assert llm.generate(tokens(5, 80), params)[0].outputs[0].token_ids != right.outputs[0].token_ids


def test_a_window_longer_than_the_text_changes_nothing(qwen3: Oracle) -> None:
    prompts = random_prompts(4, seed=1)
    whole = make_llm(qwen3, window=None, num_sink_tokens=0).generate(prompts, GREEDY)
    check_same(make_llm(qwen3, window=157).generate(prompts, GREEDY), whole)


def test_the_triton_kernel_decodes_with_a_window(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a table in any order, so it needs no change: only the base class is another one."""
    kernels = pytest.importorskip("nanopaged.attention.triton_backend")
    right = serve(make_llm(qwen3), [tokens(5, 40)], replace(GREEDY, max_tokens=2), check_num_blocks)
    triton = type("TritonSinks", (SinkAttention, kernels.TritonAttention), {})
    monkeypatch.setattr(model_runner, "SinkAttention", triton)
    check_same(
        serve(make_llm(qwen3), [tokens(5, 40)], replace(GREEDY, max_tokens=2), check_num_blocks), right
    )


# ── alone, batched, preempted, forked ─────────────────────────────────────────────────────────────

ASKED = {
    "one": replace(GREEDY, max_tokens=14),
    "several": SamplingParams(n=3, seed=1, max_tokens=14, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True),
}


@pytest.mark.parametrize("asked", ASKED)
def test_batched_and_preempted_is_as_alone(qwen3: Oracle, asked: str) -> None:
    params, prompts = ASKED[asked], [tokens(6, 9), tokens(5, 50), tokens(7, 30)]
    num_blocks = (SINKS + WINDOW) // BLOCK * params.num_sequences + 2  # two requests do not fit
    llm = make_llm(qwen3)
    alone = [serve(llm, [prompt], params, check_num_blocks)[0] for prompt in prompts]
    check_same(serve(llm, prompts, params, check_num_blocks), alone)
    for way in ("swap", "recompute"):
        small = make_llm(
            qwen3, num_blocks=num_blocks, num_host_blocks=40, preemption=way, max_num_batched_tokens=16
        )
        check_same(serve(small, prompts, params, check_num_blocks), alone)
        stats = small.engine.stats()
        assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
        assert way == "swap" or stats.num_preemptions_swap == 0
        assert stats.num_free_blocks == num_blocks


# ── random workloads, over slots that remember their tokens ───────────────────────────────────────


class SinkRunner(FakeRunner):
    """Checks that a table holds the tokens that its newest token sees, all of them and no others."""

    sinks: int
    window: int

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """As `ModelRunner`: the slots are those of `prepare`."""
        self.metadata = prepare(batch, self.block_size)[0].metadata
        slots = iter(self.metadata.slot_mapping.tolist())
        self.slot_of = {
            (seq, seq.num_computed_tokens + i): divmod(next(slots), self.block_size)
            for seq in batch.sequences
            for i in range(seq.num_scheduled_tokens)
        }
        return super().execute(batch)

    def _slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return self.slot_of[seq, position]

    def _stored(self, seq: Sequence, num_places: int) -> list[int | None]:
        places = [(block_id, offset) for block_id in seq.block_table for offset in range(self.block_size)]
        return [self.slots.get(slot) for slot in places[:num_places]]

    def store(self, seq: Sequence, values: list[int]) -> None:
        """A prefill reads before its tokens are stored, each query what it sees."""
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens
        assert len({self.slot_of[seq, position] for position in range(start, end)}) == end - start
        stored = set(self._stored(seq, self.sinks + self.window))
        for query in range(start, end):
            seen = {values[key] for key in range(start) if sees(query, key, self.sinks, self.window)}
            assert seen <= stored, f"token {query} does not find a key that it sees"
        super().store(seq, values)

    def _read(self, seq: Sequence) -> None:
        """A decode reads its whole context."""
        last = seq.num_computed_tokens + seq.num_scheduled_tokens - 1
        seen = [
            self._numbers(seq)[key] for key in range(last + 1) if sees(last, key, self.sinks, self.window)
        ]
        assert len(seq.block_table) * self.block_size <= self.sinks + self.window
        read = self._stored(seq, len(seen))
        assert sorted(read) == seen, f"token {last} reads a wrong slot"
        if seq.num_scheduled_tokens == 1:
            i = next(i for i, key in enumerate(self.metadata.seq_ids) if key == id(seq))
            assert self.metadata.context_lens[i] == len(seen)


def with_window(workload: Workload, sinks: int, window: int) -> Workload:
    """The same requests in a pool that is just large enough for the largest."""
    size, largest = workload.block_size, 0
    for asked in workload.requests:
        num_tokens = min(len(asked.prompt) + asked.params.max_tokens - 1, sinks + window)
        largest = max(largest, asked.params.num_sequences * -(-num_tokens // size))
    return replace(workload, caching=False, num_blocks=largest + workload.seed % 3)


def make_window_engine(sinks: int, window: int) -> Callable[[str, EngineConfig], LLMEngine]:
    """The `make_engine` of the random runs, with a window."""
    make_engine = test_random_runs.make_engine

    def make(model: str, config: EngineConfig) -> LLMEngine:
        if config.block_size == LONGEST:  # it serves each request alone; the fake tokens need no window
            return make_engine(model, config)
        runner = SinkRunner(config.num_blocks, config.block_size, config.num_host_blocks)
        runner.sinks, runner.window = sinks, window
        config = replace(config, model=fake_model(), num_sink_tokens=sinks, window=window)
        engine = LLMEngine(config, runner)
        engine.prompts.tokenizer = fake_tokenizer()
        return engine

    return make


@pytest.mark.parametrize("make_workload", [mixed, forked])
def test_random_workloads(make_workload: Callable[[int], Workload], monkeypatch: pytest.MonkeyPatch) -> None:
    happened: Counter[str] = Counter()
    for seed in range(10):
        rng, workload = random.Random(seed), make_workload(seed)
        size = workload.block_size * rng.randint(1, 1 + 12 // workload.block_size)
        sinks = rng.randint(0, min(4, size - 1))
        with monkeypatch.context() as patch:
            patch.setattr(test_random_runs, "make_engine", make_window_engine(sinks, size - sinks))
            run = Run(with_window(workload, sinks, size - sinks))
            run.serve()
        happened += run.happened
    assert all(happened[event] for event in ("swap", "recompute", "copy on write", "finished")), happened


def test_a_sibling_one_token_ahead_copies_a_block_that_the_other_still_has() -> None:
    """Window 4, blocks of 2: token 8 goes to block 0, token 7 of the sibling to block 1; both are shared."""
    for num_blocks, copies in ((3, None), (4, [(0, 2), (1, 3)])):
        manager = BlockManager(num_blocks, 2, enable_prefix_caching=False)
        ahead = Sequence(SimpleNamespace(ring=Ring(0, 4), cache_salt=b""), list(range(8)))
        assert manager.allocate([ahead])
        behind = manager.fork(ahead, 1)
        ahead.token_ids.append(8)
        assert manager.append_slots([ahead, behind]) == copies
        check_blocks(manager, [ahead, behind])


# ── limits and mistakes ───────────────────────────────────────────────────────────────────────────


def test_a_request_needs_blocks_for_sinks_and_window_only(qwen3: Oracle) -> None:
    llm = make_llm(qwen3, num_blocks=8)
    llm.engine.add_request("fits", tokens(1, 100), replace(GREEDY, n=2, temperature=1.0))
    with pytest.raises(ValueError, match="may need 12 blocks of 8 slots, but the whole pool has 8"):
        llm.engine.add_request("too many", tokens(1, 100), replace(GREEDY, n=3, temperature=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 28}, "num_sink_tokens .* is 3 .* 28, but must be a multiple of block_size, which is 8"),
        ({"window": 0}, "window is 0, but must be at least 1"),
        ({"window": None}, "num_sink_tokens needs a window"),
        ({"num_sink_tokens": -1}, "num_sink_tokens is -1, but must be at least 0"),
        ({"enable_prefix_caching": True}, "set enable_prefix_caching=False"),
        ({"trace": "run.html"}, "trace=None"),
        ({"attention_backend": "flash"}, "attention_backend with a window is 'flash', but must be one of"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    good = {"window": 29, "num_sink_tokens": 3, "block_size": 8, "enable_prefix_caching": False}
    EngineConfig(**good)
    with pytest.raises(ValueError, match=message):
        EngineConfig(**good | options)
