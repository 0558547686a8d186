"""Fused Triton kernels for the small operations of a layer: norm and rotary embedding of q and k; SiLU · up.

Every kernel launch has a fixed cost, even inside a CUDA graph. In a decode step PyTorch launches seven
kernels to normalise and rotate q and k, and two for the activation; here it is one each, computed in float32
throughout. `model/layers.py` has the same arithmetic in PyTorch; `TritonAttention` brings these kernels if
NANOPAGED_FUSED=1 is set. They have not run on a GPU yet: their gain is unknown, and they are off by default.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_rotate_kernel(
    qk_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    qk_token,
    NUM_Q: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One program normalises and rotates HEADS_TILE heads of one token, in place. From NUM_Q on: keys.

    HALF = 2: a head x₀ x₁ x₂ x₃ is the pairs (x₀, x₂), (x₁, x₃), each rotated by an angle of its own.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE))[:, None]
    pairs = tl.arange(0, HALF_PAD)[None, :]
    in_half = pairs < HALF
    mask = (heads < NUM_HEADS) & in_half
    x = qk_ptr + token * qk_token + heads * (2 * HALF) + pairs
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    if q_weight_ptr is not None:
        mean = tl.sum(first * first + second * second, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        q_weight = tl.load(q_weight_ptr + pairs, mask=in_half).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + pairs, mask=in_half).to(tl.float32)
        first *= scale * tl.where(heads < NUM_Q, q_weight, k_weight)
        q_weight = tl.load(q_weight_ptr + HALF + pairs, mask=in_half).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + HALF + pairs, mask=in_half).to(tl.float32)
        second *= scale * tl.where(heads < NUM_Q, q_weight, k_weight)
    cos = tl.load(cos_ptr + token * (2 * HALF) + pairs, mask=in_half).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=in_half).to(tl.float32)
    tl.store(x, (first * cos - second * sin).to(qk_ptr.dtype.element_ty), mask=mask)
    tl.store(x + HALF, (second * cos + first * sin).to(qk_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, TILE: tl.constexpr):
    """One program computes TILE columns of one row of silu(gate) · up, with silu(x) = x / (1 + e^-x)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=mask).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


# ── launching the kernels ──────────────────────────────────────────────────────────────────────────

HEADS_TILE = 16  # heads that one program normalises and rotates
SILU_TILE = 1024  # columns of one program


def fused_norm_rotate(
    qk: Tensor, num_q: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Normalise (if there are weights) and rotate queries and keys, in place.

    Args:
        qk: [num_tokens, heads, head_dim]; the first `num_q` heads are queries, the others keys. The heads
            of a token must be contiguous.
        weights: of the norms of queries and of keys, each [head_dim].
        cos: [num_tokens, 1, head_dim], the same in both halves.
        sin: [num_tokens, 1, head_dim / 2].
    """
    num_tokens, num_heads, head_dim = qk.shape
    assert qk.stride()[1:] == (head_dim, 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    norm_rotate_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_TILE))](
        qk,
        *(weights or (None, None)),
        cos,
        sin,
        eps,
        qk.stride(0),
        NUM_Q=num_q,
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        HEADS_TILE=HEADS_TILE,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
    )
    return qk


def fused_silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 · width], contiguous → silu(gate) · up [num_tokens, width]."""
    assert gate_up.is_contiguous()
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    silu_mul_kernel[(num_tokens, triton.cdiv(width, SILU_TILE))](gate_up, out, width, TILE=SILU_TILE)
    return out
