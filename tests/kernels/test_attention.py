"""The paged backends against a dense softmax, and against each other."""

from __future__ import annotations

import importlib.util
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CPU, LAYER, LENGTHS, Case
from torch import Tensor

from nanopaged.attention import choose_backend
from nanopaged.kv_cache import KVShape

is_interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs interpreted Triton kernels; test_kernels.py has compiled ones",
)
BACKENDS = ["torch", "reference", pytest.param("triton", marks=is_interpreted)]


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((6, 2), 20)])
def test_backends_equal_dense_attention(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], head_dim: int
) -> None:
    """GQA or not, odd head dims, any block size; what unused slots and other blocks hold must not leak."""
    for backend, unused in (("torch", 0.0), ("torch", 1e4), ("reference", math.nan)):
        Case(lengths, block_size, heads, head_dim, unused=unused).check(backend)


@is_interpreted
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_interpreted_kernels_equal_dense_attention(lengths: list[tuple[int, int]]) -> None:
    """In blocks of 7. (test_kernels.py has other sizes.)"""
    Case(lengths, 7, (6, 2), 20, unused=math.nan).check("triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_output_is_rounded_where_16_bits_are_slow(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512, PyTorch's products of 16 bits take 13 times as long as those of float32."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    case = Case([(50, 1), (17, 1), (20, 30)], 16, (5, 1), 64, dtype)
    is_same = case.run("torch") == case.dense().to(dtype)
    assert is_same.double().mean() > 0.99  # of the others, the exact number lies between two


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_apart_do_not_overflow(backend: str) -> None:
    """Scores of ±1e4 would overflow exp in float32 if the maximum were not subtracted first."""
    case = Case([(300, 1), (9, 1), (5, 3)], 4, (4, 2), 16)
    case.q.mul_(1e4)
    torch.testing.assert_close(case.run(backend), case.dense(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_writes_only_its_own_slots(backend: str) -> None:
    """Other slots keep their bytes, NaN included; "torch" fills a block that begins with 0."""
    case = Case([(5, 1), (2, 7)], 4, (4, 2), 8)
    expected = case.cache.data.clone()
    if backend == "torch":
        expected[case.tables[1][1:3]] = 0  # the blocks of tokens 4 to 7 and of token 8
    case.run(backend)
    for token, slot in enumerate(case.metadata.slot_mapping.tolist()):
        expected[slot // 4, LAYER, 0, :, slot % 4] = case.k[token]
        expected[slot // 4, LAYER, 1, :, slot % 4] = case.v[token]
    torch.testing.assert_close(case.cache.data, expected, atol=0, rtol=0, equal_nan=True)


# ── changed scores ────────────────────────────────────────────────────────────────────────────────


def softcap(layer: int, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return 0.5 * (scores / 0.5).tanh() if layer == LAYER else scores * math.nan


def window(layer: int, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return scores.masked_fill(keys <= queries - 9, -math.inf)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("block_size", [7, 100])
def test_a_score_mod_changes_the_scores_before_the_softmax(
    lengths: list[tuple[int, int]], block_size: int
) -> None:
    """A softcap and a window, as in Gemma 2: in decodes and prefills, with blocks before the window."""
    for backend, unused in (("torch", 0.0), ("torch", 1e4), ("reference", math.nan)):
        Case(lengths, block_size, (6, 2), 20, unused=unused).check(backend, softcap, cap=0.5)
        Case(lengths, block_size, (6, 2), 20, unused=unused).check(backend, window, window=9)


# ── flash attention, and which backend can run ────────────────────────────────────────────────────


def dense_varlen(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, softmax_scale: float, causal: bool
) -> Tensor:
    """What flash attention computes, one sequence at a time: causal, aligned to the end."""
    cu_q, cu_k, max_q, max_k = lengths
    assert causal
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    out = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril_(k1 - k0 - (q1 - q0))
        heads = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out.append(F.scaled_dot_product_attention(*heads, seen, scale=softmax_scale, enable_gqa=True))
    return torch.cat([x.transpose(0, 1) for x in out])


@is_interpreted
@pytest.mark.parametrize("lengths", [lengths for lengths in LENGTHS.values() if lengths[-1][1] > 1])
@pytest.mark.parametrize(("block_size", "gather_keys"), [(7, 1), (1, 30), (7, 1 << 16)])
def test_the_inputs_of_flash_attention(
    lengths: list[tuple[int, int]], block_size: int, gather_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flat layout of queries and contexts, with the kernel itself replaced by plain PyTorch.

    Contexts are gathered one by one, a few together, or all at once.
    """
    from nanopaged.attention import flash_backend

    monkeypatch.setattr(flash_backend, "load_varlen", lambda: dense_varlen)
    monkeypatch.setattr("nanopaged.attention.metadata.GATHER_KEYS", gather_keys)
    case = Case(lengths, block_size, (6, 2), 20)
    case.check(flash_backend.FlashAttention(case.cache, 20**-0.5))


@is_interpreted
def test_how_flash_attention_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn if it is there (4 alone is not), else PyTorch's, which 2.11 has without `enable_gqa`."""
    from nanopaged.attention import flash_backend

    calls: list[dict[str, Any]] = []

    def call(name: str, **members: Any) -> None:
        with monkeypatch.context() as patch:
            for module in ("flash_attn", "torch.nn.attention.varlen"):
                patch.setitem(sys.modules, module, SimpleNamespace(**(members if module == name else {})))
            flash_backend.load_varlen.cache_clear()
            flash_backend.load_varlen()("q", "k", softmax_scale=0.5, causal=True)

    def new(q: str, k: str, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> None:
        calls.append(locals())

    def old(q: str, k: str, scale: float, window_size: tuple[int, int]) -> None:  # of torch 2.11
        calls.append({"k": k, "scale": scale, "window_size": window_size})

    call("flash_attn", flash_attn_varlen_func=lambda q, k, **options: calls.append(options))
    assert calls.pop() == {"softmax_scale": 0.5, "causal": True}
    call("torch.nn.attention.varlen", varlen_attn=new)
    options = {"q": "q", "k": "k", "scale": 0.5, "window_size": (-1, 0), "enable_gqa": True}
    assert calls.pop() == options | {"calls": calls}
    call("torch.nn.attention.varlen", varlen_attn=old)
    assert calls.pop() == {"k": "k", "scale": 0.5, "window_size": (-1, 0)}, "the kernel takes grouped heads"
    with pytest.raises(ImportError, match="lacks window_size"):
        call("torch.nn.attention.varlen", varlen_attn=lambda q, k: None)
    flash_backend.load_varlen.cache_clear()


def test_a_backend_that_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOPAGED_CACHE", str(tmp_path))  # where no C++ kernels have been built
    shape = KVShape(1, 1, 8, torch.float32)

    def check(name: str, reason: str, *score_mod: Any) -> None:
        with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot run here: {reason}"):
            choose_backend(name, CPU, shape, *score_mod)
        assert choose_backend("auto", CPU, shape, *score_mod) == "torch"

    check("flash", "(flash attention needs a GPU .*not cpu|Triton cannot be imported)")
    check("triton", "its kernels have no place for a", softcap)
    check("flash", "its kernels have no place for a", softcap)
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("nanopaged.kernels.paged_attention.INTERPRETED", False)
        check("triton", ".*a CUDA GPU.*TRITON_INTERPRET=1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "nanopaged.kernels.paged_attention", raising=False)
    monkeypatch.delattr("nanopaged.kernels.paged_attention", raising=False)
    check("triton", "Triton cannot be imported")
