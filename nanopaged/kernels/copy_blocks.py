"""Copy whole blocks of the KV cache in one kernel launch, for copy-on-write.

When hundreds of sequences fork, hundreds of blocks are copied in a step; `Tensor.copy_` would launch a kernel
for each. The kernel does not know what a block contains.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COPY_CHUNK = 4096  # elements that one program copies


@triton.jit
def copy_kernel(data_ptr, pairs_ptr, block_len, CHUNK: tl.constexpr):
    """One program copies one chunk of one block to another block."""
    src = tl.load(pairs_ptr + 2 * tl.program_id(0))
    dst = tl.load(pairs_ptr + 2 * tl.program_id(0) + 1)
    offsets = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < block_len
    chunk = tl.load(data_ptr + src * block_len + offsets, mask=mask)
    tl.store(data_ptr + dst * block_len + offsets, chunk, mask=mask)


def copy_blocks(data: Tensor, pairs: Tensor) -> None:
    """Copy blocks within the cache, all layers at once.

    Args:
        data: [num_blocks, ...], contiguous.
        pairs: int64 [num_pairs, 2] of (source, destination). No block is both.
    """
    assert data.is_contiguous()
    block_len = data[0].numel()
    grid = (len(pairs), triton.cdiv(block_len, COPY_CHUNK))
    copy_kernel[grid](data, pairs, block_len, CHUNK=COPY_CHUNK)
