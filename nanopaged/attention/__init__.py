"""Paged attention: the choice of a backend.

    reference_backend  ReferenceAttention       a loop over sequences, queries and blocks; slow
    torch_backend      TorchAttention           large PyTorch operations; runs everywhere
    cpp_backend          ├ CppAttention         stores K/V and decodes with our C++ kernels, on CPU
    triton_backend       └ TritonAttention      stores K/V and decodes with our Triton kernels
    flash_backend            └ FlashAttention   prefills with flash attention

`begin_step(metadata)` prepares the data that all layers share. `attention(layer, q, k, v)` computes
one layer. It first stores the new K/V of the whole batch; then each query reads the blocks of its
own sequence.

    q, out    [num_tokens, num_heads, head_dim]
    k, v      [num_tokens, num_kv_heads, head_dim]

A `score_mod` changes the scores (scale · q · k) before the softmax, as in FlexAttention:

    def softcap(layer, scores, queries, keys):
        return 50 * (scores / 50).tanh()

`queries` and `keys` are positions that broadcast to the scores. Only "reference" and "torch" can
call a `score_mod`.
"""

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
    """The backend of that name, or a ValueError that says why it cannot run here.

    "auto" is the fastest backend that can run. The C++ kernels are built here.
    """
    candidates = [name]
    if name == "auto":
        candidates = ["flash", "triton"] if device.type == "cuda" else []
        if device.type == "cpu" and build.can_build_or_load():
            candidates = ["cpp"]
    for candidate in candidates:
        reason = why_unavailable(candidate, device, shape, score_mod)
        if reason is None:
            return candidate
        if name != "auto":
            raise ValueError(
                f"attention_backend={name!r} cannot run here: {reason}; 'auto' picks another"
            )
        if candidate == candidates[-1]:
            logger.warning("attention_backend=%r is not used: %s", candidate, reason)
    return "torch"


def make_backend(
    name: str, cache: KVCache, scale: float, score_mod: ScoreMod | None = None
) -> TorchAttention | ReferenceAttention:
    """The backend of a name that `choose_backend` has returned, over `cache`."""
    if name == "reference":
        return ReferenceAttention(cache, scale, score_mod)
    if name == "torch":
        return TorchAttention(cache, scale, score_mod)
    if name == "cpp":
        return CppAttention(cache, scale)
    # Triton is not installed everywhere.
    from nanopaged.attention import flash_backend, triton_backend

    if name == "triton":
        return triton_backend.TritonAttention(cache, scale)
    return flash_backend.FlashAttention(cache, scale)


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
    if name == "flash":
        return flash_backend.why_no_flash(device, shape)
    return paged_attention.why_no_triton(device)
