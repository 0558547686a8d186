"""The memory behind the blocks: one tensor, and its layout.

    data  [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]

It is block-major: all layers of a block lie in one run of memory, so that moving a block is one copy.
A layer sees a strided view of it. Inside a block the slots of one head lie together, which gives
attention long runs to read.

Only this file knows the layout. It knows nothing of sequences: which block belongs to whom is the
block manager's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanopaged.device import send


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block, K and V over all layers.

        Llama-3-8B (32 layers, 8 KV heads of 128, bfloat16): 2·32·8·128·2 B = 128 KiB a token, so a
        block of 16 is 2 MiB.
        """
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * block_size


class KVCache:
    """K/V slots of `num_blocks` blocks. A slot has a number: block · block_size + offset in it.

    Args:
        num_host_blocks: blocks in host memory, to which requests can be swapped out (pinned on CUDA).
        block_major: False lays the layers out one after another instead, each with all its blocks. It is
            there to be measured against: a block then is 2 · num_layers separate runs of memory.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        num_host_blocks: int = 0,
        block_major: bool = True,
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.block_major = block_major
        # Not initialised: what was never stored is never read, or is masked where it is.
        self.data = self._allocate(num_blocks, device=device)
        self.copy_kernel = _copy_kernel() if device.type == "cuda" else None
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.host = self._allocate(num_host_blocks, device=torch.device("cpu"), pin_memory=pinned)

    def _allocate(self, num_blocks: int, **options: Any) -> torch.Tensor:
        """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], however it lies in memory."""
        inner = (self.shape.num_kv_heads, self.block_size, self.shape.head_dim)
        layers = (self.shape.num_layers, 2)
        order = (num_blocks, *layers) if self.block_major else (*layers, num_blocks)
        try:
            data = torch.empty((*order, *inner), dtype=self.shape.dtype, **options)
        except RuntimeError as error:  # torch's out-of-memory errors are of this kind
            size = num_blocks * self.shape.block_bytes(self.block_size)
            raise ValueError(
                f"{num_blocks} blocks of K/V need {size:,} bytes on {options['device']}, which cannot be "
                "had: lower num_blocks (or num_host_blocks), or leave it open"
            ) from error
        return data if self.block_major else data.permute(2, 0, 1, 3, 4, 5)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's K and V, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.data[:, layer, 0], self.data[:, layer, 1]

    def runs(self, layer: int) -> torch.Tensor:
        """The memory as runs: the slots of one head of one block, K or V of one layer, lie together.

        [num_runs, block_size · head_dim], from the layer's first run on; `run_ids` says which is which.
        """
        length = self.block_size * self.shape.head_dim
        start = layer * self.data.stride(1)
        return self.data.as_strided(((self.data.numel() - start) // length, length), (length, 1), start)

    def run_ids(self, blocks: torch.Tensor) -> torch.Tensor:
        """Where K and V of a layer are: blocks [...] → their rows of `runs` [2, ..., num_kv_heads]."""
        length = self.block_size * self.shape.head_dim
        block, _, kv, head, _, _ = (stride // length for stride in self.data.stride())
        heads = torch.arange(self.shape.num_kv_heads, device=blocks.device)
        keys = blocks[..., None] * block + heads * head
        return torch.stack((keys, keys + kv))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers at once: dst gets what src holds, for each (src, dst)."""
        if self.copy_kernel is not None and pairs:
            self.copy_kernel(self.data, send(np.array(pairs), self.data.device))
        else:
            for src, dst in pairs:
                self.data[dst].copy_(self.data[src])

    def swap_out(self, moves: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host. Ordered with the kernels on the same stream."""
        for device_block, host_block in moves:
            self._move(self.data[device_block], self.host[host_block])

    def swap_in(self, moves: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs back to the device."""
        for host_block, device_block in moves:
            self._move(self.host[host_block], self.data[device_block])

    def _move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """One block, [num_layers, 2, ...]: a single run of memory, or in the other layout 2 · num_layers."""
        if self.block_major:
            dst.copy_(src, non_blocking=True)
        else:
            for src_run, dst_run in zip(src.flatten(0, 1), dst.flatten(0, 1), strict=True):
                dst_run.copy_(src_run, non_blocking=True)


def _copy_kernel() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """The kernel that copies any number of blocks in one launch; None where Triton is missing."""
    try:
        from nanopaged.kernels.paged_attention import copy_blocks
    except ImportError:
        return None
    return copy_blocks
