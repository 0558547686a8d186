"""Which device, and how numbers get there."""

from __future__ import annotations

import numpy as np
import torch


def pick_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} cannot be used here: only 'cpu' and 'cuda' are supported")
    return device


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: a GPU fetches pinned memory by itself, when it gets there."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
