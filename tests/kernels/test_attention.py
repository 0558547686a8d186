"""The paged backends against a dense softmax, and against each other."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Oracle, random_prompts
from serving import serve, tokens_of
from torch import Tensor

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.attention import make_attention
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.reference_backend import ScoreMod
from nanopaged.attention.torch_backend import QUERY_TILE, TorchAttention
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model_runner import ModelRunner

CPU = torch.device("cpu")
LAYERS, LAYER = 2, 1


class Case:
    """Sequences with some K/V in the cache and some new, in random blocks; a new cache is full of NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        block_size: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        unused: float = 0.0,
    ) -> None:
        """
        Args:
            lengths: (cached, new) tokens of each sequence; those with one new token first.
            unused: what the slots without a token hold, in blocks whose first token is cached. In the engine
                it is 0, or K/V of a former owner. Blocks whose first token is new hold NaN as yet.
        """
        torch.manual_seed(sum(cached + new for cached, new in lengths) + block_size + head_dim)
        rng = random.Random(0)
        num_heads, num_kv_heads = heads
        self.lengths, self.head_dim = lengths, head_dim
        # A table has a block for tokens to come, as in a chunk of a prompt.
        num_blocks = [-(-(cached + new) // block_size) + 1 for cached, new in lengths]
        ids = rng.sample(range(sum(num_blocks) + 3), sum(num_blocks))
        self.tables = [[ids.pop() for _ in range(n)] for n in num_blocks]
        self.cache = KVCache(
            KVShape(LAYERS, num_kv_heads, head_dim, dtype), sum(num_blocks) + 3, block_size, CPU
        )
        self.keys = [torch.randn(c + n, num_kv_heads, head_dim).to(dtype) for c, n in lengths]
        self.values = [torch.randn(c + n, num_kv_heads, head_dim).to(dtype) for c, n in lengths]
        self.queries = [torch.randn(n, num_heads, head_dim).to(dtype) for _, n in lengths]
        k_cache, v_cache = self.cache.layer(LAYER)
        slots: list[int] = []
        for table, (cached, new), k, v in zip(self.tables, lengths, self.keys, self.values, strict=True):
            for p in range(cached + new):
                block, offset = table[p // block_size], p % block_size
                if p < cached:
                    if offset == 0:
                        self.cache.data[block] = unused
                    k_cache[block, :, offset] = k[p]
                    v_cache[block, :, offset] = v[p]
                else:
                    slots.append(block * block_size + offset)
        self.metadata = AttentionMetadata(
            query_lens=np.array([new for _, new in lengths]),
            context_lens=np.array([cached + new for cached, new in lengths]),
            block_tables=self.tables,
            slot_mapping=np.array(slots),
            num_decodes=sum(new == 1 for _, new in lengths),
            seq_ids=list(range(len(lengths))),
        )

    def run(self, backend: str | TorchAttention, score_mod: ScoreMod | None = None) -> Tensor:
        if isinstance(backend, str):
            backend = make_attention(backend, self.cache, self.head_dim**-0.5, score_mod)
        backend.begin_step(self.metadata)
        new_k = torch.cat([k[c:] for k, (c, _) in zip(self.keys, self.lengths, strict=True)])
        new_v = torch.cat([v[c:] for v, (c, _) in zip(self.values, self.lengths, strict=True)])
        return backend(LAYER, torch.cat(self.queries), new_k, new_v)

    def dense(self, cap: float = math.inf, window: int = 1 << 60) -> Tensor:
        """softmax(q Kᵀ / √d) V with a causal mask, one sequence at a time, in float64.

        Args:
            cap: of the scores, as cap · tanh(score / cap).
            window: keys that a query attends to, its own included.
        """
        out = []
        for q, k, v, (cached, new) in zip(self.queries, self.keys, self.values, self.lengths, strict=True):
            group = q.shape[1] // k.shape[1]
            k = k.double().repeat_interleave(group, dim=1)
            v = v.double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(self.head_dim)
            if cap < math.inf:
                scores = cap * (scores / cap).tanh()
            age = torch.arange(cached, cached + new)[:, None] - torch.arange(cached + new)[None]
            p = scores.masked_fill((age < 0) | (age >= window), -math.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", p, v))
        return torch.cat(out).float()


CASES = {
    "one token": [(0, 1)],
    "decodes": [(5, 1), (0, 1), (31, 1), (15, 1), (16, 1)],
    "prompts": [(0, 5), (0, 33), (0, 16)],
    "chunks after a cached context": [(16, 5), (3, 20), (40, 2)],
    "decodes and chunks": [(9, 1), (47, 1), (0, 12), (21, 7)],
    "more queries than a tile": [(70, 1), (0, QUERY_TILE + 9), (13, 2 * QUERY_TILE)],
}


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((6, 2), 20), ((5, 1), 64)])
def test_backends_equal_dense_attention(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], head_dim: int
) -> None:
    """GQA or not, odd head dims, any block size; what unused slots and other blocks hold must not leak."""
    for backend, unused in (("torch", 0.0), ("torch", 1e4), ("reference", math.nan)):
        case = Case(lengths, block_size, heads, head_dim, unused=unused)
        torch.testing.assert_close(case.run(backend), case.dense(), atol=2e-5, rtol=1e-4)


def softcap(layer: int, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return 0.5 * (scores / 0.5).tanh() if layer == LAYER else scores * math.nan


def window(layer: int, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return scores.masked_fill(keys <= queries - 9, -math.inf)


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("block_size", [4, 7, 16, 100])
def test_a_score_mod_changes_the_scores_before_the_softmax(
    lengths: list[tuple[int, int]], block_size: int
) -> None:
    """A softcap and a window, as in Gemma 2: in decodes and prefills, with blocks before the window."""
    for backend, unused in (("torch", 0.0), ("torch", 1e4), ("reference", math.nan)):
        for score_mod, changes in ((softcap, {"cap": 0.5}), (window, {"window": 9})):
            case = Case(lengths, block_size, (6, 2), 20, unused=unused)
            got, expected = case.run(backend, score_mod), case.dense(**changes)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_score_mod_in_the_engine(
    qwen3: Oracle, backend: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sliding window, with transformers' tokens: chunks, found prefixes, preemption, samples and beams."""

    def windowed(prompt: list[int]) -> list[int]:
        """Greedy, by transformers with a mask [1, 1, queries, keys]."""
        ids = list(prompt)
        for _ in range(10):
            age = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
            mask = torch.zeros(age.shape).masked_fill((age < 0) | (age >= 9), -math.inf)[None, None]
            ids.append(int(qwen3.model(torch.tensor([ids]), attention_mask=mask).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    make = staticmethod(partial(make_attention, score_mod=window))
    monkeypatch.setattr(ModelRunner, "make_attention", make)
    options = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 16, "preemption": preemption}
    llm = LLM(qwen3.folder, attention_backend=backend, **options)
    prompts = random_prompts(5, seed=3, longest=30)
    prompts += [[*prompts[0], 5], [*prompts[1], 6]]
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with torch.inference_mode():
        expected = [windowed(prompt) for prompt in prompts]
    assert tokens_of(serve(llm, prompts, greedy)) == expected
    assert expected != [qwen3.greedy(prompt, 10, ignore_eos=True) for prompt in prompts]
    kinds = [SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True), BeamSearchParams(beam_width=3)]
    together = tokens_of(serve(llm, prompts[:4], kinds * 2))
    llm.reset_prefix_cache()
    alone = [serve(llm, [prompt], kind) for prompt, kind in zip(prompts[:4], kinds * 2, strict=True)]
    assert together == tokens_of([*chain(*alone)])
    stats = llm.engine.stats()
    assert min(getattr(stats, f"num_preemptions_{preemption}"), stats.prefix_cache_hits) > 0


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("block_size", [4, 7])
def test_interpreted_kernels_equal_dense_attention(lengths: list[tuple[int, int]], block_size: int) -> None:
    kernels = pytest.importorskip(
        "nanopaged.kernels.paged_attention", reason="the kernels are written in Triton"
    )
    if not kernels.INTERPRETED:
        pytest.skip("the kernels are compiled here; tests/kernels/test_kernels.py has them")
    case = Case(lengths, block_size, (6, 2), 20, unused=math.nan)
    torch.testing.assert_close(case.run("triton"), case.dense(), atol=2e-5, rtol=1e-4)


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


NO_TRITON = "FlashAttention decodes with Triton kernels"


@pytest.mark.parametrize("lengths", [c for c in CASES.values() if c[-1][1] > 1])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("gather_keys", [1, 30, 1 << 16])
def test_the_inputs_of_flash_attention(
    lengths: list[tuple[int, int]], block_size: int, gather_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flat layout of queries and contexts, with the kernel itself replaced by plain PyTorch.

    Contexts are gathered one by one, a few together, or all at once.
    """
    flash_backend = pytest.importorskip("nanopaged.attention.flash_backend", reason=NO_TRITON)

    class FlashPrefills(TorchAttention):
        """Flash attention's prefills; the rest needs no kernel."""

        begin_prefills = flash_backend.FlashAttention.begin_prefills
        prefill = flash_backend.FlashAttention.prefill

    monkeypatch.setattr(flash_backend, "load_varlen", lambda: dense_varlen)
    monkeypatch.setattr("nanopaged.attention.metadata.GATHER_KEYS", gather_keys)
    case = Case(lengths, block_size, (6, 2), 20)
    backend = FlashPrefills(case.cache, 20**-0.5)
    torch.testing.assert_close(case.run(backend), case.dense(), atol=2e-5, rtol=1e-4)


def test_how_flash_attention_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn if it is there (4 alone is not), else PyTorch's, which 2.11 has without `enable_gqa`."""
    flash_backend = pytest.importorskip("nanopaged.attention.flash_backend", reason=NO_TRITON)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    q, k = torch.zeros(3, 4, 8), torch.arange(2.0).view(1, 2, 1).expand(3, 2, 8)
    rest = (torch.tensor([0, 3]), torch.tensor([0, 3]), 3, 3)

    def call(name: str, **members: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with monkeypatch.context() as patch:
            for module in ("flash_attn", "torch.nn.attention.varlen"):
                patch.setitem(sys.modules, module, SimpleNamespace(**(members if module == name else {})))
            flash_backend.load_varlen.cache_clear()
            flash_backend.load_varlen()(q, k, k, *rest, softmax_scale=0.5, causal=True)
        return calls.pop()

    def new(*args: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> None:
        calls.append((args[1:3], {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}))

    def old(*args: Any, scale: float, window_size: tuple[int, int]) -> None:  # of torch 2.11
        calls.append((args[1:3], {"scale": scale, "window_size": window_size}))

    _, options = call("flash_attn", flash_attn_varlen_func=lambda *args, **kw: calls.append((args, kw)))
    assert options == {"softmax_scale": 0.5, "causal": True}
    (key, _), options = call("torch.nn.attention.varlen", varlen_attn=new)
    assert key is k
    assert options == {"scale": 0.5, "window_size": (-1, 0), "enable_gqa": True}
    (key, _), options = call("torch.nn.attention.varlen", varlen_attn=old)
    assert key is k, "the kernel takes two KV heads for four query heads"
    assert options == {"scale": 0.5, "window_size": (-1, 0)}
    with pytest.raises(ImportError, match="lacks window_size"):
        call("torch.nn.attention.varlen", varlen_attn=lambda q, k, v: None)
    flash_backend.load_varlen.cache_clear()


def test_a_backend_that_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOPAGED_CACHE", str(tmp_path))  # where no C++ kernels have been built
    cache = KVCache(KVShape(1, 1, 8, torch.float32), 2, 4, CPU)
    reason = "(flash attention needs a CUDA GPU .*this is cpu|Triton cannot be imported)"
    with pytest.raises(ValueError, match=f"attention_backend='flash' cannot run here: {reason}"):
        make_attention("flash", cache, 1.0)
    for backend in ("triton", "flash"):
        with pytest.raises(ValueError, match=f"'{backend}' cannot run here: its kernels have no place for a"):
            make_attention(backend, cache, 1.0, softcap)
    assert type(make_attention("auto", cache, 1.0, softcap)) is TorchAttention
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("nanopaged.kernels.paged_attention.INTERPRETED", False)
        with pytest.raises(ValueError, match="'triton' cannot run here: .*a CUDA GPU.*TRITON_INTERPRET=1"):
            make_attention("triton", cache, 1.0)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "nanopaged.kernels.paged_attention", raising=False)
    monkeypatch.delattr("nanopaged.kernels.paged_attention", raising=False)
    with pytest.raises(ValueError, match="'triton' cannot run here: Triton cannot be imported"):
        make_attention("triton", cache, 1.0)
    assert type(make_attention("auto", cache, 1.0)) is TorchAttention  # it needs none of them


def test_scores_far_apart_do_not_overflow() -> None:
    """Scores of ±1e4 would overflow exp in float32 if the maximum were not subtracted first."""
    case = Case([(40, 1), (9, 1)], 4, (4, 2), 16)
    for k in case.keys:
        k *= 1e4
    case.cache.layer(LAYER)[0].mul_(1e4)
    for backend in ("torch", "reference"):
        torch.testing.assert_close(case.run(backend), case.dense(), atol=2e-4, rtol=1e-3)


def test_a_layer_writes_only_its_own_slots() -> None:
    """Other slots keep their bytes, NaN included; a block whose first slot is written begins with zeros."""
    case = Case([(5, 1), (2, 7)], 4, (4, 2), 8)
    expected = case.cache.data.clone()
    expected[case.tables[1][1:3]] = 0  # the blocks of tokens 4 to 7 and of token 8
    case.run("torch")
    k, v = (
        torch.cat([x[i][cached:] for i, (cached, _) in enumerate(case.lengths)])
        for x in (case.keys, case.values)
    )
    for token, slot in enumerate(case.metadata.slot_mapping.tolist()):
        expected[slot // 4, LAYER, 0, :, slot % 4] = k[token]
        expected[slot // 4, LAYER, 1, :, slot % 4] = v[token]
    torch.testing.assert_close(case.cache.data, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("keys", [1, 40, 400])
def test_decodes_are_gathered_in_groups(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, a few together, or all at once."""
    monkeypatch.setattr("nanopaged.attention.metadata.GATHER_KEYS", keys)
    case = Case([(n, 1) for n in (150, 3, 21, 4, 3, 0, 12)] + [(5, 7)], 4, (4, 2), 16)
    torch.testing.assert_close(case.run("torch"), case.dense(), atol=2e-5, rtol=1e-4)


def test_half_precision_stays_close() -> None:
    """bfloat16 and float16 keep the softmax in float32: the error is that of the inputs' rounding."""
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        case = Case([(50, 1), (17, 1), (20, 30)], 16, (6, 2), 32, dtype)
        got = case.run("torch").float()
        torch.testing.assert_close(got, case.dense(), atol=tolerance, rtol=tolerance)
