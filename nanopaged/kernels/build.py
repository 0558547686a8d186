"""Build the C++ kernels for this machine: python -m nanopaged.kernels.build

They are compiled once, by `c++` or by the compiler in CXX (GCC or Clang), to a library in
~/.cache/nanopaged (or NANOPAGED_CACHE). The library is not used if another user can write it.
attention_backend="auto" builds it, unless NANOPAGED_BUILD=0.
"""

import ctypes
import hashlib
import logging
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
SOURCES = sorted(FOLDER.glob("*.cpp"))
HEADERS = sorted(FOLDER.glob("*.h"))
TIMEOUT = 300  # seconds; on a server the compiler takes 6


def compiler() -> list[str]:
    """The C++ compiler: CXX, which may have options ("g++ -march=x86-64-v3"), or `c++`; else []."""
    command = os.environ.get("CXX", "").split() or ["c++"]
    return command if shutil.which(command[0]) else []


def flags() -> list[str]:
    """The options, those of CXX last. OpenMP is that of PyTorch, so both use the same threads."""
    import torch  # loads OpenMP

    options = [
        "-std=c++17",
        "-O3",
        "-fno-math-errno",
        "-ffp-contract=fast",
        "-Wno-psabi",
        "-shared",
        "-fPIC",
    ]
    is_arm = platform.machine() in ("arm64", "aarch64")
    options.append("-mcpu=native" if is_arm else "-march=native")
    if sys.platform == "darwin":  # whose clang needs -Xclang before -fopenmp
        options += [f"-L{Path(torch.__file__).parent / 'lib'}", "-lomp", "-Xclang"]
    return [*options, "-fopenmp", *compiler()[1:]]


def library_path() -> Path:
    """Where the library lies. Its name has a hash of sources, flags and the CPU's features."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    features = re.findall(r"(?m)^(?:flags|Features).*", text)[:1]  # those of the first core
    key = f"{flags()} {platform.processor()} {features}"
    for path in [*SOURCES, *HEADERS]:
        key += path.read_text(encoding="utf-8")
    folder = Path(os.environ.get("NANOPAGED_CACHE") or Path.home() / ".cache" / "nanopaged")
    return folder.absolute() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def can_build_or_load() -> bool:
    """Whether "auto" tries the kernels: there is a compiler, or the library was built before."""
    if compiler() and os.environ.get("NANOPAGED_BUILD") != "0":
        return True
    try:
        return library_path().exists()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return True  # so that `load` says what is wrong


def load() -> ctypes.CDLL:
    """The library, built if it has to be. A ValueError says what is wrong and what to do."""
    try:
        path = library_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(path.parent)
        if not path.exists():
            compile_kernels(path)
        check_owner(path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"the C++ kernels cannot be built or loaded ({error}): set NANOPAGED_CACHE to another "
            "folder (your own, not noexec), or CXX to another compiler"
        ) from error


def check_owner(path: Path) -> None:
    """Raise PermissionError if another user (except root) can change the file or folder."""
    status = path.stat()
    if os.name == "posix" and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022):
        raise PermissionError(f"other users can write {path} (if it is yours: chmod go-w)")


def compile_kernels(path: Path) -> None:
    """Compile to a temporary file, then rename it, so that no process loads half a library."""
    command = compiler()
    if not command:
        raise ValueError(
            "there is no C++ compiler: install one (apt install g++), or set CXX to one"
        )
    logger.warning(
        "building the C++ kernels with %s, once (not with NANOPAGED_BUILD=0)", command[0]
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled = Path(scratch, path.name)
        done = subprocess.run(
            [command[0], *flags(), *SOURCES, "-o", compiled],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
        if done.returncode != 0:
            output = one_line(done.stderr)[-2000:]
            raise RuntimeError(f"{command[0]} could not build them: {output}")
        ctypes.CDLL(str(compiled))  # a library that cannot be loaded is not kept
        compiled.chmod(0o755)  # a group cannot write it, whatever the umask
        compiled.replace(path)


def main() -> None:
    try:
        load()
    except ValueError as error:
        sys.exit(str(error))
    print(f"the C++ kernels are ready: {library_path()}")


if __name__ == "__main__":
    run_program(main)
