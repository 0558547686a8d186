"""Devices: which one to use, and what it can do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

# Whether a GPU runs the small operations as the Triton kernels of `kernels/fused.py`. Off until measured.
FUSED_KERNELS = os.environ.get("NANOPAGED_FUSED") == "1"


def pick_device(name: str) -> torch.device:
    """The torch device of that name, with its number; "auto" is CUDA if there is a GPU, else the CPU.

    Apple's GPU, "mps", is taken only by its name, until it has been tested (docs/using.md).

    Raises:
        ValueError: there is no such device on this machine, or it is of another kind than these three.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device  # "cuda" becomes "cuda:0": some functions need the number
    except (RuntimeError, AssertionError) as error:
        # PyTorch's own words for "mps" are a page about its dispatcher.
        reason = "PyTorch finds no Apple GPU" if name.startswith("mps") else error
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {name!r} cannot be used here: only 'cpu', 'cuda' and 'mps' are supported")
    return device


def copies_async(device: torch.device) -> bool:
    """Whether the host can go on while blocks and inputs are copied, which takes pinned memory.

    To and from Apple's GPU it must wait: PyTorch copies from host memory that may have been freed by then
    (its issues 139550 and 189690).
    """
    return device.type == "cuda"


def sampling_device(device: torch.device) -> torch.device:
    """Where tokens are drawn from the logits that `device` computes: on the CPU, if it has no float64.

    Draws add up probabilities in float64, which Apple's GPU has not. So its logits are fetched, and a seed
    draws what it draws on a CPU from these logits.
    """
    return torch.device("cpu") if device.type == "mps" else device


def is_ampere(device: torch.device) -> bool:
    """Whether it is a GPU of the Ampere generation (compute capability 8.0) or a newer one.

    Older ones (T4, V100) compute bfloat16 in software, and flash attention does not support them.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton, which is installed, cannot compile our kernels for the device; None if it can.

    For 7.5 (T4) products become ordinary instructions, in place of tensor cores, and need Triton 3.5: 3.3
    fails on float16, and 3.4 on fewer than 16 rows. CUDA 13 has no compiler for older GPUs (V100).
    """
    import triton

    if device.type != "cuda":
        return f"its kernels need a CUDA GPU, not {device}, or TRITON_INTERPRET=1 for a slow trial"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 5):
        return f"its kernels need a GPU of compute capability 7.5 or more, and {device} has {major}.{minor}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if (major, minor) < (8, 0) and version < (3, 5):
        return f"its kernels need Triton 3.5 on {device}, of compute capability 7.5, not {triton.__version__}"
    return None


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


def copy_kernel(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """The kernel that copies many blocks in one launch, where Triton is installed and supports the device."""
    if device.type == "cuda":
        try:
            from nanopaged.kernels.copy_blocks import copy_blocks
        except ImportError:
            return None
        if why_no_triton(device) is None:
            return copy_blocks
    return None
