"""Apple's GPU, on a Mac; elsewhere the fake device of `fake_mps.py`, which refuses what MPS cannot do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle, random_prompts, tokens
from fake_mps import MPS, FakeMps, pretend
from serving import KINDS, tokens_of
from torch import Tensor

from nanopaged import LLM, BeamSearchParams, SamplingParams

REAL = torch.backends.mps.is_available()


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """The fake device."""
    if REAL:
        pytest.skip("there is a real Apple GPU")
    with pretend(monkeypatch) as mps:
        yield mps


@pytest.fixture
def apple(request: pytest.FixtureRequest) -> None:
    """Apple's GPU where there is one, else the fake device."""
    if not REAL:
        request.getfixturevalue("mps")


# ── the fake itself ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x, host: x.double(), "float64"),
        (lambda x, host: host.double().to(MPS), "float64"),
        (lambda x, host: torch.linalg.eig(x), "no kernel for MPS"),
        (lambda x, host: x + host, "mixes"),
        (lambda x, host: x[host.long()], "an index of the host"),
        (lambda x, host: x.__setitem__(0, host), "a value of the host"),
        (lambda x, host: host.to(MPS, non_blocking=True), "does not wait"),
        (lambda x, host: x.to("cpu", non_blocking=True), "does not wait"),
        (lambda x, host: host.copy_(x, non_blocking=True), "does not wait"),
        (lambda x, host: torch.empty(3, pin_memory=True), "pinned"),
    ],
)
def test_the_fake_refuses(mps: FakeMps, wrong: Callable[[Tensor, Tensor], object], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        wrong(torch.zeros(3, 3).to(MPS), torch.zeros(3, 3))


def test_the_fake_computes(mps: FakeMps) -> None:
    """Views share memory, and what works in place gives the tensor itself."""
    x = torch.arange(6, device=MPS).view(2, 3)
    assert x.device == MPS
    assert x[1].add_(x[0]).tolist() == [3, 5, 7]
    x[:, 0] = x[:, 2] * 2
    assert x.cpu().tolist() == [[4, 1, 2], [14, 5, 7]]
    assert x.mul_(0) is x


# ── whole runs ────────────────────────────────────────────────────────────────────────────────────

PROMPTS = random_prompts(2, seed=3, longest=12)


def engine(oracle: Oracle, device: str, **options: object) -> LLM:
    defaults = {"block_size": 4, "num_blocks": 40, "attention_backend": "torch", "preemption": "swap"}
    return LLM(oracle.folder, device=device, **defaults | options)


@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_of_sampling_gives_the_tokens_of_the_cpu(qwen3: Oracle, apple: None, name: str) -> None:
    """A seed draws what it draws on the CPU: only the logits are computed on the other device."""
    scored = {"prompt_logprobs": 2} if name == "log-probabilities" else {}
    params = dataclasses.replace(KINDS[name], max_tokens=4, **scored)
    on_mps = engine(qwen3, "mps").generate(PROMPTS, params, use_tqdm=False)
    on_cpu = engine(qwen3, "cpu").generate(PROMPTS, params, use_tqdm=False)
    assert tokens_of(on_mps) == tokens_of(on_cpu)
    if scored:
        for output, expected_output in zip(on_mps, on_cpu, strict=True):
            logprobs = output.prompt_logprobs[1:] + output.outputs[0].logprobs
            expected = expected_output.prompt_logprobs[1:] + expected_output.outputs[0].logprobs
            for position, expected_position in zip(logprobs, expected, strict=True):
                assert position == pytest.approx(expected_position, abs=1e-4)


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_preemption_copies_and_chunks(qwen3: Oracle, apple: None, preemption: str) -> None:
    """Too few blocks for three samples or beams each, prompts in chunks, prefixes, blocks copied on write."""
    options = {"num_blocks": 14, "max_num_batched_tokens": 16, "watermark": 0.0, "preemption": preemption}
    prompts = [tokens(5, 9), tokens(5, 9) + [1, 2], tokens(5, 7), tokens(5, 8), tokens(6, 9)]
    params = [SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=6, ignore_eos=True)] * 3
    params += [BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)] * 2
    runs = []
    for device in ("mps", "cpu"):
        llm = engine(qwen3, device, **options)
        runs.append(tokens_of(llm.generate(prompts, params, use_tqdm=False)))
        stats = llm.engine.stats()
        counts = {"swap": stats.num_preemptions_swap, "recompute": stats.num_preemptions_recompute}
        assert counts.get(preemption, sum(counts.values())) > 0
        assert stats.num_blocks_copied > 0
    assert runs[0] == runs[1]


def test_backends_and_dtypes(qwen3: Oracle, apple: None) -> None:
    for backend, dtype in (("reference", "auto"), ("auto", "bfloat16"), ("torch", "float16")):
        llm = engine(qwen3, "mps", attention_backend=backend, dtype=dtype)
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        assert llm.engine.runner.kv_cache.data.device == MPS


def test_the_number_of_blocks(qwen3: Oracle, apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPU shares the memory of the CPU, so the rule is the CPU's: no step is run to measure."""
    monkeypatch.setattr("nanopaged.memory.HOST_BYTES", 1 << 20)
    on_cpu = engine(qwen3, "cpu", num_blocks=None, max_num_seqs=10**6).engine.stats().num_blocks
    on_mps = engine(qwen3, "mps", num_blocks=None, max_num_seqs=10**6).engine.stats().num_blocks
    assert on_mps == on_cpu < 10**6 * MAX_MODEL_LEN // 4


# ── what it does not take ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "flash"}, "'flash' cannot .*(a CUDA GPU.*this is mps:0|cannot be imported)"),
        ({"attention_backend": "cpp"}, "'cpp' cannot run here: its kernels run on a CPU, not on mps:0"),
        ({"tensor_parallel_size": 2}, "device 'mps' cannot .*: use cpu, cuda, or mps with one rank"),
    ],
)
def test_what_needs_another_device_says_so(
    qwen3: Oracle, apple: None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine(qwen3, "mps", **options)


@pytest.mark.skipif(REAL, reason="there is a real Apple GPU")
def test_a_machine_without_it_says_so() -> None:
    with pytest.raises(ValueError, match="device 'mps' cannot be used here: PyTorch has no such device"):
        LLM(device="mps")
