"""The C++ kernels as functions of tensors. `cpp_backend.py` calls those of attention.

The library knows nothing of PyTorch: tensors are passed as addresses and strides, so dtypes are checked here.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nanopaged.kernels import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in `with_dtype` of vectors.h
ADDRESS, NUMBER, REAL, DTYPE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class Decode(ctypes.Structure):
    """The arguments of `paged_decode`, as in paged_attention.cpp, which describes them."""

    _fields_ = [
        *(
            (name, NUMBER)
            for name in ("num_runs", "num_seqs", "num_heads", "num_kv_heads", "head_dim")
        ),
        *((name, NUMBER) for name in ("block_size", "q_seq", "cache_block", "cache_head")),
        *(
            (name, ADDRESS)
            for name in ("blocks", "first_block", "num_keys", "first_row", "row_seq")
        ),
        *((name, ADDRESS) for name in ("first_part", "parts")),
        ("scale_log2", REAL),
        *((name, ADDRESS) for name in ("q", "k_cache", "v_cache", "out", "partial", "lse")),
    ]


@cache
def load() -> ctypes.CDLL:
    """The library, built if it has to be. Raises ValueError, as `build.load` does."""
    library = build.load()
    library.paged_decode.argtypes = [ctypes.POINTER(Decode), DTYPE]
    library.store_kv.argtypes = [*[ADDRESS] * 5, *[NUMBER] * 8, DTYPE]
    library.rms_norm.argtypes = [*[ADDRESS] * 3, *[NUMBER] * 3, REAL, DTYPE]
    library.norm_rotate.argtypes = [*[ADDRESS] * 5, REAL, *[NUMBER] * 5, DTYPE]
    library.silu_mul.argtypes = [*[ADDRESS] * 2, *[NUMBER] * 2, DTYPE]
    return library


def why_no_cpp(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run here, None if they can. They are built if they have to be."""
    if device.type != "cpu":
        return f"its kernels run on a CPU, not on {device}"
    if head_dim > 256:
        return f"its kernels take a head_dim of up to 256, not {head_dim}"
    try:  # with nothing to compute: it only tells whether the compiler had this dtype
        has_dtype = load().silu_mul(None, None, 0, 0, DTYPES[dtype])
    except (ValueError, AttributeError) as error:  # AttributeError: it lacks a function
        return str(error)
    return None if has_dtype else "its kernels need GCC 12 or Clang 15 for float16"


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / √(mean(x²) + ε) · w, computed in float32: x [num_tokens, size] → the same shape."""
    assert (x.stride(1), x.dtype) == (1, weight.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    load().rms_norm(
        *map(Tensor.data_ptr, (x, weight, out)), *x.shape, x.stride(0), eps, DTYPES[x.dtype]
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
    """Normalise (if there are weights) and rotate queries and keys, in place, as in decoder.py."""
    num_tokens, num_heads, head_dim = qk.shape
    assert (qk.stride()[1:], qk.dtype, qk.dtype) == ((head_dim, 1), cos.dtype, sin.dtype)
    norms = map(Tensor.data_ptr, weights) if weights is not None else (None, None)
    numbers = num_tokens, num_heads, num_q, head_dim // 2, qk.stride(0)
    addresses = qk.data_ptr(), *norms, cos.data_ptr(), sin.data_ptr()
    load().norm_rotate(*addresses, eps, *numbers, DTYPES[qk.dtype])
    return qk


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 · width], contiguous → silu(gate) · up [num_tokens, width]."""
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    load().silu_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape, DTYPES[gate_up.dtype])
    return out
