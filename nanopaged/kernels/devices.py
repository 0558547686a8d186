"""Devices: which one to use, and what it can do."""

from __future__ import annotations

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
