"""How many blocks there is memory for, once the largest step has had what it needs.

On a GPU that is measured: the largest step is run, and what it took beyond the weights is set aside.

    total · memory_utilization  =  what is in use (weights, other programs)  +  the largest step  +  blocks

(What CUDA graphs take comes out of the rest, which is therefore not to be made too small.)
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from nanopaged.attention.flash_backend import GATHER_KEYS
from nanopaged.attention.metadata import PagedBatch, make_attention
from nanopaged.block_manager import blocks_needed
from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.device import send
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model.decoder import Model
from nanopaged.sampler import LOGITS_TILE, Draws, SampleRow, sample


def size_pool(
    config: EngineConfig, model: Model, shape: KVShape, max_model_len: int, step_budget: int
) -> int:
    """Blocks for the pool: as many as fit, and no more than could be used.

    Raises:
        ValueError: not even one sequence of `max_model_len` tokens fits.
    """
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        peak = _peak_memory(lambda: largest_step(config, model, shape, max_model_len, step_budget), device)
        total = torch.cuda.mem_get_info(device)[1]
        used = total - available_memory(device)
        free = int(total * (config.memory_utilization or 0.9)) - used - peak
    else:
        free = int(available_memory(device) * (config.memory_utilization or 0.5))
    needed = blocks_needed(max_model_len, config.block_size)
    return blocks_that_fit(free, shape.block_bytes(config.block_size), needed * config.max_num_seqs, needed)


def _peak_memory(work: Callable[[], None], device: torch.device) -> int:
    """Bytes that `work` has in use on a GPU when it has most, beyond those in use before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def largest_step(
    config: EngineConfig, model: Model, shape: KVShape, max_model_len: int, step_budget: int
) -> None:
    """A step that uses up the budget, with contexts as long as can be and as many tokens drawn as can be.

    The chunks are the ends of sequences of `max_model_len` tokens, enough of them for flash attention to
    gather as much as it ever does. All share the blocks of a small cache, in which all layers share one.
    """
    device, block_size = model.embed_tokens.weight.device, config.block_size
    at_least = -(-step_budget // max_model_len)
    num_chunks = max(at_least, min(config.max_num_seqs, step_budget, -(-GATHER_KEYS // max_model_len)))
    query_lens = np.full(num_chunks, step_budget // num_chunks)
    query_lens[: step_budget % num_chunks] += 1
    positions = np.concatenate([np.arange(max_model_len - n, max_model_len) for n in query_lens])
    num_blocks = blocks_needed(max_model_len, block_size)
    one_layer = KVShape(1, shape.num_kv_heads, shape.head_dim, shape.dtype)
    cache = KVCache(one_layer, num_blocks, block_size, device)
    batch = PagedBatch(
        query_lens=query_lens,
        context_lens=np.full(num_chunks, max_model_len),
        block_tables=[list(range(num_blocks))] * num_chunks,
        slot_mapping=positions,  # of blocks 0, 1, 2, ... in order
        num_decodes=0,
        owners=list(range(num_chunks)),
    )
    # The loop over blocks needs less memory than any other backend, and hours for a step of this size.
    backend = "auto" if config.attention_backend == "reference" else config.attention_backend
    attend = make_attention(backend, cache, 1.0).plan(batch)
    positions = send(positions, device)
    hidden = model(positions * 0, positions, lambda layer, q, k, v: attend(0, q, k, v))
    # The second sorts all scores. Banning tokens takes a copy of them, and so do forks and beams before.
    params = SamplingParams(top_k=10), SamplingParams(top_p=0.9, min_p=0.1)
    rows = [SampleRow(params[i % 2], 0, i, 0, [0]) for i in range(max(config.max_num_seqs, LOGITS_TILE))]
    logits = model.logits(hidden[:1].expand(len(rows), -1))
    sample(logits.clone(), Draws(rows, device))


def blocks_that_fit(free_bytes: int, block_bytes: int, max_useful: int, needed: int) -> int:
    """Blocks for a pool in `free_bytes` of memory: as many as fit, and no more than could be used.

    Args:
        max_useful: what `max_num_seqs` sequences of `max_model_len` tokens could fill.
        needed: what a single sequence of `max_model_len` tokens fills.

    Raises:
        ValueError: not even `needed` blocks fit.
    """
    fit = max(0, free_bytes) // block_bytes
    if fit < needed:
        raise ValueError(
            f"one sequence of max_model_len tokens needs {needed} blocks of {block_bytes:,} bytes of "
            f"K/V, but only {fit} fit in the {free_bytes:,} bytes left for them: lower max_model_len, "
            "raise memory_utilization, or set num_blocks yourself"
        )
    return min(fit, max_useful)


def available_memory(device: torch.device) -> int:
    """Bytes of memory that are free now: of the GPU, or of this computer."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as meminfo:  # Linux: counts what caches would give back
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except OSError:
        pass
    try:  # macOS: the total is all that can be asked for
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30  # Windows
