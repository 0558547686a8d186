"""What the runner measures at start-up: how many blocks fit, and which preemption is cheaper."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MAX_MODEL_LEN, Oracle, random_prompts, tokens_of

from nanopaged import LLM, EngineConfig, SamplingParams, memory
from nanopaged.kv_cache import KVShape
from nanopaged.model.decoder import PLAIN
from nanopaged.model_runner import choose_operations
from nanopaged.parallel import Ranks
from nanopaged.sampler import LOGITS_TILE

GB = 1 << 30
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 2 MiB a block of 16


def config_of(max_model_len: int, **options: object) -> EngineConfig:
    lengths = {"max_model_len": max_model_len, "max_num_batched_tokens": 8192}
    return EngineConfig(model="unused", **lengths, **options)


def size_on_a_gpu(monkeypatch: pytest.MonkeyPatch, peak: int, **options: object) -> int:
    """A card of 80 GB of which 16 GB are in use, and PyTorch holds the `peak` bytes of the largest step."""
    held = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (64 * GB - held[0], 80 * GB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.__setitem__(0, 0))
    monkeypatch.setattr(memory, "largest_step", lambda *_: held.__setitem__(0, peak))
    model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    return memory.measure_num_blocks(config_of(8192, **options), model, SHAPE, "torch")


def test_what_is_left_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5 · 80 GB - 16 GB in use - 4 GB for the largest step = 20 GB, in blocks of 2 MiB.

    Two sequences of 8,192 tokens can fill 1,024 blocks, one needs 512.
    """
    assert size_on_a_gpu(monkeypatch, 4 * GB, memory_utilization=0.5) == 10 * 1024
    assert size_on_a_gpu(monkeypatch, 4 * GB, max_num_seqs=2) == 1024
    for utilization, fit in ((0.26, 409), (0.1, 0)):  # less than nothing is left
        with pytest.raises(ValueError, match=f"needs 512 blocks of 2,097,152 bytes.* only {fit} fit"):
            size_on_a_gpu(monkeypatch, 4 * GB, memory_utilization=utilization)


@pytest.mark.parametrize(
    ("free", "limit", "max_model_len", "options", "num_bytes"),
    [
        (6 * GB, "max", 8192, {}, 3 * GB),
        (24 * GB, "max", 8192, {}, 4 * GB),
        (24 * GB, "max", 65536, {}, 8 * GB),  # one sequence of full length
        (24 * GB, "max", 8192, {"max_num_seqs": 2}, 2 * GB),
        (24 * GB, "max", 8192, {"memory_utilization": 0.5}, 12 * GB),
        (6 * GB, "max", 8192, {"tensor_parallel_size": 3}, 1 * GB),
        (24 * GB, "max", 8192, {"tensor_parallel_size": 2}, 2 * GB),
        (6 * GB, f"{4 * GB}\n", 8192, {}, 2 * GB),
        (6 * GB, "9" * 19, 8192, {}, 3 * GB),
    ],
)
def test_the_share_of_a_computers_memory(
    free: int,
    limit: str,
    max_model_len: int,
    options: dict[str, Any],
    num_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Past bug: a container's limit did not count, so the container was killed when the cache was full."""
    file = tmp_path / "memory.max"
    file.write_text(limit, encoding="utf-8")
    monkeypatch.setattr(memory, "CGROUP_LIMITS", (file, tmp_path / "missing"))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    model = SimpleNamespace(embed_tokens=torch.nn.Embedding(1, 1))
    config = config_of(max_model_len, **options)
    num_blocks = memory.measure_num_blocks(config, model, SHAPE, "torch")
    assert num_blocks * SHAPE.block_bytes(16) == num_bytes


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "keys", "num_tokens"),
    [
        (3, 40, 1 << 16, 3 * 14),
        (50, 400, 1 << 16, 50 * 8),
        (300, 17, 1 << 16, 17),
        (50, 40, 3 * 160, 3 * 14),
        (50, 400, 100, 3 * 134),
        (2, 400, 1 << 16, 2 * 160),
    ],
)
def test_the_largest_step(
    qwen3: Oracle,
    max_num_seqs: int,
    budget: int,
    keys: int,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes the budget in equal parts, rounded up, and samples for all sequences there can be.

    A budget of 400 is more than two sequences of 160 tokens can fill, so no step computes all of it.
    """
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    monkeypatch.setattr(memory, "GATHER_KEYS", keys)
    llm = LLM(qwen3.folder, dtype="float32", num_blocks=20, **options)
    runner, drawn = llm.engine.runner, []
    before = runner.kv_cache.data.fill_(1.0).clone()
    draw, make_backend, made = memory.draw_samples, memory.make_backend, []
    monkeypatch.setattr(memory, "make_backend", lambda *a: made.append(a[0]) or make_backend(*a))
    monkeypatch.setattr(
        memory, "draw_samples", lambda logits, rows: drawn.append(logits) or draw(logits, rows)
    )
    computed = []
    hook = runner.model.register_forward_pre_hook(lambda _, args: computed.append(args[1]))
    memory.largest_step(llm.engine.config, runner.model, runner.kv_cache.shape, "reference")
    hook.remove()
    (positions,), (logits,) = computed, drawn
    assert made == ["torch"], "the reference would take hours"
    assert len(positions) == num_tokens
    assert int(positions.max()) == MAX_MODEL_LEN - 1, "the end of a context as long as can be"
    assert int(positions.min()) >= 0, "no sequence is longer"
    assert len(logits) == max(max_num_seqs, LOGITS_TILE)
    assert torch.equal(runner.kv_cache.data, before), "its blocks are its own"


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_the_cheaper_preemption(
    qwen3: Oracle, choice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It chooses the faster way and logs both times; the contents of the blocks stay unchanged."""
    runner = LLM(qwen3.folder, dtype="float32", num_blocks=20, preemption="swap").engine.runner
    before = runner.kv_cache.data.fill_(3.0).clone()
    seconds = iter([0.1, 2.0] if choice == "swap" else [0.2, 0.1])  # a block out and in; 64 tokens
    measure = memory.seconds
    monkeypatch.setattr(memory, "seconds", lambda *args: measure(*args) * 0 + next(seconds))
    with caplog.at_level(logging.INFO, "nanopaged"):
        assert memory.measure_preemption(runner.model, runner.kv_cache, budget=2048) == choice
    assert f"preemption by {choice}: " in caplog.text
    assert f"{100 if choice == 'swap' else 200}.000 ms to swap" in caplog.text
    assert torch.equal(runner.kv_cache.data, before)


def test_the_rank_with_the_least_memory_decides() -> None:
    class OtherRank(Ranks):
        def all_reduce(self, x: torch.Tensor, op: Any = None) -> torch.Tensor:
            assert op == dist.ReduceOp.MIN
            return torch.minimum(x, torch.tensor([7, 9]))

    model = SimpleNamespace(embed_tokens=torch.nn.Embedding(1, 1))
    config = config_of(64, num_blocks=10, num_host_blocks=5, tensor_parallel_size=2)
    assert memory.choose_num_blocks(config, model, SHAPE, OtherRank(0, size=2, store=None), "torch") == (7, 5)


def test_host_blocks_are_for_swapping(qwen3: Oracle) -> None:
    """Unless configured, there are as many as in the KV cache, but none if nothing is ever swapped."""
    for preemption, num_host_blocks in (("swap", 20), ("auto", 20), ("recompute", 0)):
        llm = LLM(qwen3.folder, num_blocks=20, preemption=preemption)
        assert llm.engine.stats().num_host_blocks == num_host_blocks


@pytest.mark.parametrize("oracle", ["llama", "qwen3"], indirect=True)
def test_compiled_operations_give_the_same_tokens(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are traced as for a GPU, for any number of tokens, without the slow compiler behind it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    operations = choose_operations("torch", torch.float32, is_eager=False)
    assert choose_operations("torch", torch.float32, is_eager=True) == PLAIN
    on_cpu = LLM(oracle.folder, num_blocks=64, attention_backend="torch").engine.runner.model
    assert on_cpu.add_norm is PLAIN.add_norm
    monkeypatch.setattr("nanopaged.model_runner.choose_operations", lambda *_: operations)
    llm = LLM(oracle.folder, dtype="float32", num_blocks=64, attention_backend="torch")
    prompts = random_prompts(4, seed=3)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == [oracle.greedy(prompt, 12) for prompt in prompts]


def test_an_mlp_computes_long_prompts_in_blocks(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanopaged.model.decoder.MLP_BLOCK", 3)
    llm = LLM(qwen3.folder, dtype="float32", num_blocks=64)
    prompts = random_prompts(4, seed=3)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == [qwen3.greedy(prompt, 12) for prompt in prompts]


def test_the_last_mlp_computes_only_what_is_sampled(qwen3: Oracle) -> None:
    """A prompt of ten tokens in chunks of four, whose last token is sampled."""
    llm = LLM(qwen3.folder, dtype="float32", num_blocks=64, max_num_batched_tokens=4)
    sizes = []
    for layer in (0, -1):
        mlp = llm.engine.runner.model.layers[layer].mlp
        mlp.register_forward_hook(lambda _, inputs, out: sizes.append(len(inputs[0])))
    prompt = list(range(3, 13))
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert sizes == [4, 0, 4, 0, 2, 1, 1, 1]
    assert tokens_of(output) == [qwen3.greedy(prompt, 2)]


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_the_way_to_preempt_is_measured_only_if_it_is_open(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"swap": "recompute", "recompute": "swap"}[way]
    monkeypatch.setattr("nanopaged.model_runner.measure_preemption", lambda *_: other)
    assert LLM(num_blocks=8, preemption=way).engine.stats().preemption == way
    assert LLM(num_blocks=8).engine.stats().preemption == other
