"""The Triton kernels against a dense softmax: interpreted on a small grid, on a GPU on a large one."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import LAYER, Case

pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform has not")

from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.kernels import paged_attention as kernels
from nanopaged.kv_cache import KVCache, KVShape

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = list(TOLERANCE)


def decodes(
    lens: list[int],
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Sequences with contexts of these lengths and one new token each; NaN in all other slots."""
    lengths = [(n - 1, 1) for n in lens]
    return Case(lengths, block_size, heads, head_dim, dtype, unused=math.nan, device=DEVICE)


def check(case: Case, *max_splits: int) -> None:
    """For each value of `max_splits`, see `split_contexts`."""
    attention = TritonAttention(case.cache, case.head_dim**-0.5)
    expected = case.dense()
    atol = TOLERANCE[case.dtype]
    for number in max_splits:
        attention.max_splits = lambda _, number=number: number
        out = case.run(attention)
        assert out.dtype == case.dtype
        torch.testing.assert_close(out.float(), expected, atol=atol, rtol=atol)


# ── decode ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [
        ((2, 2), 64, 16),
        ((8, 2), 128, 16),
        ((7, 1), 80, 7),
        ((6, 2), 96, 1),
        ((16, 1), 20, 256),
        ((3, 1), 256, 32),
        ((17, 1), 8, 3),
    ],
)
def test_decode_equals_dense(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    """Lengths 1 and 2, a block and its neighbours, several tiles; in one split, and in several."""
    lens = [1, 2, max(1, block_size - 1), block_size, block_size + 1, 300]
    check(decodes(lens, block_size, heads, head_dim), 1, 16)


@pytest.mark.parametrize("dtype", TYPES)
def test_decode_in_each_type(dtype: torch.dtype) -> None:
    check(decodes([5, 64, 260], 16, (4, 2), 64, dtype), 1, 3)


def test_a_context_without_keys_gives_zeros() -> None:
    """A row of padding in a CUDA graph."""
    case = decodes([5, 40], 16, (4, 2), 64)
    attention = TritonAttention(case.cache, 1.0)
    case.run(attention)
    attention.firsts = torch.tensor([0, 0, 1], device=DEVICE)
    attention.splits = torch.tensor([[1, 0, 40]], device=DEVICE)
    assert not attention.decode(LAYER, case.q)[0].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, on meeting the NaN
def test_nan_in_a_context_is_not_hidden() -> None:
    """NaN among the keys of one sequence appears in its own output, and in no other."""
    case = decodes([170, 140], 16, (2, 1), 16)
    case.cache.layer(LAYER)[0][case.tables[1][2], :, 3] = math.nan
    attention = TritonAttention(case.cache, 1.0)
    for number in (1, 4):
        attention.max_splits = lambda _, number=number: number
        out = case.run(attention)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()


def test_offsets_beyond_32_bits() -> None:
    """A cache of more than 2^31 elements, of which only a few pages are ever touched."""
    shape = KVShape(1, 1, 64, torch.float16)
    per_block = 2 * 16 * 64
    cache = KVCache(shape, 2**31 // per_block + 4, 16, DEVICE)
    far = cache.data.shape[0] - 1
    k, v = torch.randn(2, 1, 1, 64).to(DEVICE, torch.float16)
    k_cache, v_cache = cache.layer(0)
    kernels.store_kv(k, v, k_cache, v_cache, torch.tensor([far * 16], device=DEVICE))
    assert torch.equal(k_cache[far, 0, 0], k[0, 0])
    tables = torch.tensor([[far]], dtype=torch.int32, device=DEVICE)
    row, firsts = torch.tensor([0], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    splits = torch.tensor([[0, 0, 1]], device=DEVICE)
    out = kernels.paged_decode(k, k_cache, v_cache, tables, row, splits, firsts, 1.0)
    assert torch.equal(out, v)  # one key: its value is the answer


@pytest.mark.parametrize("seed", range(20))
def test_splits(seed: int) -> None:
    """Each key of each context once, in order; equal lengths; no more splits than a graph has room for."""
    rng = random.Random(seed)
    lens = np.array([rng.choice((0, 1, 127, 128, 129, 1000, 32768)) for _ in range(rng.randrange(1, 70))])
    max_splits = rng.choice((1, 2, 7, 132, 1056))
    splits, firsts = kernels.split_contexts(lens, max_splits)
    assert len(splits) == firsts[-1] <= len(lens) + max_splits
    longest = max(1, -(-lens.sum() // max_splits // kernels.MIN_SPLIT)) * kernels.MIN_SPLIT
    for i, length in enumerate(lens):
        ends = [*range(longest, length, longest), length] if length else []
        expected = [[i, start, end] for start, end in zip([0, *ends], ends, strict=False)]
        assert splits[firsts[i] : firsts[i + 1]].tolist() == expected


# ── the settings of each GPU ──────────────────────────────────────────────────────────────────────

# Compute capability → KB of shared memory that a program may have (from the CUDA C++ Programming Guide).
# Kernels are not compiled for 8.7 (Orin), 10.3 (B300), 11.0 (Thor) and 12.1 (DGX Spark).
SHARED_MEMORY = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}
SHARED_MEMORY |= {(10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99}


def most_shared(capability: tuple[int, int], settings: dict[str, Any], itemsize: int) -> int:
    """Bytes of shared memory that Triton takes at most for these settings.

    From 8.0 on, there are two tiles of K and V, as one is loaded while the other is computed, beside the
    queries and p, which are float32 at most. Before, p takes the place of K.
    """
    tile, rows, dims = (settings[name] for name in ("TILE", "GROUP_PAD", "DIM_PAD"))
    k, queries, p = tile * dims * itemsize, rows * dims * 4, rows * tile * 4
    return 4 * k + queries + p + 1024 if capability >= (8, 0) else k + queries + max(k, p)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_settings_fit_each_gpu(capability: tuple[int, int]) -> None:
    """Every head dim, group, type and block size: powers of two that hold them, within the shared memory.

    A group may have 64 query heads, and together with its dims 8,192 numbers.
    """
    heads = range(1, 65)
    for group, head_dim, dtype in itertools.product(heads, (2, 8, 20, 64, 80, 96, 128, 192, 256), TYPES):
        settings = kernels.decode_settings(capability, group, head_dim, dtype)
        tile, rows, dims = (settings[name] for name in ("TILE", "GROUP_PAD", "DIM_PAD"))
        assert all(n & (n - 1) == 0 for n in (tile, rows, dims))
        assert 16 <= tile <= kernels.MIN_SPLIT
        assert group <= rows < max(2 * group, 17)
        assert head_dim <= dims < max(2 * head_dim, 17)
        assert settings["num_warps"] in (4, 8)
        if capability >= (8, 0):
            assert rows >= 16, "tensor cores multiply 16 rows"
        if rows * dims <= 8192:
            assert most_shared(capability, settings, dtype.itemsize) <= SHARED_MEMORY[capability] << 10


@pytest.mark.parametrize("dtype", TYPES)
def test_results_do_not_depend_on_the_settings(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of each GPU (equal ones once): larger and smaller tiles, groups padded or not."""
    case = decodes([1, 17, 140], 16, (3, 1), 64, dtype)
    seen: list[dict[str, Any]] = []
    for settings in [kernels.decode_settings(capability, 3, 64, dtype) for capability in SHARED_MEMORY]:
        if settings not in seen:
            seen.append(settings)
            monkeypatch.setattr(kernels, "decode_settings", lambda *_, settings=settings: settings)
            check(case, 1, 4)
    assert {settings["GROUP_PAD"] for settings in seen} == {4, 16}


# ── compiled for GPUs that are not there ──────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_compile_without_spills(pytestconfig: pytest.Config) -> None:
    """Every kernel for seven architectures: nothing on the stack, and room for two programs on an SM.

    Where an SM has 100 KB of shared memory or less, it has room for one if a head is wide (256) or a group
    large (64); two tiles of wide float32 heads take 83 KB, so one on an A100, too. The bound of the settings'
    test holds, too, and loads overlap with products. Binaries are kept in pytest's cache.
    """
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py")]
    if hasattr(pytestconfig, "cache"):  # not with -p no:cacheprovider
        command.append(str(pytestconfig.cache.mkdir("triton")))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert {row["arch"] for row in rows} == {75, 80, 86, 89, 90, 100, 120}
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for row in rows:
        assert row["stack"] == 0, row
        capability, words = divmod(row["arch"], 10), row["kernel"].split()
        wide = "dim 256" in row["kernel"] or "group 64" in row["kernel"]
        most = 200 if "fp32" in row["kernel"] and "dim 256" in row["kernel"] else 100
        assert row["programs"] >= (1 if wide and SHARED_MEMORY[capability] < most else 2), row
        if words[0] == "decode":
            group, dim, dtype = int(words[3]), int(words[5]), types[words[1]]
            settings = kernels.decode_settings(capability, group, dim, dtype)
            assert row["shared"] <= most_shared(capability, settings, dtype.itemsize), row
            if row["arch"] >= 80:  # K and V of the next tile are loaded while this one is computed
                assert row["buffers"] >= 2, row
                assert row["in flight"] == 2, row


# ── the large grid ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "heads", [(1, 1), (8, 8), (16, 8), (12, 4), (32, 8), (40, 8), (28, 4), (16, 1), (32, 1)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_decode_on_a_gpu(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """GQA ratios 1 to 32, odd ones among them; one split = many."""
    check(decodes([1, 15, 16, 17, 255, 256, 257, 1000, 3001], 16, heads, head_dim, dtype), 1, 16, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 16, 31, 32, 64, 100, 128, 256])
def test_block_sizes_on_a_gpu(dtype: torch.dtype, block_size: int) -> None:
    """Lengths around a block and in the thousands."""
    lens = [1, max(1, block_size - 1), block_size, block_size + 1, 777, 4096, 5000]
    check(decodes(lens, block_size, (8, 2), 128, dtype), 1, 3, 16, 200)
