"""Prefills through flash attention: all prefills of a batch in one call, without padding.

"Varlen" (variable-length) attention reads the sequences of a batch end to end, and the offsets of their
beginnings:

    queries of 3 and 2 tokens      cu_seqlens_q  0 3 5        q  [5, num_heads, head_dim]
    contexts of 3 and 6 keys       cu_seqlens_k  0 3 9        k  [9, num_kv_heads, head_dim]

The causal mask is aligned to the end of each context. Cached contexts are gathered from their blocks first,
so blocks may have any size (flash-attn itself can only read blocks of 256 tokens or a multiple).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache as cached
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import GATHER_KEYS, AttentionMetadata, slots_of
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.kernels.devices import is_ampere
from nanopaged.kv_cache import KVCache, to_device


class FlashAttention(TritonAttention):
    """Decodes as in `TritonAttention`, prefills by flash attention.

    If many requests share a prefix, their contexts together may be longer than the whole KV cache. So
    prefills are computed in groups, which gather at most GATHER_KEYS keys, or one longer context.
    """

    def begin_prefills(self, metadata: AttentionMetadata) -> None:
        """Group the prefills, and send their offsets and the slots of their contexts.

        GATHER_KEYS = 10    context_lens 4 5 3 20 1    → groups (4, 5), (3), (20), (1)
        """
        n, size = metadata.num_decodes, self.cache.block_size
        query_lens, context_lens = metadata.query_lens[n:], metadata.context_lens[n:]
        bounds, num_keys = [0], 0
        for i, context_len in enumerate(context_lens.tolist()):
            if num_keys + context_len > GATHER_KEYS and i > bounds[-1]:
                bounds.append(i)
                num_keys = 0
            num_keys += context_len
        bounds.append(len(context_lens))
        # (tokens, [2 (block, offset), num_keys] of the contexts, lengths for varlen attention)
        self.groups: list[tuple[slice, Tensor | None, tuple]] = []
        start = 0  # among the tokens of the prefills
        for lo, hi in zip(bounds, bounds[1:], strict=False):
            q_lens, k_lens = query_lens[lo:hi], context_lens[lo:hi]
            slots = None  # without cached contexts the new K and V are read directly
            if (k_lens > q_lens).any():
                tables = metadata.block_tables[n + lo : n + hi]
                parts = [slots_of(t, np.arange(k), size) for t, k in zip(tables, k_lens, strict=True)]
                slots = to_device(np.array(np.divmod(np.concatenate(parts), size)), self.device)
            lengths = (
                to_device(np.cumsum([0, *q_lens], dtype=np.int32), self.device),  # 3 2 4 → 0 3 5 9
                to_device(np.cumsum([0, *k_lens], dtype=np.int32), self.device),
                int(q_lens.max()),
                int(k_lens.max()),
            )
            self.groups.append((slice(start, start + int(q_lens.sum())), slots, lengths))
            start += int(q_lens.sum())

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `TorchAttention.prefill`, with one call for all prefills of a group."""
        k_cache, v_cache = self.cache.layer(layer)
        outs = []
        for tokens, slots, lengths in self.groups:
            keys, values = k[tokens], v[tokens]
            if slots is not None:
                blocks, offsets = slots
                keys, values = k_cache[blocks, :, offsets], v_cache[blocks, :, offsets]
            keys, values = self.cache.unpack(keys), self.cache.unpack(values)
            outs.append(load_varlen()(q[tokens], keys, values, *lengths, softmax_scale=self.scale))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


@cached
def load_varlen() -> Callable[..., Tensor]:
    """The varlen attention of flash-attn if it is installed, else PyTorch's own.

    Returns:
        varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_query_len, max_context_len, softmax_scale=…) → out

    Raises:
        ImportError: neither is installed, or PyTorch's is too old to be causal.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # flash-attn 4 alone has the package but not this
    except ImportError:
        return load_torch_varlen()
    return partial(flash_attn_varlen_func, causal=True)


def load_torch_varlen() -> Callable[..., Tensor]:
    """`torch.nn.attention.varlen`. Some versions need K and V repeated for each query head."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn  # its options differ from version to version
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        raise ImportError(f"varlen attention of torch {torch.__version__} lacks window_size or scale")

    def attend(q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | int, softmax_scale: float) -> Tensor:
        causal = -1, 0  # all keys before, none after
        options: dict[str, Any] = {"scale": softmax_scale, "window_size": causal}
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return varlen_attn(q, k, v, *lengths, **options)

    return attend


def why_no_flash(cache: KVCache) -> str | None:
    """Why flash attention cannot run on this cache; None if it can."""
    device = cache.data.device
    if not cache.data.is_cuda:
        return f"flash attention needs a CUDA GPU, not {device}"
    if not is_ampere(device):
        major, minor = torch.cuda.get_device_capability(device)
        return f"flash attention needs compute capability 8.0 or more, and {device} has {major}.{minor}"
    if cache.shape.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention computes in float16 or bfloat16, not {cache.shape.dtype}"
    if cache.shape.head_dim > 256 or cache.shape.head_dim % 8:
        return f"flash attention needs a head_dim of 8, 16, ..., 256, not {cache.shape.head_dim}"
    try:
        load_varlen()
    except ImportError as error:
        return f"neither flash-attn nor PyTorch's varlen attention can be imported ({error})"
    return None
