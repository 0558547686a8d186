"""The parts of a decoder: linear, RMSNorm, rotary embedding, MLP.

Weights are allocated empty, on their device and in their dtype; `checkpoint.py` fills them. The layers know
no sequences: a row of their input is a token, of any sequence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged.model.model_config import ModelConfig
from nanopaged.model.parallel import Ranks

# Whether a GPU runs the small operations as the Triton kernels of `kernels/fused.py`. Off until measured.
FUSED_KERNELS = os.environ.get("NANOPAGED_FUSED") == "1"

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "swish": F.silu}  # name → function


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A weight of this shape, not initialised and without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [out_features, in_features].

    Args:
        ranks: if W is split by columns, the ranks whose results add up to y.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = empty_weight(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_weight(out_features, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None

    def pack(self) -> str | None:
        """On a CPU, reorder the weights once into the layout that oneDNN's matrix product reads.

        `F.linear` reorders them at every call, or uses a slower kernel. Measured on one core for 32 tokens
        and 768 → 3072 features: float32 0.59 instead of 1.41 ms (docs/benchmarks.md), bfloat16 about 15 %
        less. These operators are private to PyTorch. If they are missing or fail, `F.linear` is used.

        Returns:
            Why they cannot be used on this CPU; None if they are, or if it is a GPU.
        """
        if self.weight.device.type != "cpu":
            return None
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            probe = self.weight.new_zeros(1, self.weight.shape[1])
            torch.ops.mkldnn._linear_pointwise(probe, packed, self.bias, "none", [], "")
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return str(error).partition("\n")[0]
        self._packed = packed
        self.weight = None  # only the packed copy is needed from here on
        return None

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → [num_tokens, out_features]."""
        if self._packed is not None:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        else:
            out = F.linear(x, self.weight, self.bias)
        return out if self.ranks is None else self.ranks.all_reduce(out)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)


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

    def __init__(
        self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
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
    if FUSED_KERNELS:
        from nanopaged.kernels.fused import fused_norm_rotate

        return fused_norm_rotate(qk, num_q, weights, eps, cos, sin)
    if weights is not None:
        qk = rms_norm(qk, eps)
        qk[:, :num_q].mul_(weights[0])
        qk[:, num_q:].mul_(weights[1])
    rotated = qk * cos
    (first, second), (out_first, out_second) = qk.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return rotated


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), with gate and up in one matrix (Shazeer, arXiv 2002.05202)."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks | None
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.gate_up_proj = Linear(hidden, 2 * inner, config.mlp_bias, dtype, device)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, dtype, device, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        gate_up = self.gate_up_proj(x)  # [num_tokens, 2 · intermediate_size]
        if FUSED_KERNELS and self.activation is F.silu:
            from nanopaged.kernels.fused import fused_silu_mul

            return self.down_proj(fused_silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(self.activation(gate).mul_(up))
