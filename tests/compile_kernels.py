"""Compile every Triton kernel for GPUs that need not be there, and read what they use from the binaries.

    python tests/compile_kernels.py                   the default settings, for sm_80, sm_90 and sm_100
    python tests/compile_kernels.py --json            one line for each
    python tests/compile_kernels.py --cache FOLDER    keep the binaries: compile only what has changed

Registers are per thread, the stack (bytes) is where registers spill to, shared memory (bytes) is per program.
"""

from __future__ import annotations

import argparse
import json
import os
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

from nanopaged.kernels import copy_blocks, fused
from nanopaged.kernels import paged_attention as kernels

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# (query heads a KV head, head dim, block size, type, splits): the models people run, and the odd ones
DECODES = [
    (2, 128, 16, torch.bfloat16, 1),  # Qwen3-0.6B
    (4, 128, 16, torch.bfloat16, 1),  # Llama-3-8B
    (4, 128, 16, torch.bfloat16, 16),
    (4, 64, 16, torch.float16, 8),  # Llama-3.2-1B
    (1, 80, 16, torch.float16, 1),
    (8, 96, 1, torch.bfloat16, 4),
    (7, 128, 7, torch.bfloat16, 1),  # Qwen2.5-7B's odd group, and an odd block
    (16, 256, 256, torch.bfloat16, 2),
    (4, 128, 16, torch.float32, 1),
    (2, 256, 32, torch.float32, 4),
    (3, 64, 16, torch.float32, 1),
    (64, 128, 16, torch.bfloat16, 64),  # one KV head for all, and a long context
]


def sources() -> Iterator[tuple[str, ASTSource, dict[str, int]]]:
    """(name, source, options) of each kernel at each setting."""
    for group, head_dim, block_size, dtype, num_splits in DECODES:
        decode, options = kernels.decode_settings(group, head_dim, block_size, num_splits, dtype)
        kind, out = TYPES[dtype], TYPES[dtype] if num_splits == 1 else "fp32"
        name = f"decode {kind} group {group} dim {head_dim} block {block_size} splits {num_splits}"
        pointers = {"q_ptr": kind, "k_cache_ptr": kind, "v_cache_ptr": kind, "tables_ptr": "i32"}
        pointers |= {"rows_ptr": "i64", "lens_ptr": "i64", "out_ptr": out, "lse_ptr": "fp32"}
        yield name, source(kernels.decode_kernel, pointers, decode, {"scale_log2": "fp32"}), options
        if num_splits > 1:
            pointers = {"partial_ptr": "fp32", "lse_ptr": "fp32", "lens_ptr": "i64", "out_ptr": kind}
            names = ("HEAD_DIM", "NUM_SPLITS", "TILE", "DIM_PAD")
            constants = {key: decode[key] for key in names}
            constants["SPLITS_PAD"] = triton.next_power_of_2(num_splits)
            name = f"reduce {kind} dim {head_dim} splits {num_splits}"
            yield name, source(kernels.reduce_kernel, pointers, constants), {}
    for kind in TYPES.values():
        pointers = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), kind) | {
            "slots_ptr": "i64"
        }
        constants = {"NUM_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "HEADS_PAD": 8, "DIM_PAD": 128}
        yield f"store {kind} heads 8 dim 128", source(kernels.store_kernel, pointers, constants), {}
        pointers = {"data_ptr": kind, "pairs_ptr": "i64"}
        constants = {"CHUNK": copy_blocks.COPY_CHUNK}
        yield f"copy {kind}", source(copy_blocks.copy_kernel, pointers, constants), {}
        for weight in (kind, None):
            pointers = dict.fromkeys(("qk_ptr", "q_weight_ptr", "k_weight_ptr", "cos_ptr", "sin_ptr"), kind)
            constants = {
                "NUM_Q": 16,
                "NUM_HEADS": 24,
                "HALF": 64,
                "HEADS_TILE": fused.HEADS_TILE,
                "HALF_PAD": 64,
            }
            if weight is None:
                constants |= {"q_weight_ptr": None, "k_weight_ptr": None}
            name = f"{'norm, ' if weight else ''}rotate {kind} dim 128"
            yield name, source(fused.norm_rotate_kernel, pointers, constants, {"eps": "fp32"}), {}
        pointers = dict.fromkeys(("gate_up_ptr", "out_ptr"), kind)
        yield f"silu, mul {kind}", source(fused.silu_mul_kernel, pointers, {"TILE": fused.SILU_TILE}), {}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache", help="folder of binaries, found by a hash of source, target and Triton")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as nothing:
        os.environ["TRITON_CACHE_DIR"] = args.cache or nothing
        for name, src, options in sources():
            for arch in args.arch:
                compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
                meta = compiled.metadata
                used = {"threads": 32 * meta.num_warps, **resources(compiled.asm["cubin"])}
                used["shared"] = meta.shared
                if args.json:
                    print(json.dumps({"kernel": name, "arch": arch, **used}), flush=True)
                else:
                    columns = "  ".join(f"{key} {value:6}" for key, value in used.items())
                    print(f"{name:52} sm_{arch:<4} {columns}", flush=True)


if __name__ == "__main__":
    main()
