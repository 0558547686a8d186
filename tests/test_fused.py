"""The fused kernels against the formulas in float64, and in the engine."""

from __future__ import annotations

import pytest
import torch
from conftest import Oracle, random_prompts
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform has not")

from nanopaged import LLM, SamplingParams
from nanopaged.kernels import devices, fused
from nanopaged.model.layers import Linear, RMSNorm, allocate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = list(TOLERANCE)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def check_norm_rotate(
    num_tokens: int, num_q: int, num_k: int, head_dim: int, dtype: torch.dtype, normalise: bool
) -> None:
    """On part of a wider projection, whose other values stay unchanged."""
    torch.manual_seed(head_dim)
    eps, num_heads = 1e-3, num_q + num_k
    qkv = randn(num_tokens, num_heads + num_k, head_dim, dtype=dtype) * 3
    weights = tuple(randn(head_dim, dtype=dtype) for _ in range(2)) if normalise else None
    angles = torch.randn(num_tokens, 1, head_dim // 2, device=DEVICE) * 10
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    before, x = qkv.clone(), qkv[:, :num_heads].double()
    if normalise:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        x = torch.cat((x[:, :num_q] * weights[0].double(), x[:, num_q:] * weights[1].double()), dim=1)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
    qk = fused.fused_norm_rotate(qkv[:, :num_heads], num_q, weights, eps, torch.cat((cos, cos), dim=-1), sin)
    assert_close(qk, torch.cat((turned.real, turned.imag), dim=-1))
    assert torch.equal(qkv[:, num_heads:], before[:, num_heads:])


def check_silu_mul(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = randn(num_tokens, 2 * width, dtype=dtype) * 5
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(fused.fused_silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("num_q", "num_k", "head_dim"), [(2, 1, 8), (16, 8, 64), (17, 1, 20), (6, 2, 2), (28, 4, 128)]
)
def test_norm_rotate(dtype: torch.dtype, normalise: bool, num_q: int, num_k: int, head_dim: int) -> None:
    """As many heads as one program takes, fewer and more."""
    check_norm_rotate(5, num_q, num_k, head_dim, dtype, normalise)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 48, 1024, 1025])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    check_silu_mul(3, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 256, 16384])
def test_fused_kernels_on_a_gpu(dtype: torch.dtype, num_tokens: int) -> None:
    """The sizes of Qwen3-0.6B and Llama-3-8B, for one token up to a large step of prompts."""
    check_norm_rotate(num_tokens, 16, 8, 128, dtype, normalise=True)
    check_norm_rotate(num_tokens, 32, 8, 128, dtype, normalise=False)
    check_silu_mul(num_tokens, 3072, dtype)
    check_silu_mul(num_tokens, 14336, dtype)


def test_the_engine_with_fused_kernels(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, head norms, odd head sizes, chunks and decodes: transformers' tokens."""
    used = []
    monkeypatch.setattr(devices, "FUSED_KERNELS", True)
    silu_mul = fused.fused_silu_mul
    monkeypatch.setattr(fused, "fused_silu_mul", lambda x: used.append(x) or silu_mul(x))
    prompts = random_prompts(3, seed=8, longest=20)
    llm = LLM(
        oracle.folder, dtype="float32", attention_backend="triton", num_blocks=100, max_num_batched_tokens=16
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 8)
    assert used


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_norm_and_linear_on_a_gpu(dtype: torch.dtype) -> None:
    """They have no kernel of ours, but PyTorch's own."""
    torch.manual_seed(0)
    x = randn(7, 96, dtype=dtype)
    norm, linear = RMSNorm(96, 1e-3), Linear(96, 48, True)
    for module in (norm, linear):
        allocate(module, dtype, DEVICE)
    for weight in (norm.weight, linear.weight, linear.bias):
        weight.data.copy_(torch.randn(weight.shape) / 8)
    mean = x.double().square().mean(-1, keepdim=True)
    assert_close(norm(x), x.double() / (mean + 1e-3).sqrt() * norm.weight.double())
    assert_close(linear(x), x.double() @ linear.weight.double().T + linear.bias.double())
