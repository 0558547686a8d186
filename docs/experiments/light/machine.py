"""The machine, the versions, its limits, and what "auto" picks on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from common import ROOT, commit_of, copy_bandwidth, device_name
from roofline import linear_speed

from light import Light
from nanopaged.attention import make_attention
from nanopaged.kv_cache import KVCache, KVShape

PACKAGES = ["torch", "triton", "transformers", "numpy", "flash-attn", "vllm", "nano-vllm", "pytest"]
SETTINGS = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "TRITON_", "NANOPAGED_", "OMP_")


def machine(light: Light) -> str:
    """A table of all that the other parts depend on."""
    name, smi, torch_version = device_name(), ask_driver(), version_of("torch")
    light.table("", "")
    if light.on_gpu:
        properties = torch.cuda.get_device_properties(light.device)
        free, total = torch.cuda.mem_get_info(light.device)
        capability, built = torch.cuda.get_device_capability(light.device), torch.cuda.get_arch_list()
        light.row("GPU", f"{name}, {torch.cuda.device_count()} of them, one is used")
        light.row("compute capability", f"{capability}; torch is built for {' '.join(built)}")
        light.row("multiprocessors", properties.multi_processor_count)
        light.row("memory", f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB of it free")
        light.row("Triton's kernels", light.no_kernels or "can run")
    light.row("nvidia-smi", smi or "not found")
    light.row("CUDA of torch", torch.version.cuda or "none: a CPU build")
    light.row("Python, system", f"{platform.python_version()}, {platform.platform()}")
    light.row("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch")
    light.row("commit", commit_of(ROOT) or "unknown: no git checkout")
    for package in PACKAGES:
        light.row(package, version_of(package))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    light.row("C compiler, Python.h", f"{compiler}, {'found' if headers else 'not found'}")
    for setting in sorted(setting for setting in os.environ if setting.startswith(SETTINGS)):
        light.row(f"`{setting}`", f"`{os.environ[setting]}`")
    if smi and not light.on_gpu and light.wanted != "rehearsal":
        light.wrong(
            f"nvidia-smi shows a GPU that torch {torch_version} cannot use: another build, or driver?"
        )
    if light.on_gpu and not (compiler and headers):
        light.wrong("Triton needs a C compiler and Python's headers: install gcc and python3-dev")
    if light.on_gpu and version_of("triton") == "not installed":
        light.wrong("Triton is not installed, so neither kernels nor CUDA graphs can be used")
    return f"{name}, torch {torch_version}: {limits(light)}; attention by {auto_backend(light)}"


def limits(light: Light) -> str:
    """How fast it copies memory, and computes."""
    light.now("copying memory")
    bandwidth = copy_bandwidth(light.device)
    if light.on_gpu:
        light.note("bandwidth", bandwidth)  # a slow GPU has more time, see first_light.py
    light.now("a large linear layer")
    speed = linear_speed(light.args.dtype)
    computed = f"{speed / 1e12:,.1f} TFLOP/s in {light.args.dtype}"
    return f"{bandwidth / 1e9:,.0f} GB/s copied (read and written), {computed}"


def auto_backend(light: Light) -> str:
    """The backend that "auto" chooses; for flash attention, whose function it calls."""
    light.now("the attention backend")
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=64, dtype=light.dtype)
    cache = KVCache(shape, num_blocks=1, block_size=16, device=light.device)
    name = type(make_attention("auto", cache, 1.0)).__name__
    if name != "FlashAttention":
        return name
    from nanopaged.attention.flash_backend import load_varlen

    is_flash_attn = load_varlen().__module__.startswith("flash_attn")
    return f"{name}, {'flash-attn' if is_flash_attn else 'varlen attention of torch'}"


def ask_driver() -> str:
    """Name, driver, power limit and clock of each GPU; empty without nvidia-smi."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,utilization.gpu"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=8)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
