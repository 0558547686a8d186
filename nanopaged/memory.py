"""What an engine chooses when it starts: the dtype, how many blocks fit, the way to preempt."""

from __future__ import annotations

import logging
import timeit
from collections.abc import Callable

import numpy as np
import psutil
import torch

from nanopaged.attention import make_attention
from nanopaged.attention.metadata import GATHER_KEYS, AttentionMetadata
from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.kv_cache import KVCache, KVShape, to_device
from nanopaged.model.decoder import Model
from nanopaged.parallel import Ranks
from nanopaged.sampler import LOGITS_TILE, Draw, SamplingMetadata, sample
from nanopaged.sequence import Moves

# The most host memory for a KV cache on a CPU, and for swapped requests, of all ranks, unless configured.
HOST_BYTES = 4 << 30

logger = logging.getLogger("nanopaged")


def pick_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and K/V. "auto" is the checkpoint's, if it is fast here."""
    dtype = checkpoint if name == "auto" else name
    if (
        dtype == "bfloat16"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        dtype = "float16" if name == "auto" else dtype
        advice = (
            "dtype='float16' is faster"
            if dtype == "bfloat16"
            else "the checkpoint is read as float16"
        )
        logger.warning("%s has no instructions for bfloat16: %s", device, advice)
    return getattr(torch, dtype)


def count_blocks(
    config: EngineConfig,
    model: Model,
    shape: KVShape,
    ranks: Ranks | None,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> tuple[int, int]:
    """Blocks of the KV cache and in host memory: those of `config`, or measured."""
    num_host_blocks, block_bytes = config.num_host_blocks, shape.block_bytes(config.block_size)
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = measure_num_blocks(config, model, shape, max_model_len, max_num_batched_tokens)
    num_blocks = ranks.smallest(num_blocks) if ranks is not None else num_blocks
    if num_host_blocks is None:
        most = HOST_BYTES // config.tensor_parallel_size // block_bytes
        num_host_blocks = 0 if config.preemption == "recompute" else min(num_blocks, most)
        num_host_blocks = num_pinned(num_host_blocks, block_bytes, model.embed_tokens.weight.device)
        num_host_blocks = ranks.smallest(num_host_blocks) if ranks is not None else num_host_blocks
    size = f"{num_blocks:,} blocks of {config.block_size} tokens ({num_blocks * block_bytes >> 20:,} MiB)"
    logger.info("KV cache: %s, and %s blocks for swapped requests", size, f"{num_host_blocks:,}")
    return num_blocks, num_host_blocks


def num_pinned(num_blocks: int, block_bytes: int, device: torch.device) -> int:
    """How many blocks of host memory can be pinned for a GPU: all of them, or a half, a quarter, …"""
    while device.type == "cuda" and num_blocks > 0:
        try:
            torch.empty(num_blocks * block_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            break
        except RuntimeError:
            num_blocks //= 2
            logger.warning(
                "too little host memory can be pinned for swaps: trying %s blocks", num_blocks
            )
    return num_blocks


def measure_num_blocks(
    config: EngineConfig,
    model: Model,
    shape: KVShape,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> int:
    """Blocks for the KV cache: as many as fit in memory with the largest step, and no more than can be used.

    On a GPU the largest step is run, and its peak memory beyond the weights is set aside:

        total · memory_utilization  =  in use (weights, other programs)  +  the largest step  +  blocks

    CUDA graphs, captured later, use the memory left over: 10 % by default. On a CPU, blocks take at most
    `HOST_BYTES` of all ranks, unless a share is configured or one sequence needs more.
    """
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        peak = peak_memory(
            lambda: largest_step(config, model, shape, max_model_len, max_num_batched_tokens),
            device,
        )
        free, total = torch.cuda.mem_get_info(device)
        num_bytes = int(total * (config.memory_utilization or 0.9)) - (total - free) - peak
    else:
        usable = psutil.virtual_memory().available * (config.memory_utilization or 0.5)
        num_bytes = int(usable / config.tensor_parallel_size)
    block_bytes = shape.block_bytes(config.block_size)
    fit = max(0, num_bytes) // block_bytes
    needed = -(-max_model_len // config.block_size)  # blocks of one sequence: ceil division
    if fit < needed:
        what = (
            f"one sequence of max_model_len tokens needs {needed} blocks of {block_bytes:,} bytes"
        )
        way_out = "lower max_model_len, raise memory_utilization, or set num_blocks yourself"
        raise ValueError(f"{what}, but only {fit} fit in memory: {way_out}")
    useful = needed * config.max_num_seqs
    if device.type != "cuda" and config.memory_utilization is None:
        useful = min(useful, max(needed, HOST_BYTES // config.tensor_parallel_size // block_bytes))
    return min(fit, useful)


def peak_memory(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes of GPU memory that `work` uses beyond those in use before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def largest_step(
    config: EngineConfig,
    model: Model,
    shape: KVShape,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> None:
    """Run a step that needs the most memory: the whole budget, the longest contexts, the most samples.

    Prefills are the ends of the longest contexts, enough to gather as many keys as a backend does at once.
    All share the blocks of one small cache of a single layer.
    """
    device = model.embed_tokens.weight.device
    budget = max_num_batched_tokens
    num_seqs = min(config.max_num_seqs, budget, -(-GATHER_KEYS // max_model_len))
    num_seqs = max(num_seqs, -(-budget // max_model_len))
    query_lens = np.diff(np.arange(num_seqs + 1) * budget // num_seqs)  # 10 tokens by 3: 3 3 4
    positions = np.concatenate([np.arange(max_model_len - n, max_model_len) for n in query_lens])
    num_blocks = -(-max_model_len // config.block_size)
    one_layer = KVShape(1, shape.num_kv_heads, shape.head_dim, shape.dtype)
    cache = KVCache(one_layer, num_blocks, config.block_size, device)
    # The reference backend would take hours, and needs less memory.
    backend = "auto" if config.attention_backend == "reference" else config.attention_backend
    attention = make_attention(backend, cache, 1.0)
    # The blocks are 0, 1, 2, ..., so a slot is a position.
    ends, tables = np.full(num_seqs, max_model_len), [list(range(num_blocks))] * num_seqs
    attention.begin_step(
        AttentionMetadata(query_lens, ends, tables, positions, 0, [*range(num_seqs)])
    )
    tokens = to_device(positions, device)
    hidden = model(tokens * 0, tokens, lambda layer, q, k, v: attention(0, q, k, v))
    # Top-p sorts all probabilities; penalties and bans copy the logits, and so do forks (`clone`).
    filters = SamplingParams(top_k=10), SamplingParams(top_p=0.9, min_p=0.1)
    num_rows = max(config.max_num_seqs, LOGITS_TILE)
    draws = [Draw(filters[i % 2], 0, i, 0, [0], {0: 1}) for i in range(num_rows)]
    logits = model.logits(hidden[:1].expand(num_rows, -1))
    sample(logits.clone(), SamplingMetadata(draws, device))


def cheaper_preemption(model: Model, kv_cache: KVCache, budget: int) -> str:
    """The faster way ("swap" or "recompute") to restore a block, measured now.

    The time to copy a block out and in is compared with its share of a prefill, without attention: of 64
    tokens on a CPU, of a step's budget on a GPU, where a short one takes the time of its launches.
    """
    num_moves, device = min(8, len(kv_cache.data), len(kv_cache.host)), kv_cache.data.device
    if num_moves == 0:
        return "recompute"
    blocks = [(i, i) for i in range(num_moves)]
    moves = Moves(swap_out=blocks, swap_in=blocks)
    swap = seconds(lambda: kv_cache.move_blocks(moves), device) / num_moves
    num_tokens = budget if device.type == "cuda" else min(64, budget)
    ids = torch.arange(num_tokens, dtype=torch.int64, device=device) % model.config.vocab_size
    prefill = seconds(lambda: model(ids, ids * 0, lambda layer, q, k, v: q), device)
    recompute = prefill * kv_cache.block_size / len(ids)
    choice = "swap" if swap < recompute else "recompute"
    measured = (
        f"{1e3 * swap:.3f} ms to swap a block out and in, {1e3 * recompute:.3f} ms to recompute it"
    )
    logger.info("preemption by %s: %s", choice, measured)
    return choice


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, the best of three runs."""

    def wait_for_work() -> None:
        work()
        torch.get_device_module(
            device
        ).synchronize()  # a GPU may still compute; for a CPU this does nothing

    return min(timeit.repeat(wait_for_work, number=1, repeat=3))
