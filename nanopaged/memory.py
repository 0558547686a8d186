"""What an engine measures and chooses when it starts: the dtype, how many blocks fit, the way to preempt.

The runner has the model and the KV cache; here their sizes are found.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from nanopaged.attention import make_attention
from nanopaged.attention.metadata import GATHER_KEYS, AttentionMetadata
from nanopaged.checks.lengths import ResolvedConfig
from nanopaged.config import SamplingParams
from nanopaged.kernels.devices import is_ampere
from nanopaged.kv_cache import KVCache, KVShape, to_device
from nanopaged.model.decoder import Model
from nanopaged.model.parallel import Ranks
from nanopaged.model.prompt_scores import LOGITS_TILE
from nanopaged.sampler import Draw, SamplingMetadata, sample

# The most host memory for a KV cache on a CPU, and for swapped requests, of all ranks, unless configured.
HOST_BYTES = 4 << 30

logger = logging.getLogger("nanopaged")


def pick_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and K/V.

    Args:
        name: of `EngineConfig`. "auto" is the checkpoint's dtype, but float16 where bfloat16 would be slow.
    """
    dtype = checkpoint if name == "auto" else name
    if dtype == "bfloat16" and device.type == "cuda" and not is_ampere(device):
        if name == "auto":
            dtype = "float16"
        advice = "dtype='float16' is faster" if dtype == "bfloat16" else "the checkpoint is read as float16"
        logger.warning("%s has no instructions for bfloat16: %s", device, advice)
    return getattr(torch, dtype)


def count_blocks(
    config: ResolvedConfig, model: Model, shape: KVShape, ranks: Ranks | None
) -> tuple[int, int]:
    """Blocks of the KV cache and in host memory: those of `config`, or measured."""
    num_blocks, num_host_blocks = config.num_blocks, config.num_host_blocks
    if num_blocks is None:
        num_blocks = measure_num_blocks(config, model, shape)
        if ranks is not None:
            num_blocks = ranks.smallest(num_blocks)
    if num_host_blocks is None:
        most = HOST_BYTES // config.tensor_parallel_size // shape.block_bytes(config.block_size)
        num_host_blocks = 0 if config.preemption == "recompute" else min(num_blocks, most)
    mebibytes = num_blocks * shape.block_bytes(config.block_size) >> 20
    size = f"{num_blocks:,} blocks of {config.block_size} tokens ({mebibytes:,} MiB)"
    logger.info("KV cache: %s, and %s blocks for swapped requests", size, f"{num_host_blocks:,}")
    return num_blocks, num_host_blocks


def measure_num_blocks(config: ResolvedConfig, model: Model, shape: KVShape) -> int:
    """Blocks for the KV cache: as many as fit in memory with the largest step, and no more than can be used.

    On a GPU the largest step is run, and its peak memory beyond the weights is set aside:

        total · memory_utilization  =  in use (weights, other programs)  +  the largest step  +  blocks

    CUDA graphs, captured later, use the memory left over: 10 % of the GPU's by default.

    On a CPU, where other programs need the memory too, they take at most `HOST_BYTES`, unless a share is
    configured or a single sequence needs more. All ranks share this memory, and so does Apple's GPU.

    Raises:
        ValueError: not even one sequence of `max_model_len` tokens fits.
    """
    device, max_model_len = model.embed_tokens.weight.device, config.max_model_len
    if device.type == "cuda":
        peak = peak_memory(lambda: largest_step(config, model, shape), device)
        free, total = torch.cuda.mem_get_info(device)
        num_bytes = int(total * (config.memory_utilization or 0.9)) - (total - free) - peak
    else:
        num_bytes = int(available_memory() / config.tensor_parallel_size * (config.memory_utilization or 0.5))
    block_bytes = shape.block_bytes(config.block_size)
    fit = max(0, num_bytes) // block_bytes
    needed = -(-max_model_len // config.block_size)  # blocks of one sequence: ceil division
    if fit < needed:
        raise ValueError(
            f"one sequence of max_model_len tokens needs {needed} blocks of {block_bytes:,} bytes of "
            f"K/V, but only {fit} fit in the {num_bytes:,} bytes left for them: lower max_model_len "
            "or block_size, raise memory_utilization, or set num_blocks yourself"
        )
    useful = needed * config.max_num_seqs
    if device.type != "cuda" and config.memory_utilization is None:
        useful = min(useful, max(needed, HOST_BYTES // config.tensor_parallel_size // block_bytes))
    return min(fit, useful)


def peak_memory(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes of GPU memory that `work` uses at any time, beyond the bytes in use before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def largest_step(config: ResolvedConfig, model: Model, shape: KVShape) -> None:
    """Run a step that needs the most memory: the whole budget, the longest contexts, the most samples.

    Each prefill is the end of a context of `max_model_len` tokens, and there are enough prefills for flash
    attention to gather its maximum of keys. All share the blocks of one small cache, whose single layer
    stands in for all layers.
    """
    device, max_model_len = model.embed_tokens.weight.device, config.max_model_len
    token_budget = config.max_num_batched_tokens
    at_least = -(-token_budget // max_model_len)
    num_seqs = max(at_least, min(config.max_num_seqs, token_budget, -(-GATHER_KEYS // max_model_len)))
    query_lens = np.full(num_seqs, token_budget // num_seqs)
    query_lens[: token_budget % num_seqs] += 1
    positions = np.concatenate([np.arange(max_model_len - n, max_model_len) for n in query_lens])
    num_blocks = -(-max_model_len // config.block_size)
    one_layer = KVShape(1, shape.num_kv_heads, shape.head_dim, shape.dtype)
    cache = KVCache(one_layer, num_blocks, config.block_size, device)
    # The reference backend would take hours for this step, and needs less memory than any other.
    backend = "auto" if config.attention_backend == "reference" else config.attention_backend
    attention = make_attention(backend, cache, 1.0)
    attention.begin_step(
        AttentionMetadata(
            query_lens=query_lens,
            context_lens=np.full(num_seqs, max_model_len),
            block_tables=[list(range(num_blocks))] * num_seqs,
            slot_mapping=positions,  # the blocks are 0, 1, 2, ..., so a slot is a position
            num_decodes=0,
            seq_ids=list(range(num_seqs)),
        )
    )
    ids = to_device(positions, device)
    hidden = model(ids * 0, ids, lambda layer, q, k, v: attention(0, q, k, v))
    # Top-p sorts all probabilities. Penalties make a copy of the logits, and so do banned tokens and
    # forks (`clone`).
    params = (
        SamplingParams(top_k=10, presence_penalty=1),
        SamplingParams(top_p=0.9, min_p=0.1, presence_penalty=1),
    )
    num_rows = max(config.max_num_seqs, LOGITS_TILE)
    rows = [Draw(params[i % 2], 0, i, 0, [0], {0: 1}) for i in range(num_rows)]
    logits = model.logits(hidden[:1].expand(len(rows), -1))
    sample(logits.clone(), SamplingMetadata(rows, device))


def available_memory() -> int:
    """Bytes of this computer's memory that are free now."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as meminfo:  # Linux: includes the memory of file caches
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except OSError:
        pass
    try:  # macOS reports only the total: assume that half is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30  # Windows: assume 4 GiB


def cheaper_preemption(
    model: Model, kv_cache: KVCache, together: Callable[[str], AbstractContextManager[None]]
) -> str:
    """The faster way ("swap" or "recompute") to restore a block, measured now.

    The time to copy a block out and in is compared with its share of a short prefill. Without host blocks it
    is "recompute", and nothing is measured.

    Args:
        together: a context in which the other ranks run this function, too.
    """
    num_host_blocks, device = len(kv_cache.host), kv_cache.data.device
    if num_host_blocks == 0:
        return "recompute"
    moves = [(i, i) for i in range(min(8, len(kv_cache.data), num_host_blocks))]
    swap = seconds(lambda: kv_cache.move_blocks(moves, moves, []), device) / len(moves)
    num_tokens = 64  # a short prefill, without its attention
    ids = torch.arange(num_tokens, device=device) % model.config.vocab_size
    with together("cheaper_preemption"):
        prefill = seconds(lambda: model(ids, ids * 0, lambda layer, q, k, v: q), device)
    recompute = prefill * kv_cache.block_size / num_tokens
    choice = "swap" if swap < recompute else "recompute"
    measured = f"{1e3 * swap:.3f} ms to swap a block out and in, {1e3 * recompute:.3f} ms to recompute it"
    logger.info("preemption by %s: %s", choice, measured)
    return choice


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, the best of three runs."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        torch.get_device_module(device).synchronize()  # a GPU may still compute; for a CPU this does nothing
        times.append(time.perf_counter() - began)
    return min(times)
