"""The C++ kernels: how they are built and called. `paged_attention.cpp` and `fused.cpp` have the kernels.

They are compiled once for this machine's processor, by `c++`, or by what $CXX names: GCC or Clang. The
library lies in ~/.cache/nanopaged (or $NANOPAGED_CACHE) under a name made of the sources, the flags and the
processor, so a changed source or another processor gets a library of its own. It knows nothing of PyTorch:
tensors are passed as addresses and strides, so it compiles in seconds and outlives an update of PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("nanopaged")

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "paged_attention.cpp", FOLDER / "fused.cpp"]
HEADER = FOLDER / "vectors.h"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in `with_dtype` of vectors.h
MAX_HEAD_DIM = 256


def compiler() -> str | None:
    """The C++ compiler: what $CXX names, or `c++`; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "c++")


def flags() -> list[str]:
    """Options of the compiler. OpenMP is PyTorch's own, so that both use the same threads."""
    on_mac = sys.platform == "darwin"
    openmp = ["-Xclang", "-fopenmp", f"-L{Path(torch.__file__).parent / 'lib'}", "-lomp"]
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    return [
        *("-std=c++17", "-O3", processor, "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"),
        *("-shared", "-fPIC", *(openmp if on_mac else ["-fopenmp"])),
    ]


def library_path() -> Path:
    """Where the library of these sources and this processor is, or would be."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    parts = [path.read_bytes() for path in (*SOURCES, HEADER)]
    parts += [" ".join(flags()).encode(), platform.machine().encode(), features.encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("NANOPAGED_CACHE") or Path.home() / ".cache" / "nanopaged")
    return folder / f"kernels-{key}.so"


def build() -> Path:
    """Compile the kernels, unless it was done before. Returns the library's path.

    The library is written under another name and then renamed. So two processes that build at once both get
    a whole one, and a build that was stopped leaves none.

    Raises:
        ValueError: there is no compiler, or it failed; the message has what it printed.
    """
    path, command = library_path(), compiler()
    if path.exists():
        return path
    if command is None:
        wanted = os.environ.get("CXX") or "c++"
        raise ValueError(
            f"the C++ kernels need a compiler, and there is no {wanted!r}: install one (Debian and Ubuntu: "
            "apt install g++; macOS: xcode-select --install), or name one in the variable CXX"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.warning("building the C++ kernels with %s, once: this takes about 10 seconds", command)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        arguments = [command, *flags(), *map(str, SOURCES), "-o", str(made)]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ValueError(
                f"{command} could not build the C++ kernels (it must be GCC or Clang, from GCC 9 or Clang 10 "
                f"on):\n{result.stderr[-2000:] or result.stdout[-2000:]}"
            )
        made.replace(path)
    logger.warning("built %s in %.1f s", path, time.perf_counter() - start)
    return path


class Decode(ctypes.Structure):
    """The arguments of `paged_decode`; paged_attention.cpp describes them in a struct of the same fields."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_runs", "num_seqs", "num_heads", "num_kv_heads")),
        *(
            (name, ctypes.c_int64)
            for name in ("head_dim", "block_size", "q_seq", "cache_block", "cache_head")
        ),
        *((name, ctypes.c_void_p) for name in ("blocks", "first_block", "num_keys")),
        *(
            (name, ctypes.c_void_p)
            for name in ("first_row", "row_seq", "first_part", "parts", "partial", "lse")
        ),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "out")),
    ]


@cache
def load() -> ctypes.CDLL:
    """The library, built if it has to be, and checked.

    Raises:
        ValueError: it cannot be built or loaded, or it gives wrong results.
    """
    path = build()
    try:
        library = ctypes.CDLL(str(path))
        address, number, real, dtype = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        library.paged_decode.argtypes = [ctypes.POINTER(Decode), dtype]
        library.store_kv.argtypes = [*[address] * 5, *[number] * 8, dtype]
        library.rms_norm.argtypes = [*[address] * 3, *[number] * 3, real, dtype]
        library.norm_rotate.argtypes = [*[address] * 5, real, *[number] * 5, dtype]
        library.silu_mul.argtypes = [*[address] * 2, *[number] * 2, dtype]
    except (OSError, AttributeError) as error:
        raise ValueError(f"{path} cannot be loaded ({error}): delete it, and it is built again") from error
    x = torch.linspace(-3, 3, 40).view(1, 40)
    out = torch.empty(1, 20)
    library.silu_mul(x.data_ptr(), out.data_ptr(), 1, 20, 0)
    if not torch.allclose(out, torch.nn.functional.silu(x[:, :20]) * x[:, 20:]):
        raise ValueError(f"{path} computes wrong results: delete it, and it is built again")
    return library


def is_ready() -> bool:
    """Whether the kernels have been built on this machine before, and work. They are not built here."""
    path = library_path()
    if not path.exists():
        if any(path.parent.glob("kernels-*.so")):
            logger.warning(
                "the C++ kernels were built from other sources, or for another processor, and are not used; "
                "python -m nanopaged.kernels.build builds them again"
            )
        return False
    try:
        load()
    except ValueError as error:
        logger.warning("the C++ kernels are not used: %s", error)
        return False
    return True


def why_no_cpp(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run here, None if they can. They are built if they have to be."""
    if device.type != "cpu":
        return f"its kernels run on a CPU, not on {device}"
    if head_dim > MAX_HEAD_DIM:
        return f"its kernels take heads of up to {MAX_HEAD_DIM} numbers, and this model has {head_dim}"
    try:
        # Nothing to compute: it only tells whether the compiler had this dtype.
        if not load().silu_mul(None, None, 0, 0, DTYPES[dtype]):
            return "its kernels need GCC 12 or Clang 15 for float16; bfloat16 and float32 need no such thing"
    except ValueError as error:
        return str(error)
    return None


def paged_decode(arguments: Decode, dtype: torch.dtype) -> None:
    """Paged decode of one layer, see the struct `Decode` in paged_attention.cpp."""
    load().paged_decode(ctypes.byref(arguments), DTYPES[dtype])


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the new keys and values of a batch to their slots.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim]; the heads of a token are contiguous.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], two views of one tensor.
        slot_mapping: int64 [num_tokens], block · block_size + offset.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1) == k_cache.stride()[2:]
    load().store_kv(
        *(x.data_ptr() for x in (k, v, k_cache, v_cache, slot_mapping)),
        *(num_tokens, k.stride(0), v.stride(0), num_heads, head_dim, k_cache.shape[2], *k_cache.stride()[:2]),
        DTYPES[k.dtype],
    )


def fused_rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / √(mean(x²) + ε) · w, computed in float32: x [num_tokens, size] → the same shape."""
    assert x.stride(1) == 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    load().rms_norm(*pointers, *x.shape, x.stride(0), eps, DTYPES[x.dtype])
    return out


def fused_norm_rotate(
    qk: Tensor, num_q: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Normalise (if there are weights) and rotate queries and keys, in place, as in fused.py."""
    num_tokens, num_heads, head_dim = qk.shape
    assert qk.stride()[1:] == (head_dim, 1)
    q_weight, k_weight = (w.data_ptr() for w in weights) if weights is not None else (None, None)
    load().norm_rotate(
        *(qk.data_ptr(), q_weight, k_weight, cos.data_ptr(), sin.data_ptr()),
        *(eps, num_tokens, num_heads, num_q, head_dim // 2, qk.stride(0), DTYPES[qk.dtype]),
    )
    return qk


def fused_silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 · width], contiguous → silu(gate) · up [num_tokens, width]."""
    assert gate_up.is_contiguous()
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    load().silu_mul(gate_up.data_ptr(), out.data_ptr(), num_tokens, width, DTYPES[gate_up.dtype])
    return out
