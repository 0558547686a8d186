"""Compile every Triton kernel for GPUs that need not be there, and read what they use from the binaries.

    python tests/compile_kernels.py [FOLDER]

prints a line of JSON for each kernel, as docs/records/gpu-status.md sums up. FOLDER keeps binaries,
so that only what has changed is compiled again. Registers are per thread, the stack (bytes) is where they
spill to, shared memory (bytes) is per program. "programs" is how many of them a streaming multiprocessor (SM)
holds at once; for the others see `overlap`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c as one instruction; unset, 3.9 warns
if sys.argv[1:]:
    os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanopaged.kernels import paged_attention as kernels

ARCHITECTURES = {  # sm_NN → GPUs, shared memory of an SM in KB, its threads (CUDA C++ Programming Guide)
    75: ("T4, RTX 20", 64, 1024),
    80: ("A100", 164, 2048),
    86: ("RTX 30, A10", 100, 1536),
    89: ("RTX 40, L4", 100, 1536),
    90: ("H100, H200", 228, 2048),
    100: ("B200", 228, 2048),
    120: ("RTX 50", 100, 1536),
}
REGISTERS = 65_536  # of an SM, of any
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# (query heads a KV head, head dim, block size, type): the models people run, and the odd ones
DECODES = [
    (2, 128, 16, torch.bfloat16),  # Qwen3-0.6B
    (4, 128, 16, torch.bfloat16),  # Llama-3-8B
    (4, 128, 16, torch.float16),
    (4, 64, 16, torch.float16),  # Llama-3.2-1B
    (1, 80, 16, torch.float16),
    (8, 96, 1, torch.bfloat16),
    (7, 128, 7, torch.bfloat16),  # Qwen2.5-7B's odd group, and an odd block
    (16, 256, 256, torch.bfloat16),
    (4, 128, 16, torch.float32),
    (2, 256, 32, torch.float32),
    (3, 64, 16, torch.float32),
    (64, 128, 16, torch.bfloat16),  # one KV head for all
    (32, 256, 16, torch.float32),  # spilled with four warps, and so did dimension 128
]
INTEGERS = {"tables_ptr": "*i32", "rows_ptr": "*i64", "splits_ptr": "*i64", "firsts_ptr": "*i64"}
ARGUMENTS = INTEGERS | {"slots_ptr": "*i64", "partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32"}


def sources(capability: tuple[int, int]) -> Iterator[tuple[str, ASTSource, dict[str, int]]]:
    """(name, source, options) of each kernel at each setting."""
    for group, head_dim, block_size, dtype in DECODES:
        decode = kernels.decode_settings(capability, group, head_dim, dtype)
        options = {name: decode.pop(name) for name in ("num_warps", "num_stages")}
        decode |= {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
        name = f"decode {TYPES[dtype]} group {group} dim {head_dim} block {block_size}"
        yield name, source(kernels.decode_kernel, TYPES[dtype], decode), options
    for (head_dim, pad), kind in itertools.product(((80, 128), (256, 256)), ("bf16", "fp32")):
        constants = {"HEAD_DIM": head_dim, "DIM_PAD": pad, "CHUNK": 16}
        yield f"reduce {kind} dim {head_dim}", source(kernels.reduce_kernel, kind, constants), {}
    for kind in ("bf16", "fp32"):
        constants = {"HEAD_DIM": 128, "BLOCK_SIZE": 16, "SIZE": 1024, "SIZE_PAD": 1024}
        yield f"store {kind} heads 8 dim 128", source(kernels.store_kernel, kind, constants), {}


def source(kernel: triton.JITFunction, kind: str, constants: dict[str, Any]) -> ASTSource:
    """The kernel as it is specialised at run time: pointers and strides divisible by 16."""
    signature = {}
    for name in kernel.arg_names:
        usual = f"*{kind}" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else ARGUMENTS.get(name, usual)
    unaligned = kernel.do_not_specialize_on_alignment or ()
    attrs = {}
    for i, (name, type_name) in enumerate(signature.items()):
        if type_name not in ("constexpr", "fp32") and name not in unaligned:
            attrs[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attrs)


def resources(binary: bytes) -> dict[str, int]:
    """Registers and stack, as the disassembler that comes with Triton reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r" REG:(\d+)", printed)[1]),
        "stack": int(re.search(r" STACK:(\d+)", printed)[1]),
    }


def overlap(ttgir: str) -> dict[str, int]:
    """How the loop over tiles loads K and V, in Triton's intermediate code.

    "buffers" is how many tiles of K, and of V, fit into shared memory, and "in flight" how many copies go on
    while a tile is computed: 2 are K and V of the next tile. Both are 0 if nothing is copied asynchronously.
    """
    buffers = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    waits = re.findall(r"ttg\.async_wait .*num = (\d+)", ttgir)
    return {"buffers": min(map(int, buffers), default=0), "in flight": max(map(int, waits), default=0)}


def measure(arch: int) -> Iterator[dict[str, Any]]:
    """Compile the kernels for an architecture: what each of them uses."""
    _, memory, most_threads = ARCHITECTURES[arch]
    reserved = 1024 if arch >= 80 else 0  # shared memory that the driver takes of each program
    for name, src, options in sources(divmod(arch, 10)):
        compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
        shared, threads = compiled.metadata.shared, 32 * compiled.metadata.num_warps
        used = resources(compiled.asm["cubin"])
        registers = -(-used["registers"] // 8) * 8  # given out in eights
        limits = [REGISTERS // (registers * threads), most_threads // threads]
        programs = min(*limits, (memory << 10) // max(1, shared + reserved))
        row = {"kernel": name, "arch": arch, "threads": threads, **used}
        yield row | {"shared": shared, "programs": programs, **overlap(compiled.asm["ttgir"])}


def main() -> None:
    for arch in ARCHITECTURES:
        for row in measure(arch):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
