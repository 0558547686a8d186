"""The C++ kernels as functions of tensors. `store_kv` and `paged_decode` are as in Triton.

The library knows nothing of PyTorch. It gets addresses and strides, so dtypes are checked here.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged.kernels import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in `with_dtype` of vectors.h
FLOAT = ctypes.c_float
INT = ctypes.c_int64
INTS = ctypes.POINTER(INT)
LOG2_E = math.log2(math.e)  # 2^(x · log2(e)) = e^x


class Address(ctypes.c_void_p):
    """An argument that is a tensor or None in Python, and its address in the library."""

    @classmethod
    def from_param(cls, value: Any) -> Address:
        return cls(None if value is None else value.data_ptr())


class DType(ctypes.c_int):
    """An argument that is a torch.dtype in Python, and its number in the library."""

    @classmethod
    def from_param(cls, value: Any) -> DType:
        return cls(DTYPES[value])


class Runs(ctypes.Structure):
    """The runs of a decode, with the fields of `struct Runs` in paged_attention.cpp."""

    _fields_ = [
        ("num_runs", INT),
        ("num_seqs", INT),
        ("blocks", INTS),
        ("first_block", INTS),
        ("num_keys", INTS),
        ("first_row", INTS),
        ("row_seq", INTS),
        ("first_of_seq", INTS),
        ("rows_by_seq", INTS),
    ]


RUNS = ctypes.POINTER(Runs)


def int_array(values: list[int] | np.ndarray) -> ctypes.Array:
    """An int64 array as the library reads it. A field of `Runs` keeps it alive."""
    return np.ctypeslib.as_ctypes(np.array(values, dtype=np.int64))


@cache
def load() -> ctypes.CDLL:
    """The library, built if it has to be. Raises ValueError, as `build.load` does."""
    library = build.load()
    library.paged_decode.argtypes = [Address] * 4 + [RUNS] + [INT] * 7 + [FLOAT, DType]
    library.paged_prefill.argtypes = [Address] * 5 + [INT] * 9 + [FLOAT, DType]
    library.store_kv.argtypes = [Address] * 4 + [INTS] + [INT] * 8 + [DType]
    library.rms_norm.argtypes = [Address] * 3 + [INT] * 3 + [FLOAT, DType]
    library.norm_rotate.argtypes = [Address] * 5 + [FLOAT] + [INT] * 5 + [DType]
    library.silu_mul.argtypes = [Address] * 2 + [INT] * 2 + [DType]
    library.num_columns.argtypes = [DType]
    library.linear.argtypes = [Address] * 4 + [INT] * 3 + [DType]
    return library


def why_no_cpp(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run here; None if they can. They are built if they have to be."""
    if device.type != "cpu":
        return f"its kernels run on a CPU, not on {device}"
    if head_dim > 256:
        return f"its kernels take a head_dim of up to 256, not {head_dim}"
    try:  # a call with nothing to compute returns 0 if the processor lacks this dtype
        has_dtype = load().silu_mul(None, None, 0, 0, dtype)
    except (ValueError, AttributeError) as error:  # AttributeError: the library lacks a function
        return str(error)
    return None if has_dtype else "this processor cannot convert float16"


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: ctypes.Array) -> None:
    """Write the new k, v [num_tokens, num_kv_heads, head_dim] of a batch to their slots.

    Args:
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        slots: `int_array` [num_tokens], block · block_size + offset.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.dtype == v.dtype == k_cache.dtype
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)  # the heads of a token are contiguous
    load().store_kv(
        k,
        v,
        k_cache,
        v_cache,
        slots,
        num_tokens,
        k.stride(0),
        v.stride(0),
        num_heads,
        head_dim,
        k_cache.shape[2],
        k_cache.stride(0),
        k_cache.stride(1),
        k.dtype,
    )


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, scale: float) -> Tensor:
    """One query of each sequence attends to its context: q [num_seqs, num_heads, head_dim] → as q.

    Args:
        k_cache, v_cache: as in `store_kv`.
        runs: of the sequences' block tables, see `find_runs`.
    """
    num_seqs, num_heads, head_dim = q.shape
    assert q.dtype == k_cache.dtype
    assert q.stride()[1:] == (head_dim, 1)
    assert num_seqs == runs.num_seqs
    out = q.new_empty(q.shape)
    load().paged_decode(
        q,
        k_cache,
        v_cache,
        out,
        runs,
        num_heads,
        k_cache.shape[1],
        head_dim,
        k_cache.shape[2],
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        scale * LOG2_E,
        q.dtype,
    )
    return out


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_len: int,
    scale: float,
    out: Tensor,
) -> None:
    """The last queries of a context, each with the keys up to its own position.

    Args:
        q: [num_queries, num_heads, head_dim]; `out` is of the same shape, and contiguous.
        k_cache, v_cache: as in `store_kv`.
        block_table: int64 [num_blocks], of the whole context.
    """
    num_queries, num_heads, head_dim = q.shape
    assert q.dtype == k_cache.dtype == out.dtype
    assert q.stride()[1:] == (head_dim, 1)
    load().paged_prefill(
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        num_queries,
        context_len,
        num_heads,
        k_cache.shape[1],
        head_dim,
        k_cache.shape[2],
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        scale * LOG2_E,
        q.dtype,
    )


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / √(mean(x²) + ε) · w, computed in float32: x [num_tokens, size] → the same shape."""
    num_tokens, size = x.shape
    assert x.dtype == weight.dtype
    assert x.stride(1) == 1
    out = x.new_empty(x.shape)
    load().rms_norm(
        x,
        weight,
        out,
        num_tokens,
        size,
        x.stride(0),
        eps,
        x.dtype,
    )
    return out


def norm_rotate(
    qk: Tensor,
    num_q: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Normalise (if there are weights) and rotate, as `decoder.norm_rotate`, but in place."""
    num_tokens, num_heads, head_dim = qk.shape
    assert qk.dtype == cos.dtype == sin.dtype
    assert qk.stride()[1:] == (head_dim, 1)
    q_weight, k_weight = weights or (None, None)
    load().norm_rotate(
        qk,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        num_tokens,
        num_heads,
        num_q,
        head_dim // 2,
        qk.stride(0),
        qk.dtype,
    )
    return qk


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 · width], contiguous → silu(gate) · up [num_tokens, width]."""
    assert gate_up.is_contiguous()
    num_tokens = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    load().silu_mul(gate_up, out, num_tokens, width, gate_up.dtype)
    return out


def has_linear(dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` has a kernel for this dtype and processor.

    It has none for bfloat16 where the processor has AMX, with which PyTorch multiplies faster.
    """
    return bool(load().linear(None, None, None, None, 0, 0, 0, dtype))


class PackedLinear:
    """The function x → x Wᵀ + b, with W in the order in which the kernel reads it (linear.cpp).

    Args:
        weight: W [outputs, inputs].
        bias: b [outputs], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_outputs = weight.shape[0]
        self.bias = bias
        outputs = load().panel_outputs()
        columns = load().num_columns(weight.dtype)
        # Panels are filled up with outputs, and pairs with a column, whose weights are 0.
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % outputs)
        if any(padding):  # else `F.pad` would copy the weights for nothing
            weight = F.pad(weight, padding)
        panels = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, outputs))
        # [panels, outputs, inputs/columns, columns] → [panels, inputs/columns, outputs, columns]
        self.packed = panels.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, inputs] → [num_tokens, outputs]."""
        assert x.dtype == self.packed.dtype
        x = x.contiguous()
        num_tokens, num_inputs = x.shape
        out = x.new_empty(num_tokens, self.num_outputs)
        load().linear(
            x,
            self.packed,
            self.bias,
            out,
            num_tokens,
            num_inputs,
            self.num_outputs,
            x.dtype,
        )
        return out
