"""The CUDA path without a GPU: the whole engine on the fake tensors of `fake_cuda.py`.

Devices and dtypes of all tensors, and the copies for which the host waits.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import KINDS, MAX_MODEL_LEN, VOCAB_SIZE, Oracle
from torch import Tensor

pytest.importorskip("triton", reason="on a GPU, K/V is stored and read by Triton kernels")

from fake_cuda import CUDA, FakeCuda, pretend

from nanopaged import LLM, SamplingParams
from nanopaged import engine as engine_module
from nanopaged import model_runner as runner_module
from nanopaged.attention import choose_backend
from nanopaged.attention.metadata import StepInputs
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.sequence import Moves, ScheduledBatch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with pretend(monkeypatch) as cuda:
        yield cuda


@pytest.mark.parametrize(
    ("capability", "version", "backend", "reason", "auto"),
    [
        ((7, 0), "3.9.0", "triton", "7.5 with Triton 3.5, and cuda:0 has 7.0 with Triton 3.9.0", "torch"),
        ((7, 5), "3.4.1", "triton", "7.5 with Triton 3.5, and cuda:0 has 7.5 with Triton 3.4.1", "torch"),
        ((7, 5), "3.10.0+git5", "flash", "compute capability 8.0 or more, and not cuda:0", "triton"),
        ((7, 5), "3.5.0", "flash", "compute capability 8.0 or more, and not cuda:0", "triton"),
        ((8, 0), "3.2.0", "reference", None, "flash"),
    ],
)
def test_kernels_need_turing(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    version: str,
    backend: str,
    reason: str | None,
    auto: str,
) -> None:
    """Where they cannot run they are refused with the reason, and "auto" takes the next ones."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("triton.__version__", version)
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    assert choose_backend("auto", CUDA, shape) == auto
    if reason is not None:
        message = f"'{backend}' cannot run here: .*{re.escape(reason)}; 'auto' picks another"
        with pytest.raises(ValueError, match=message):
            choose_backend(backend, CUDA, shape)


# ── the engine on it ──────────────────────────────────────────────────────────────────────────────

Steps = list[list[tuple[str, str]]]  # the events of each


def on_cuda(oracle: Oracle, **options: object) -> LLM:
    defaults = {"device": "cuda:0", "dtype": "bfloat16", "block_size": 4, "num_blocks": 60, "max_num_seqs": 4}
    defaults |= {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "preemption": "swap"}
    return LLM(oracle.folder, **defaults | options)


def run(cuda: FakeCuda, llm: LLM, lengths: list[int], params: object) -> Steps:
    """Generate from prompts of these lengths; returns the events of each step."""
    params = params if isinstance(params, list) else [params] * len(lengths)
    hook = llm.engine.runner.model.register_forward_pre_hook(lambda *_: cuda.note("model"))
    for i, (length, p) in enumerate(zip(lengths, params, strict=True)):
        prompt = [(i + j) % VOCAB_SIZE for j in range(length)]
        llm.engine.queue(llm.engine.prompts.make_request(str(i), prompt, p))
    cuda.taken()
    steps = []
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        llm.engine.check_invariants()
        steps.append(cuda.taken())
    hook.remove()
    return steps


def where(step: list[tuple[str, str]], *kinds: str) -> list[str]:
    return [where for what, where in step if what in kinds]


def check(step: list[tuple[str, str]], waits: list[str], sent_late: list[str] | None = None) -> None:
    """The host waits only in `waits`, and after the first wait it sends only `sent_late`."""
    assert where(step, "wait") == waits
    assert where(step, "blocking send") == []
    if waits:
        assert where(step[step.index(("wait", waits[0])) :], "send") == (sent_late or [])


DRAWN = ["sampler.py gather_logprobs"]


@pytest.mark.parametrize(
    ("oracle", "backend", "dtype", "enforce_eager"),
    [
        ("llama", "flash", "bfloat16", False),
        ("qwen2", "triton", "float32", True),
        ("qwen3", "torch", "float16", True),
    ],
    indirect=["oracle"],
)
def test_a_step_waits_for_the_tokens_alone(
    oracle: Oracle,
    cuda: FakeCuda,
    backend: str,
    dtype: str,
    enforce_eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes, new prompts, later chunks of prompts, and mixtures. Decode-only steps are replayed."""
    seen, prepare = [], runner_module.prepare

    def watched(batch: ScheduledBatch, block_size: int) -> StepInputs:
        inputs = prepare(batch, block_size)
        seen.append((inputs.metadata, any(seq.needs_sample for seq in batch.sequences)))
        return inputs

    monkeypatch.setattr(runner_module, "prepare", watched)
    if backend == "flash":  # which needs a head_dim that is a multiple of 8
        read = engine_module.read_model_config
        wide = partial(dataclasses.replace, head_dim=16)
        monkeypatch.setattr(engine_module, "read_model_config", lambda folder: wide(read(folder)))
    llm = on_cuda(oracle, attention_backend=backend, dtype=dtype, enforce_eager=enforce_eager)
    params = SamplingParams(max_tokens=2)
    steps = run(cuda, llm, [20], params) + run(cuda, llm, [5, 20], params)
    kinds = set()
    for (batch, draws), step in zip(seen, steps, strict=True):
        check(step, DRAWN if draws else [])
        n, cached = batch.num_decodes, batch.context_lens > batch.query_lens
        alone = n == len(cached)
        kinds.add((n > 0, None if alone else bool(cached[n:].any())))
        if backend != "torch":
            replayed = alone and not enforce_eager
            assert len(where(step, "replay")) == int(replayed)
            assert len(where(step, "model")) == int(not replayed)
            assert where(step, "send").count("cuda_graphs.py run") == int(replayed), "all inputs go together"
            launches = Counter(where(step, "launch"))
            assert launches["store_kernel"] == (0 if replayed else 2)
            assert launches["decode_kernel"] == (0 if replayed or n == 0 else 2)
            assert launches["varlen"] == (2 if backend == "flash" and not alone else 0)
    assert kinds == {(True, None), (False, False), (False, True), (True, True)}


def test_graphs_are_captured_without_the_host(qwen3: Oracle, cuda: FakeCuda) -> None:
    """`FakeCuda` fails on anything but launches in a capture; its inputs are sent before."""
    on_cuda(qwen3, attention_backend="triton", max_num_seqs=9)
    events = cuda.taken()
    assert len(where(events, "capture")) == len([1, 2, 4, 8, 9])
    first = events.index(("capture", "cuda_graphs.py _capture_size"))
    assert where(events[first:], "wait", "blocking send") == []


@pytest.mark.parametrize("name", list(KINDS))
def test_samples_are_fetched_at_once(qwen3: Oracle, cuda: FakeCuda, name: str) -> None:
    """One wait, for tokens and log-probabilities."""
    llm = on_cuda(qwen3, attention_backend="triton", enforce_eager=True)
    for step in run(cuda, llm, [9], dataclasses.replace(KINDS[name], max_tokens=3)):
        check(step, DRAWN)


def test_scores_of_prompts(qwen3: Oracle, cuda: FakeCuda) -> None:
    """They are fetched before the tokens are drawn; what the sampler needs is sent between."""
    llm = on_cuda(qwen3, attention_backend="triton")
    first, second, third = run(cuda, llm, [30], SamplingParams(max_tokens=2, prompt_logprobs=1))
    check(first, DRAWN)
    check(second, DRAWN + DRAWN, ["sampler.py __init__"])
    check(third, DRAWN)


# ── blocks that move, and how many there are ──────────────────────────────────────────────────────


def test_blocks_move_while_the_host_goes_on(cuda: FakeCuda) -> None:
    """All copies on write are one gather and one scatter. A block goes out, or comes back, in one copy."""
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=20, dtype=torch.bfloat16)
    cache = KVCache(shape, 8, 4, CUDA, num_host_blocks=5)
    moves = Moves(swap_out=[(0, 4), (3, 2)], swap_in=[(2, 7)], copies=[(0, 1), (2, 3), (2, 4)])
    cache.move_blocks(moves)
    assert [what for what, _ in cuda.taken()] == ["fetch", "fetch", "send", "send"]
    cache.move_blocks(Moves())
    assert cuda.taken() == []
    assert [name for name in cuda.launched if "index" in name] == ["index_select", "index_copy_"]


@pytest.mark.parametrize(("preemption", "enforce_eager"), [("swap", False), ("auto", True)])
def test_forks_and_swaps(qwen3: Oracle, cuda: FakeCuda, preemption: str, enforce_eager: bool) -> None:
    """With too few blocks for all: the host does not wait for swaps or copies on write."""
    options = {"preemption": preemption, "enforce_eager": enforce_eager, "max_num_seqs": 9}
    llm = on_cuda(qwen3, attention_backend="triton", num_blocks=16, **options)
    moved = {"fetch": 0, "send": 0}
    for step in run(cuda, llm, [7, 9, 6], SamplingParams(n=3, max_tokens=8)):
        check(step, DRAWN if where(step, "wait") else [])
        for what in moved:
            moved[what] += where(step, what).count("kv_cache.py move_blocks")
    stats = llm.engine.stats()
    assert stats.num_blocks_copied > 0
    assert cuda.launched.count("index_copy_") > 0
    if preemption == "swap":
        assert stats.num_preemptions_swap > 0
        assert moved["fetch"] > 0
        assert moved["send"] > 0


@pytest.mark.parametrize(
    ("backend", "dtype"), [("flash", "bfloat16"), ("triton", "float32"), ("torch", "float16")]
)
def test_the_largest_step(qwen3: Oracle, cuda: FakeCuda, backend: str, dtype: str) -> None:
    """The step that is measured runs, with cached contexts and sorted scores."""
    llm = on_cuda(qwen3, num_blocks=None, attention_backend=backend, dtype=dtype, enforce_eager=True)
    events = cuda.taken()
    assert where(events, "wait") == DRAWN
    assert set(where(events, "blocking send")) == {"decoder.py rotary_tables"}
    assert llm.engine.stats().num_blocks == 4 * MAX_MODEL_LEN // 4
    assert "sort" in cuda.launched
    if backend != "torch":
        assert "store_kernel" in where(events, "launch")
    if backend == "flash":
        assert "varlen" in where(events, "launch")


def test_less_host_memory_than_wanted_can_be_pinned(
    qwen3: Oracle, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the option that takes less, and with it the engine starts."""
    empty = torch.empty

    def short(*sizes: Any, **options: Any) -> Tensor:
        out = empty(*sizes, **options)
        if options.get("pin_memory") and out.nbytes > 20 * block_bytes:
            raise RuntimeError("CUDA error: out of memory")
        return out

    block_bytes = on_cuda(qwen3).engine.runner.kv_cache.data[0].nbytes
    monkeypatch.setattr(torch, "empty", short)
    message = "60 blocks of 4 tokens need .* lower num_blocks, num_host_blocks"
    for options in ({}, {"num_host_blocks": 60}):
        with pytest.raises(ValueError, match=message):
            on_cuda(qwen3, **options)
    assert len(on_cuda(qwen3, num_host_blocks=15).engine.runner.kv_cache.host) == 15
