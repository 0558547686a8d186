"""Build the C++ kernels for this machine: python -m nanopaged.kernels.build

They are compiled once, by `c++` or what $CXX names: GCC or Clang. The library lies in ~/.cache/nanopaged (or
$NANOPAGED_CACHE). Its name has hashes of its sources and of its content: half a file is not loaded. What
another user can write is refused. attention_backend="auto" builds it, unless NANOPAGED_BUILD=0.
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

from nanopaged.terminal import one_line, run_program

logger = logging.getLogger("nanopaged")

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "paged_attention.cpp", FOLDER / "fused.cpp"]
HEADER = FOLDER / "vectors.h"
TIMEOUT = 300  # seconds; the compiler takes 6 on a server


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, which may have options, or `c++`. [] if there is none."""
    name = os.environ.get("CXX", "").strip() or "c++"
    command = [name] if shutil.which(name) else name.split()
    return command if shutil.which(command[0]) else []


def flags() -> list[str]:
    """OpenMP is PyTorch's own, so that both use the same threads."""
    import torch  # loads it

    options = [
        "-std=c++17",
        "-O3",
        "-fno-math-errno",
        "-ffp-contract=fast",
        "-Wno-psabi",
        "-shared",
        "-fPIC",
    ]
    options.append(
        "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    )
    mac = ["-Xclang", "-fopenmp", f"-L{Path(torch.__file__).parent / 'lib'}", "-lomp"]
    return [*options, *(mac if sys.platform == "darwin" else ["-fopenmp"])]


def digest(content: bytes) -> str:
    """A hash for a file's name."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_and_name() -> tuple[Path, str]:
    """Where libraries lie, and how the names of ours begin."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    features = re.search(r"(?m)^(flags|Features).*", text)
    key = f"{flags()} {platform.machine()} {features[0] if features else platform.processor()}"
    key += "".join(path.read_text(encoding="utf-8") for path in (*SOURCES, HEADER))
    folder = os.environ.get("NANOPAGED_CACHE") or Path.home() / ".cache" / "nanopaged"
    return Path(folder).absolute(), f"kernels-{digest(key.encode())}"


def check_owner(path: Path) -> None:
    """Raise PermissionError if another user (but root) can change the file, or the files of a folder."""
    about = path.stat()
    if os.name == "posix" and (about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022):
        raise PermissionError(f"other users can write {path} (if it is yours: chmod go-w)")


def find() -> Path | None:
    """The library, if it was built before and is whole."""
    folder, name = folder_and_name()
    for path in folder.glob(f"{name}-*.so"):
        if path.is_file() and path.stem == f"{name}-{digest(path.read_bytes())}":
            check_owner(folder)
            check_owner(path)
            return path
    return None


def run(*command: str | Path) -> None:
    """Run a command. Raises RuntimeError with its output."""
    with tempfile.TemporaryFile() as said:  # no pipe: a child of the compiler would hold it open
        status = subprocess.call(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=TIMEOUT
        )
        said.seek(0)
        text = one_line(said.read().decode(errors="replace"))[-2000:]
    if status != 0:
        raise RuntimeError(f"{command[0]} could not build them: {text}")


def compile_kernels() -> Path:
    """Two processes that build at once both get a whole library, since it is renamed."""
    command, (folder, name) = compiler(), folder_and_name()
    if not command:
        raise ValueError(
            "there is no C++ compiler: install one (apt install g++), or name one in CXX"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)
    logger.warning(
        "building the C++ kernels with %s, once (not with NANOPAGED_BUILD=0)", command[0]
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, "kernels.so")
        run(*command, *flags(), *SOURCES, "-o", made)
        # In a process of its own, which a bad library may end.
        code = (
            f"import sys; sys.path = {sys.path}; import torch; from nanopaged.kernels import build"
        )
        run(sys.executable, "-c", f"{code}; build.check({str(made)!r})")
        made.chmod(0o755)
        return made.replace(folder / f"{name}-{digest(made.read_bytes())}.so")


def check(path: Path | str) -> ctypes.CDLL:
    """The library, if it can be loaded and computes right."""
    library = ctypes.CDLL(str(path))
    gate_up, out = (ctypes.c_float * 2)(-2, 3), ctypes.c_float()
    library.silu_mul(gate_up, ctypes.byref(out), ctypes.c_int64(1), ctypes.c_int64(1), 0)
    if not math.isclose(out.value, 3 * -2 / (1 + math.exp(2)), rel_tol=1e-5):
        raise ArithmeticError("it computes wrong results")
    return library


def is_wanted() -> bool:
    """Whether "auto" tries the kernels: they can be built, or were built before, or cannot be looked for."""
    try:
        return bool(compiler() and os.environ.get("NANOPAGED_BUILD") != "0") or find() is not None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return True


def load() -> ctypes.CDLL:
    """The library, built if it has to be, and checked; a ValueError says what is wrong and what to do."""
    try:
        return check(find() or compile_kernels())
    except (
        OSError,
        RuntimeError,
        AttributeError,
        ArithmeticError,
        subprocess.SubprocessError,
    ) as error:
        advice = "set NANOPAGED_CACHE to another folder (your own, not noexec), or CXX to another compiler"
        raise ValueError(
            f"the C++ kernels cannot be built or loaded ({error}): {advice}"
        ) from error


def main() -> None:
    try:
        load()
    except ValueError as error:
        sys.exit(str(error))
    print(f"the C++ kernels are ready: {find()}")


if __name__ == "__main__":
    run_program(main)
