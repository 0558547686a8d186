"""Prefills: flash-attn, PyTorch's varlen attention and plain PyTorch, beside each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from common import time_call

from light import Light
from nanopaged.attention import make_attention, why_unavailable
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.attention.torch_backend import TorchAttention
from nanopaged.kv_cache import KVCache, KVShape

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16  # of Qwen3-0.6B
SCALE = HEAD_DIM**-0.5
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of the largest value


def prefill(light: Light) -> str:
    """Each way over several batches: its error, and TFLOP/s."""
    cases = [(8, 1024, 1024), (1, 4096, 4096), (16, 128, 2048), (1, 512, 16384)]
    best: dict[str, float] = {}
    light.table("sequences x (new of all tokens)", "attention", "largest error", "ms", "TFLOP/s")
    for num_seqs, new, length in light.pick(cases, cases[:1], [(2, 24, 24), (2, 7, 40)]):
        what = f"{num_seqs} x ({new:,} of {length:,})"
        with light.trying(what), torch.inference_mode():
            time_ways(light, what, num_seqs, new, length, best)
    return f"TFLOP/s at best: {', '.join(f'{name} {rate:.1f}' for name, rate in best.items())}"


def time_ways(light: Light, what: str, num_seqs: int, new: int, length: int, best: dict[str, float]) -> None:
    """A row for each way to compute the last `new` tokens of `num_seqs` contexts, all of one length."""
    blocks_each = -(-length // BLOCK_SIZE)
    ids = random.Random(0).sample(range(num_seqs * blocks_each), num_seqs * blocks_each)
    tables, positions = [ids[i::num_seqs] for i in range(num_seqs)], np.arange(length - new, length)
    metadata = AttentionMetadata(
        query_lens=np.full(num_seqs, new),
        context_lens=np.full(num_seqs, length),
        block_tables=tables,
        slot_mapping=np.concatenate([slots_of(table, positions, BLOCK_SIZE) for table in tables]),
        num_decodes=0,
        seq_ids=list(range(num_seqs)),
    )
    cache = make_cache(light, light.dtype, num_blocks=len(ids))
    exact = make_cache(light, torch.float32, num_blocks=len(ids))
    exact.data.copy_(cache.data.normal_())
    q = torch.randn(num_seqs * new, NUM_HEADS, HEAD_DIM).to(light.device, light.dtype)
    k, v = torch.randn(2, num_seqs * new, NUM_KV_HEADS, HEAD_DIM).to(light.device, light.dtype)
    reference = TorchAttention(exact, SCALE)
    reference.begin_step(metadata)
    expected = reference(0, q.float(), k.float(), v.float())
    operations = 4 * num_seqs * new * (length - (new - 1) / 2) * NUM_HEADS * HEAD_DIM
    for name, attention in ways(cache):
        if isinstance(attention, str):
            light.row(what, name, attention, "–", "–")
            continue
        with light.trying(f"{name}, {what}"):
            attention.begin_step(metadata)
            difference = (attention(0, q, k, v).float() - expected).abs().max()
            error = (difference / expected.abs().max()).item()
            if not error <= TOLERANCE[light.dtype]:
                light.wrong(f"{name}, {what}: error {error:.1e}, more than {TOLERANCE[light.dtype]:.0e}")
            seconds = time_call(partial(attention.prefill, 0, q, k, v), light.device, in_graph=False)
            rate = operations / seconds / 1e12
            best[name] = max(rate, best.get(name, 0.0))
            light.row(what, name, f"{error:.1e}", f"{1e3 * seconds:.2f}", f"{rate:.2f}")


def make_cache(light: Light, dtype: torch.dtype, num_blocks: int) -> KVCache:
    """A cache of one layer."""
    shape = KVShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    return KVCache(shape, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=light.device)


def ways(cache: KVCache) -> Iterator[tuple[str, TorchAttention | str]]:
    """(name, the backend, or why it cannot run). The two of flash attention differ in the function called."""
    for name, load in {
        "flash-attn": load_flash_attn,
        "PyTorch's varlen attention": load_torch_varlen,
    }.items():
        try:
            varlen = load()
        except ImportError as error:
            yield name, f"not there: {error}"
            continue
        reason = why_unavailable("flash", cache.data.device, cache.shape)
        if reason is None:
            from nanopaged.attention import flash_backend

            flash_backend.load_varlen = lambda varlen=varlen: varlen
        yield name, reason or make_attention("flash", cache, SCALE)
    yield "plain PyTorch", TorchAttention(cache, SCALE)


def load_flash_attn() -> Callable[..., torch.Tensor]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def load_torch_varlen() -> Callable[..., torch.Tensor]:
    from nanopaged.attention.flash_backend import load_torch_varlen  # it imports Triton

    return load_torch_varlen()
