"""A fake GPU: tensors that claim to be on a CUDA device, and hold no data.

PyTorch's fake tensors have a device, a dtype, a shape and strides, and nothing else is computed. `FakeCuda`
sees every operation on them. It records what would be slow on a GPU (copies for which the host waits), and
fails where a real GPU would: operations that mix host and device tensors, kernels with wrong arguments, and
anything but launches while a graph is captured. All values read from it are 0.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import nanopaged
from nanopaged import cuda_graphs
from nanopaged.attention import flash_backend
from nanopaged.kernels import paged_attention as kernels

CUDA = torch.device("cuda:0")
PACKAGE = Path(nanopaged.__file__).parent
GRID_LIMITS = (2**31 - 1, 65535, 65535)
# What the kernels index with; all their other tensors are floating point.
INTEGERS = dict.fromkeys(("slots_ptr", "rows_ptr", "splits_ptr", "firsts_ptr"), torch.int64) | {
    "tables_ptr": torch.int32
}


class FakeCuda(TorchDispatchMode):
    """Records every operation on fake tensors.

    Attributes:
        events: (what, where) in order. What: "send" and "fetch" of pinned memory, which are asynchronous,
            "blocking send", "wait", "launch" of a Triton kernel, "capture" and "replay". Where: the file and
            function of the package, or the kernel.
        launched: the names of all kernels and of PyTorch's operations on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.events: list[tuple[str, str]] = []
        self.launched: list[str] = []
        self.pinned: dict[int, object] = {}  # storages, kept alive so that their numbers are not reused
        self.capturing = False

    def note(self, what: str, where: str | None = None) -> None:
        if where is None:
            where = _where()
        assert not self.capturing or what == "launch", f"{what} in {where}, while a graph is captured"
        self.events.append((what, where))

    def taken(self) -> list[tuple[str, str]]:
        """The events since the last call."""
        taken, self.events = self.events, []
        return taken

    # ── operations ────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        given = _tensors([*args, *kwargs.values()])
        for tensor in given:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # known numbers would be sent to a real GPU
        out = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pin(out)
        host = [tensor for tensor in given if tensor.is_cpu]
        if not any(tensor.is_cuda for tensor in given + _tensors(out)):
            return out
        assert not self.capturing or not host, f"{func} reads {host} of the host, while a graph is captured"
        if name in ("to", "_to_copy", "copy_") and (host or not out.is_cuda):
            src = args[1] if name == "copy_" else args[0]
            self._copied(func, args, kwargs, out, src)
            return out
        # A single number of the host is an argument of the kernel.
        assert all(tensor.dim() == 0 for tensor in host), f"{func} mixes {host} of the host with the device's"
        self.launched.append(name)
        return out

    def _copied(self, func: Any, args: tuple, kwargs: dict[str, Any], dst: Tensor, src: Tensor) -> None:
        """Between host and device: asynchronous if the host memory is pinned and `non_blocking` is set."""
        names = (argument.name for argument in func._schema.arguments)
        options = dict(zip(names, args, strict=False)) | kwargs
        host = dst if src.is_cuda else src
        at_once = bool(options.get("non_blocking")) and _storage(host) in self.pinned
        at_once &= dst.stride() == src.stride() and dst.dtype == src.dtype  # the same layout and dtype
        if src.is_cuda:
            self.note("fetch" if at_once else "wait")
        else:
            self.note("send" if at_once else "blocking send")

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    # ── methods of tensors for which PyTorch would ask for a driver ───────────────────────────────

    def getitem(self, tensor: Tensor, index: object) -> Tensor:
        if not tensor.is_cuda:
            return torch.Tensor.__getitem__(tensor, index)
        indices = _indices(index)
        return torch.ops.aten.index(tensor, indices) if indices else _view(tensor, index)

    def setitem(self, tensor: Tensor, index: object, value: object) -> None:
        if not tensor.is_cuda:
            torch.Tensor.__setitem__(tensor, index, value)
            return
        indices = _indices(index)
        if indices:
            assert isinstance(value, Tensor), "a number to be put at indices is sent first, which waits"
            torch.ops.aten.index_put_(tensor, indices, value)
        elif isinstance(value, Tensor):
            self.copy_(_view(tensor, index), value)
        else:
            _view(tensor, index).fill_(value)

    def copy_(self, tensor: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        return torch.ops.aten.copy_(tensor, src, non_blocking)

    def to(self, tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args[:1] == (torch.device("cuda"),):
            args = (CUDA, *args[1:])
        return torch.Tensor.to(tensor, *args, **kwargs)

    def pin_memory(self, tensor: Tensor) -> Tensor:
        return self._pin(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))

    def tolist(self, tensor: Tensor) -> list[Any]:
        if tensor.is_cuda and tensor.numel() > 0:  # else nothing is copied
            self.note("wait")
        return np.zeros(tensor.shape, dtype=float if tensor.is_floating_point() else int).tolist()

    def item(self, tensor: Tensor) -> float:
        return self.tolist(tensor)


def _tensors(value: object) -> list[Tensor]:
    """Those in lists and tuples of lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _where() -> str:
    """The innermost running function of the package, leaving out `to_device` and comprehensions."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        name = frame.f_code.co_name
        if PACKAGE in file.parents and name != "to_device" and "<" not in name:
            return f"{file.name} {name}"
        frame = frame.f_back
    return "a test"


def _view(tensor: Tensor, index: object) -> Tensor:
    """What numbers and slices leave of it."""
    view = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")[index]
    return tensor.as_strided(view.shape, view.stride(), tensor.storage_offset() + view.storage_offset())


def _indices(index: object) -> list[Tensor | None]:
    """The tensors among the parts of an index, and None for a whole dimension; [] if there are none."""
    parts = list(index) if isinstance(index, tuple) else [index]
    assert not any(isinstance(part, list | np.ndarray) for part in parts), "a list is sent first, which waits"
    if not any(isinstance(part, Tensor) for part in parts):
        return []
    for part in parts:
        if isinstance(part, Tensor):
            assert part.is_cuda, "an index of the host is sent first, which waits"
            assert part.dtype != torch.bool, "how many a mask selects has to be asked, which waits"
        else:
            assert part == slice(None), f"not taken by this fake: {index}"
    return [part if isinstance(part, Tensor) else None for part in parts]


class Launcher:
    """Replaces a Triton kernel: `launcher[grid](...)` checks the arguments that a GPU would get."""

    def __init__(self, cuda: FakeCuda, name: str, kernel: Any) -> None:
        self.cuda, self.name = cuda, name
        self.signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert isinstance(grid, tuple)
        assert all(type(n) is int and 0 < n <= most for n, most in zip(grid, GRID_LIMITS, strict=False)), grid
        return self.launch

    def launch(self, *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        for name, value in self.signature.bind(*args, **constants).arguments.items():
            if name.endswith("_ptr"):
                assert value.is_cuda, f"{name} of {self.name} is on the host"
                is_right = value.dtype == INTEGERS[name] if name in INTEGERS else value.is_floating_point()
                assert is_right, f"{name} of {self.name} is {value.dtype}"
                assert value.is_contiguous() or name not in INTEGERS, f"{name} of {self.name} has gaps"
            elif name != "DOT":
                assert type(value) in (int, float), f"{name} of {self.name} is {value!r}"
        self.cuda.note("launch", self.name)
        self.cuda.launched.append(self.name)


def fake_varlen(cuda: FakeCuda) -> Callable[..., Tensor]:
    """Flash attention that checks its arguments."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, softmax_scale: float, causal: bool) -> Tensor:
        cu_q, cu_k, max_q, max_k = lengths
        assert causal
        assert all(t.is_cuda for t in (q, k, v, cu_q, cu_k))
        assert q.dtype == k.dtype == v.dtype
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert 0 < max_q <= max_k <= len(k)
        cuda.note("launch", "varlen")
        cuda.launched.append("varlen")
        return torch.empty_like(q)

    return attend


def fake_capture(cuda: FakeCuda) -> Callable[[Any, Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]:
    """Replaces `DecodeGraphs.capture`: a capture must not touch the host."""

    def capture(_: Any, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        cuda.note("capture")
        cuda.capturing = True
        try:
            out = work()
        finally:
            cuda.capturing = False
        return out, lambda: cuda.note("replay")

    return capture


def fake_apply(module: torch.nn.Module, function: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """What `to` and `to_empty` of a module do. PyTorch would swap tensors, which fake ones refuse."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(function(weight), requires_grad=False))
    return module


@contextmanager
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """In this context all tensors are fake, "cuda:0" is a device, and weights are not read."""
    cuda = FakeCuda()
    for name in ("getitem", "setitem", "copy_", "to", "pin_memory", "tolist", "item"):
        method = getattr(cuda, name)
        monkeypatch.setattr(
            FakeTensor,
            f"__{name}__" if name.endswith("etitem") else name,
            lambda *args, method=method, **kwargs: method(*args, **kwargs),
            raising=False,
        )
    for name, kernel in vars(kernels).copy().items():
        if name.endswith("_kernel"):
            monkeypatch.setattr(kernels, name, Launcher(cuda, name, kernel))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "MIN_SPLIT", 16)  # so that short contexts have splits, too
    monkeypatch.setattr(flash_backend, "load_varlen", lambda: fake_varlen(cuda))
    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "capture", fake_capture(cuda))
    monkeypatch.setattr("nanopaged.model.checkpoint._read_weights", lambda *_: None)
    monkeypatch.setattr(torch.nn.Module, "_apply", lambda module, function, **_: fake_apply(module, function))
    driver = {
        "synchronize": lambda: cuda.note("wait"),
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=132),
        "get_device_capability": lambda _: (9, 0),
        "mem_get_info": lambda _: (60 << 30, 80 << 30),
        "reset_peak_memory_stats": lambda _: None,
        "memory_allocated": lambda _: 1 << 30,
        "max_memory_allocated": lambda _: 2 << 30,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
    }
    monkeypatch.setattr("gc.collect", lambda: 0)  # a quarter of a second for each engine
    for name, answer in driver.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda _: None, raising=False)
    with cuda.fake, cuda:
        yield cuda
