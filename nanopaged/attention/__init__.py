"""Paged attention: the choice of a backend.

    reference_backend  ReferenceAttention           a loop over sequences, queries and blocks; slow
    torch_backend      TorchAttention               large PyTorch operations; runs everywhere
    cpp_backend          ├ CppAttention             stores K/V and decodes with our C++ kernels, on a CPU
    triton_backend       └ TritonAttention          stores K/V and decodes with our Triton kernels
    flash_backend            └ FlashAttention       prefills with flash attention

`begin_step(metadata)` prepares what all layers share. `attention(layer, q, k, v)` computes one layer: it
stores the new K/V of the whole batch first, then every query reads the blocks of its own sequence.

    q, out    [num_tokens, num_heads, head_dim]
    k, v      [num_tokens, num_kv_heads, head_dim]

A `score_mod` changes the scores (scale · q · k) before the softmax, as in FlexAttention:

    def softcap(layer, scores, queries, keys):
        return 50 * (scores / 50).tanh()

`queries` and `keys` are positions, and broadcast to the scores. Only "reference" and "torch" can call it.
"""

from __future__ import annotations

import logging

import torch

from nanopaged.attention.cpp_backend import CppAttention
from nanopaged.attention.reference_backend import ReferenceAttention, ScoreMod
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kernels import build, cpp
from nanopaged.kv_cache import KVCache, KVShape

logger = logging.getLogger("nanopaged")


def choose_backend(
    name: str, device: torch.device, shape: KVShape, score_mod: ScoreMod | None = None
) -> str:
    """The backend of that name, or a ValueError that says why it cannot run here; "auto" is the fastest one.

    The C++ kernels are built here.
    """
    fastest = {"cuda": ["flash", "triton"], "cpu": ["cpp"] * build.is_wanted()}.get(device.type, [])
    for candidate in fastest if name == "auto" else [name]:
        reason = why_unavailable(candidate, device, shape, score_mod)
        if reason is None:
            return candidate
        if name != "auto":
            raise ValueError(
                f"attention_backend={name!r} cannot run here: {reason}; 'auto' picks another"
            )
        if candidate == "cpp":
            logger.warning("the C++ kernels are not used: %s", reason)
    return "torch"


def make_attention(
    name: str, cache: KVCache, scale: float, score_mod: ScoreMod | None = None
) -> TorchAttention | ReferenceAttention:
    """The backend that `choose_backend` chooses, over `cache`."""
    name = choose_backend(name, cache.data.device, cache.shape, score_mod)
    if name in ("flash", "triton"):
        from nanopaged.attention import flash_backend  # Triton is not installed everywhere

        chosen = flash_backend.FlashAttention if name == "flash" else flash_backend.TritonAttention
        return chosen(cache, scale)
    if name == "cpp":
        return CppAttention(cache, scale)
    return (ReferenceAttention if name == "reference" else TorchAttention)(cache, scale, score_mod)


def why_unavailable(
    name: str, device: torch.device, shape: KVShape, score_mod: ScoreMod | None = None
) -> str | None:
    """Why a backend cannot run on the device or with these sizes; None if it can."""
    if name in ("reference", "torch"):
        return None
    if score_mod is not None:
        return "its kernels have no place for a score_mod"
    if name == "cpp":
        return cpp.why_no_cpp(device, shape.head_dim, shape.dtype)
    try:
        from nanopaged.attention import flash_backend
        from nanopaged.kernels import paged_attention
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    reason = flash_backend.why_no_flash(device, shape) if name == "flash" else None
    return paged_attention.why_no_triton(device) or reason
