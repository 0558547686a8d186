"""A function of the reader beside the source's, on the same tensors: the first difference, in words."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from beside import engines_own
from torch import Tensor

torch.set_num_threads(1)  # the tensors are so small that a second thread only waits
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def check(
    rule: str,
    function: Callable[..., Any],
    *arguments: Any,
    view: Callable[[Any], Any] = lambda result: result,
) -> None:
    """The reader's function must return what the source's does, seen by `view`, and change no argument."""
    before = deepcopy(arguments)
    with engines_own():
        right = function(*before)
    found = function(*arguments)
    names = list(inspect.signature(function).parameters)[: len(arguments)]
    inputs = [f"{name} {described(x)}" for name, x in zip(names, before, strict=True) if described(x)]
    case = f"{rule}: `{getattr(function, '__name__', '')}` of {', '.join(inputs)}"
    assert found is not None or right is None, f"{case}: it returns nothing."
    for name, old, new in zip(names, before, arguments, strict=True):
        assert is_same(old, new), f"{case}: it changes its `{name}`, which it may only read."
        assert memory_of(found) != memory_of(new), f"{case}: the result is a view of `{name}`, so copy it."
    wrong = difference(view(found), view(right))
    assert not wrong, f"{case}: {wrong}."


def memory_of(x: Any) -> Any:
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else object()


def is_same(old: Any, new: Any) -> bool:
    """Whether tensors, lists, and the tensors of an object are as before."""
    if isinstance(old, Tensor):
        return torch.equal(old.nan_to_num(7), new.nan_to_num(7))
    if isinstance(old, list):
        return old == new
    fields = getattr(old, "__dict__", {})
    return all(is_same(x, getattr(new, name)) for name, x in fields.items() if isinstance(x, Tensor))


def described(argument: Any) -> str:
    """An argument in a sentence; "" if it has no numbers."""
    if isinstance(argument, Tensor):
        is_small = argument.numel() <= 8 and not argument.isnan().any()
        kind = f"{list(argument.shape)} ({str(argument.dtype).removeprefix('torch.')})"
        return shown(argument) if is_small else kind
    if isinstance(argument, list):
        return reprlib.repr(argument)
    return str(argument) if isinstance(argument, int | float | str) else ""


def shown(x: Tensor) -> str:
    """The numbers of a small tensor: 1.657062 3 nan."""
    return " ".join(f"{number:.7g}" for number in x.double().flatten().tolist())


def difference(found: Any, right: Any) -> str:
    """How a result differs from the right one, in words; "" if it does not."""
    if not isinstance(found, Tensor) or not isinstance(right, Tensor):
        return "" if found == right else f"it gives {found} instead of {right}"
    if found.shape != right.shape:
        return f"its shape is {list(found.shape)} instead of {list(right.shape)}"
    if found.dtype != right.dtype:
        return f"its dtype is {found.dtype} instead of {right.dtype}"
    tolerance = TOLERANCE.get(right.dtype, 0.0)  # integers must be equal
    is_close = torch.isclose(found.double(), right.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
    if is_close.all():
        return ""
    if right.numel() <= 8:
        return f"it gives {shown(found)} instead of {shown(right)}"
    place = (~is_close).nonzero()[0].tolist()
    return f"at {place} it gives {found[tuple(place)]:.5g} instead of {right[tuple(place)]:.5g}"
