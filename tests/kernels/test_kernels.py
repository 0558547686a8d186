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
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform has not")

from nanopaged.attention.triton_backend import BlockTables
from nanopaged.kernels import paged_attention as kernels
from nanopaged.kv_cache import KVCache, KVShape

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, LAYER = 2, 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = list(TOLERANCE)


class Case:
    """Contexts in random blocks, the first two of which all longer ones share; NaN everywhere else."""

    def __init__(
        self,
        lens: list[int],
        block_size: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(sum(lens) + head_dim)
        self.lens, self.head_dim, self.dtype = lens, head_dim, dtype
        num_heads, num_kv_heads = heads
        needed = [-(-n // block_size) for n in lens]
        ids = list(range(sum(needed) + 5))
        random.Random(0).shuffle(ids)
        shared = [ids.pop(), ids.pop()]
        self.tables = [
            shared[:n] + [ids.pop() for _ in range(n - 2)] if n > 2 else [ids.pop() for _ in range(n)]
            for n in needed
        ]
        shape = KVShape(LAYERS, num_kv_heads, head_dim, dtype)
        self.cache = KVCache(shape, sum(needed) + 5, block_size, DEVICE)
        self.cache.data.fill_(math.nan)
        k_cache, v_cache = self.cache.layer(LAYER)
        for table, n in zip(self.tables, lens, strict=True):
            for i, block in enumerate(table):
                num_keys = min(block_size, n - i * block_size)
                k_cache[block, :, :num_keys] = torch.randn(num_kv_heads, num_keys, head_dim).to(DEVICE, dtype)
                v_cache[block, :, :num_keys] = torch.randn(num_kv_heads, num_keys, head_dim).to(DEVICE, dtype)
        # Rows of a wider tensor, as the queries are in the output of a fused projection.
        self.q = torch.randn(len(lens), num_heads + 3, head_dim).to(DEVICE, dtype)[:, 1:-2]

    def decode(self, max_splits: int) -> Tensor:
        tables = BlockTables(DEVICE)
        rows = torch.tensor(tables.update(list(range(len(self.lens))), self.tables), device=DEVICE)
        splits, firsts = kernels.split_contexts(np.array(self.lens), max_splits)
        k_cache, v_cache = self.cache.layer(LAYER)
        return kernels.paged_decode(
            self.q,
            k_cache,
            v_cache,
            block_tables=tables.data,
            rows=rows,
            splits=torch.from_numpy(splits).to(DEVICE),
            firsts=torch.from_numpy(firsts).to(DEVICE),
            scale=self.head_dim**-0.5,
        )

    def dense(self) -> Tensor:
        """softmax(q Kᵀ / √d) V in float64; zeros for a sequence without keys."""
        k_cache, v_cache = (part.double() for part in self.cache.layer(LAYER))
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        for i, (table, n) in enumerate(zip(self.tables, self.lens, strict=True)):
            if n > 0:
                k, v = (part[table].transpose(0, 1).flatten(1, 2)[:, :n] for part in (k_cache, v_cache))
                q = self.q[i].double().view(len(k), -1, self.head_dim)
                p = (q @ k.transpose(1, 2) / math.sqrt(self.head_dim)).softmax(-1)
                out[i] = (p @ v).flatten(0, 1)
        return out.float()

    def check(self, *max_splits: int) -> None:
        """For each value of `max_splits`, see `split_contexts`."""
        expected = self.dense()
        for number in max_splits:
            out = self.decode(number)
            assert out.dtype == self.dtype
            atol = TOLERANCE[self.dtype]
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
    """Lengths 0, 1, a block and its neighbours, several tiles; in one split, and in several."""
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 300]
    Case(lens, block_size, heads, head_dim).check(1, 2, 16)


@pytest.mark.parametrize("dtype", TYPES)
def test_decode_in_each_type(dtype: torch.dtype) -> None:
    Case([5, 64, 260], 16, (4, 2), 64, dtype).check(1, 3)


def test_decode_of_scores_far_apart() -> None:
    """Scores of ±1e4 would overflow if the maximum were not subtracted, in tiles and between splits."""
    case = Case([300, 9], 16, (4, 2), 64)
    case.q = case.q * 1e4
    expected = case.dense()
    for max_splits in (1, 4):
        torch.testing.assert_close(case.decode(max_splits), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, on meeting the NaN
def test_nan_in_a_context_is_not_hidden() -> None:
    """NaN among the keys of one sequence appears in its own output, and in no other."""
    case = Case([170, 140], 16, (2, 1), 16)
    case.cache.layer(LAYER)[0][case.tables[1][2], :, 3] = math.nan
    for max_splits in (1, 4):
        out = case.decode(max_splits)
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


@pytest.mark.parametrize("batch", [[1024] * 63 + [32768], [700] * 255 + [32768], [512], [1024] * 256])
def test_no_program_has_much_more_than_its_share(batch: list[int]) -> None:
    """On an H100 with 8 KV heads: at most an eighth of what each of 132 multiprocessors has to read."""
    splits, _ = kernels.split_contexts(np.array(batch), max_splits=132)
    share = 8 * sum(batch) / 132
    assert (splits[:, 2] - splits[:, 1]).max() <= max(kernels.MIN_SPLIT, share / 8 + kernels.MIN_SPLIT)


# ── store ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(2, 64, 16), (3, 80, 7), (1, 20, 1)])
def test_store(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Slots in any order, -1 skipped, K and V out of a fused projection; all else stays as it was."""
    cache = KVCache(KVShape(LAYERS, num_kv_heads, head_dim, dtype), 9, block_size, DEVICE)
    cache.data.normal_()
    expected = cache.data.clone()
    fused = torch.randn(6, 4 + 2 * num_kv_heads, head_dim).to(DEVICE, dtype)
    k, v = fused[:, 4 : 4 + num_kv_heads], fused[:, 4 + num_kv_heads :]
    slots = random.Random(1).sample(range(9 * block_size), 6)
    slots[2] = -1
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, LAYER, 0, :, slot % block_size] = k[token]
            expected[slot // block_size, LAYER, 1, :, slot % block_size] = v[token]
    kernels.store_kv(k, v, *cache.layer(LAYER), torch.tensor(slots, device=DEVICE))
    assert torch.equal(cache.data, expected)


# ── the settings of each GPU ──────────────────────────────────────────────────────────────────────

# Compute capability → KB of shared memory that a program may have (from the CUDA C++ Programming Guide).
# Kernels are not compiled for 8.7 (Orin), 10.3 (B300), 11.0 (Thor) and 12.1 (DGX Spark).
SHARED_MEMORY = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}
SHARED_MEMORY |= {(10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99}


def most_shared(capability: tuple[int, int], constants: dict[str, Any], itemsize: int) -> int:
    """Bytes of shared memory that Triton takes at most for these constants.

    From 8.0 on, there are two tiles of K and V, as one is loaded while the other is computed, beside the
    queries and p, which are float32 at most. Before, p takes the place of K.
    """
    tile, rows, dims = (constants[name] for name in ("TILE", "GROUP_PAD", "DIM_PAD"))
    k, queries, p = tile * dims * itemsize, rows * dims * 4, rows * tile * 4
    return 4 * k + queries + p + 1024 if capability >= (8, 0) else k + queries + max(k, p)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_settings_fit_each_gpu(capability: tuple[int, int]) -> None:
    """Every head dim, group, type and block size: powers of two that hold them, within the shared memory.

    A group may have 64 query heads, and together with its dims 8,192 numbers.
    """
    heads = range(1, 65)
    for group, head_dim, dtype in itertools.product(heads, (2, 8, 20, 64, 80, 96, 128, 192, 256), TYPES):
        constants, options = kernels.decode_settings(capability, group, head_dim, dtype)
        tile, rows, dims = (constants[name] for name in ("TILE", "GROUP_PAD", "DIM_PAD"))
        assert all(n & (n - 1) == 0 for n in (tile, rows, dims))
        assert 16 <= tile <= kernels.MIN_SPLIT
        assert group <= rows < max(2 * group, 17)
        assert head_dim <= dims < max(2 * head_dim, 17)
        assert options["num_warps"] in (4, 8)
        if capability >= (8, 0):
            assert rows >= 16, "tensor cores multiply 16 rows"
        if rows * dims <= 8192:
            assert most_shared(capability, constants, dtype.itemsize) <= SHARED_MEMORY[capability] << 10


@pytest.mark.parametrize("dtype", TYPES)
def test_results_do_not_depend_on_the_settings(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the constants of each GPU (equal ones once): larger and smaller tiles, groups padded or not."""
    settings, case = kernels.decode_settings, Case([0, 17, 140], 16, (3, 1), 64, dtype)
    seen: list[dict[str, Any]] = []
    for capability in SHARED_MEMORY:
        constants, _ = settings(capability, 3, 64, dtype)
        if constants not in seen:
            seen.append(constants)
            monkeypatch.setattr(
                kernels, "decode_settings", lambda _, *setting, own=capability: settings(own, *setting)
            )
            case.check(1, 4)
    assert {constants["GROUP_PAD"] for constants in seen} == {4, 16}


# ── compiled for GPUs that are not there ──────────────────────────────────────────────────────────

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_compile_without_spills(pytestconfig: pytest.Config) -> None:
    """Every kernel for seven architectures: nothing on the stack, and room for two programs on an SM.

    Where an SM has 100 KB of shared memory or less, it has room for one if a head is wide (256) or a group
    large (64); two tiles of wide float32 heads take 83 KB, so one on an A100, too. The bound of the settings'
    test holds, too, and loads overlap with products.

    Binaries are kept in pytest's cache; a kernel is compiled again if its source, the target or Triton has
    changed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), "--json"]
    if hasattr(pytestconfig, "cache"):  # not with -p no:cacheprovider
        command += ["--cache", str(pytestconfig.cache.mkdir("triton"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    *compiled, summary = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = {(row["kernel"].split()[0], row["arch"]) for row in compiled}
    names = ("decode", "reduce", "store")
    assert kinds == {(name, arch) for name in names for arch in ARCHITECTURES}
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for row in compiled:
        assert row["stack"] == 0, row
        capability, words = divmod(row["arch"], 10), row["kernel"].split()
        wide = "dim 256" in row["kernel"] or "group 64" in row["kernel"]
        most = 200 if "fp32" in row["kernel"] and "dim 256" in row["kernel"] else 100
        assert row["programs"] >= (1 if wide and SHARED_MEMORY[capability] < most else 2), row
        if words[0] == "decode":
            group, dim, dtype = int(words[3]), int(words[5]), types[words[1]]
            constants, _ = kernels.decode_settings(capability, group, dim, dtype)
            assert row["shared"] <= most_shared(capability, constants, dtype.itemsize), row
            if row["arch"] >= 80:  # K and V of the next tile are loaded while this one is computed
                assert row["buffers"] >= 2, row
                assert row["in flight"] == 2, row
    text = (ROOT / "docs" / "records" / "gpu-status.md").read_text(encoding="utf-8")
    if f"| Triton {summary['triton']} |" in text:  # other versions have other numbers
        assert summary["table"] in text


# ── the large grid ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "heads", [(1, 1), (8, 8), (16, 8), (12, 4), (32, 8), (40, 8), (28, 4), (16, 1), (32, 1)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_decode_on_a_gpu(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """GQA ratios 1 to 32, odd ones among them; one split = many."""
    Case([0, 1, 15, 16, 17, 255, 256, 257, 1000, 3001], 16, heads, head_dim, dtype).check(1, 16, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 16, 31, 32, 64, 100, 128, 256])
def test_block_sizes_on_a_gpu(dtype: torch.dtype, block_size: int) -> None:
    """Lengths around a block and in the thousands."""
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 777, 4096, 5000]
    Case(lens, block_size, (8, 2), 128, dtype).check(1, 3, 16, 200)
