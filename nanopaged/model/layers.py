"""The parts of a decoder: linear, RMSNorm, rotary embedding, MLP.

They are made on PyTorch's meta device, which has shapes and no memory; `checkpoint.py` gives the weights
memory, a dtype and their values. The layers know no sequences: a row of their input is a token, of any
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged.model import onednn
from nanopaged.model.model_config import ModelConfig
from nanopaged.model.parallel import Ranks

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "swish": F.silu}  # name → function


def empty_weight(*shape: int, dtype: torch.dtype | None = None, device: Any = "meta") -> nn.Parameter:
    """A weight of this shape, not initialised and without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give the weights of a module memory. Two names of one weight stay names of one weight."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight not in made:
                made[weight] = empty_weight(*weight.shape, dtype=dtype, device=device)
            setattr(part, name, made[weight])


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [out_features, in_features].

    Args:
        ranks: if W is split by columns, the ranks whose results add up to y.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight: nn.Parameter | None = empty_weight(out_features, in_features)
        self.bias = empty_weight(out_features) if bias else None
        self._reordered: Tensor | None = None

    def reorder_weight(self) -> str | None:
        """Reorder W for oneDNN; see `onednn.reorder`. Returns why that cannot be done, None if it is."""
        assert self.weight is not None
        self._reordered, reason = onednn.reorder(self.weight, self.bias)
        if self._reordered is not None:
            self.weight = None  # only the reordered copy is needed from here on
        return reason

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → [num_tokens, out_features]."""
        if self._reordered is not None:
            out = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")
        else:
            assert self.weight is not None
            out = F.linear(x, self.weight, self.bias)
        return out if self.ranks is None else self.ranks.all_reduce(out)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """RMSNorm of x [..., size], computed in float32, returned in the dtype of x.

    On a CPU, `F.rms_norm` makes eight temporaries, which takes 16 times as long for 2,048 tokens in bfloat16
    (docs/benchmarks.md). Here it is one temporary, changed in place.
    """
    if x.is_cuda:  # one kernel
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    y = x.to(torch.float32, copy=True)
    mean = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    y = y.mul_(mean.add_(eps).rsqrt_()).to(x.dtype)
    return y if weight is None else y.mul_(weight)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions: theta^(-2i / head_dim), i < head_dim / 2.

    Llama 3's scaling divides the frequencies of long wavelengths (compared with the context length of the
    pretraining) by `factor`, keeps those of short ones, and blends between, so that the angles of far
    positions stay within the range that the model was trained on.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: short wavelength, unchanged; 0: divided by factor
    return frequencies * (keep + (1 - keep) / scaling.factor)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv 2104.09864): rotates q and k by their position.

    The pair (x_i, x_{i + half}) is rotated by the angle a_i of its position:

        x_i cos a_i - x_{i + half} sin a_i        x_{i + half} cos a_i + x_i sin a_i
    """

    def compute(
        self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Tables of the cosines and sines of `max_positions` positions."""
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(config))  # [max_positions, head_dim / 2]
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
        self.sin = angles.sin().to(device, dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos [num_tokens, 1, head_dim] (for both halves) and sin [num_tokens, 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def norm_rotate(
    qk: Tensor, num_q: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Queries and keys of the new tokens: normalised head by head, if there are weights, and rotated.

    Args:
        qk: [num_tokens, heads, head_dim]; the first `num_q` heads are queries, the rest keys. May be changed.
        weights: of the norms of queries and of keys, each [head_dim].
        cos, sin: of the tokens' positions, from `Rotary`.

    Returns:
        [num_tokens, heads, head_dim]
    """
    if weights is not None:
        qk = rms_norm(qk, eps)
        qk[:, :num_q].mul_(weights[0])
        qk[:, num_q:].mul_(weights[1])
    rotated = qk * cos
    (first, second), (out_first, out_second) = qk.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return rotated


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 · width] → silu(gate) · up [num_tokens, width]; silu(x) = x / (1 + e^-x)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class Operations:
    """The small operations of a layer: those above, or fused ones that an attention backend has (`fused`)."""

    rms_norm: Callable[[Tensor, float, Tensor], Tensor] = rms_norm
    norm_rotate: Callable[..., Tensor] = norm_rotate
    silu_mul: Callable[[Tensor], Tensor] = silu_mul


class Part(nn.Module):
    """A part of a layer that has small operations; `Model.use` replaces them."""

    operations = Operations()


class RMSNorm(Part):
    """x / √(mean(x²) + ε) · w over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, size] → the same shape."""
        return self.operations.rms_norm(x, self.eps, self.weight)


class MLP(Part):
    """down(act(gate(x)) · up(x)), with gate and up in one matrix (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, ranks: Ranks | None) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.gate_up_proj = Linear(hidden, 2 * inner, config.mlp_bias)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        gate_up = self.gate_up_proj(x)  # [num_tokens, 2 · intermediate_size]
        if self.activation is F.silu:
            return self.down_proj(self.operations.silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(self.activation(gate).mul_(up))
