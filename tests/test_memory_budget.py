"""How many blocks fit: the arithmetic of a GPU without one, and the step that is measured there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle

from nanopaged import LLM, EngineConfig, memory_budget
from nanopaged.kv_cache import KVShape
from nanopaged.sampler import LOGITS_TILE

GB = 1 << 30
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 2 MiB a block of 16


def size_on_a_gpu(monkeypatch: pytest.MonkeyPatch, peak: int, **options: object) -> int:
    """A card of 80 GB of which 16 GB are in use, and a largest step of `peak` bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (64 * GB, 80 * GB))
    monkeypatch.setattr(memory_budget, "_peak_memory", lambda work, device: peak)
    model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    return memory_budget.size_pool(EngineConfig(model="unused", **options), model, SHAPE, 8192, 8192)


def test_what_is_left_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5 · 80 GB - 16 GB in use - 4 GB for the largest step = 20 GB, in blocks of 2 MiB."""
    assert size_on_a_gpu(monkeypatch, 4 * GB, memory_utilization=0.5) == 10 * 1024


def test_no_more_blocks_than_could_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of 8,192 tokens can fill 1,024 blocks."""
    assert size_on_a_gpu(monkeypatch, 4 * GB, max_num_seqs=2) == 1024


def test_a_gpu_too_small_for_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where less than nothing is left: the message has the blocks needed and their size."""
    for utilization, fit in ((0.26, 409), (0.1, 0)):
        with pytest.raises(ValueError, match=f"needs 512 blocks of 2,097,152 bytes.* only {fit} fit"):
            size_on_a_gpu(monkeypatch, 4 * GB, memory_utilization=utilization)


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(3, 40), (50, 400), (300, 17)])
def test_the_largest_step(
    qwen3: Oracle, max_num_seqs: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes as many tokens as a step may have, and samples for as many sequences as there can be."""
    llm = LLM(qwen3.folder, dtype="float32", max_num_seqs=max_num_seqs, num_blocks=20)
    runner, drawn = llm.engine.runner, []
    before = runner.kv_cache.data.fill_(1.0).clone()
    sample = memory_budget.sample
    monkeypatch.setattr(
        memory_budget, "sample", lambda logits, draws: drawn.append(logits) or sample(logits, draws)
    )
    computed = []
    hook = runner.model.register_forward_pre_hook(lambda _, args: computed.append(args[1]))
    shape = runner.kv_cache.shape
    memory_budget.largest_step(llm.engine.config, runner.model, shape, MAX_MODEL_LEN, budget)
    hook.remove()
    (positions,), (logits,) = computed, drawn
    assert len(positions) == budget
    assert int(positions.max()) == MAX_MODEL_LEN - 1, "the end of a context as long as can be"
    assert len(logits) == max(max_num_seqs, LOGITS_TILE)
    assert torch.equal(runner.kv_cache.data, before), "its blocks are its own"
