"""Compile every Triton kernel for GPUs that need not be there, and read what they use from the binaries.

    python tests/compile_kernels.py                   a line for each, and the table of gpu-status.md
    python tests/compile_kernels.py --table           the table alone
    python tests/compile_kernels.py --json            the same, for programs
    python tests/compile_kernels.py --cache FOLDER    keep the binaries: compile only what has changed

Registers are per thread, the stack (bytes) is where registers spill to, shared memory (bytes) is per program.
"programs" is how many of them a streaming multiprocessor (SM) holds at once; for the others see `overlap`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c as one instruction; unset, 3.9 warns

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
TABLE = {  # columns of the table → a kernel; {half} is bf16, and fp16 where a GPU has no bfloat16
    "16 bits, 4 heads of 128": "decode {half} group 4 dim 128 block 16",
    "float16, 4 heads of 64": "decode fp16 group 4 dim 64 block 16",
    "float32, 4 heads of 128": "decode fp32 group 4 dim 128 block 16",
}


def sources(arch: int) -> Iterator[tuple[str, ASTSource, dict[str, int]]]:
    """(name, source, options) of each kernel at each setting that an architecture needs.

    sm_89 has the code of sm_86 (as many registers in each kernel), so the table's settings are enough. The
    small kernels are the same everywhere, so three architectures compile all their types.
    """
    capability = divmod(arch, 10)
    decodes, small = DECODES, TYPES.values() if arch in (75, 80, 90) else ["bf16"]
    if arch == 75:  # a checkpoint in bfloat16 is read as float16, unless the user wants it as it is
        half = {torch.bfloat16: torch.float16}
        decodes = [*[(*d[:3], half.get(d[3], d[3])) for d in DECODES], DECODES[0]]
    if arch == 89:
        decodes = [DECODES[1], DECODES[2], DECODES[7]]
    for group, head_dim, block_size, dtype in decodes:
        decode, options = kernels.decode_settings(capability, group, head_dim, dtype)
        decode |= {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
        kind = TYPES[dtype]
        pointers = {"q_ptr": kind, "k_cache_ptr": kind, "v_cache_ptr": kind, "tables_ptr": "i32"}
        pointers |= {"rows_ptr": "i64", "splits_ptr": "i64", "partial_ptr": "fp32", "lse_ptr": "fp32"}
        name = f"decode {kind} group {group} dim {head_dim} block {block_size}"
        yield name, source(kernels.decode_kernel, pointers, decode, {"scale_log2": "fp32"}), options
    for (head_dim, pad), kind in itertools.product(((80, 128), (128, 128), (256, 256)), small):
        pointers = {"partial_ptr": "fp32", "lse_ptr": "fp32", "firsts_ptr": "i64", "out_ptr": kind}
        constants = {"HEAD_DIM": head_dim, "DIM_PAD": pad, "CHUNK": 16}
        yield f"reduce {kind} dim {head_dim}", source(kernels.reduce_kernel, pointers, constants), {}
    for kind in small:
        pointers = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), kind) | {
            "slots_ptr": "i64"
        }
        constants = {"NUM_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "HEADS_PAD": 8, "DIM_PAD": 128}
        yield f"store {kind} heads 8 dim 128", source(kernels.store_kernel, pointers, constants), {}


def source(
    kernel: triton.JITFunction,
    pointers: dict[str, str],
    constants: dict[str, object],
    others: dict[str, str] | None = None,
) -> ASTSource:
    """The kernel as it is specialised at run time: pointers and strides divisible by 16."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = f"*{pointers[name]}" if name in pointers else (others or {}).get(name, "i32")
    unaligned = kernel.do_not_specialize_on_alignment or ()
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in unaligned
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return ASTSource(kernel, signature, constants, attrs)


def resources(binary: bytes) -> dict[str, int]:
    """Registers and stack, as the disassembler that comes with Triton reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":", 1) for field in printed.split() if field.count(":") == 1)
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"])}


def overlap(ttgir: str) -> dict[str, int]:
    """How the loop over tiles loads K and V, in Triton's intermediate code.

    "buffers" is how many tiles of K, and of V, fit into shared memory, and "in flight" how many copies go on
    while a tile is computed: 2 are K and V of the next tile. Both are 0 if nothing is copied asynchronously.
    """
    buffers = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    waits = re.findall(r"ttg\.async_wait .*num = (\d+)", ttgir)
    return {"buffers": min(map(int, buffers), default=0), "in flight": max(map(int, waits), default=0)}


def measure(arch: int) -> Iterator[dict[str, object]]:
    """Compile the kernels for an architecture: what each of them uses."""
    _, memory, most_threads = ARCHITECTURES[arch]
    reserved = 1024 if arch >= 80 else 0  # shared memory that the driver takes of each program
    for name, src, options in sources(arch):
        compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
        meta = compiled.metadata
        used = resources(compiled.asm["cubin"])
        threads = 32 * meta.num_warps
        registers = -(-used["registers"] // 8) * 8  # given out in eights
        programs = min(
            REGISTERS // (registers * threads),
            (memory << 10) // max(1, meta.shared + reserved),
            most_threads // threads,
        )
        row = {"kernel": name, "arch": arch, "threads": threads, **used}
        yield row | {"shared": meta.shared, "programs": programs, **overlap(compiled.asm["ttgir"])}


def table(rows: list[dict[str, object]]) -> str:
    """The table of docs/records/gpu-status.md, in Markdown: registers · shared memory · programs of an SM."""
    lines = [
        f"| Triton {triton.__version__} | {' | '.join(TABLE)} | spilled |",
        "|---" * (len(TABLE) + 2) + "|",
    ]
    for arch in dict.fromkeys(row["arch"] for row in rows):
        gpus = ARCHITECTURES[arch][0]
        used = {row["kernel"]: row for row in rows if row["arch"] == arch}
        picked = [used[name.format(half="bf16" if arch >= 80 else "fp16")] for name in TABLE.values()]
        cells = [f"{row['registers']} · {row['shared']:,} · {row['programs']}" for row in picked]
        spilled = max(row["stack"] for row in used.values())
        lines.append(f"| sm_{arch} ({gpus}) | {' | '.join(cells)} | {spilled} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache", help="folder of binaries, found by a hash of source, target and Triton")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as nothing:
        os.environ["TRITON_CACHE_DIR"] = args.cache or nothing
        rows = []
        for row in itertools.chain.from_iterable(map(measure, args.arch)):
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
            elif not args.table:
                numbers = "  ".join(f"{key} {value:6}" for key, value in list(row.items())[2:])
                print(f"{row['kernel']:52} sm_{row['arch']:<4} {numbers}", flush=True)
        if args.json:
            print(json.dumps({"triton": triton.__version__, "table": table(rows)}))
        else:
            print(table(rows))


if __name__ == "__main__":
    main()
