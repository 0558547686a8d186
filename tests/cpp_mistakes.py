"""Mistakes in the C++ kernels, one at a time: does a test of test_cpp.py fail for each of them?

    python tests/cpp_mistakes.py

Prints a line for each mistake: the change, and the test that failed, or SURVIVED. It takes some ten minutes,
because the kernels are compiled anew for each. (mutate.py does the same for the Python files.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ATTENTION, FUSED, VECTORS = "paged_attention.cpp", "fused.cpp", "vectors.h"
MISTAKES = [  # (file, text, what stands there instead)
    (ATTENTION, "position % d.block_size;", "0;"),
    (ATTENTION, "table[position / d.block_size], offset", "table[0], offset"),
    (ATTENTION, "std::min(first + TILE, end)", "first + TILE"),
    (ATTENTION, "Ints live = lanes < (float)(end - first - t * LANES);", "Ints live = lanes < 99.0f;"),
    (ATTENTION, "Ints live = lanes < (", "Ints live = lanes <= ("),
    (ATTENTION, "(kv_head * group + i % group) * d.head_dim;", "(kv_head + i % group) * d.head_dim;"),
    (ATTENTION, "kv_head * d.cache_head;\n    const T* v_cache", "0;\n    const T* v_cache"),
    (ATTENTION, "sum_pv[v] *= rescale;", "sum_pv[v] *= 1.0f;"),
    (ATTENTION, "l[i] = l[i] * rescale + sum(total);", "l[i] = l[i] + sum(total);"),
    (ATTENTION, "even[v] + odd[v];", "even[v];"),
    (ATTENTION, "m[i] + std::log2(l[i]);", "m[i];"),
    (ATTENTION, "row_seq[i / group] * d.q_seq", "row_seq[0] * d.q_seq"),
    (ATTENTION, "const float weight = std::exp2(d.lse[source] - top);", "const float weight = 1.0f;"),
    (ATTENTION, "out[v] / total, d.head_dim - LANES * v", "out[v] / total, LANES"),
    (ATTENTION, "slots[token] % block_size * head_dim", "0"),
    (ATTENTION, "schedule(dynamic)", "schedule(dynamic) nowait"),
    (FUSED, "/ size + eps", "/ size"),
    (FUSED, "row * size + i, load(source", "row * x_row + i, load(source"),
    (FUSED, "head < num_q ? q_weight : k_weight", "q_weight"),
    (FUSED, "store(second + i, b * c + a * s, n);", "store(second + i, b * c - a * s, n);"),
    (FUSED, "load(weight + half + i, n)", "load(weight + i, n)"),
    (FUSED, "cos + token * 2 * half + i", "cos + token * half + i"),
    (FUSED, "row * 2 * width, *ups", "row * width, *ups"),
    (VECTORS, "+ 0x7fff + ((bits >> 16) & 1)", ""),
    (VECTORS, "x < 128.0f ? maximum(x, all(-126.0f)) : all(128.0f)", "maximum(x, all(-126.0f))"),
    (VECTORS, "if (n >= LANES) return store(x, v);", "return store(x, v);"),
]


def main() -> None:
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("nanopaged", "tests", "docs"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        environment = os.environ | {"PYTHONPATH": folder, "TMPDIR": folder}
        command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "tests/test_cpp.py"]
        for file, text, instead in MISTAKES:
            path = Path(folder) / "nanopaged" / "kernels" / file
            right = path.read_text(encoding="utf-8")
            assert right.count(text) == 1, f"{file} has this text {right.count(text)} times: {text}"
            path.write_text(right.replace(text, instead), encoding="utf-8")
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            path.write_text(right, encoding="utf-8")
            failed = re.search(r"^(?:FAILED|ERROR) tests/test_cpp.py::(\S+)", done.stdout, re.MULTILINE)
            survivors += done.returncode == 0
            what = "SURVIVED" if done.returncode == 0 else failed[1] if failed else f"exit {done.returncode}"
            print(f"{file}: {text!r} → {instead!r}: {what}", flush=True)
    print(f"{len(MISTAKES) - survivors} of {len(MISTAKES)} found")


if __name__ == "__main__":
    main()
