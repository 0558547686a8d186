"""Microseconds to schedule a step of decodes and book its results, per step and per sequence."""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.common import machine
from benchmarks.no_model import NoModel, make_request
from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, help="the median of so many counts")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    print(f"blocks of {args.block_size}, prompts of 100 tokens; median of {args.steps} steps; {machine()}")
    print(f"{'blocks':>9} {'sequences':>9} {'us a step':>10} {'us a sequence':>14}")
    for num_blocks in (1000, 10_000, 100_000, 1_000_000):
        for num_seqs in (1, 16, 64, 256, 1024, 4096):
            if num_seqs * ((100 + args.steps) // args.block_size + 2) <= num_blocks:
                seconds = time_steps(num_blocks, num_seqs, args)
                us = 1e6 * seconds
                print(f"{num_blocks:9,} {num_seqs:9,} {us:10.1f} {us / num_seqs:14.3f}")


def time_steps(num_blocks: int, num_seqs: int, args: argparse.Namespace) -> float:
    rng = random.Random(args.seed)
    scheduler = Scheduler(BlockManager(num_blocks, args.block_size), num_seqs, 1 << 20)
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True)
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), [rng.randrange(32000) for _ in range(100)], params))
    runner, seconds = NoModel(args.seed), []
    while scheduler.has_unfinished:
        began = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = runner.execute(batch)
        answered = time.perf_counter()
        scheduler.update(batch, result)
        seconds.append(scheduled - began + time.perf_counter() - answered)
    return statistics.median(seconds[1:-1])  # without the prefill and the end
