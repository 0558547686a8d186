"""Paged attention: the choice of a backend. Each backend is one class in one file.

    reference_backend  ReferenceAttention           a loop over sequences, queries and blocks; slow
    torch_backend      TorchAttention               large PyTorch operations; runs everywhere
    cpp_backend          ├ CppAttention             stores K/V and decodes with our C++ kernels, on a CPU
    triton_backend       └ TritonAttention          stores K/V and decodes with our Triton kernels
    flash_backend            └ FlashAttention       prefills with flash attention

A backend has two methods. `begin_step(metadata)` prepares the tensors that all layers share: slots, block
tables, lengths, masks. Calling the backend, `attention(layer, q, k, v)`, computes one layer: it stores the
new K/V of the whole batch first, then every query reads the blocks of its own sequence. Because of this order
a sequence can read a block that another sequence of the same batch fills.

    q, out    [num_tokens, num_heads, head_dim]
    k, v      [num_tokens, num_kv_heads, head_dim]

A model that changes its scores before the softmax has a `score_mod`, a function (as in FlexAttention):

    def softcap(layer, scores, queries, keys):
        return 50 * (scores / 50).tanh()

    def window(layer, scores, queries, keys):
        return scores.masked_fill(keys <= queries - 4096, -math.inf)

The scores are scale · q · k. `queries` and `keys` are the positions of the tokens, and broadcast to the
scores. The future is masked afterwards. "reference" and "torch" call it; the kernels of "cpp", "triton" and
"flash" have no place for it, so these backends refuse it.

Backends know no sequences and no queues, only `AttentionMetadata` and the KV cache. To add a backend, write
its class, and add its name here and to `config.ATTENTION_BACKENDS`.
"""

from __future__ import annotations

from nanopaged.attention.reference_backend import ReferenceAttention, ScoreMod
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.config import ATTENTION_BACKENDS
from nanopaged.kernels import cpp
from nanopaged.kernels.devices import why_no_triton
from nanopaged.kv_cache import KVCache


def make_attention(
    backend: str, cache: KVCache, scale: float, score_mod: ScoreMod | None = None
) -> TorchAttention | ReferenceAttention:
    """The backend of that name, over `cache`; "auto" is the fastest one that runs on the cache's device.

    Triton and flash attention are imported only when chosen, since they are not installed everywhere.

    Args:
        scale: a factor of q · k, usually head_dim^-0.5 (`ModelConfig.attention_scale`).
        score_mod: what changes the scores, see above; None changes nothing.

    Raises:
        ValueError: there is no such backend, or it cannot run here; the message says why.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend is {backend!r}, but must be one of {ATTENTION_BACKENDS}")
    if backend == "auto":
        # On a CPU Triton's kernels can only be interpreted, which is slow and meant for tests.
        fast = ("flash", "triton") if cache.data.is_cuda else ("cpp",) if cpp.is_ready() else ()
        backend = next((name for name in fast if why_unavailable(name, cache, score_mod) is None), "torch")
    reason = why_unavailable(backend, cache, score_mod)
    if reason:
        raise ValueError(f"attention_backend={backend!r} cannot run here: {reason}; 'auto' picks another")
    if backend == "reference":
        return ReferenceAttention(cache, scale, score_mod)
    if backend == "torch":
        return TorchAttention(cache, scale, score_mod)
    if backend == "triton":
        from nanopaged.attention.triton_backend import TritonAttention

        return TritonAttention(cache, scale)
    if backend == "cpp":
        from nanopaged.attention.cpp_backend import CppAttention

        return CppAttention(cache, scale)
    from nanopaged.attention.flash_backend import FlashAttention

    return FlashAttention(cache, scale)


def why_unavailable(backend: str, cache: KVCache, score_mod: ScoreMod | None = None) -> str | None:
    """Why a backend cannot run on the cache's device, or with this `score_mod`; None if it can."""
    if backend not in ("triton", "flash", "cpp"):
        return None
    if score_mod is not None:
        return "its kernels have no place for a score_mod"
    if backend == "cpp":
        return cpp.why_no_cpp(cache.data.device, cache.shape.head_dim, cache.data.dtype)
    try:
        from nanopaged.kernels import paged_attention as kernels
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    reason = None if kernels.INTERPRETED else why_no_triton(cache.data.device)
    if reason is not None or backend == "triton":
        return reason
    from nanopaged.attention.flash_backend import why_no_flash

    return why_no_flash(cache)
