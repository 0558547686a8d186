"""A fake Apple GPU: tensors that claim to be on the device "mps:0", and are computed on the CPU.

`FakeMps` sees every operation on them, and fails where PyTorch's MPS backend would fail or go wrong: float64,
operators without a kernel for it, operands of the host next to those of the device, pinned memory, and copies
for which the host does not wait. Unlike the tensors of `fake_cuda.py` these hold data, so a run gives tokens.

What it does not know is which dtypes and shapes each Metal kernel takes, and how exact it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MPS = torch.device("mps:0")
WIDE = (torch.float64, torch.complex128)  # docs.pytorch.org/docs/stable/notes/mps.html
COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "autogen")


@cache
def kernels() -> dict[str, frozenset[str]]:
    """PyTorch's own list: operator → the backends for which it has a kernel ("MPS", "CPU", …)."""
    listed = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    found: dict[str, frozenset[str]] = {}
    delegates: dict[str, str] = {}
    for entry in listed.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        name = entry.partition("(")[0]
        keys: set[str] = set()
        in_dispatch = False
        for line in entry.splitlines()[1:]:
            field, _, value = line.partition("#")[0].strip().partition(":")
            if line.startswith("    ") and in_dispatch:
                keys.update(key.strip() for key in field.split(","))
                continue
            in_dispatch = field == "dispatch"
            if field == "structured_delegate":
                delegates[name] = value.strip()
            if field == "autogen":
                found.update({made.strip(): frozenset({"autogen"}) for made in value.split(",")})
        found[name] = frozenset(keys)
    return found | {name: found[name] | found[to] for name, to in delegates.items()}


class MpsTensor(Tensor):
    """A tensor of the fake device; `data_of_it` has its numbers."""

    data_of_it: Tensor

    @staticmethod
    def __new__(cls: type[MpsTensor], data: Tensor) -> MpsTensor:
        with torch.inference_mode(False):  # or a view of it could not be made of weights, which are none
            layout = {"strides": data.stride(), "storage_offset": data.storage_offset()}
            made = Tensor._make_wrapper_subclass(cls, data.shape, **layout, dtype=data.dtype, device=MPS)
        made.data_of_it = data
        return made

    def __repr__(self, **_: object) -> str:
        return f"MpsTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            return DRIVERLESS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        raise AssertionError(f"{func} outside of the fake device")


class FakeMps(TorchDispatchMode):
    """Computes what is asked of the fake device, if MPS can."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler, which takes seconds, to keep it from this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        given = _tensors([*args, *kwargs.values()])
        to_mps = device is not None and torch.device(device).type == "mps"
        assert not kwargs.get("pin_memory"), f"{func} asks for pinned memory"
        if not to_mps and not any(isinstance(tensor, MpsTensor) for tensor in given):
            return func(*args, **kwargs)

        name = func.name().removeprefix("aten::")
        can = kernels().get(name, {"of another library"})
        if not can & {"MPS", *COMPOSITES}:
            assert not can or "CompositeImplicitAutograd" in can, f"{func} has no kernel for MPS: {set(can)}"
            with self:  # it is made of other operators
                return func.decompose(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            names = (argument.name for argument in func._schema.arguments)
            options = dict(zip(names, args, strict=False)) | kwargs
            assert not options.get("non_blocking"), f"{func} does not wait for the copy"
        else:
            host = [tensor for tensor in given if not isinstance(tensor, MpsTensor)]
            assert all(tensor.dim() == 0 for tensor in host), f"{func} mixes {host} of the host with MPS's"

        if to_mps:
            kwargs["device"] = torch.device("cpu")
        plain_args = [_plain(value) for value in args]
        out = func(*plain_args, **{name: _plain(value) for name, value in kwargs.items()})
        to_host = device is not None and not to_mps
        if to_host or (name == "copy_" and not isinstance(args[0], MpsTensor)):
            return out
        if func._schema.is_mutable:  # what works in place returns the tensor that it was given
            return kwargs.get("out", args[0])
        return _wrap(func, out)


def _tensors(values: list[object]) -> list[Tensor]:
    """Those among the values, and in lists of them."""
    parts = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
    return [part for part in parts if isinstance(part, Tensor)]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    return value.data_of_it if isinstance(value, MpsTensor) else value


def _wrap(func: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_wrap(func, part) for part in value)
    if not isinstance(value, Tensor):
        return value
    assert value.dtype not in WIDE, f"{func} gives {value.dtype}, which MPS has not"
    return MpsTensor(value)


def _getitem(tensor: MpsTensor, index: Any) -> MpsTensor:
    _check_index(index)
    return MpsTensor(tensor.data_of_it[_plain(index)])


def _setitem(tensor: MpsTensor, index: Any, value: object) -> None:
    _check_index(index)
    assert not isinstance(value, Tensor) or isinstance(value, MpsTensor), "a value of the host is put in"
    tensor.data_of_it[_plain(index)] = _plain(value)


def _check_index(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        assert not isinstance(part, list | Tensor) or isinstance(part, MpsTensor), "an index of the host"


# Methods that would ask PyTorch for a Metal device before they ask for an operator.
DRIVERLESS = {
    Tensor.tolist: lambda tensor: tensor.cpu().tolist(),
    Tensor.copy_: torch.ops.aten.copy_.default,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
}


@contextmanager
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """In this context "mps" is a device."""
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    with FakeMps() as mps:
        yield mps
