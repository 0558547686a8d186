"""Microseconds per token to swap K/V out and in again, and to compute it again (paper, §7.3, Fig. 19).

    python docs/experiments/preemption.py --plot docs/book/figures/preemption.svg

The paper's engine had a K/V tensor for each layer, so swapping a block took 2 · num_layers small copies, and
small blocks swapped badly. Here all layers of a block are contiguous (block-major), and swapping it is one
copy; the paper's layout (layer-major) is measured for comparison. Then whole runs in pools that are too small
for all requests: output tokens per second with preemption="swap" and with "recompute".

Finally the admission watermark, the share of the blocks that must stay free when a request is admitted while
others run: without one, a request takes the last blocks, is soon preempted, and computes its prompt again.
The requests go through the real scheduler and block manager without a model, in a pool of 15,700 slots.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import (
    add_model_arguments,
    add_plot_argument,
    at_least,
    machine,
    make_llm,
    make_parser,
    model_name,
    pick_device,
    save_lines,
)
from memory import Lengths, draw_lengths
from no_model import TRACES, NoModel, Run, make_request, make_scheduler, serve_all

from nanopaged import SamplingParams
from nanopaged.terminal import run_program

if TYPE_CHECKING:
    import torch

    from nanopaged.kv_cache import KVShape

BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
NUM_TOKENS = 2048  # whose K/V is swapped
Pairs = list[tuple[int, int]]  # (device block, host block)


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument("--repeat", type=at_least(1), default=3, help="rounds in each pool; medians count")
    parser.add_argument("--requests", type=at_least(1), default=600, help="of each trace, for the watermark")
    add_plot_argument(parser)
    args = parser.parse_args()
    device = pick_device()
    seconds, shape = time_prefill(args)
    recompute = 1e6 * seconds
    print(f"{model_name(args)}: {shape.block_bytes(1):,} bytes of K/V a token; {machine()}")
    print(f"{'block size':>10} {'block-major':>12} {'layer-major':>12} {'recompute':>10}   us a token")
    lines: dict[str, list[float]] = {"recompute": [], "swap, layer-major": [], "swap, block-major": []}
    for block_size in BLOCK_SIZES:
        swaps = [
            1e6 * time_swap(make(shape, block_size, device), block_size, device, args.seed)
            for make in (block_major_swap, layer_major_swap)
        ]
        for line, us in zip(lines.values(), (recompute, swaps[1], swaps[0]), strict=True):
            line.append(us)
        print(f"{block_size:10} {swaps[0]:12.2f} {swaps[1]:12.2f} {recompute:10.2f}", flush=True)
    if args.plot:
        x_label, y_label = "block size (tokens)", "microseconds per token"
        save_lines(args.plot, BLOCK_SIZES, lines, x_label, y_label, log_y=True)
    run_small_pools(args)
    run_watermarks(args)


# ── one swap ──────────────────────────────────────────────────────────────────────────────────────


def block_major_swap(shape: KVShape, block_size: int, device: torch.device) -> Callable[[Pairs], None]:
    """Our K/V cache: a block is one copy."""
    from nanopaged.kv_cache import KVCache
    from nanopaged.sequence import Moves

    num_blocks = NUM_TOKENS // block_size
    cache = KVCache(
        shape,
        num_blocks=2 * num_blocks,
        block_size=block_size,
        device=device,
        num_host_blocks=num_blocks,
    )
    cache.data.normal_()

    def swap(pairs: Pairs) -> None:
        back = [(host_block, device_block) for device_block, host_block in pairs]
        cache.move_blocks(Moves(swap_out=pairs, swap_in=back))

    return swap


def layer_major_swap(shape: KVShape, block_size: int, device: torch.device) -> Callable[[Pairs], None]:
    """The paper's layout: each layer has its K and its V together, so a block is 2 · num_layers copies.

    [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
    """
    import torch

    num_blocks = NUM_TOKENS // block_size
    block = (shape.num_kv_heads, block_size, shape.head_dim)
    on_device = torch.randn(shape.num_layers, 2, 2 * num_blocks, *block, dtype=shape.dtype, device=device)
    on_host = torch.empty(
        shape.num_layers, 2, num_blocks, *block, dtype=shape.dtype, pin_memory=device.type == "cuda"
    )

    def swap(pairs: Pairs) -> None:
        layers = list(zip(on_device.flatten(0, 1), on_host.flatten(0, 1), strict=True))
        for device_block, host_block in pairs:
            for device_layer, host_layer in layers:
                host_layer[host_block].copy_(device_layer[device_block], non_blocking=True)
        for device_block, host_block in pairs:
            for device_layer, host_layer in layers:
                device_layer[device_block].copy_(host_layer[host_block], non_blocking=True)

    return swap


def time_swap(swap: Callable[[Pairs], None], block_size: int, device: torch.device, seed: int) -> float:
    """Seconds a token for scattered blocks to go out and come in; the median of seven rounds."""
    import torch

    num_blocks = NUM_TOKENS // block_size
    rng = random.Random(seed)
    rounds = []
    for _ in range(7):
        device_blocks = rng.sample(range(2 * num_blocks), num_blocks)
        pairs = list(zip(device_blocks, rng.sample(range(num_blocks), num_blocks), strict=True))
        began = time.perf_counter()
        swap(pairs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / NUM_TOKENS


def time_prefill(args: argparse.Namespace, num_tokens: int = 512) -> tuple[float, KVShape]:
    """Seconds a token to compute a prompt, the median of five rounds; and the shape of its K/V."""
    llm = make_llm(args, max_model_len=1024, max_num_seqs=1, enable_prefix_caching=False)
    rng, rounds = random.Random(args.seed), []
    for i in range(6):
        prompt = rng.choices(range(llm.engine.vocab_size), k=num_tokens)
        began = time.perf_counter()
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        if i > 0:  # the first round warms up
            rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / num_tokens, llm.engine.runner.kv_cache.shape


# ── whole runs ────────────────────────────────────────────────────────────────────────────────────


def run_small_pools(args: argparse.Namespace) -> None:
    """16 requests of 64 tokens in and 96 out, in pools for a share of the blocks that they need at most."""
    needed = 16 * 160 // 16
    print(
        f"\n{'pool':>5} {'swap':>9} {'preempted':>10} {'recompute':>10} {'preempted':>10}   output tokens/s"
    )
    for share in (1.0, 0.7, 0.5, 0.3):
        swap, recompute = serve_in_turns(round(share * needed), args)
        print(f"{share:5.0%} {swap[0]:9.1f} {swap[1]:10} {recompute[0]:10.1f} {recompute[1]:10}", flush=True)


def serve_in_turns(num_blocks: int, args: argparse.Namespace) -> list[tuple[float, int]]:
    """(median output tokens per second, requests preempted in a round), by swapping and by recomputing."""
    llms = [
        make_llm(
            args,
            block_size=16,
            num_blocks=num_blocks,
            max_model_len=160,
            max_num_seqs=16,
            preemption=preemption,
            enable_prefix_caching=False,
        )
        for preemption in ("swap", "recompute")
    ]
    rng, rates = random.Random(args.seed), [[], []]
    prompts = [rng.choices(range(llms[0].engine.vocab_size), k=64) for _ in range(16)]
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    for i in range(args.repeat + 1):
        for llm, its_rates in zip(llms, rates, strict=True):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if i > 0:  # the first round warms up
                its_rates.append(16 * 96 / (time.perf_counter() - began))
    stats = [llm.engine.stats() for llm in llms]
    preempted = [s.num_preemptions_swap + s.num_preemptions_recompute for s in stats]
    return [
        (statistics.median(its_rates), total // (args.repeat + 1))
        for its_rates, total in zip(rates, preempted, strict=True)
    ]


# ── the watermark ─────────────────────────────────────────────────────────────────────────────────


def run_watermarks(args: argparse.Namespace) -> None:
    """What a watermark saves (tokens computed again) and costs (requests that run at once, so steps)."""
    print(f"\n{'trace':15} {'watermark':>9} {'computed':>9} {'preempted':>10} {'at once':>8} {'steps':>7}")
    for trace, means in TRACES.items():
        lengths = draw_lengths(means, args.requests, args.seed)
        # An output's last token needs no K/V.
        num_needed = sum(num_input + num_output - 1 for num_input, num_output in lengths)
        for watermark in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1):
            run = replay(lengths, watermark, args.seed)
            computed = run.num_computed / num_needed
            print(
                f"{trace:15} {watermark:9.0%} {computed:9.3f} {run.num_preempted:10} {run.at_once:8.1f} "
                f"{run.num_steps:7}",
                flush=True,
            )
    print("computed: tokens computed per token of a prompt or an output; at once: while requests wait")


def replay(lengths: Lengths, watermark: float, seed: int) -> Run:
    scheduler = make_scheduler(
        15700 // 16, 16, max_num_batched_tokens=2048, enable_prefix_caching=False, watermark=watermark
    )
    for i, (num_input, num_output) in enumerate(lengths):
        scheduler.add(make_request(str(i), [0] * num_input, SamplingParams(max_tokens=num_output)))
    return serve_all(scheduler, NoModel(seed))


if __name__ == "__main__":
    run_program(main)
