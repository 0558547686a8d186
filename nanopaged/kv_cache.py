"""The KV cache: one tensor that holds the keys and values of all blocks, its layout, and the moves of blocks.

    data  [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]

The layout is block-major: all layers of a block are contiguous, so moving a block is one copy. A layer sees a
strided view. Inside a block the slots of one head are contiguous (a *head block*), which gives attention long
contiguous reads.

Only this module knows how layers lie in `data`. It knows no sequences: the block manager decides which block
belongs to which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopaged.kernels.devices import allocate_blocks, copies_async, copy_kernel


def to_device(array: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Copy a host array to the device (into `out`, if given) without blocking the host.

    A GPU copies from pinned memory asynchronously. `torch.tensor(list, device="cuda")` would wait for all
    kernels launched before it.
    """
    tensor, no_wait = torch.from_numpy(array), copies_async(device)
    if no_wait:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=no_wait) if out is None else out.copy_(tensor, non_blocking=no_wait)


def take_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """The given rows of a tensor. Rows 0, 1, 2, … are a view: nothing is sent to the device or copied."""
    if rows == list(range(len(rows))):
        return tensor[: len(rows)]
    return tensor[to_device(np.array(rows), tensor.device)]


@dataclass(frozen=True)
class KVShape:
    """The sizes and the dtype of the K/V of one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of all layers.

        Llama-3-8B (32 layers, 8 KV heads of 128, bfloat16): 2·32·8·128·2 B = 128 KiB a token, so a
        block of 16 tokens is 2 MiB.
        """
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * block_size


class KVCache:
    """The K/V of `num_blocks` blocks on the device, and of `num_host_blocks` swapped blocks in host memory.

    A token is stored in a slot: slot = block · block_size + offset in the block.

    Attributes:
        data: the device blocks, see the top of this file.
        host: the host blocks, in the same layout; pinned memory if the device is a GPU.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device, num_host_blocks: int = 0
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        sizes = shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim
        # Not initialised: a slot without a token is not read, or is zero (`TorchAttention.clear`).
        self.data = allocate_blocks(num_blocks, sizes, shape.dtype, device)
        host, self.no_wait = torch.device("cpu"), copies_async(device)
        self.host = allocate_blocks(num_host_blocks, sizes, shape.dtype, host, self.no_wait)
        self.copy_kernel = copy_kernel(device)  # None: blocks are copied one by one

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's K and V, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.data[:, layer, 0], self.data[:, layer, 1]

    def pack(self, kv: Tensor) -> Tensor:
        """K or V [..., head_dim] of tokens → what is stored of it in a slot [..., slot width].

        Backends pass all K/V through `pack` before they store it, and through `unpack` after they read it.
        Here both change nothing: they are the place for a quantised cache. (The Triton decode kernel reads
        slots without `unpack`.)
        """
        return kv

    def unpack(self, stored: Tensor) -> Tensor:
        """What is stored in slots [..., slot width] → K or V [..., head_dim]; see `pack`."""
        return stored

    def head_blocks(self, layer: int) -> Tensor:
        """The cache as rows, one for each head block, from this layer on: [num_rows, block_size · head_dim].

        `head_block_ids` gives the rows of a block.
        """
        rows = self.data.view(-1, self.block_size * self.data.shape[-1])
        return rows[layer * 2 * self.shape.num_kv_heads :]

    def head_block_ids(self, blocks: Tensor) -> Tensor:
        """Block ids [...] → their rows of `head_blocks` [2 (K, V), ..., num_kv_heads], the same in any layer.

        3 layers, 2 KV heads: a block has 3·2·2 = 12 head blocks. Counted from the start of any layer, the K
        of block 5 is in rows 5·12 = 60 and 61, its V in rows 62 and 63.
        """
        num_layers, num_heads = self.shape.num_layers, self.shape.num_kv_heads
        heads = torch.arange(num_heads, device=blocks.device)
        k_rows = blocks[..., None] * (num_layers * 2 * num_heads) + heads
        return torch.stack((k_rows, k_rows + num_heads))

    def move_blocks(
        self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]], copies: list[tuple[int, int]]
    ) -> None:
        """Move the blocks of a step, in this order: out to the host, in from the host, copies on write.

        A device block that one request gives up may be used by another in the same step, so swapping out
        comes first. A block just swapped in may be the source of a copy, so copies come last. On a GPU the
        moves are queued in the stream of the kernels: the host does not wait for them.

        Args: pairs of blocks, see `ScheduledBatch`.
        """
        for device_block, host_block in swap_out:
            self.host[host_block].copy_(self.data[device_block], non_blocking=self.no_wait)
        for host_block, device_block in swap_in:
            self.data[device_block].copy_(self.host[host_block], non_blocking=self.no_wait)
        if copies and self.copy_kernel is not None:
            self.copy_kernel(self.data, to_device(np.array(copies), self.data.device))
        else:
            for src, dst in copies:
                self.data[dst].copy_(self.data[src])
