"""Build the C++ kernels for this machine: python -m nanopaged.kernels.build

They are compiled once, by `c++` or what $CXX names: GCC or Clang. The library lies in ~/.cache/nanopaged (or
$NANOPAGED_CACHE). Its name has a hash of what it is made from, and one of its content, so that half a file is
not loaded. attention_backend="auto" builds it, unless NANOPAGED_BUILD=0.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger("nanopaged")

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "paged_attention.cpp", FOLDER / "fused.cpp"]
HEADER = FOLDER / "vectors.h"
TIMEOUT = 300  # seconds; the compiler takes 6 on a server, and some 60 on a small board


def compiler() -> str | None:
    """The C++ compiler: what $CXX names, or `c++`; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "c++")


def flags() -> list[str]:
    """OpenMP is PyTorch's own, so that both use the same threads."""
    options = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC"]
    options.append("-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native")
    mac = ["-Xclang", "-fopenmp", f"-L{Path(torch.__file__).parent / 'lib'}", "-lomp"]
    return [*options, *(mac if sys.platform == "darwin" else ["-fopenmp"])]


def digest(content: bytes) -> str:
    """A hash for a file's name."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_and_name() -> tuple[Path, str]:
    """Where libraries lie, and how the names of ours begin."""
    cpuinfo = Path("/proc/cpuinfo")
    features = re.search(
        r"(?m)^(flags|Features).*", cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    )
    key = f"{flags()} {platform.machine()} {features[0] if features else platform.processor()}"
    key += "".join(path.read_text(encoding="utf-8") for path in (*SOURCES, HEADER))
    folder = os.environ.get("NANOPAGED_CACHE") or Path.home() / ".cache" / "nanopaged"
    return Path(folder), f"kernels-{digest(key.encode())}"


def find() -> Path | None:
    """The library, if it was built before and is whole."""
    try:
        folder, name = folder_and_name()
        built = folder.glob(f"{name}-*.so")
        return next((path for path in built if path.stem == f"{name}-{digest(path.read_bytes())}"), None)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def compile_kernels() -> Path:
    """Two processes that build at once both get a whole library, since it is renamed."""
    command, (folder, name) = compiler(), folder_and_name()
    if command is None:
        raise ValueError("there is no C++ compiler: install one (apt install g++), or name one in CXX")
    folder.mkdir(parents=True, exist_ok=True)
    logger.warning("building the C++ kernels with %s, once (not with NANOPAGED_BUILD=0)", command)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "kernels.so"
        arguments = [command, *flags(), *SOURCES, "-o", made]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        if done.returncode != 0:
            raise ValueError(f"{command} could not build the C++ kernels:\n{done.stderr[-2000:]}")
        return made.replace(folder / f"{name}-{digest(made.read_bytes())}.so")


def is_wanted() -> bool:
    """Whether "auto" takes the kernels: they can be built now, or were built before."""
    return (compiler() is not None and os.environ.get("NANOPAGED_BUILD") != "0") or find() is not None


def load() -> ctypes.CDLL:
    """The library, built if it has to be, and checked; a ValueError says what is wrong and what to do."""
    try:
        path = find() or compile_kernels()
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        advice = f"({error}): set NANOPAGED_CACHE to a folder for them, or CXX to another compiler"
        raise ValueError(f"the C++ kernels cannot be built or loaded {advice}") from error
    gate_up, out = (ctypes.c_float * 2)(-2, 3), ctypes.c_float()
    library.silu_mul(gate_up, ctypes.byref(out), ctypes.c_int64(1), ctypes.c_int64(1), 0)
    if not math.isclose(out.value, 3 * -2 / (1 + math.exp(2)), rel_tol=1e-5):
        raise ValueError(f"{path} computes wrong results: set CXX to another compiler, and delete it")
    return library


if __name__ == "__main__":
    try:
        load()
    except ValueError as error:
        sys.exit(str(error))
    print(f"the C++ kernels are ready: {find()}")
