"""Blocks saved by parallel sampling and beam search: 1 - blocks in use / entries of the block tables (§6.3).

Requests of exponentially distributed lengths go through the real scheduler and block manager, without a
model; the prefix cache is off, so that requests share nothing with each other. "cache alone" is parallel
sampling without forks or copies on write: each output is a request of its own with the same prompt, and what
they share is what the prefix cache finds, whole blocks of the prompt.
"""

from __future__ import annotations

import argparse
import random

from common import add_plot_argument, at_least, save_lines
from no_model import TRACES, NoModel, make_request
from tqdm import tqdm

from nanopaged import BeamSearchParams, SamplingParams, audit
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler

PAPER = {
    ("Alpaca-like", "parallel"): "6.1 to 9.8 %",
    ("Alpaca-like", "cache alone"): "",
    ("ShareGPT-like", "cache alone"): "",
    ("Alpaca-like", "beam"): "37.6 to 55.2 %",
    ("ShareGPT-like", "parallel"): "16.2 to 30.5 %",
    ("ShareGPT-like", "beam"): "44.3 to 66.3 %",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=at_least(1), default=500)
    parser.add_argument("--block-size", type=at_least(1), default=16)
    add_plot_argument(parser)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    print(f"{args.requests} requests a row, blocks of {args.block_size}; widths 2, 4, 6")
    print(f"{'trace':15} {'sharing':12} {'n = 2':>7} {'n = 4':>7} {'n = 6':>7}   paper, 2 to 6")
    lines: dict[str, list[float]] = {}
    for trace, means in TRACES.items():
        for kind in ("parallel", "cache alone", "beam"):
            saved = [replay(kind, width, means, args) for width in (2, 4, 6)]
            lines[f"{kind}, {trace}"] = saved
            columns = " ".join(f"{share:7.1%}" for share in saved)
            print(f"{trace:15} {kind:12} {columns}   {PAPER[trace, kind]}")
    if args.plot:
        save_lines(args.plot, [2, 4, 6], lines, "sequences a request", "share of blocks saved")


def replay(kind: str, width: int, means: tuple[int, int], args: argparse.Namespace) -> float:
    rng = random.Random(args.seed)
    manager = BlockManager(100_000, args.block_size, enable_prefix_caching=kind == "cache alone")
    scheduler = Scheduler(manager, max_num_seqs=64 * width, max_num_batched_tokens=8192)
    for i in range(args.requests):
        num_input, num_output = (min(2048, 1 + int(rng.expovariate(1 / mean))) for mean in means)
        prompt = [rng.randrange(32000) for _ in range(num_input)]
        if kind == "beam":
            params = BeamSearchParams(beam_width=width, max_tokens=num_output)
        else:
            params = SamplingParams(n=width if kind == "parallel" else 1, max_tokens=num_output)
        for copy in range(width if kind == "cache alone" else 1):
            scheduler.add(make_request(f"{i}-{copy}", prompt, params))
    runner, saved, entries = NoModel(args.seed), 0, 0
    with tqdm(total=len(scheduler.waiting), desc=f"{kind} {width}", leave=False) as bar:
        while scheduler.has_unfinished:
            batch = scheduler.schedule()
            for request in scheduler.update(batch, runner.execute(batch)):
                bar.update(request.finished)
            saved += audit.num_blocks_saved(manager, scheduler.sequences)
            entries += sum(len(seq.block_table) for seq in scheduler.sequences)
    return saved / entries
