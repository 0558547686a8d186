"""Which operations of a step depend on the batch, with and without the fork, and what the fork costs.

With the patch applied: python docs/forks/invariant/measure.py [operations | speed]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from common import SHAPES

from nanopaged import LLM, SamplingParams
from nanopaged.attention.invariant_backend import InvariantAttention
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model import layers
from nanopaged.model.layers import Linear, in_tiles
from nanopaged.sampler import Draw, SamplingMetadata, sample

BATCHES = (2, 3, 5, 8, 16, 17, 33, 64)
MOST = max(BATCHES)
LINEARS = {"qkv_proj": (768, 1280), "o_proj": (768, 768), "gate_up_proj": (768, 4096)}
LINEARS |= {"down_proj": (2048, 768), "lm_head": (768, 32000)}  # of the shape 100m
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 6, 2, 64, 400
Found = tuple[int, int]  # comparisons that differ, of how many


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def compare_rows(function: Callable[..., Tensor], *rows: Tensor) -> Found:
    """Each row alone, and in the first rows of every batch size."""
    alone = [function(*(x[i : i + 1].clone() for x in rows))[0] for i in range(MOST)]
    batches = [function(*(x[:n].clone() for x in rows)) for n in BATCHES]
    equal = [torch.equal(out[i], alone[i]) for out in batches for i in range(len(out))]
    return equal.count(False), len(equal)


def row_operations(dtype: torch.dtype) -> dict[str, tuple[Found, Found]]:
    """Operation → what differs without and with the fork."""
    found = {}

    def add(name: str, plain: Callable[..., Tensor], ours: Callable[..., Tensor], *rows: Tensor) -> None:
        found[name] = compare_rows(plain, *rows), compare_rows(ours, *rows)

    def same(name: str, function: Callable[..., Tensor], *rows: Tensor) -> None:
        """What the fork leaves as it is."""
        found[name] = (compare_rows(function, *rows),) * 2

    for name, (inputs, outputs) in LINEARS.items():
        linear = Linear(inputs, outputs, False)
        linear.weight = torch.nn.Parameter(torch.randn(outputs, inputs).to(dtype) / inputs**0.5, False)
        x = torch.randn(MOST, inputs).to(dtype)
        for kind in ("F.linear", "oneDNN"):
            if kind == "oneDNN":
                linear.reorder_weight()
            product = linear._product
            add(f"{name}, {kind}", product, lambda x, product=product: in_tiles(product, x), x)
    fused, weight = InvariantAttention.fused, torch.rand(768).to(dtype)
    hidden = torch.randn(MOST, 768).to(dtype)
    same("rms_norm", lambda x: layers.rms_norm(x, 1e-6, weight), hidden)
    norms = torch.rand(2, HEAD_DIM).to(dtype)
    angles = torch.rand(MOST, 1, HEAD_DIM)
    rows = torch.randn(MOST, 8, HEAD_DIM), angles.cos(), angles[..., : HEAD_DIM // 2].sin()
    same(
        "norm_rotate",
        lambda qk, cos, sin: layers.norm_rotate(qk, 6, norms, 1e-6, cos, sin),
        *(x.to(dtype) for x in rows),
    )
    for width in (2048, 3001, 50):  # the last two are no multiple of the CPU's vectors
        gate_up = torch.randn(MOST, 2 * width).to(dtype)
        add(f"silu_mul, {width} wide", layers.silu_mul, fused["silu_mul"], gate_up)
    same("residual", torch.add, hidden, hidden.flip(0))
    logits = torch.randn(MOST, 32003)
    same("log_softmax", lambda x: x.log_softmax(-1), logits)

    def drawn(logits: Tensor) -> Tensor:
        params = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.001)
        metadata = SamplingMetadata([Draw(params, 1, 0, 0, [])] * len(logits), logits.device)
        return torch.tensor([[each.token_id, each.logprob] for each in sample(logits, metadata)]).double()

    same("sampler", drawn, logits)
    kinds = ({"top_k": 20, "top_p": 0.9, "logprobs": 2}, {"top_p": 0.9}, {"top_k": 50, "logprobs": 5})

    def drawn_with_others(logits: Tensor, index: Tensor) -> Tensor:
        draws = [Draw(SamplingParams(**kinds[i % 3]), 1, i, 0, []) for i in index.tolist()]
        found = sample(logits, SamplingMetadata(draws, logits.device))
        rows = [[each.token_id, each.logprob, *list(each.logprobs or (0, 0))[:2]] for each in found]
        return torch.tensor(rows, dtype=torch.float64)

    def one_by_one(*rows: Tensor) -> Tensor:
        return torch.cat(list(map(drawn_with_others, *(x.split(1) for x in rows))))

    rounded = logits.bfloat16().float()  # so that some are equal
    add("sampler: other params beside it", drawn_with_others, one_by_one, rounded, torch.arange(MOST))
    return found


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


class Attention:
    """One layer over a cache of 64 sequences of 400 tokens; the first 40 begin with the same blocks."""

    def __init__(self, kind: type[TorchAttention], dtype: torch.dtype, block_size: int = 16) -> None:
        self.block_size = block_size
        torch.manual_seed(0)
        per_table = TOKENS // block_size
        shape = KVShape(1, KV_HEADS, HEAD_DIM, dtype)
        cache = KVCache(shape, MOST * per_table, block_size, torch.device("cpu"))
        cache.data.normal_()
        self.kv = cache.data.clone()
        self.attention = kind(cache, HEAD_DIM**-0.5)
        self.queries = torch.randn(MOST, TOKENS, HEADS, HEAD_DIM).to(dtype)
        self.tables = [list(range(i * per_table, (i + 1) * per_table)) for i in range(MOST)]
        self.shared = [self.tables[0][:20] + table[20:] for table in self.tables]

    def run(self, work: list[tuple[int, int, int]], shared: bool = False) -> Tensor:
        """Compute tokens `start` to `end` of sequences → their attention [num_tokens, heads, head_dim].

        The K/V that is stored is what the cache has at these slots already.
        """
        tables = [(self.shared if shared else self.tables)[i] for i, _, _ in work]
        spans = [np.arange(start, end) for _, start, end in work]
        slots = [slots_of(table, span, self.block_size) for table, span in zip(tables, spans, strict=True)]
        slots = np.concatenate(slots)
        self.attention.cache.data.copy_(self.kv)
        k, v = (self.kv[slots // self.block_size, 0, i, :, slots % self.block_size] for i in (0, 1))
        lens = np.array([len(span) for span in spans])
        ends = np.array([end for _, _, end in work])
        decodes = int((lens == 1).sum())
        metadata = AttentionMetadata(lens, ends, tables, slots, decodes, list(range(len(work))))
        self.attention.begin_step(metadata)
        q = torch.cat([self.queries[i, start:end] for i, start, end in work])
        return self.attention(0, q, k, v)


def attention_cases(kind: type[TorchAttention], dtype: torch.dtype) -> dict[str, Found]:
    """What differs from a decode of the token alone, or from a prefill of the prompt in one piece."""
    of_five, attention = Attention(kind, dtype, 5), Attention(kind, dtype)
    lens = [1 + i * 37 % TOKENS for i in range(MOST)]
    decodes = [(i, n - 1, n) for i, n in enumerate(lens)]
    alone = [attention.run([work])[0] for work in decodes]
    alone_of_five = [of_five.run([work])[0] for work in decodes]
    found: dict[str, list[bool]] = {"decode: in a batch": [], "decode: in a batch, blocks of 5": []}
    for n in BATCHES:
        out, out_of_five = attention.run(decodes[:n]), of_five.run(decodes[:n])
        found["decode: in a batch"] += [torch.equal(out[i], alone[i]) for i in range(n)]
        equal = [torch.equal(out_of_five[i], alone_of_five[i]) for i in range(n)]
        found["decode: in a batch, blocks of 5"] += equal
    last = [(i, TOKENS - 1, TOKENS) for i in range(40)]
    out = attention.run(last, shared=True)
    found["decode: blocks shared"] = [
        torch.equal(out[i], attention.run([work], shared=True)[0]) for i, work in enumerate(last)
    ]
    whole = attention.run([(0, 0, TOKENS)])
    one_by_one = [attention.run([(0, i, i + 1)])[0] for i in range(0, TOKENS, 7)]
    found["prefill: as decodes"] = [torch.equal(whole[7 * i], one) for i, one in enumerate(one_by_one)]
    for size in (16, 50, 128):
        pieces = [attention.run([(0, i, min(i + size, TOKENS))]) for i in range(0, TOKENS, size)]
        found[f"prefill: chunks of {size}"] = list(map(torch.equal, torch.cat(pieces), whole))
    others = [(1, 5, 6), (2, 0, 77), (0, 0, TOKENS), (3, 100, 210)]
    start = 1 + 77
    batched = attention.run(others)[start : start + TOKENS]
    found["prefill: in a batch"] = list(map(torch.equal, batched, whole))
    return {name: (equal.count(False), len(equal)) for name, equal in found.items()}


def differences(dtype: torch.dtype) -> dict[str, tuple[Found, Found]]:
    """Operation → comparisons that differ, without and with the fork."""
    torch.manual_seed(0)
    found = row_operations(dtype)
    plain, ours = (attention_cases(kind, dtype) for kind in (TorchAttention, InvariantAttention))
    return found | {name: (plain[name], ours[name]) for name in plain}


# ── speed ─────────────────────────────────────────────────────────────────────────────────────────


def make_llm(dtype: str, invariant: bool) -> LLM:
    """Random weights of the shape 28m."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES["28m"]), encoding="utf-8")
        return LLM(folder, dtype=dtype, load_format="dummy", num_blocks=1000, batch_invariant=invariant)


def seconds(llm: LLM, num: int, prompt_len: int, output_len: int) -> float:
    """CPU time of `num` requests; other programs do not count."""
    prompts = [[3 + (7 * i + j) % 30000 for j in range(prompt_len)] for i in range(num)]
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0)
    llm.reset_prefix_cache()
    began = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - began


def rates(llm: LLM) -> tuple[float, ...]:
    """Tokens per second: of a prefill of 8 · 256, of one decode and of 16 decodes at once."""
    prefill = seconds(llm, 8, 256, 1)
    one = seconds(llm, 1, 128, 33) - seconds(llm, 1, 128, 1)
    many = seconds(llm, 16, 128, 33) - seconds(llm, 16, 128, 1)
    return 8 * 256 / prefill, 32 / one, 16 * 32 / many


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ["operations", "speed"]
    if "operations" in wanted:
        found = [differences(dtype) for dtype in (torch.float32, torch.bfloat16)]
        print("operation | comparisons | float32 differs | bfloat16 | with the fork")
        for name, ((float32, total), (ours, _)) in found[0].items():
            (bfloat16, _), (ours_too, _) = found[1][name]
            print(f"{name} | {total} | {float32} | {bfloat16} | {ours + ours_too}")
    if "speed" in wanted:
        print("dtype | batch_invariant | prefill | 1 decode | 16 decodes (tokens/s, median of 3)")
        for name in ("float32", "bfloat16"):
            llms = {invariant: make_llm(name, invariant) for invariant in (False, True)}
            for llm in llms.values():
                seconds(llm, 1, 32, 2)
            turns = [[rates(llm) for llm in llms.values()] for _ in range(3)]
            for invariant, *its_rates in zip(llms, *turns, strict=True):
                figures = [f"{statistics.median(each):,.0f}" for each in zip(*its_rates, strict=True)]
                print(name, invariant, *figures, sep=" | ", flush=True)
