"""What the block size costs and gains: waste at the ends, prefixes found, speed of decoding (paper, §7.2).

Large blocks waste the slots at the end of each sequence, and a prefix is found only as far as it fills
blocks. Small ones make longer tables, and each block is a read of its own. Requests are ShareGPT-like, ten to
a prefix of some hundred tokens, and go through the real scheduler and block manager without a model; then one
layer's decode of 32 sequences is timed, with the attention that "auto" picks here.
"""

from __future__ import annotations

import argparse
import random

import torch
from common import add_plot_argument, at_least, save_lines, time_call
from kernel import Case, draw_lens
from no_model import TRACES, NoModel, make_request
from tqdm import tqdm

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.kv_cache import pick_device
from nanopaged.scheduler import Scheduler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-size", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256]
    )
    parser.add_argument("--requests", type=at_least(1), default=200)
    parser.add_argument("--slots", type=at_least(1), default=15700, help="tokens for which there is memory")
    add_plot_argument(parser)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    print(f"{args.requests} requests, {args.slots} slots")
    print(f"{'block size':>10} {'slots wasted':>13} {'prefix found':>13} {'decode, us':>11}")
    columns: dict[str, list[float]] = {"slots wasted": [], "prefix tokens not found": []}
    for block_size in args.block_size:
        wasted, found = replay(block_size, args)
        seconds = time_decode(block_size, args.seed)
        columns["slots wasted"].append(wasted)
        columns["prefix tokens not found"].append(1 - found)
        print(f"{block_size:10} {wasted:13.1%} {found:13.1%} {1e6 * seconds:11.1f}", flush=True)
    if args.plot:
        save_lines(args.plot, args.block_size, columns, "block size (tokens)", "share")


def replay(block_size: int, args: argparse.Namespace) -> tuple[float, float]:
    """(share of allocated slots without a token, share of the prefix tokens that were found)."""
    rng = random.Random(args.seed)
    manager = BlockManager(args.slots // block_size, block_size)
    scheduler = Scheduler(manager, max_num_seqs=32, max_num_batched_tokens=2048)
    sharable = 0
    for i in range(args.requests):
        if i % 10 == 0:
            prefix = [rng.randrange(32000) for _ in range(rng.randint(50, 300))]
        elif i >= 10:
            sharable += len(prefix)  # the first ten are admitted together, before anything is computed
        num_input, num_output = (1 + int(rng.expovariate(1 / mean)) for mean in TRACES["ShareGPT-like"])
        prompt = prefix + [rng.randrange(32000) for _ in range(min(1000, num_input))]
        params = SamplingParams(max_tokens=min(500, num_output))
        scheduler.add(make_request(str(i), prompt, params))
    runner, allocated, filled, found = NoModel(args.seed), 0, 0, 0
    with tqdm(total=args.requests, desc=f"blocks of {block_size}", leave=False) as bar:
        while scheduler.has_unfinished:
            batch = scheduler.schedule()
            for seq in scheduler.sequences:
                # Counted by table, so that a shared block is full for each who has it.
                allocated += len(seq.block_table) * block_size
                filled += min(seq.num_tokens, len(seq.block_table) * block_size)
            for request in scheduler.update(batch, runner.execute(batch)):
                if request.finished:
                    bar.update()
                    found += (request.num_cached_tokens or 0) if int(request.request_id) >= 10 else 0
    return 1 - filled / allocated, found / max(1, sharable)


def time_decode(block_size: int, seed: int) -> float:
    """Seconds for one layer of 32 sequences with 64 to 1,024 keys each."""
    device = pick_device("auto")
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    settings = argparse.Namespace(layers=2, kv_heads=4, group=3, head_dim=64, seed=seed, dtype=dtype)
    with torch.inference_mode():
        case = Case(draw_lens(32, "64-1024", seed), block_size, "block", settings, device)
        return time_call(case.paged(), device)
