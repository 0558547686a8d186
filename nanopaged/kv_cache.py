"""The KV cache: one tensor with the keys and values of all blocks.

    data  [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]

All layers of a block are contiguous, so moving a block is one copy; a layer sees a strided view.
Inside a block the slots of one head are contiguous, so attention has long contiguous reads.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from nanopaged.sequence import Moves


def to_device(numbers: ArrayLike, device: torch.device) -> Tensor:
    """Copy an array, or lists of numbers, from the host to the device.

    A GPU copies from pinned memory while the host goes on. For Apple's GPU the host waits, because
    PyTorch may copy memory that was freed (its issues 139550 and 189690).
    """
    tensor = torch.from_numpy(np.asarray(numbers))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def take_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """The given rows of a tensor. If they are the first rows in order, the result is a view."""
    if rows == list(range(len(rows))):
        return tensor[: len(rows)]
    return tensor[to_device(rows, tensor.device)]


@dataclass(frozen=True)
class KVShape:
    """The sizes and the dtype of the K/V of one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of all layers.

        Llama-3-8B (32 layers, 8 KV heads of 128, bfloat16): 2·32·8·128·2 B = 128 KiB per token, so
        a block of 16 tokens is 2 MiB.
        """
        num_elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size
        return num_elements * self.dtype.itemsize


class KVCache:
    """The K/V of `num_blocks` blocks on the device (`data`), and of swapped ones in host memory
    (`host`).

    A token is stored in a slot: slot = block · block_size + offset in the block.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.no_wait = device.type == "cuda"  # see `to_device`
        # Not initialised: a slot without a token is not read, or is zeroed by `TorchAttention`.
        self.data = self._allocate(num_blocks, device)
        self.host = self._allocate(num_host_blocks, torch.device("cpu"), pin_memory=self.no_wait)

    def _allocate(self, num_blocks: int, device: torch.device, pin_memory: bool = False) -> Tensor:
        shape = self.shape
        try:
            return torch.empty(
                num_blocks,
                shape.num_layers,
                2,
                shape.num_kv_heads,
                self.block_size,
                shape.head_dim,
                dtype=shape.dtype,
                device=device,
                pin_memory=pin_memory,
            )
        except (RuntimeError, TypeError, OverflowError) as error:  # no memory, or above 64 bits
            raise ValueError(
                f"{num_blocks:,} blocks of {self.block_size:,} tokens need "
                f"{num_blocks * shape.block_bytes(self.block_size):,} bytes on {device}, more "
                "than are free: lower num_blocks, num_host_blocks or block_size"
            ) from error

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's K and V, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.data[:, layer, 0], self.data[:, layer, 1]

    def move_blocks(self, moves: Moves) -> None:
        """Move the blocks of a step: out to the host, in from the host, then copies on write.

        A block that is swapped out may be used in the same step, and one swapped in may be the
        source of a copy. On a GPU the host does not wait.
        """
        for device_block, host_block in moves.swap_out:
            self.host[host_block].copy_(self.data[device_block], non_blocking=self.no_wait)
        for host_block, device_block in moves.swap_in:
            self.data[device_block].copy_(self.host[host_block], non_blocking=self.no_wait)
        if moves.copies:
            src, dst = to_device(moves.copies, self.data.device).T
            self.data.index_copy_(0, dst, self.data.index_select(0, src))
