"""Microseconds a token to swap K/V out and in again, and to compute it again (paper, §7.3, Fig. 19).

The paper's engine kept each layer's blocks apart, so a block was 2 · layers small copies, and small blocks
swapped badly. Here a block is one run of memory; the other layout is measured beside it. Then whole runs in
pools too small for all their requests: output tokens a second when victims are swapped and when recomputed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
from common import (
    add_model_arguments,
    add_plot_argument,
    checkpoint,
    machine,
    model_name,
    save_lines,
)

from nanopaged import LLM, SamplingParams
from nanopaged.block_pool import blocks_needed
from nanopaged.kv_cache import KVCache, KVShape, pick_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_plot_argument(parser)


def run(args: argparse.Namespace) -> None:
    device = pick_device("auto")
    recompute, shape = time_prefill(args)
    recompute *= 1e6
    print(f"{model_name(args)}: {shape.block_bytes(1):,} bytes a token; {machine()}")
    print(f"{'block size':>10} {'swap':>12} {'recompute':>10}   us a token")
    rows = []
    for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        swap = 1e6 * time_swap(shape, block_size, device, args.seed)
        rows.append((block_size, swap, recompute))
        print(f"{block_size:10} {swap:12.2f} {recompute:10.2f}")
    if args.plot:
        sizes, *columns = map(list, zip(*rows, strict=True))
        lines = dict(zip(("swap", "recompute"), columns, strict=True))
        save_lines(args.plot, sizes, lines, "block size (tokens)", "microseconds a token", log_y=True)
    pool_table(args)


def pool_table(args: argparse.Namespace) -> None:
    """16 requests of 64 tokens in and 96 out, in pools for a share of what they need at most."""
    needed = 16 * blocks_needed(160, 16)
    print(f"\n{'pool':>5} {'swap':>9} {'victims':>8} {'recompute':>10} {'victims':>8}   output tokens/s")
    with checkpoint(args) as folder:
        for share in (1.0, 0.7, 0.5, 0.3):
            columns = [serve(folder, round(share * needed), way, args) for way in ("swap", "recompute")]
            figures = " ".join(
                f"{rate:{width}.1f} {n:8}" for width, (rate, n) in zip((9, 10), columns, strict=True)
            )
            print(f"{share:5.0%} {figures}", flush=True)


def serve(
    folder: Path | str, num_blocks: int, preemption: str, args: argparse.Namespace
) -> tuple[float, int]:
    """(output tokens a second, requests preempted)."""
    llm = LLM(
        folder,
        dtype=args.dtype,
        num_blocks=num_blocks,
        max_model_len=160,
        preemption=preemption,
        enable_prefix_caching=False,
    )
    vocab, rng = range(llm.engine.vocab_size), random.Random(args.seed)
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    llm.generate([[1] * 64], SamplingParams(max_tokens=2), use_tqdm=False)
    began = time.perf_counter()
    llm.generate([rng.choices(vocab, k=64) for _ in range(16)], params)
    seconds, stats = time.perf_counter() - began, llm.engine.stats()
    return 16 * 96 / seconds, stats.num_preemptions_swap + stats.num_preemptions_recompute


def time_swap(
    shape: KVShape,
    block_size: int,
    device: torch.device,
    seed: int,
    num_tokens: int = 2048,
) -> float:
    """Seconds a token for the way out and in of scattered blocks; the median of seven rounds."""
    num_blocks = num_tokens // block_size
    cache = KVCache(shape, 2 * num_blocks, block_size, device, num_blocks)
    cache.data.normal_()
    rng, rounds = random.Random(seed), []
    for _ in range(7):
        device_blocks = rng.sample(range(2 * num_blocks), num_blocks)
        host_blocks = rng.sample(range(num_blocks), num_blocks)
        began = time.perf_counter()
        swap_out = list(zip(device_blocks, host_blocks, strict=True))
        cache.move_blocks(swap_out, [], [])
        cache.move_blocks([], [(host, device) for device, host in swap_out], [])
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / num_tokens


def time_prefill(args: argparse.Namespace, num_tokens: int = 512) -> tuple[float, KVShape]:
    """Seconds a token to compute a prompt, attention included, the median of five; and the K/V's shape."""
    with checkpoint(args) as folder:
        llm = LLM(folder, dtype=args.dtype, max_model_len=1024, enable_prefix_caching=False)
    rng, rounds = random.Random(args.seed), []
    for _ in range(5):
        prompt = [rng.randrange(llm.engine.vocab_size) for _ in range(num_tokens)]
        began = time.perf_counter()
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / num_tokens, llm.engine.runner.kv_cache.shape
