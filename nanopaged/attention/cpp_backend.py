"""Paged attention on a CPU: our C++ kernels store K/V and decode; prefills stay in PyTorch.

The kernels read K and V where they lie, and blocks that several sequences share only once.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kernels import cpp

RUN_KEYS = 512  # keys in a run: several runs of a long context are for several threads
MIN_SAVED_KEYS = 64  # whose reading must be saved for a run of their own (docs/reference/cpu.md)


class CppAttention(TorchAttention):
    """`kernels/paged_attention.cpp` has the kernels."""

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Note the slots. No block is cleared: no slot without a token is read."""
        self.slots = np.ascontiguousarray(metadata.slot_mapping, dtype=np.int64)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots."""
        k_cache, v_cache = self.layers[layer]
        # The heads of a token are contiguous.
        assert (
            (*k.stride()[1:], k.dtype)
            == (*v.stride()[1:], v.dtype)
            == (k.shape[2], 1, k_cache.dtype)
        )
        numbers = (
            len(k),
            k.stride(0),
            v.stride(0),
            *k.shape[1:],
            self.cache.block_size,
            *k_cache.stride()[:2],
        )
        addresses = *map(Tensor.data_ptr, (k, v, k_cache, v_cache)), self.slots.ctypes.data
        cpp.load().store_kv(*addresses, *numbers, cpp.DTYPES[k.dtype])

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Divide the block tables into runs: parts of a table, and the sequences that read them.

        Blocks with which several tables begin are one run for all of these sequences. Runs of more than
        RUN_KEYS keys are cut.

            tables  0: [5, 2, 7]   1: [5, 2, 9]      block_size = 4, context_lens 11, 9

            run         0      1    2
            blocks     5 2     7    9        num_keys  8 3 1
            sequences  0 1     0    1        row_seq   0 1 0 1
        """
        size, n = self.cache.block_size, metadata.num_decodes
        lens, tables = metadata.context_lens[:n].tolist(), metadata.block_tables[:n]
        parts, own = (
            [],
            [0] * n,
        )  # (sequences, first key, end); the first key that a sequence reads alone
        # The last block of a sequence is its own.
        limits, saved = [(length - 1) // size for length in lens], MIN_SAVED_KEYS // size
        for seqs, first, end in find_shared_blocks(tables, limits, saved) if n > 1 else ():
            parts.append((seqs, first * size, end * size))
            for seq in seqs:
                own[seq] = max(own[seq], end * size)
        parts += [([seq], own[seq], lens[seq]) for seq in range(n)]

        step = max(1, RUN_KEYS // size) * size
        runs = [
            (seqs, i, min(i + step, end))
            for seqs, first, end in parts
            for i in range(first, end, step)
        ]
        blocks = [tables[seqs[0]][first // size : -(-end // size)] for seqs, first, end in runs]
        readers, firsts, ends = zip(*runs, strict=True)
        row_seq = list(chain(*readers))
        keys = list(chain(*blocks)), starts(map(len, blocks)), np.subtract(ends, firsts)
        order = np.argsort(
            row_seq, kind="stable"
        )  # the parts of a sequence, in the order of the keys
        rows = starts(map(len, readers)), row_seq, starts(np.bincount(row_seq)), order
        # Kept, since the step has only their addresses.
        self.arrays = [np.array(values, dtype=np.int64) for values in (*keys, *rows)]
        cache, scale = self.layers[0][0], self.scale * math.log2(math.e)  # 2^(x · log2(e)) = e^x
        numbers = len(runs), n, 0, *cache.shape[1::2], size, 0, *cache.stride()[:2]
        self.step = cpp.Decode(*numbers, *[array.ctypes.data for array in self.arrays], scale)

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """As `TorchAttention.decode`."""
        step, (k_cache, v_cache) = self.step, self.layers[layer]
        assert (q.stride()[1:], q.dtype, len(q)) == ((q.shape[2], 1), k_cache.dtype, step.num_seqs)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        step.num_heads, step.q_seq = q.shape[1], q.stride(0)
        step.q, step.k_cache, step.v_cache, step.out = map(
            Tensor.data_ptr, (q, k_cache, v_cache, out)
        )
        cpp.load().paged_decode(ctypes.byref(step), cpp.DTYPES[q.dtype])
        return out


def starts(sizes: Iterable[int]) -> np.ndarray:
    """Where each of several lists begins if they lie end to end, and their end: 2 1 1 → 0 2 3 4."""
    return np.cumsum([0, *sizes])


def find_shared_blocks(
    tables: list[list[int]], limits: list[int], min_saved: int
) -> list[tuple[list[int], int, int]]:
    """Groups of sequences whose block tables begin alike, and groups within these groups.

    Four requests with a common system prompt, two of them samples of one prompt:

        tables  0: [5, 2, 7, 4]   1: [5, 2, 7, 9]   2: [5, 2, 3]   3: [5, 2, 6]   4: [8, 1]

        ([0, 1, 2, 3], 0, 2)    blocks 5 and 2: 6 reads saved
        ([0, 1], 2, 3)          block 7: 1 read saved

    Args:
        limits: how many blocks of each sequence may be shared.
        min_saved: reads that a group must save; else one within it begins where it would have.

    Returns:
        (sequences, first block, end) of each group.
    """
    found: list[tuple[list[int], int, int]] = []
    groups = [
        (list(range(len(tables))), 0, 0)
    ]  # (sequences, blocks that they share, those of them found)
    while groups:
        seqs, depth, first = groups.pop()
        alike: dict[int, list[int]] = defaultdict(list)  # the next block → sequences
        for seq in seqs:
            if depth < limits[seq]:
                alike[tables[seq][depth]].append(seq)
        for group in alike.values():
            if len(group) == 1:
                continue
            # What the smallest and the largest table begin with, all between them do.
            low, high = min(tables[seq] for seq in group), max(tables[seq] for seq in group)
            end, most = depth + 1, min(limits[seq] for seq in group)
            while end < most and low[end] == high[end]:
                end += 1
            is_worth_it = (len(group) - 1) * (end - first) >= min_saved
            if is_worth_it:
                found.append((group, first, end))
            groups.append((group, end, end if is_worth_it else first))
    return found
