"""K/V in 8 bits. The oracle is transformers with the bytes that the engine stored, read with numpy."""

from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
import torch
from harness import GREEDY, SMALL, Oracle, Run, Workload, check_refused, draw_workload, serve
from int8kv import LLM, Int8Config, Int8Engine, pack, unpack
from torch import Tensor
from transformers import DynamicCache

from nanopaged import SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult


def check_slots(slots: Tensor, kv: Tensor, rounding: float) -> Tensor:
    """The slots hold `kv` to half a scale, and `rounding` of one. Returns their K/V.

    A bfloat16 is the upper half of a float32. It has 8 bits, so it is rounded by 2^-8 at most.
    """
    halves = np.ascontiguousarray(slots.numpy()[..., -2:]).view(np.uint16).astype(np.uint32)
    scales, numbers = torch.from_numpy((halves << 16).view(np.float32)), slots[..., :-2].float()
    torch.testing.assert_close(scales, kv.abs().amax(-1, keepdim=True) / 127, rtol=2**-8 + 1e-4, atol=1e-37)
    assert ((numbers * scales - kv).abs() <= (0.5 + rounding) * scales).all()
    return numbers * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_stored_to_half_a_scale(dtype: torch.dtype) -> None:
    """Heads of many magnitudes. Reading rounds once, to the dtype."""
    torch.manual_seed(0)
    most = 3 if dtype == torch.float16 else 30
    rows = (torch.randn(4000, 2, 16) * torch.logspace(-most, most, 4000)[:, None, None]).to(dtype)
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


class StoredOracle(Oracle):
    """Transformers over the slots that the engine `llm` wrote for each prompt."""

    def __init__(self, oracle: Oracle, llm: LLM) -> None:
        self.model, self.runner, self.slots = oracle.model, llm.engine.runner, dict[tuple[int, ...], Tensor]()
        self.execute, self.runner.execute = self.runner.execute, self.execute_and_read

    def execute_and_read(self, batch: ScheduledBatch) -> StepResult:
        result = self.execute(batch)
        for seq in batch.sequences:
            # [blocks, layers, 2, heads, block_size, width] → [layers, 2, heads, tokens, width]
            blocks = self.runner.kv_cache.data[seq.block_table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            self.slots[tuple(seq.request.prompt_token_ids)] = blocks[:, :, :, :end].clone()
        return result

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], num_prompt_tokens: int) -> Tensor:
        """The last token was not computed, so it has no row of its own."""
        stored = StoredCache(self.slots[tuple(token_ids[:num_prompt_tokens])])
        rows = self.model(torch.tensor([token_ids[:-1]]), past_key_values=stored).logits[0].log_softmax(-1)
        return torch.cat((rows, rows[-1:]))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("budget", "scored"), [(7, 0), (2048, None)], ids=["chunks", "whole"])
def test_transformers_with_our_slots_says_the_same(
    oracle: Oracle, budget: int, scored: int | None, backend: str
) -> None:
    """Every reader sees what was stored: decodes in a batch, after swaps, prompts in chunks or whole.

    The prompts in chunks are scored. The others find in the prefix cache what their twins have just stored.
    """
    options = SMALL | {"num_blocks": 18, "preemption": "swap", "max_num_batched_tokens": budget}
    llm = LLM(oracle.folder, attention_backend=backend, **options)
    prompts = [prompt for prompt in harness.random_prompts(4, seed=1, longest=16) for _ in range(2)]
    stored = StoredOracle(oracle, llm)
    stored.check(serve(llm, prompts, replace(GREEDY, prompt_logprobs=scored)))
    assert harness.num_preempted(llm) > 0
    assert (llm.engine.stats().prefix_cache_hits > 0) == (scored is None)


class Int8Run(Run):
    """A number near a tie may become the int8 beside it, which moved a log-probability by 0.0012 at most."""

    engine_class = alone_class = Int8Engine
    tolerance = 0.02


def draw_greedy(seed: int) -> Workload:
    """A workload of greedy texts, because rounding to another int8 would more often change a random draw."""
    workload = draw_workload(seed)
    for asked in workload.requests:
        rules = {"max_tokens": asked.params.max_tokens, "n": asked.params.width}
        asked.params = SamplingParams(temperature=0, logprobs=2, ignore_eos=True, **rules)
    return workload


def test_random_workloads(qwen3: Oracle) -> None:
    """Each request says what it says alone."""
    events = ["cache hit", "copy on write", "swap", "recompute", "fault: update"]
    harness.random_runs(Int8Run, qwen3.folder, 12, events, draw_greedy)


def test_what_is_refused() -> None:
    check_refused(LLM, [({"attention_backend": "cpp"}, "must be one of auto, torch, reference")])
    assert Int8Config(attention_backend="auto").attention_backend == "torch"
