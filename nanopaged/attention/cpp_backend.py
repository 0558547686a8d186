"""Paged attention on a CPU: our C++ kernels store K/V, decode and prefill.

The kernels read K and V in place, and they read blocks that several sequences share only once.
"""

from collections import defaultdict
from collections.abc import Iterator
from os.path import commonprefix  # of lists of any kind

import numpy as np
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kernels import cpp

RUN_KEYS = 512  # longer runs are cut, so that several threads can share one long context


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

            run         0      1    2
            blocks     5 2     7    9        num_keys  8 3 1      first_block  0 2 3 4
            sequences  0 1     0    1        row_seq   0 1 0 1    first_row    0 2 3 4

            the rows of each sequence        rows_by_seq  0 2 1 3    first_of_seq  0 2 4
        """
        n = metadata.num_decodes
        context_lens = metadata.context_lens[:n].tolist()
        runs = find_runs(metadata.block_tables[:n], context_lens, self.cache.block_size)
        blocks = []
        num_keys = []
        row_seq = []
        first_block = [0]
        first_row = [0]
        for blocks_of_run, num_keys_of_run, seqs in runs:
            blocks += blocks_of_run
            num_keys.append(num_keys_of_run)
            row_seq += seqs
            first_block.append(len(blocks))
            first_row.append(len(row_seq))
        num_rows = np.bincount(row_seq)  # of each sequence
        self.runs = cpp.Runs(
            num_runs=len(num_keys),
            num_seqs=n,
            blocks=cpp.int_array(blocks),
            first_block=cpp.int_array(first_block),
            num_keys=cpp.int_array(num_keys),
            first_row=cpp.int_array(first_row),
            row_seq=cpp.int_array(row_seq),
            first_of_seq=cpp.int_array([0, *num_rows.cumsum()]),
            rows_by_seq=cpp.int_array(np.argsort(row_seq, kind="stable")),
        )

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """As `TorchAttention.decode`."""
        k_cache, v_cache = self.layers[layer]
        return cpp.paged_decode(q, k_cache, v_cache, self.runs, self.scale)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `TorchAttention.prefill`."""
        if not cpp.has_linear(q.dtype):  # PyTorch multiplies with AMX, so its prefill is faster
            return super().prefill(layer, q, k, v)
        k_cache, v_cache = self.layers[layer]
        out = q.new_empty(q.shape)
        for tokens, table, context_len in self.prefills:
            cpp.paged_prefill(
                q[tokens], k_cache, v_cache, table, context_len, scale=self.scale, out=out[tokens]
            )
        return out


def find_runs(
    tables: list[list[int]], context_lens: list[int], block_size: int
) -> Iterator[tuple[list[int], int, list[int]]]:
    """Divide contexts into runs, so that blocks with which several tables begin are read once.

    A run has consecutive blocks of a table, the number of their keys, and the sequences that read
    them.

    Four requests with a common system prompt, two of them samples of one prompt:

        tables  0: [5, 2, 7, 4]   1: [5, 2, 7, 9]   2: [5, 2, 3]   3: [5, 2, 6]   4: [8, 1]

        blocks     5 2        7      4    9    3    6    8 1
        sequences  0 1 2 3    0 1    0    1    2    3    4
    """
    used = [  # a table may have more blocks than its context (ceil division)
        table[: -(-length // block_size)]
        for table, length in zip(tables, context_lens, strict=True)
    ]
    max_blocks = max(1, RUN_KEYS // block_size)
    groups = [(list(range(len(tables))), 0)]  # sequences, and how many equal blocks they begin with
    while groups:
        seqs, first = groups.pop()
        end = first + len(commonprefix([used[seq][first:] for seq in seqs]))
        for start in range(first, end, max_blocks):
            blocks = used[seqs[0]][start : min(start + max_blocks, end)]
            # A block that is not full is still written, so it has one sequence, and is its last.
            num_left = context_lens[seqs[0]] - start * block_size
            yield blocks, min(len(blocks) * block_size, num_left), seqs
        by_next_block = defaultdict(list)
        for seq in seqs:
            if end < len(used[seq]):
                by_next_block[used[seq][end]].append(seq)
        groups += [(group, end) for group in by_next_block.values()]
