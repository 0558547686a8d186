"""What an engine chooses when it starts: the dtype, how many blocks fit, and how to preempt."""

import logging
import math
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from nanopaged.attention import make_backend
from nanopaged.attention.metadata import GATHER_KEYS, AttentionMetadata
from nanopaged.attention.torch_backend import is_fast_on_cpu
from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.kernels import build
from nanopaged.kv_cache import KVCache, KVShape, to_device
from nanopaged.model.decoder import Model
from nanopaged.parallel import UNDER_TORCHRUN, Ranks
from nanopaged.sampler import LOGITS_TILE, Draw, SamplingMetadata, draw_samples
from nanopaged.sequence import Moves

# Unless configured, the KV cache on a CPU takes at most this much host memory for all ranks, and so
# do swapped requests on any device.
HOST_BYTES = 4 << 30

# The memory limit of a container, by control groups of version 2 and of version 1.
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

logger = logging.getLogger("nanopaged")


def pick_device(name: str, ranks: Ranks) -> torch.device:
    """The torch device of that name, with its number. Each rank of a machine has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.size > 1 and name.startswith("cuda"):
        local_rank = dist.get_node_local_rank() if UNDER_TORCHRUN else ranks.rank
        name = f"cuda:{local_rank}"
    try:
        device = torch.empty(0, device=name).device  # "cuda" becomes "cuda:0"
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {name!r} cannot be used here: PyTorch has no such device"
        ) from error
    is_mps_alone = device.type == "mps" and ranks.size == 1
    if device.type not in ("cpu", "cuda") and not is_mps_alone:
        raise ValueError(
            f"device {name!r} cannot be used here: use cpu, cuda, or mps with one rank"
        )
    return device


def usual_budget(device: str) -> int:
    """How many tokens a step may compute, unless configured.

    Before a step with prefills the host of a GPU launches each kernel, which takes longer than
    computing 2048 tokens.
    """
    return 8192 if torch.cuda.is_available() and device != "cpu" else 2048


def pick_dtype(config: EngineConfig, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and K/V. "auto" is the checkpoint's, if it is fast here."""
    dtype = checkpoint if config.dtype == "auto" else config.dtype
    if dtype == "bfloat16" and not has_fast_bfloat16(config, device):
        faster = "float16" if device.type == "cuda" else "float32"
        advice = f"dtype={faster!r} is faster"
        if config.dtype == "auto":
            dtype = faster
            advice = f"the checkpoint is read as {faster}"
        logger.warning(f"{device} has no instructions for bfloat16: {advice}")
    return getattr(torch, dtype)


def has_fast_bfloat16(config: EngineConfig, device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16, or needs none."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu" or is_fast_on_cpu(torch.bfloat16):
        return True
    # Our C++ kernels are fast without such instructions, PyTorch is not (reference/cpu.md).
    return config.attention_backend in ("auto", "cpp") and build.can_build_or_load()


def choose_num_blocks(
    config: EngineConfig, model: Model, shape: KVShape, ranks: Ranks, backend: str
) -> tuple[int, int]:
    """The number of blocks in the KV cache and in host memory, as configured or as measured."""
    block_bytes = shape.block_bytes(config.block_size)
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = measure_num_blocks(config, model, shape, backend)
    num_host_blocks = config.num_host_blocks
    if num_host_blocks is None:
        num_host_blocks = min(num_blocks, HOST_BYTES // config.tensor_parallel_size // block_bytes)
        if config.preemption == "recompute":
            num_host_blocks = 0
    if ranks.size > 1:  # all have the same blocks, so the rank with the least memory decides
        device = model.embed_tokens.weight.device
        counts = torch.tensor([num_blocks, num_host_blocks], device=device)
        num_blocks, num_host_blocks = ranks.all_reduce(counts, dist.ReduceOp.MIN).tolist()
    logger.info(
        f"KV cache: {num_blocks:,} blocks of {config.block_size} tokens"
        f" ({num_blocks * block_bytes >> 20:,} MiB),"
        f" and {num_host_blocks:,} blocks for swapped requests"
    )
    return num_blocks, num_host_blocks


def measure_num_blocks(config: EngineConfig, model: Model, shape: KVShape, backend: str) -> int:
    """The number of blocks that fit in memory next to the largest step, and that can be used.

    On a GPU the largest step is run once. PyTorch then still holds the memory that it took, which
    counts as in use:

        total · memory_utilization = in use (weights, other programs, largest step) + blocks

    CUDA graphs, which are captured later, use the memory that is left, 10 % by default. On a CPU
    all ranks together take at most `HOST_BYTES`, unless `memory_utilization` is set or one sequence
    needs more.
    """
    block_bytes = shape.block_bytes(config.block_size)
    num_needed = math.ceil(config.max_model_len / config.block_size)  # for one sequence
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # return what loading no longer needs
        largest_step(config, model, shape, backend)
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.empty_cache()
        num_bytes = total * (config.memory_utilization or 0.9) - (total - free)
    else:
        num_ranks = config.tensor_parallel_size
        num_bytes = available_memory() * (config.memory_utilization or 0.5) / num_ranks
        if config.memory_utilization is None:
            num_bytes = min(num_bytes, max(HOST_BYTES / num_ranks, num_needed * block_bytes))
    num_fitting = max(0, int(num_bytes)) // block_bytes
    if num_fitting < num_needed:
        raise ValueError(
            f"one sequence of max_model_len={config.max_model_len} tokens needs {num_needed} blocks"
            f" of {block_bytes:,} bytes, but only {num_fitting} fit in memory: lower max_model_len,"
            " raise memory_utilization, or set num_blocks yourself"
        )
    return min(num_fitting, num_needed * config.max_num_seqs)


def available_memory() -> int:
    """Bytes that are free on this machine, or that this process may still take in its container."""
    available = psutil.virtual_memory().available
    for file in CGROUP_LIMITS:
        limit = file.read_text(encoding="utf-8").strip() if file.is_file() else "max"
        if limit != "max":
            available = min(available, int(limit) - psutil.Process().memory_info().rss)
    return available


@torch.inference_mode()
def largest_step(config: EngineConfig, model: Model, shape: KVShape, backend: str) -> None:
    """Run the step that needs the most memory, with the most tokens, keys and samples.

    The prefills are the ends of contexts of `max_model_len` tokens, and have the same number of
    tokens each. If `max_num_seqs` allows, there are enough of them for the whole budget, and for a
    backend to gather as many keys as it ever gathers together. All contexts share the blocks of one
    small cache with a single layer.
    """
    device = model.embed_tokens.weight.device
    length = config.max_model_len
    budget = config.max_num_batched_tokens
    num_full = math.ceil(max(GATHER_KEYS, budget) / length)
    num_seqs = min(config.max_num_seqs, budget, num_full)
    query_len = min(length, math.ceil(budget / num_seqs))
    positions = np.tile(np.arange(length - query_len, length), num_seqs)
    num_blocks = math.ceil(length / config.block_size)
    cache = KVCache(
        replace(shape, num_layers=1),
        num_blocks=num_blocks,
        block_size=config.block_size,
        device=device,
    )
    if backend == "reference":
        backend = "torch"  # which needs more memory, and does not take hours
    attention = make_backend(backend, cache, 1.0)
    metadata = AttentionMetadata(
        query_lens=np.full(num_seqs, query_len),
        context_lens=np.full(num_seqs, length),
        block_tables=[list(range(num_blocks))] * num_seqs,
        slot_mapping=positions,  # because the blocks are 0, 1, 2, …
        num_decodes=0,
        seq_ids=list(range(num_seqs)),
    )
    attention.begin_step(metadata)
    tokens = to_device(positions, device)
    hidden = model(tokens * 0, tokens, lambda layer, q, k, v: attention(0, q, k, v))
    # Top-p sorts all probabilities. Penalties, bans and forks copy the logits.
    params = SamplingParams(top_p=0.9, min_p=0.1)
    draw = Draw(params, uniform=0.5, banned_token_ids=[0], token_counts={0: 1})
    num_rows = max(config.max_num_seqs, LOGITS_TILE)
    logits = model.logits(hidden[:1].expand(num_rows, -1))
    draw_samples(logits.clone(), SamplingMetadata([draw] * num_rows, device))


@torch.inference_mode()
def measure_preemption(model: Model, kv_cache: KVCache, budget: int) -> str:
    """The faster way to bring back a preempted block, "swap" or "recompute", as measured now.

    Swapping a block takes a copy out and a copy in. Recomputing it takes its share of a prefill
    without attention. That prefill has 64 tokens on a CPU. On a GPU it has the whole budget,
    because a short one takes as long as its launches.
    """
    if len(kv_cache.host) == 0:
        return "recompute"
    device = kv_cache.data.device
    moves = Moves(swap_out=[(0, 0)], swap_in=[(0, 0)])
    swap = seconds(lambda: kv_cache.move_blocks(moves), device)
    num_tokens = budget if device.type == "cuda" else min(64, budget)
    ids = torch.arange(num_tokens, device=device) % model.config.vocab_size
    prefill = seconds(lambda: model(ids, ids * 0, lambda layer, q, k, v: q), device)
    recompute = prefill * kv_cache.block_size / num_tokens
    choice = "swap" if swap < recompute else "recompute"
    logger.info(
        f"preemption by {choice}: {1e3 * swap:.3f} ms to swap a block out and in,"
        f" {1e3 * recompute:.3f} ms to recompute it"
    )
    return choice


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The seconds that `work` takes, the best of three runs."""

    def run() -> None:
        work()
        torch.get_device_module(device).synchronize()  # a GPU may still compute

    return min(timeit.repeat(run, number=1, repeat=3))
