"""Prefills through flash attention: all prefills of a batch in one call, without padding.

"Varlen" (variable-length) attention reads sequences that lie end to end, and their offsets:

    queries of 3 and 2 tokens      cu_seqlens_q  0 3 5        q  [5, num_heads, head_dim]
    contexts of 3 and 6 keys       cu_seqlens_k  0 3 9        k  [9, num_kv_heads, head_dim]

Cached contexts are gathered from their blocks first, because flash-attn can read only blocks of 256
tokens in place.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata, gather_groups, slots_of
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.kv_cache import KVShape, to_device


@dataclass
class PrefillGroup:
    """Prefills that are computed by one call."""

    tokens: slice  # among those of all prefills
    slots: Tensor | None  # [2 (block, offset), num_keys]; without cached contexts None
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class FlashAttention(TritonAttention):
    """Decodes as in `TritonAttention`, prefills by flash attention."""

    def begin_prefills(self, metadata: AttentionMetadata) -> None:
        """Group the prefills, and send their offsets and slots."""
        block_size = self.cache.block_size
        start = 0
        self.groups = []
        for seqs in gather_groups(metadata.context_lens, start=metadata.num_decodes):
            q_lens = metadata.query_lens[seqs]
            k_lens = metadata.context_lens[seqs]
            slots = None
            if (k_lens > q_lens).any():
                slots_of_seqs = [
                    slots_of(table, np.arange(length), block_size)
                    for table, length in zip(metadata.block_tables[seqs], k_lens, strict=True)
                ]
                blocks_and_offsets = np.divmod(np.concatenate(slots_of_seqs), block_size)
                slots = to_device(blocks_and_offsets, self.device)
            end = start + int(q_lens.sum())
            group = PrefillGroup(
                tokens=slice(start, end),
                slots=slots,
                cu_seqlens_q=to_device(np.cumsum([0, *q_lens], dtype=np.int32), self.device),
                cu_seqlens_k=to_device(np.cumsum([0, *k_lens], dtype=np.int32), self.device),
                max_seqlen_q=int(q_lens.max()),
                max_seqlen_k=int(k_lens.max()),
            )
            self.groups.append(group)
            start = end

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `TorchAttention.prefill`, with one call for all prefills of a group."""
        k_cache, v_cache = self.layers[layer]
        outs = []
        for group in self.groups:
            if group.slots is None:
                keys, values = k[group.tokens], v[group.tokens]
            else:
                blocks, offsets = group.slots
                keys, values = k_cache[blocks, :, offsets], v_cache[blocks, :, offsets]
            out = load_varlen()(
                q[group.tokens],
                keys,
                values,
                group.cu_seqlens_q,
                group.cu_seqlens_k,
                group.max_seqlen_q,
                group.max_seqlen_k,
                softmax_scale=self.scale,
                causal=True,
            )
            outs.append(out)
        return torch.cat(outs)


@cache
def load_varlen() -> Callable[..., Any]:
    """flash-attn's varlen attention if it is installed, else PyTorch's, called in the same way.

    PyTorch's kernel takes grouped heads as they are. Newer versions want to be told (`enable_gqa`).
    """
    try:  # flash-attn 4 alone has the package, but not this function
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn
    known = inspect.signature(varlen_attn).parameters.keys()
    if not {"window_size", "scale"} <= known:
        raise ImportError(f"varlen attention of torch {torch.__version__} lacks window_size")
    options: dict[str, Any] = {"window_size": (-1, 0)}  # all keys before a query, none after it
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return lambda *args, softmax_scale, causal: varlen_attn(*args, scale=softmax_scale, **options)


def why_no_flash(device: torch.device, shape: KVShape) -> str | None:
    """Why flash attention cannot run here; None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return f"flash attention needs a GPU of compute capability 8.0 or more, and not {device}"
    is_half = shape.dtype in (torch.float16, torch.bfloat16)
    if not is_half or shape.head_dim > 256 or shape.head_dim % 8:
        return (
            "flash attention takes 16 bits and a head_dim of 8, 16, ..., 256, "
            f"not {shape.dtype} and {shape.head_dim}"
        )
    try:
        load_varlen()
    except ImportError as error:
        return f"neither flash-attn nor PyTorch's varlen attention can be imported ({error})"
    return None
