"""K/V in 8 bits. The oracle is transformers with the bytes that the engine stored, read with numpy.

Rounding to int8 is a step function: two runs that differ by float32's rounding (another batch, another
backend) may round a number near a tie to two neighbours, which moves log-probabilities more. `check_same`
allows for it. The tests with transformers, and of single layers, do not depend on it.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_random_runs
import torch
from conftest import Oracle, make_checkpoint, oracle, qwen3, random_prompts
from int8kv import LLM, Int8Cache, Int8Config, Int8Engine, Int8Shape, pack, unpack
from random_workloads import tiny
from serving import serve
from torch import Tensor
from transformers import DynamicCache

import nanopaged
from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams, memory
from nanopaged.attention import make_attention
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.kv_cache import KVShape
from nanopaged.sequence import NonFiniteLogits, ScheduledBatch, StepResult

FIXTURES = oracle, qwen3
ONE_STEP = 0.02  # of a log-probability, if a number is rounded to the int8 beside it; 0.0012 was seen
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(n=3, seed=1, max_tokens=8, logprobs=0, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True),
    replace(GREEDY, prompt_logprobs=0),
]


@pytest.fixture(autouse=True)
def bytes_that_were_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of -1 twice is the scale NaN, the worst that memory may hold."""
    allocate = Int8Cache.__init__

    def fill(cache: Int8Cache, shape: KVShape, **options: Any) -> None:
        allocate(cache, shape, **options)
        cache.data.fill_(-1)
        cache.host.fill_(-1)

    monkeypatch.setattr(Int8Cache, "__init__", fill)


def make_llm(folder: Any, **config: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "block_size": 4, "num_blocks": 400} | config)


def check_slots(slots: Tensor, kv: Tensor, rounding: float) -> Tensor:
    """The slots hold `kv` to half a scale, which is the largest number of a slot / 127. Returns their K/V.

    A bfloat16 is the upper half of a float32. It has 8 bits, so it is rounded by 2^-8 at most.

    Args:
        rounding: what is allowed in addition, in scales.
    """
    halves = np.ascontiguousarray(slots.numpy()[..., -2:]).view(np.uint16).astype(np.uint32)
    scales, numbers = torch.from_numpy((halves << 16).view(np.float32)), slots[..., :-2].float()
    torch.testing.assert_close(scales, kv.abs().amax(-1, keepdim=True) / 127, rtol=2**-8 + 1e-4, atol=1e-37)
    assert ((numbers * scales - kv).abs() <= (0.5 + rounding) * scales).all()
    return numbers * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_stored_to_half_a_scale(dtype: torch.dtype) -> None:
    """Heads and single numbers of all magnitudes. Reading rounds once, to the dtype."""
    torch.manual_seed(0)
    low, high = (-30, 30) if dtype is not torch.float16 else (-3, 3)
    rows = torch.randn(4000, 2, 16) * 10 ** torch.empty(4000, 2, 1).uniform_(low, high)
    rows[::2] *= 10 ** torch.empty(2000, 2, 16).uniform_(-4, 0)
    rows = rows.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else rows.to(dtype)
    slots = pack(rows)
    torch.testing.assert_close(unpack(slots, dtype), check_slots(slots, rows.float(), 1e-4).to(dtype))


def test_zeros_and_what_is_not_finite() -> None:
    """Zeros are zeros, also the bytes of a slot that was cleared. NaN and infinity stay in their own slot."""
    assert (unpack(pack(torch.zeros(2, 16)), torch.float32) == 0).all()
    assert pack(torch.zeros(2, 16))[:, -2:].any()  # a scale above 0: 0 / 0 is no int8
    assert (unpack(torch.zeros(2, 18, dtype=torch.int8), torch.float32) == 0).all()
    for value in (torch.nan, torch.inf, -torch.inf):
        rows = torch.ones(3, 2, 16)
        rows[1, 0, 5] = value
        read = unpack(pack(rows), torch.float32)
        assert not read[1, 0, 5].isfinite()
        assert torch.equal(read.isfinite().all(-1), rows.isfinite().all(-1))


class StoredCache(DynamicCache):
    """Attention reads what the engine stored, which must be transformers' own K/V to half a scale."""

    def __init__(self, slots: Tensor) -> None:
        """`slots`: int8 [num_layers, 2 (K, V), num_kv_heads, num_tokens, head_dim + 2]."""
        super().__init__()
        self.slots = slots

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any) -> tuple[Tensor, ...]:
        pairs = zip(self.slots[layer], (k, v), strict=True)
        return tuple(check_slots(slots, kv[0], rounding=0.01)[None] for slots, kv in pairs)


def logprobs_of(output: RequestOutput) -> Tensor:
    """Of the prompt's tokens, if it was scored, and of the tokens of all outputs."""
    pairs = list(zip((output.prompt_logprobs or [])[1:], output.prompt_token_ids[1:], strict=False))
    for each in output.outputs:
        pairs += zip(each.logprobs or [], each.token_ids, strict=False)
    return torch.tensor([float(row[token]) for row, token in pairs])


@pytest.mark.parametrize(("budget", "scored"), [(7, 0), (2048, None)], ids=["chunks", "whole"])
def test_transformers_with_our_slots_says_the_same(oracle: Oracle, budget: int, scored: int | None) -> None:
    """Tokens, and log-probabilities to 1e-4: decodes in a batch, after swaps, prompts in chunks or whole.

    The prompts in chunks are scored, the others are found in the prefix cache the second time.
    """
    llm = make_llm(oracle.folder, max_num_batched_tokens=budget, num_blocks=18, preemption="swap")
    execute, slots = llm.engine.runner.execute, dict[tuple[int, ...], Tensor]()

    def execute_and_read(batch: ScheduledBatch) -> StepResult:
        result = execute(batch)
        for seq in batch.sequences:
            # [blocks, layers, 2, heads, block_size, width] → [layers, 2, heads, tokens, width]
            blocks = llm.engine.runner.kv_cache.data[seq.block_table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            slots[tuple(seq.request.prompt_token_ids)] = blocks[:, :, :, :end].clone()
        return result

    llm.engine.runner.execute = execute_and_read
    for _ in range(2):
        prompts = random_prompts(4, seed=budget, longest=40)
        for output in serve(llm, prompts, replace(GREEDY, prompt_logprobs=scored)):
            prompt, completion = output.prompt_token_ids, output.outputs[0]
            ids = prompt + completion.token_ids
            with torch.inference_mode():
                stored = StoredCache(slots[tuple(prompt)])
                logits = oracle.model(torch.tensor([ids[:-1]]), past_key_values=stored).logits[0]
            expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
            assert completion.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
            ours = logprobs_of(output)
            torch.testing.assert_close(ours, expected[-len(ours) :], atol=1e-4, rtol=0)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap > 0
    assert (stats.prefix_cache_hits > 0) == (scored is None)


def check_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """The same tokens. Log-probabilities to 1e-4 in three requests of four, and in all to ONE_STEP."""
    errors = []
    for pair in zip(ours, theirs, strict=True):
        assert [each.token_ids for each in pair[0].outputs] == [each.token_ids for each in pair[1].outputs]
        sums = [[each.cumulative_logprob / len(each.token_ids) for each in o.outputs] for o in pair]
        a, b = (torch.cat((logprobs_of(o), torch.tensor(s))) for o, s in zip(pair, sums, strict=True))
        errors.append(float((a - b).abs().max()))
    assert np.quantile(errors, 0.75) < 1e-4
    assert max(errors) < ONE_STEP


def test_what_a_request_says_alone(qwen3: Oracle) -> None:
    """It says so in a batch: whole prompts, chunks, preempted, from the cache, by the other backend."""
    prompts, params = random_prompts(8, seed=2, longest=40), KINDS * 2
    llm, alone = make_llm(qwen3.folder, enable_prefix_caching=False), []
    for prompt, its in zip(prompts, params, strict=True):
        alone += serve(llm, [prompt], [its])
    for config, event in (
        ({"attention_backend": "auto"}, "prefix_cache_hits"),
        ({"max_num_batched_tokens": 7}, "prefix_cache_hits"),
        ({"num_blocks": 24, "preemption": "swap"}, "num_preemptions_swap"),
        ({"num_blocks": 24, "preemption": "recompute"}, "num_preemptions_recompute"),
        ({"attention_backend": "reference", "block_size": 16}, "num_blocks_copied"),
    ):
        llm = make_llm(qwen3.folder, **config)
        for _ in range(2 if event == "prefix_cache_hits" else 1):
            check_same(serve(llm, prompts, params), alone)
        assert getattr(llm.engine.stats(), event) > 0


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_chunks_of_the_same_kv_give_the_same_attention(name: str) -> None:
    """One layer: 23 tokens at once, in chunks, one by one. A prefill, too, reads what was stored."""
    torch.manual_seed(0)
    q, k, v = torch.randn(23, 6, 16), torch.randn(23, 2, 16), torch.randn(23, 2, 16)
    outs = []
    for lengths in ([23], [9, 1, 13], [1] * 23):
        table, parts, start = [6, 0, 3, 7, 2, 5], [], 0
        shape = Int8Shape(num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        cache = Int8Cache(shape, num_blocks=8, block_size=4, device=torch.device("cpu"))
        attention = make_attention(name, cache, scale=0.25)
        for n in lengths:
            end = start + n
            metadata = AttentionMetadata(
                query_lens=np.array([n]),
                context_lens=np.array([end]),
                block_tables=[table],
                slot_mapping=slots_of(table, np.arange(start, end), block_size=4),
                num_decodes=1 if n == 1 else 0,
                seq_ids=[0],
            )
            attention.begin_step(metadata)
            parts.append(attention(0, q[start:end], k[start:end], v[start:end]))
            start = end
        outs.append(torch.cat(parts))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


def test_the_engine_notices_kv_that_is_not_finite(tmp_path: Any) -> None:
    """Only the first token's K/V is NaN. Its request is aborted, and its blocks are used again."""
    make_checkpoint("llama", tmp_path)
    llm = make_llm(tmp_path, num_blocks=12)
    (alone,) = serve(llm, [[1, 2, 3]], GREEDY)
    bad = next(token for token in range(10, 97) if token not in alone.outputs[0].token_ids)
    llm.engine.runner.model.embed_tokens.weight[bad] = torch.nan
    llm.engine.add_request("bad", [bad, *range(4, 10), *range(4, 10)], GREEDY)
    with pytest.raises(NonFiniteLogits, match="'bad'"):
        llm.engine.step()
    llm.engine.abort_request("bad")
    check_same(serve(llm, [[1, 2, 3]], GREEDY), [alone])


def test_the_same_memory_has_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model: heads of 32 in float32 are 128 bytes, and 34 here. The tensor has what is counted."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 20))
    config: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "memory_utilization": 0.5}
    plain, runner = nanopaged.LLM(**config).engine.runner, LLM(**config).engine.runner
    assert runner.num_blocks == plain.num_blocks * 128 // 34
    assert runner.kv_cache.data.nbytes == runner.num_blocks * runner.kv_cache.shape.block_bytes(16)
    llama: dict[str, Any] = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    assert Int8Shape(**llama).block_bytes(16) * 256 == KVShape(**llama).block_bytes(16) * 130
    # What a GPU runs to measure its memory computes with the model's dtype.
    monkeypatch.setattr(memory, "GATHER_KEYS", 64)
    memory.largest_step(
        config=Int8Config(max_num_seqs=2),
        model=runner.model,
        shape=runner.kv_cache.shape,
        max_model_len=64,
        max_num_batched_tokens=16,
    )


def test_what_is_refused() -> None:
    assert Int8Config(attention_backend="auto").attention_backend == "torch"
    for name in ("cpp", "triton", "flash"):
        with pytest.raises(
            ValueError, match=f"backend is '{name}', but must be one of auto, torch, reference"
        ):
            LLM(attention_backend=name)
    with pytest.raises(ValueError, match="need an Int8Config"):
        Int8Engine(EngineConfig(num_blocks=9))


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing, eviction, preemption, aborts and faults: each request says what it says alone."""

    def make_engine(model: str, config: EngineConfig) -> LLMEngine:
        return Int8Engine(Int8Config(**vars(config) | {"dtype": "float32"}))

    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    monkeypatch.setattr(test_random_runs, "large_engine", cache(test_random_runs.large_engine.__wrapped__))
    monkeypatch.setitem(test_random_runs.TOLERANCE, "tiny", ONE_STEP)
    events = ["cache hit", "copy on write", "swap", "recompute", "abort", "fault: update"]
    test_random_runs.serve_random(tiny, 3, events)
