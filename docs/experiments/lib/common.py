"""What the experiments share: their options, models with random weights, the machine, timing.

torch and transformers take seconds to load. The functions that need them import them, so that `--help` and a
mistake in the arguments are answered immediately.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nanopaged import LLM

ROOT = Path(__file__).parents[3]  # of the checkout
sys.path.append(str(ROOT))  # for bench.py and nanopaged

DTYPES = ["float32", "bfloat16", "float16"]
SHAPES = ["test", "28m", "100m", "qwen3-0.6b"]  # bench.py has their sizes
ROUNDS = 9  # of a call that is timed


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a docstring as it is, and the defaults."""


def make_parser(docstring: str) -> argparse.ArgumentParser:
    """Its --help begins with the docstring."""
    return argparse.ArgumentParser(description=docstring, formatter_class=_HelpFormatter)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from `minimum` on."""

    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return number


def make_llm(shape: str, dtype: str, model: str = "", seed: int = 0, **config: Any) -> LLM:
    """The model in a folder or of a hub id; without one, random weights of a shape of bench.py."""
    from nanopaged import LLM

    if model:
        return LLM(model, dtype=dtype, **config)

    import bench

    with tempfile.TemporaryDirectory() as folder:
        bench.make_config(shape).save_pretrained(folder)
        return LLM(folder, dtype=dtype, load_format="dummy", seed=seed, **config)


def machine() -> str:
    """The versions and the device, for a headline. (torch's own number names the build, such as +cpu.)"""
    import torch

    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    return f"{versions}, {device_name()}, {torch.get_num_threads()} threads"


def pick_device() -> torch.device:
    """CUDA if there is any, else the CPU."""
    import torch

    return torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device


def device_name() -> str:
    """The name of the GPU, or of the CPU as far as the system tells it."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with suppress(OSError):  # Linux has this file; on a processor that is not x86 it may have no such line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long one call takes."""
    began = clock()
    call()
    return clock() - began


def medians(rounds: list[tuple[float, ...]]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def time_call(
    call: Callable[[], object], device: torch.device, best: bool = False, in_graph: bool = True
) -> float:
    """Seconds, the median or the best of nine. On a GPU: of a CUDA graph, with an empty L2 cache.

    Args:
        in_graph: if False, a GPU launches the kernels one by one, for a call that cannot be captured.
    """
    if device.type == "cuda":
        import torch
        from triton.testing import do_bench

        call()  # compiles the kernels
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
        return do_bench(call, return_mode="min" if best else "median") / 1e3
    seconds = [seconds_of(call) for _ in range(ROUNDS)]
    return min(seconds) if best else statistics.median(seconds)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy much larger than any cache; the best of nine.

    On a GPU it takes at most a quarter of the memory that other programs leave free.
    """
    import torch

    size = 128 << 20
    if device.type == "cuda":
        size = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 8)
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)

    def copy() -> None:
        dst.copy_(src)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 2 * size / min(seconds_of(copy) for _ in range(ROUNDS))


def product_speed(dtype_name: str) -> float:
    """Floating-point operations a second of PyTorch's large product, the best of nine."""
    import torch

    device = pick_device()
    size = 8192 if device.type == "cuda" else 2048
    matrix = torch.randn(size, size, device=device).to(getattr(torch, dtype_name))
    return 2 * size**3 / time_call(lambda: torch.nn.functional.linear(matrix, matrix), device, best=True)
