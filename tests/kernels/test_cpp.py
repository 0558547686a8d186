"""The C++ kernels: numbers, the engine with them, and what happens where they cannot be built.

cpp_mistakes.py, which is run by hand, plants mistakes in the kernels; each makes a test of this file fail.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Oracle, random_prompts
from serving import serve
from test_attention import CASES, CPU, LAYER, Case
from torch import Tensor

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.attention import cpp_backend, make_attention
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.kernels import cpp
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model import layers

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BUILT = Path(tempfile.gettempdir()) / f"nanopaged-test-kernels-{os.getuid() if hasattr(os, 'getuid') else 0}"


@pytest.fixture(autouse=True)
def built_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of these sources, in a folder of the tests."""
    if cpp.compiler() is None:
        pytest.skip("no C++ compiler (Debian and Ubuntu: apt install g++)")
    monkeypatch.setenv("NANOPAGED_CACHE", str(BUILT))
    monkeypatch.setattr(cpp_backend, "MIN_SAVED_KEYS", 1)  # blocks that are shared are read once, however few


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("block_size", [1, 4, 7, 16, 100])
def test_attention_equals_a_dense_softmax(lengths: list[tuple[int, int]], block_size: int) -> None:
    """Groups of 1, 3 and 16 heads. What the slots without a token hold is never read: NaN."""
    for heads, head_dim in (((4, 4), 8), ((6, 2), 20), ((16, 1), 64)):
        case = Case(lengths, block_size, heads, head_dim, unused=math.nan)
        torch.testing.assert_close(case.run("cpp"), case.dense(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 80, 96, 128, 192, 256])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    skip_without(dtype)
    case = Case([(70, 1), (0, 1), (31, 1), (32, 1)], 16, (6, 2), head_dim, dtype, unused=math.nan)
    torch.testing.assert_close(
        case.run("cpp").float(), case.dense(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def skip_without(dtype: torch.dtype) -> None:
    if cpp.why_no_cpp(CPU, 8, dtype) is not None:
        pytest.skip("the compiler has no float16 (GCC 12 and Clang 15 have)")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("run_keys", [1, 64, 512])
@pytest.mark.parametrize("seed", range(4))
def test_shared_blocks_and_runs(
    seed: int, run_keys: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of tables: every sequence gets what it gets alone, for any cut of the contexts into runs."""
    monkeypatch.setattr(cpp_backend, "RUN_KEYS", run_keys)
    rng = np.random.default_rng(seed)
    size, num_seqs = (4, 16)[seed % 2], 9
    cache = KVCache(KVShape(2, 2, 24, torch.float32), 400, size, CPU)
    cache.data.normal_()
    fresh = iter(rng.permutation(400).tolist())
    tables: list[list[int]] = []
    for _ in range(num_seqs):
        parent = tables[rng.integers(len(tables))] if tables else []
        table = parent[: rng.integers(len(parent) + 1)]
        tables.append(table + [next(fresh) for _ in range(rng.integers(1, 12))])
    lens = np.array([len(t) * size - rng.integers(size) for t in tables])
    last = [t[-1] * size + (n - 1) % size for t, n in zip(tables, lens, strict=True)]
    metadata = AttentionMetadata(
        np.ones(num_seqs, dtype=np.int64), lens, tables, np.array(last), num_seqs, list(range(num_seqs))
    )
    q, k, v = (torch.randn(num_seqs, n, 24) for n in (6, 2, 2))
    outs = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for backend in ("reference", "cpp"):
            attention = make_attention(backend, cache, 24**-0.5)
            attention.begin_step(metadata)
            outs.append(attention(LAYER, q, k, v))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(outs[1], outs[0], atol=2e-5, rtol=1e-4)


def test_a_nan_of_a_live_token_is_not_hidden() -> None:
    """The engine refuses logits that are not finite, so attention must not swallow what makes them so."""
    for place in ("queries", "keys", "values"):
        case = Case([(9, 1), (20, 1)], 4, (2, 2), 8)
        getattr(case, place)[1][-1] = math.nan
        out = case.run("cpp")
        assert out[0].isfinite().all()
        assert out[1].isnan().all(), place


def test_scores_of_any_size() -> None:
    """The largest of them has all the weight, and exp2 neither overflows nor underflows to NaN."""
    case = Case([(40, 1)], 4, (2, 2), 8)
    case.queries[0] *= 1e4
    torch.testing.assert_close(case.run("cpp"), case.dense(), atol=1e-3, rtol=1e-3)


# ── the fused operations ──────────────────────────────────────────────────────────────────────────


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (3, 17), (5, 64), (700, 100)])
def test_rms_norm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    skip_without(dtype)
    wide, weight = torch.randn(num_tokens, 2 * size).to(dtype) * 3, torch.randn(size).to(dtype)
    x = wide[:, :size]  # rows that are not contiguous
    actual = cpp.fused_rms_norm(x, 1e-3, weight)
    assert_close(actual, layers.rms_norm(x.float(), 1e-3, weight.float()), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """As PyTorch rounds what float32 gives."""
    skip_without(dtype)
    x, weight = torch.randn(50, 64).to(dtype), torch.randn(64).to(dtype)
    exact = cpp.fused_rms_norm(x.float(), 1e-6, weight.float())
    assert torch.equal(cpp.fused_rms_norm(x, 1e-6, weight), exact.to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_q", "num_k", "head_dim"), [(2, 1, 8), (17, 1, 20), (6, 2, 2), (28, 4, 128)])
def test_norm_rotate(num_q: int, num_k: int, head_dim: int, normalise: bool, dtype: torch.dtype) -> None:
    """On part of a wider projection, whose other values stay unchanged."""
    skip_without(dtype)
    qkv = torch.randn(70, num_q + 2 * num_k, head_dim).to(dtype) * 3
    weights = tuple(torch.randn(2, head_dim).to(dtype)) if normalise else None
    angles = torch.randn(70, 1, head_dim // 2) * 10
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1).to(dtype), angles.sin().to(dtype)
    before, qk = qkv.clone(), qkv[:, : num_q + num_k]
    floats = (weights[0].float(), weights[1].float()) if weights is not None else None
    expected = layers.norm_rotate(qk.float(), num_q, floats, 1e-3, cos.float(), sin.float())
    assert_close(cpp.fused_norm_rotate(qk, num_q, weights, 1e-3, cos, sin), expected, dtype)
    assert torch.equal(qkv[:, num_q + num_k :], before[:, num_q + num_k :])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 48, 1025])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    """Also of gates so large that e^-x is infinite or 0."""
    skip_without(dtype)
    gate_up = torch.randn(70, 2 * width).to(dtype) * 5
    gate_up[:3, 0] = torch.tensor([-1000, 1000, math.nan])
    assert_close(
        cpp.fused_silu_mul(gate_up).nan_to_num(99), layers.silu_mul(gate_up.float()).nan_to_num(99), dtype
    )


# ── the engine ────────────────────────────────────────────────────────────────────────────────────


def test_the_engine_gives_the_tokens_of_transformers(oracle: Oracle) -> None:
    """Greedy and with log-probabilities, for each family: chunks, decodes and a prefix that is found."""
    prompts = random_prompts(4, seed=5, longest=60)
    prompts += [prompts[-1] + [3, 4]]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    llm = LLM(
        oracle.folder,
        dtype="float32",
        attention_backend="cpp",
        block_size=4,
        num_blocks=100,
        max_num_batched_tokens=24,
    )
    for prompt, output in zip(prompts, serve(llm, prompts, [params] * 5), strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == oracle.greedy(prompt, 8)
        expected = oracle.logprobs(prompt + completion.token_ids)
        for row, token, reference in zip(
            completion.logprobs, completion.token_ids, expected[len(prompt) - 1 :], strict=False
        ):
            assert row[token] == pytest.approx(reference[token].item(), abs=1e-4)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_samples_and_beams_in_a_small_pool(qwen3: Oracle, preemption: str) -> None:
    """They share blocks, copy them and are preempted: the same texts as with the plain backend."""
    prompts = random_prompts(6, seed=3, longest=40)
    sampled = SamplingParams(n=3, seed=1, temperature=0.8, max_tokens=12, ignore_eos=True)
    params = [sampled, BeamSearchParams(beam_width=3, max_tokens=10)] * 3
    texts = []
    for backend in ("torch", "cpp"):
        llm = LLM(
            qwen3.folder,
            dtype="float32",
            attention_backend=backend,
            block_size=4,
            num_blocks=40,
            preemption=preemption,
        )
        outputs = serve(llm, prompts, params)
        texts.append([[completion.token_ids for completion in output.outputs] for output in outputs])
        assert getattr(llm.engine.stats(), f"num_preemptions_{preemption}") > 0
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_two_ranks(qwen3: Oracle) -> None:
    """Each of two processes has the kernels, and half of the heads."""
    prompts = random_prompts(3, seed=9, longest=30)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM(qwen3.folder, attention_backend="cpp", num_blocks=64, tensor_parallel_size=2, dtype="float32")
    for prompt, output in zip(prompts, serve(llm, prompts, [params] * 3), strict=True):
        assert output.outputs[0].token_ids == qwen3.greedy(prompt, 6)


# ── building ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the library, in a process that has loaded none."""
    monkeypatch.setenv("NANOPAGED_CACHE", str(tmp_path / "cache"))
    cpp.load.cache_clear()
    yield tmp_path / "cache"
    cpp.load.cache_clear()


def fake_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of our own: a script that gets the arguments."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def backend_of(qwen3: Oracle, backend: str) -> str:
    return type(LLM(qwen3.folder, attention_backend=backend, num_blocks=8).engine.runner.attention).__name__


@pytest.mark.slow
def test_auto_takes_the_kernels_only_if_they_have_been_built(
    qwen3: Oracle, nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert backend_of(qwen3, "auto") == "TorchAttention"
    assert not nothing_built.exists()
    environment = os.environ | {"PYTHONPATH": str(cpp.FOLDER.parents[1])}
    for _ in range(2):  # the second finds the first's
        done = subprocess.run(
            [sys.executable, "-m", "nanopaged.kernels.build"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert str(cpp.library_path()) in done.stdout
    assert backend_of(qwen3, "auto") == "CppAttention"
    assert len(list(nothing_built.iterdir())) == 1
    assert not caplog.records


def test_without_a_compiler_the_error_says_what_to_install(
    qwen3: Oracle, nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no 'no-such-compiler': install one .*apt install g\\+\\+"):
        backend_of(qwen3, "cpp")
    assert backend_of(qwen3, "auto") == "TorchAttention"


def test_a_compiler_that_fails_is_quoted(
    qwen3: Oracle, nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, "echo 'error: unknown type name' >&2; exit 1", monkeypatch)
    with pytest.raises(ValueError, match="(?s)could not build.*unknown type name"):
        backend_of(qwen3, "cpp")
    assert not list(nothing_built.iterdir())


def test_a_broken_library_is_not_used(
    qwen3: Oracle, nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ "auto" goes on without it and warns; "cpp" says what to delete."""
    nothing_built.mkdir()
    cpp.library_path().write_bytes(b"no library")
    assert backend_of(qwen3, "auto") == "TorchAttention"
    assert "the C++ kernels are not used" in caplog.text
    with pytest.raises(ValueError, match="cannot be loaded .*delete it"):
        backend_of(qwen3, "cpp")


@pytest.mark.slow
def test_a_library_with_wrong_results_is_not_used(
    qwen3: Oracle, nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a compiler with a bug: here one that is told to compute sigmoid(-x)."""
    wrong = tmp_path / "fused.cpp"
    text = (cpp.FOLDER / "fused.cpp").read_text(encoding="utf-8")
    wrong.write_text(
        text.replace("-1.44269504f", "1.44269504f").replace('"vectors.h"', f'"{cpp.HEADER}"'),
        encoding="utf-8",
    )
    monkeypatch.setattr(cpp, "SOURCES", [cpp.SOURCES[0], wrong])
    with pytest.raises(ValueError, match="computes wrong results: delete it"):
        backend_of(qwen3, "cpp")
    assert backend_of(qwen3, "auto") == "TorchAttention"


def test_a_library_of_other_sources_is_not_used(
    qwen3: Oracle, nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing_built.mkdir()
    (nothing_built / "kernels-0123.so").write_bytes(b"of last month")
    with caplog.at_level(logging.WARNING):
        assert backend_of(qwen3, "auto") == "TorchAttention"
    assert "python -m nanopaged.kernels.build builds them again" in caplog.text


@pytest.mark.slow
def test_two_processes_that_build_at_once(nothing_built: Path) -> None:
    """Each has a whole library in the end, and there is one."""
    code = "from nanopaged.kernels import cpp; cpp.load(); print('loaded')"
    environment = os.environ | {"PYTHONPATH": str(cpp.FOLDER.parents[1])}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["loaded"] * 2
    assert len(list(nothing_built.iterdir())) == 1


def test_what_the_kernels_cannot_do_is_refused() -> None:
    cache = KVCache(KVShape(1, 1, 264, torch.float32), 2, 4, CPU)
    with pytest.raises(ValueError, match="heads of up to 256 numbers, and this model has 264"):
        make_attention("cpp", cache, 1.0)
    small = KVCache(KVShape(1, 1, 8, torch.float32), 2, 4, CPU)
    with pytest.raises(ValueError, match="no place for a score_mod"):
        make_attention("cpp", small, 1.0, lambda layer, scores, queries, keys: scores)
    assert cpp.why_no_cpp(torch.device("meta"), 8, torch.float32) == "its kernels run on a CPU, not on meta"
