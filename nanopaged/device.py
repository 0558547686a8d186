"""Which device, and how numbers get there."""

from __future__ import annotations

import numpy as np
import torch


def pick_device(name: str) -> torch.device:
    """The torch device of that name, with its number; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device  # "cuda" has become "cuda:0": some functions insist on it
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} cannot be used here: only 'cpu' and 'cuda' are supported")
    return device


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the host, where the device can fetch it: a GPU reads pinned memory by itself."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: a GPU fetches the numbers when it gets there."""
    return pinned(array, device).to(device, non_blocking=True)
