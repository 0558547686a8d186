"""Devices: which one to use, and what it can do."""

from __future__ import annotations

import math

import torch


def pick_device(name: str) -> torch.device:
    """The torch device of that name, with its number; "auto" is CUDA if there is a GPU, else the CPU.

    Raises:
        ValueError: there is no such device on this machine, or it is neither a CPU nor a CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device  # "cuda" becomes "cuda:0": some functions need the number
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} cannot be used here: only 'cpu' and 'cuda' are supported")
    return device


def is_ampere(device: torch.device) -> bool:
    """Whether it is a GPU of the Ampere generation (compute capability 8.0) or a newer one.

    Older ones (T4, V100) compute bfloat16 in software, and neither Triton nor flash attention supports them.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def allocate_blocks(
    num_blocks: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Memory for blocks of a KV cache [num_blocks, *sizes], not initialised.

    Raises:
        ValueError: there is not enough memory.
    """
    try:
        pin_memory = pin_memory and num_blocks > 0
        return torch.empty((num_blocks, *sizes), dtype=dtype, device=device, pin_memory=pin_memory)
    except (RuntimeError, TypeError, OverflowError) as error:  # no memory, or more than 64 bits hold
        num_bytes = num_blocks * math.prod(sizes) * dtype.itemsize
        raise ValueError(
            f"{num_blocks:,} blocks of {sizes[-2]:,} tokens need {num_bytes:,} bytes on {device}, more than "
            "can be allocated: lower num_blocks, num_host_blocks or block_size, or leave them at their "
            "defaults"
        ) from error
