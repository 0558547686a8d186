"""The pieces a decoder is made of: linear, RMSNorm, rotary embedding, activation.

Weights are made empty, on their device and in their type; `weights.py` fills them. What is here in plain
PyTorch is in few kernels on a GPU: see `fused.py`.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged.model.model_config import ModelConfig


def _empty(*shape: int, like: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool, like: Tensor) -> None:
        super().__init__()
        self.weight = _empty(out_features, in_features, like=like)
        self.bias = _empty(out_features, like=like) if bias else None
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """On a CPU, lay the weights out once in the order in which oneDNN's kernels read them.

        A plain linear would do that again at every call, or use a slower kernel. The operators are
        PyTorch's own but private, so where they are missing or refuse, the plain linear stays.
        """
        if self.weight.device.type != "cpu":
            return
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            probe = self.weight.new_zeros(1, self.weight.shape[1])
            torch.ops.mkldnn._linear_pointwise(probe, packed, self.bias, "none", [], "")
        except (RuntimeError, AttributeError, NotImplementedError):
            return
        self._packed = packed
        self.weight = None  # the packed copy is all that is needed from here on

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += forward(x). A GPU adds as it multiplies, and needs a kernel of its own for a bias only."""
        if not x.is_cuda:
            total += self(x)
            return
        total.addmm_(x, self.weight.t())
        if self.bias is not None:
            total += self.bias


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        super().__init__()
        self.weight = _empty(size, like=like)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # PyTorch has one kernel for it
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return rms_normalize(x, self.eps).mul_(self.weight)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) over the last dimension: worked out in float32, returned in the type of x.

    On a CPU PyTorch takes eight steps with a temporary each, which for a long prompt in bfloat16 costs ten
    times the arithmetic; here it is one temporary, changed in place.
    """
    y = x.to(torch.float32, copy=True)
    mean = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return y.mul_(mean.add_(eps).rsqrt_()).to(x.dtype)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions: theta^(-2i / head_dim), i < head_dim / 2.

    Llama 3's scaling slows the pairs whose wavelength is long against the length it was first trained
    on by `factor`, leaves the short ones, and blends in between, so that far positions stay within the
    angles the model has seen.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: short wavelength, as it is; 0: slowed
    return frequencies * (keep + (1 - keep) / scaling.factor)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv 2104.09864): turns q and k by their position.

    The pair (x_i, x_{i + half}) is turned by the angle a_i of its position:

        x_i cos a_i - x_{i + half} sin a_i        x_{i + half} cos a_i + x_i sin a_i
    """

    def __init__(self, config: ModelConfig, max_positions: int, like: Tensor) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(config))  # [max_positions, head_dim / 2]
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(like)
        self.sin = angles.sin().to(like)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos [num_tokens, 1, head_dim] (for both halves) and sin [num_tokens, 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [num_tokens, heads, head_dim] by the tables of its positions."""
    turned = x * cos
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return turned


def norm_rotate(
    qk: Tensor, num_q: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Queries and keys of the new tokens, normalised head by head (if there are weights) and turned.

    Args:
        qk: [num_tokens, heads, head_dim], the first `num_q` heads queries, the others keys; may be changed.
        weights: of the norms of queries and of keys, each [head_dim].
    """
    if (kernels := fused_kernels(qk)) is not None:
        return kernels.norm_rotate(qk, num_q, weights, eps, cos, sin)
    if weights is not None:
        qk = rms_normalize(qk, eps)
        for heads, weight in zip((qk[:, :num_q], qk[:, num_q:]), weights, strict=True):
            heads *= weight
    return rotate(qk, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, from both in one tensor [num_tokens, 2 · width] (Shazeer, arXiv 2002.05202)."""
    if (kernels := fused_kernels(gate_up)) is not None:
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def fused_kernels(x: Tensor) -> ModuleType | None:
    """The kernels of `fused.py`, if x is on a GPU and Triton is there."""
    return _import_fused() if x.is_cuda else None


@cache
def _import_fused() -> ModuleType | None:
    try:
        from nanopaged.kernels import fused
    except ImportError:
        return None
    return fused
