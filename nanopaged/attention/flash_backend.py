"""Prefills through flash attention: all of a batch in one call, without padding.

"Varlen" (variable-length) attention reads sequences end to end, and where they begin:

    queries of 3 and 2 tokens      cu_seqlens_q  0 3 5        q  [5, num_heads, head_dim]
    contexts of 3 and 6 keys       cu_seqlens_k  0 3 9        k  [9, num_kv_heads, head_dim]

Cached contexts are gathered from their blocks first: flash-attn can only read blocks of 256 tokens.
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

from nanopaged.attention.metadata import AttentionMetadata, gather_groups, slots_of
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.kv_cache import KVShape, to_device


class FlashAttention(TritonAttention):
    """Decodes as in `TritonAttention`, prefills by flash attention."""

    def begin_prefills(self, metadata: AttentionMetadata) -> None:
        """Group the prefills, and send their offsets and slots."""
        n, size, start = (
            metadata.num_decodes,
            self.cache.block_size,
            0,
        )  # start: among the prefills' tokens
        # (tokens, [2 (block, offset), num_keys] of the contexts, lengths for varlen attention)
        self.groups: list[tuple[slice, Tensor | None, tuple]] = []
        for group in gather_groups(metadata.context_lens[n:]):
            q_lens, k_lens = metadata.query_lens[n:][group], metadata.context_lens[n:][group]
            slots = None  # without cached contexts the new K and V are read directly
            if (k_lens > q_lens).any():
                tables = metadata.block_tables[n:][group]
                parts = [
                    slots_of(t, np.arange(k), size) for t, k in zip(tables, k_lens, strict=True)
                ]
                slots = to_device(np.array(np.divmod(np.concatenate(parts), size)), self.device)
            cu_q = to_device(np.cumsum([0, *q_lens], dtype=np.int32), self.device)  # 3 2 → 0 3 5
            cu_k = to_device(np.cumsum([0, *k_lens], dtype=np.int32), self.device)
            end = start + int(q_lens.sum())
            self.groups.append(
                (slice(start, end), slots, (cu_q, cu_k, int(q_lens.max()), int(k_lens.max())))
            )
            start = end

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `TorchAttention.prefill`, with one call for all prefills of a group."""
        k_cache, v_cache = self.layers[layer]
        outs = []
        for tokens, slots, lengths in self.groups:
            keys, values = k[tokens], v[tokens]
            if slots is not None:
                blocks, offsets = slots
                keys, values = k_cache[blocks, :, offsets], v_cache[blocks, :, offsets]
            outs.append(load_varlen()(q[tokens], keys, values, *lengths, softmax_scale=self.scale))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


@cached
def load_varlen() -> Callable[..., Tensor]:
    """That of flash-attn if it is installed, else PyTorch's own, called as in `prefill`."""
    try:
        from flash_attn import (
            flash_attn_varlen_func,
        )  # flash-attn 4 alone has the package but not this
    except ImportError:
        return load_torch_varlen()
    return partial(flash_attn_varlen_func, causal=True)


def load_torch_varlen() -> Callable[..., Tensor]:
    """`torch.nn.attention.varlen`, if it is new enough to be causal and to have grouped heads."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn  # its options differ from version to version
    if (
        not {"window_size", "scale", "enable_gqa"}
        <= inspect.signature(varlen_attn).parameters.keys()
    ):
        raise ImportError(
            f"varlen attention of torch {torch.__version__} lacks window_size or enable_gqa"
        )
    options = {"window_size": (-1, 0), "enable_gqa": True}  # all keys before, none after
    return lambda *args, softmax_scale: varlen_attn(*args, scale=softmax_scale, **options)


def why_no_flash(device: torch.device, shape: KVShape) -> str | None:
    """Why flash attention cannot run here; None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return f"flash attention needs a CUDA GPU of compute capability 8.0, and this is {device}"
    if (
        shape.dtype not in (torch.float16, torch.bfloat16)
        or shape.head_dim > 256
        or shape.head_dim % 8
    ):
        return f"flash attention takes 16 bits and a head_dim of 8, 16, ..., 256, not {shape}"
    try:
        load_varlen()
    except ImportError as error:
        return f"neither flash-attn nor PyTorch's varlen attention can be imported ({error})"
    return None
