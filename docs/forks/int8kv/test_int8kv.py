"""The fork int8kv: K/V stored as int8, with a scale in each slot.

Rounding to int8 is a step function. Two runs that differ by float32's rounding (another batch, another
backend) may round a number near a tie to two neighbouring int8. That happens seldom, but then it moves
log-probabilities by much more than float32's rounding. `check_same` allows for it. Two tests do not depend on
it: one gives transformers the bytes that the engine stored, one gives a single layer the same K/V in chunks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_random_runs
import torch
from conftest import EOS, Oracle, make_checkpoint, random_prompts
from random_workloads import mixed, tiny
from torch import Tensor
from transformers import DynamicCache

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.attention import TorchAttention, make_attention
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.checks.failures import NonFiniteLogits
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model import sizing
from nanopaged.sequence import ScheduledBatch, StepResult

CPU = torch.device("cpu")
EXACT = 1e-4  # float32's rounding
ONE_STEP = 0.02  # of a log-probability, if a number is rounded to the int8 beside it; 0.0012 was seen
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)


def make_llm(folder: Path, **config: object) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_dtype": "int8", "block_size": 4, "num_blocks": 400}
    return LLM(folder, **defaults | config)


def make_cache(num_blocks: int, block_size: int = 4, head_dim: int = 16) -> KVCache:
    """Two KV heads. Every byte that is never written is -1, so its scale is NaN."""
    cache = KVCache(KVShape(1, 2, head_dim, torch.float32, quantised=True), num_blocks, block_size, CPU)
    cache.data.fill_(-1)
    return cache


def read_slots(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Slots int8 [..., slot_width] → numbers [..., head_dim] and scales [..., 1], without `KVCache.unpack`.

    A bfloat16 is the upper half of a float32.
    """
    slots = slots.numpy()
    halves = np.ascontiguousarray(slots[..., -2:]).view(np.uint16).astype(np.uint32)
    scales = (halves << 16).view(np.float32)
    return torch.from_numpy(slots[..., :-2].astype(np.float32)), torch.from_numpy(scales)


def check_slots(slots: Tensor, kv: Tensor, rounding: float) -> Tensor:
    """The slots hold `kv` to half a scale, which is the largest number of a slot / 127. Returns their K/V.

    A bfloat16 has 8 bits, so it is rounded by 2^-8 at most. `rounding` is allowed in addition, in scales.
    """
    numbers, scales = read_slots(slots)
    torch.testing.assert_close(scales, kv.abs().amax(-1, keepdim=True) / 127, rtol=2**-8 + 1e-4, atol=1e-37)
    assert ((numbers * scales - kv).abs() <= (0.5 + rounding) * scales).all()
    return numbers * scales


# ── pack and unpack ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_stored_to_half_a_scale(dtype: torch.dtype) -> None:
    """Heads and single numbers of all magnitudes. Unpacking rounds once, to the dtype."""
    cache = KVCache(KVShape(1, 2, 16, dtype, quantised=True), 1, 4, CPU)
    torch.manual_seed(0)
    low, high = (-30, 30) if dtype is not torch.float16 else (-3, 3)
    rows = torch.randn(4000, 2, 16) * 10 ** torch.empty(4000, 2, 1).uniform_(low, high)
    rows[::2] *= 10 ** torch.empty(2000, 2, 16).uniform_(-4, 0)
    rows = rows.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else rows.to(dtype)
    stored = cache.pack(rows)
    expected = check_slots(stored, rows.float(), rounding=1e-4)
    torch.testing.assert_close(cache.unpack(stored), expected.to(dtype))
    assert cache.unpack(stored).dtype == dtype


def test_the_example_of_the_docstring() -> None:
    cache = make_cache(1, head_dim=4)
    stored = cache.pack(torch.tensor([12.5, -31.75, 0.7, 0]))
    assert stored[:4].tolist() == [50, -127, 3, 0]
    assert cache.unpack(stored).tolist() == [12.5, -31.75, 0.75, 0]


def test_zeros() -> None:
    """A head of zeros, and the zero bytes of a masked slot: no NaN from 0 / 0."""
    cache = make_cache(1)
    assert (cache.unpack(cache.pack(torch.zeros(2, 16))) == 0).all()
    assert (cache.unpack(torch.zeros(2, cache.data.shape[-1], dtype=torch.int8)) == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """In its own slot only."""
    cache = make_cache(1)
    rows = torch.ones(3, 2, 16)
    rows[1, 0, 5] = value
    unpacked = cache.unpack(cache.pack(rows))
    assert not unpacked[1, 0, 5].isfinite()
    assert torch.equal(unpacked.isfinite().all(-1), rows.isfinite().all(-1))


def test_the_engine_notices_kv_that_is_not_finite(tmp_path: Path) -> None:
    """Only the first token's K/V is NaN, so the last token's logits are NaN through the cache. The request is
    aborted, its blocks are used again, and the other request says what it says alone."""
    make_checkpoint("llama", tmp_path)
    llm = make_llm(tmp_path, num_blocks=12)
    (alone,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    bad = next(token for token in range(10, 97) if token not in alone.outputs[0].token_ids)
    llm.engine.runner.model.embed_tokens.weight[bad] = torch.nan
    llm.engine.add_request("bad", [bad, *range(4, 10), *range(4, 10)], GREEDY)
    llm.engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(NonFiniteLogits) as caught:
        llm.engine.step()
    assert caught.value.request_id == "bad"
    llm.engine.abort_request("bad")
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


# ── against transformers ──────────────────────────────────────────────────────────────────────────


class StoredCache(DynamicCache):
    """Attention reads the K/V that the engine stored, which must be transformers' own to half a scale."""

    def __init__(self, slots: Tensor) -> None:
        """`slots`: int8 [num_layers, 2 (K, V), num_kv_heads, num_tokens, slot_width]."""
        super().__init__()
        self.slots = slots

    def update(self, k: Tensor, v: Tensor, layer: int, *args: object) -> tuple[Tensor, Tensor]:
        return tuple(
            check_slots(slots, kv[0], rounding=0.01)[None]
            for slots, kv in zip(self.slots[layer], (k, v), strict=True)
        )


class Int8Cache(DynamicCache):
    """K/V are quantised when they come in, by an arithmetic of its own."""

    def update(self, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        def quantise(kv: Tensor) -> Tensor:
            scale = (kv.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
            return (kv / scale).round().clamp(-127, 127) * scale

        return super().update(quantise(k), quantise(v), *args)


def serve_and_read_slots(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> list[tuple[RequestOutput, Tensor]]:
    """Each output, and the slots of all its tokens but the last, as `StoredCache` takes them."""
    engine, execute = llm.engine, llm.engine.runner.execute
    slots: dict[str, Tensor] = {}
    done: dict[str, RequestOutput] = {}

    def execute_and_read(batch: ScheduledBatch) -> StepResult:
        result = execute(batch)
        for seq in batch.sequences:
            # [blocks, layers, 2, heads, block_size, width] → [layers, 2, heads, tokens, width]
            blocks = engine.runner.kv_cache.data[seq.block_table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            slots[seq.request.request_id] = blocks[:, :, :, :end].clone()
        return result

    engine.runner.execute = execute_and_read
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()
    engine.runner.execute = execute
    return [(done[str(i)], slots[str(i)]) for i in range(len(prompts))]


@pytest.mark.parametrize(("budget", "scored"), [(7, 0), (2048, None)], ids=["chunks", "whole"])
def test_transformers_with_our_slots_says_the_same(oracle: Oracle, budget: int, scored: int | None) -> None:
    """Tokens, and log-probabilities to 1e-4: decodes in a batch, after swaps, prompts in chunks or whole.

    The prompts in chunks are scored, the others are found in the prefix cache the second time.
    """
    llm = make_llm(oracle.folder, max_num_batched_tokens=budget, num_blocks=18, preemption="swap")
    prompts = random_prompts(4, seed=budget, longest=40)
    params = replace(GREEDY, prompt_logprobs=scored)
    for _ in range(2):
        for output, slots in serve_and_read_slots(llm, prompts, params):
            prompt, completion = output.prompt_token_ids, output.outputs[0]
            ids = prompt + completion.token_ids
            with torch.inference_mode():
                logits = oracle.model(torch.tensor([ids[:-1]]), past_key_values=StoredCache(slots)).logits[0]
            expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
            assert completion.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
            ours = logprobs_of(output)
            torch.testing.assert_close(ours, expected[-len(ours) :], atol=EXACT, rtol=0)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap > 0
    assert (stats.prefix_cache_hits > 0) == (scored is None)


def test_greedy_tokens_and_beams_of_transformers_with_an_int8_cache(qwen3: Oracle) -> None:
    """transformers quantises on its own."""
    prompts = random_prompts(4, seed=4, longest=30)
    llm = make_llm(qwen3.folder)
    greedy = llm.generate(prompts, GREEDY, use_tqdm=False)
    beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    for prompt, ours, hypotheses in zip(prompts, greedy, beams, strict=True):
        options = {"attention_mask": torch.ones(1, len(prompt)), "do_sample": False}
        ids = torch.tensor([prompt])
        out = qwen3.model.generate(
            ids, max_new_tokens=8, eos_token_id=None, past_key_values=Int8Cache(), **options
        )
        assert ours.outputs[0].token_ids == out[0, len(prompt) :].tolist()
        options |= {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
        out = qwen3.model.generate(
            ids,
            max_new_tokens=6,
            eos_token_id=EOS,
            past_key_values=Int8Cache(),
            return_dict_in_generate=True,
            **options,
        )
        for ours, theirs, score in zip(hypotheses.outputs, out.sequences, out.sequences_scores, strict=True):
            length = len(prompt) + len(ours.token_ids)
            assert ours.token_ids == theirs[len(prompt) : length].tolist()
            assert ours.score == pytest.approx(score.item(), abs=ONE_STEP)


def test_the_error_of_int8(oracle: Oracle) -> None:
    """Against transformers' K/V in float32: the log-probabilities of random prompts of 40 tokens.

    The models have heads of 12 to 20 numbers and weights of great variance, which is hard for a quantiser.
    Means of 0.016, 0.030 and 0.032 were measured, and the bound is three times the largest of them.
    """
    prompts = [prompt[:40] for prompt in random_prompts(8, seed=6, longest=60) if len(prompt) >= 40]
    llm = make_llm(oracle.folder)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.logprobs(prompt)[range(len(prompt) - 1), prompt[1:]]
        errors.append((logprobs_of(output) - expected).abs())
    assert 0 < torch.cat(errors).mean() < 0.1


# ── one engine against another ────────────────────────────────────────────────────────────────────


def logprobs_of(output: RequestOutput) -> Tensor:
    """Of the prompt's tokens, if it was scored, and of the tokens of all outputs."""
    prompt_rows = zip((output.prompt_logprobs or [None])[1:], output.prompt_token_ids[1:], strict=False)
    values = [row[token] for row, token in prompt_rows]
    for completion in output.outputs:
        rows = completion.logprobs or []
        values += [row[token] for row, token in zip(rows, completion.token_ids, strict=False)]
    return torch.tensor(values)


def check_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """The same tokens. Log-probabilities to 1e-4 in three requests of four, and in all to ONE_STEP."""
    errors = []
    for our, their in zip(ours, theirs, strict=True):
        assert [c.token_ids for c in our.outputs] == [c.token_ids for c in their.outputs]
        scores = [
            torch.tensor([c.cumulative_logprob / len(c.token_ids) for c in o.outputs]) for o in (our, their)
        ]
        values = [torch.cat((logprobs_of(o), s)) for o, s in zip((our, their), scores, strict=True)]
        errors.append((values[0] - values[1]).abs().max().item())
    assert np.quantile(errors, 0.75) < EXACT
    assert max(errors) < ONE_STEP


KINDS = (
    GREEDY,
    SamplingParams(n=3, seed=1, max_tokens=8, logprobs=0, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True),
    replace(GREEDY, prompt_logprobs=0),
)


@pytest.fixture(scope="module")
def alone(qwen3: Oracle) -> SimpleNamespace:
    """Eight prompts, two of each kind, and their outputs one at a time, without a prefix cache."""
    prompts, params = random_prompts(8, seed=2, longest=40), [*KINDS, *KINDS]
    llm = make_llm(qwen3.folder, enable_prefix_caching=False)
    outputs = [
        llm.generate([prompt], [p], use_tqdm=False)[0] for prompt, p in zip(prompts, params, strict=True)
    ]
    return SimpleNamespace(prompts=prompts, params=params, outputs=outputs)


@pytest.mark.parametrize(
    ("config", "event"),
    [
        ({}, "prefix_cache_hits"),
        ({"max_num_batched_tokens": 7}, "prefix_cache_hits"),
        ({"num_blocks": 24, "preemption": "swap"}, "num_preemptions_swap"),
        ({"num_blocks": 24, "preemption": "recompute"}, "num_preemptions_recompute"),
        ({"attention_backend": "reference", "block_size": 16}, "num_blocks_copied"),
    ],
    ids=["batched", "chunks", "swap", "recompute", "reference"],
)
def test_what_a_request_says_alone(qwen3: Oracle, alone: SimpleNamespace, config: dict, event: str) -> None:
    """It says so in a batch: of whole prompts, in chunks, preempted, with another backend, from the cache."""
    llm = make_llm(qwen3.folder, **config)
    for _ in range(2 if event == "prefix_cache_hits" else 1):
        check_same(llm.generate(alone.prompts, alone.params, use_tqdm=False), alone.outputs)
        llm.engine.check_invariants()
    assert getattr(llm.engine.stats(), event) > 0


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_chunks_of_the_same_kv_give_the_same_attention(backend: str) -> None:
    """One layer: 23 tokens at once, in chunks, or one by one, to float32's rounding.

    The K/V that go in are the same bit for bit, so no number is rounded to another int8. A prefill that read
    its K/V without packing them would differ.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(23, 6, 16), torch.randn(23, 2, 16), torch.randn(23, 2, 16)
    outs = []
    for lengths in ([23], [9, 1, 13], [1] * 23):
        cache, table = make_cache(8), [6, 0, 3, 7, 2, 5]
        attention = make_attention(backend, cache, 16**-0.5)
        parts, start = [], 0
        for n in lengths:
            here = slice(start, start + n)
            slots = slots_of(table, np.arange(start, start + n), 4)
            attention.begin_step(
                AttentionMetadata(np.array([n]), np.array([start + n]), [table], slots, int(n == 1), [0])
            )
            parts.append(attention(0, q[here], k[here], v[here]))
            start += n
        outs.append(torch.cat(parts))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs[2], outs[0], atol=1e-5, rtol=1e-5)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_of_a_block() -> None:
    """Llama-3-8B: 128 bfloat16 are 256 bytes, 128 int8 and a scale 130. The tensor has just these bytes."""
    full = KVShape(32, 8, 128, torch.bfloat16)
    small = replace(full, quantised=True)
    assert full.block_bytes(16) == 2 << 20
    assert small.block_bytes(16) * 256 == full.block_bytes(16) * 130
    assert KVCache(small, 3, 16, CPU).data.nbytes == 3 * small.block_bytes(16)


def test_the_same_memory_has_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model in float32: a slot has 34 bytes, not 128, so there are 3.76 times as many blocks."""
    monkeypatch.setattr(sizing, "available_memory", lambda: 64 << 20)
    config = {"dtype": "float32", "max_model_len": 256, "memory_utilization": 0.5}
    runners = [LLM(kv_cache_dtype=name, **config).engine.runner for name in ("auto", "int8")]
    for runner in runners:
        assert runner.num_blocks == (32 << 20) // runner.kv_cache.shape.block_bytes(16)
    assert runners[1].num_blocks / runners[0].num_blocks == pytest.approx(128 / 34, rel=1e-2)


def test_the_profile_run_has_int8_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU measures the largest step with it, to find how many blocks fit beside it."""
    shapes: list[KVShape] = []

    def make_recorded_cache(shape: KVShape, *args: object) -> KVCache:
        shapes.append(shape)
        return KVCache(shape, *args)

    runner = LLM(kv_cache_dtype="int8", num_blocks=200).engine.runner
    monkeypatch.setattr(sizing, "KVCache", make_recorded_cache)
    options = {"attention_backend": "torch", "max_num_seqs": 2, "max_model_len": 64}
    config = EngineConfig(kv_cache_dtype="int8", max_num_batched_tokens=16, **options)
    monkeypatch.setattr(sizing, "GATHER_KEYS", 64)
    sizing.largest_step(config, runner.model, runner.kv_cache.shape)
    assert shapes == [replace(runner.kv_cache.shape, num_layers=1)]


# ── options ───────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8', but must be one of auto, int8"):
        EngineConfig(kv_cache_dtype="fp8")


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_kernels_refuse_int8_and_name_the_backend_that_can(backend: str) -> None:
    with pytest.raises(ValueError, match=f"'{backend}' cannot run.*attention_backend=\"torch\" can"):
        LLM(kv_cache_dtype="int8", attention_backend=backend, num_blocks=200)


def test_auto_picks_torch_on_a_gpu() -> None:
    """A cache that says it is on a GPU, where the kernels would be the first choice."""
    cache = make_cache(1)
    on_gpu = SimpleNamespace(shape=cache.shape, data=SimpleNamespace(is_cuda=True, device=CPU))
    assert type(make_attention("auto", on_gpu, 1.0)) is TorchAttention


# ── random workloads ──────────────────────────────────────────────────────────────────────────────


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing, eviction, preemption, aborts and faults, with `check_invariants` after every step.

    The fake model checks that the option changes nothing in the scheduler, the tiny model has int8 K/V.
    """

    def make_engine(model: str, config: EngineConfig) -> LLMEngine:
        config = replace(config, kv_cache_dtype="int8")
        return LLMEngine(replace(config, dtype="float32")) if model == "tiny" else make_fake(model, config)

    make_fake = test_random_runs.make_engine
    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    monkeypatch.setattr(test_random_runs, "large_engine", cache(test_random_runs.large_engine.__wrapped__))
    monkeypatch.setitem(test_random_runs.TOLERANCE, "tiny", ONE_STEP)
    happened: Counter[str] = Counter()
    for workload in (*map(mixed, range(24)), *map(tiny, (4, 13))):
        run = test_random_runs.Run(workload)
        run.serve()
        if workload.model == "tiny":
            assert run.engine.runner.kv_cache.data.dtype == torch.int8
            happened += run.happened
    assert all(happened[event] for event in ("cache hit", "copy on write", "swap", "recompute", "abort"))
