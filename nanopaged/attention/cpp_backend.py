"""Paged attention with our C++ kernels for storing K/V and for decodes, on a CPU; prefills stay in PyTorch.

`kernels/paged_attention.cpp` has the kernels. They read K and V where they lie, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.key_rows import share_blocks
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import LOG2_E, TorchAttention
from nanopaged.kernels import cpp
from nanopaged.kv_cache import KVCache

RUN_KEYS = 512  # keys in a run: a long context becomes several, which different threads can compute
MIN_SAVED_KEYS = 64  # keys whose reading must be saved for a run of their own (docs/cpu.md)


class CppAttention(TorchAttention):
    """In each layer one kernel stores the new K/V of the batch, and one computes its decodes."""

    fused: dict[str, Callable[..., Tensor]] = {
        "rms_norm": cpp.fused_rms_norm,
        "norm_rotate": cpp.fused_norm_rotate,
        "silu_mul": cpp.fused_silu_mul,
    }

    def __init__(self, cache: KVCache, scale: float) -> None:
        super().__init__(cache, scale)
        # Made once: four views a layer would take 2 % of a decode step of one sequence.
        self.layers = [cache.layer(layer) for layer in range(cache.shape.num_layers)]

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Note the slots. No block has to be cleared: the kernel reads no slot without a token."""
        self.slot_mapping = torch.from_numpy(metadata.slot_mapping)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the encoded k, v [num_tokens, num_kv_heads, head_dim] of the whole batch to their slots."""
        cpp.store_kv(k, v, *self.layers[layer], self.slot_mapping)

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Divide the block tables into runs: parts of a table, and the sequences that read them.

        Blocks with which several tables begin are one run for all of these sequences. The rest of a table is
        read by its sequence alone. Runs of more than RUN_KEYS keys are cut.

            tables  0: [5, 2, 7]   1: [5, 2, 9]      block_size = 4, context_lens 11, 9

            run         0      1    2
            blocks     5 2     7    9        num_keys  8 3 1
            sequences  0 1     0    1        row_seq   0 1 0 1
        """
        cache, size, num_seqs = self.cache, self.cache.block_size, metadata.num_decodes
        context_lens, tables = metadata.context_lens[:num_seqs].tolist(), metadata.block_tables[:num_seqs]
        shared, num_shared = share_blocks(metadata, size, MIN_SAVED_KEYS // size)
        wholes = [(seqs, first * size, end * size) for seqs, first, end in shared]
        wholes += [([seq], int(num_shared[seq]) * size, context_lens[seq]) for seq in range(num_seqs)]
        step = max(1, RUN_KEYS // size) * size
        runs = [
            (seqs, first, min(first + step, end))
            for seqs, start, end in wholes
            for first in range(start, end, step)
        ]

        blocks = [tables[seqs[0]][first // size : -(-end // size)] for seqs, first, end in runs]
        row_seq = np.array(list(chain.from_iterable(seqs for seqs, _, _ in runs)))
        self.arrays = {
            "blocks": np.array(list(chain.from_iterable(blocks))),
            "first_block": np.cumsum([0, *map(len, blocks)]),
            "num_keys": np.array([end - first for _, first, end in runs]),
            "first_row": np.cumsum([0, *(len(seqs) for seqs, _, _ in runs)]),
            "row_seq": row_seq,
            "first_part": np.cumsum([0, *np.bincount(row_seq)]),
            "parts": np.argsort(row_seq, kind="stable"),  # in the order of the keys
        }
        k_cache = self.layers[0][0]
        self.arguments = cpp.Decode(
            num_runs=len(runs),
            num_seqs=num_seqs,
            num_kv_heads=cache.shape.num_kv_heads,
            head_dim=cache.shape.head_dim,
            block_size=size,
            cache_block=k_cache.stride(0),
            cache_head=k_cache.stride(1),
            scale_log2=self.scale * LOG2_E,
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """Queries [num_decodes, num_heads, head_dim] → their attention outputs, of the same shape."""
        k_cache, v_cache = self.layers[layer]
        num_seqs, num_heads, head_dim = q.shape
        assert q.stride()[1:] == (head_dim, 1)
        num_rows, dim_pad = len(self.arrays["row_seq"]), max(16, 1 << (head_dim - 1).bit_length())
        partial, lse = torch.empty(num_rows, num_heads, dim_pad), torch.empty(num_rows, num_heads)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        step = self.arguments
        step.num_heads, step.q_seq = num_heads, q.stride(0)
        step.partial, step.lse, step.out = partial.data_ptr(), lse.data_ptr(), out.data_ptr()
        step.q, step.k_cache, step.v_cache = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        cpp.paged_decode(step, q.dtype)
        return out
