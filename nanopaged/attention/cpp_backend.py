"""Paged attention on a CPU: our C++ kernels store K/V, decode and prefill.

The kernels read K and V in place, and they read blocks that several sequences share only once.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kernels import cpp

RUN_KEYS = 512  # longer runs are cut, so that several threads can share one long context
MIN_SAVED_KEYS = 64  # a group of sequences must save reading this many keys (docs/reference/cpu.md)


@dataclass(slots=True)
class Run:
    """Consecutive blocks of a block table, and the sequences that read them."""

    seqs: list[int]
    first_block: int
    end_block: int


class CppAttention(TorchAttention):
    """`kernels/paged_attention.cpp` and `kernels/prefill.cpp` have the kernels."""

    def begin_store(self, metadata: AttentionMetadata) -> None:
        """Keep the slots. No block is cleared, because the kernels read no slot without a token."""
        self.slots = cpp.int_array(metadata.slot_mapping)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots."""
        k_cache, v_cache = self.layers[layer]
        cpp.store_kv(k, v, k_cache, v_cache, self.slots)

    def begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Lay the runs out as the kernel reads them.

        Each pair of a run and one of its sequences is a row, which gets a partial result:

            tables  0: [5, 2, 7]   1: [5, 2, 9]      block_size = 4, context_lens 11, 9
            (if sharing 8 keys were enough, see MIN_SAVED_KEYS)

            run         0      1    2
            blocks     5 2     7    9        num_keys  8 3 1      first_block  0 2 3
            sequences  0 1     0    1        row_seq   0 1 0 1    first_row    0 2 3 4
        """
        n = metadata.num_decodes
        block_size = self.cache.block_size
        tables = metadata.block_tables[:n]
        context_lens = metadata.context_lens[:n].tolist()
        blocks = []
        first_block = []
        num_keys = []
        first_row = [0]
        row_seq = []
        for run in find_runs(tables, context_lens, block_size):
            seq = run.seqs[0]
            end_key = min(run.end_block * block_size, context_lens[seq])
            first_block.append(len(blocks))
            blocks += tables[seq][run.first_block : run.end_block]
            num_keys.append(end_key - run.first_block * block_size)
            row_seq += run.seqs
            first_row.append(len(row_seq))
        num_rows = np.bincount(row_seq)  # of each sequence
        k_cache = self.layers[0][0]  # all layers have the same sizes and strides
        self.step = cpp.Decode(
            num_runs=len(num_keys),
            num_seqs=n,
            num_kv_heads=k_cache.shape[1],
            head_dim=k_cache.shape[3],
            block_size=block_size,
            cache_block=k_cache.stride(0),
            cache_head=k_cache.stride(1),
            blocks=cpp.int_array(blocks),
            first_block=cpp.int_array(first_block),
            num_keys=cpp.int_array(num_keys),
            first_row=cpp.int_array(first_row),
            row_seq=cpp.int_array(row_seq),
            first_part=cpp.int_array([0, *num_rows.cumsum()]),
            # The rows of each sequence, in the order of its keys
            parts=cpp.int_array(np.argsort(row_seq, kind="stable")),
            scale_log2=self.scale * cpp.LOG2_E,
        )

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """As `TorchAttention.decode`."""
        k_cache, v_cache = self.layers[layer]
        return cpp.paged_decode(q, k_cache, v_cache, self.step)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `TorchAttention.prefill`, which is faster where PyTorch multiplies with AMX."""
        if not cpp.has_linear(q.dtype):
            return super().prefill(layer, q, k, v)
        k_cache, v_cache = self.layers[layer]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first = 0
        for table, query_len, context_len in self.prefills:
            tokens = slice(first, first + query_len)
            cpp.paged_prefill(
                q[tokens], k_cache, v_cache, table, context_len, scale=self.scale, out=out[tokens]
            )
            first = tokens.stop
        return out


def find_runs(tables: list[list[int]], context_lens: list[int], block_size: int) -> list[Run]:
    """Divide block tables into runs: shared blocks first, then the others of each sequence."""
    # The new token is written to the last block, so no other sequence shares that block.
    limits = [(length - 1) // block_size for length in context_lens]
    runs = find_shared_blocks(tables, limits, MIN_SAVED_KEYS // block_size)
    first_own = [0] * len(tables)  # the first block that a sequence reads alone
    for run in runs:
        for seq in run.seqs:
            first_own[seq] = max(first_own[seq], run.end_block)
    for seq, length in enumerate(context_lens):
        num_blocks = -(-length // block_size)  # ceil division
        runs.append(Run([seq], first_own[seq], num_blocks))
    cut = []
    max_blocks = max(1, RUN_KEYS // block_size)
    for run in runs:
        for first in range(run.first_block, run.end_block, max_blocks):
            cut.append(Run(run.seqs, first, min(first + max_blocks, run.end_block)))
    return cut


def find_shared_blocks(tables: list[list[int]], limits: list[int], min_saved: int) -> list[Run]:
    """Find groups of sequences whose block tables begin alike, and groups within these groups.

    Four requests with a common system prompt, two of them samples of one prompt:

        tables  0: [5, 2, 7, 4]   1: [5, 2, 7, 9]   2: [5, 2, 3]   3: [5, 2, 6]   4: [8, 1]

        Run([0, 1, 2, 3], 0, 2)    blocks 5 and 2: 6 reads saved
        Run([0, 1], 2, 3)          block 7: 1 read saved

    Args:
        limits: how many blocks of each sequence may be shared.
        min_saved: a group is kept only if sharing saves at least this many block reads; otherwise
            its blocks are counted to its subgroups.
    """
    found = []
    # Groups with equal blocks up to `end_block`; those from `first_block` on are in no run yet.
    groups = [Run(list(range(len(tables))), 0, 0)]
    while groups:
        group = groups.pop()
        by_next_block: dict[int, list[int]] = defaultdict(list)
        for seq in group.seqs:
            if group.end_block < limits[seq]:
                by_next_block[tables[seq][group.end_block]].append(seq)
        for seqs in by_next_block.values():
            if len(seqs) == 1:
                continue
            # Sorted as lists, all tables begin with what the first and the last have in common.
            low = min(tables[seq] for seq in seqs)
            high = max(tables[seq] for seq in seqs)
            limit = min(limits[seq] for seq in seqs)
            first = group.first_block
            end = group.end_block + 1
            while end < limit and low[end] == high[end]:
                end += 1
            if (len(seqs) - 1) * (end - first) >= min_saved:
                found.append(Run(seqs, first, end))
                first = end
            groups.append(Run(seqs, first, end))
    return found
