"""Throughput and time to first token when prompts share a beginning, with the prefix cache and without."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from common import (
    add_model_arguments,
    add_plot_argument,
    at_least,
    checkpoint,
    machine,
    save_lines,
)

from nanopaged import LLM, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, shape="28m")
    parser.add_argument(
        "--prefix", type=int, nargs="+", default=[0, 128, 512, 1024, 2048], help="shared tokens"
    )
    parser.add_argument("--requests", type=at_least(1), default=16)
    parser.add_argument("--own", type=at_least(1), default=32, help="tokens of each prompt after the prefix")
    parser.add_argument("--output", type=at_least(1), default=32)
    parser.add_argument("--block-size", type=int, default=16)
    add_plot_argument(parser)


def run(args: argparse.Namespace) -> None:
    print(f"{args.requests} requests, {args.own} tokens of their own, {args.output} out; {machine()}")
    print(f"{'prefix':>6} {'cache':>5} {'output tokens/s':>15} {'first token, s (median)':>24} {'found':>6}")
    lines: dict[str, list[float]] = {"cache on": [], "cache off": []}
    with checkpoint(args) as folder:
        for prefix in args.prefix:
            for cache in (True, False):
                rate, first, found = serve(folder, prefix, cache, args)
                name = "on" if cache else "off"
                lines[f"cache {name}"].append(rate)
                print(f"{prefix:6} {name:>5} {rate:15.1f} {first:24.3f} {found:6.1%}", flush=True)
    if args.plot:
        save_lines(args.plot, args.prefix, lines, "shared prefix (tokens)", "output tokens a second")


def serve(
    folder: Path | str, prefix: int, cache: bool, args: argparse.Namespace
) -> tuple[float, float, float]:
    """(output tokens a second, median seconds to the first token, share of prompt tokens found)."""
    rng = random.Random(args.seed)
    llm = LLM(
        folder,
        dtype=args.dtype,
        block_size=args.block_size,
        enable_prefix_caching=cache,
        max_model_len=prefix + args.own + args.output + 8,
    )
    shared = [rng.randrange(llm.engine.vocab_size) for _ in range(prefix)]
    prompts = [
        shared + [rng.randrange(llm.engine.vocab_size) for _ in range(args.own)] for _ in range(args.requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    found = sum(output.metrics.num_cached_tokens for output in outputs) / sum(map(len, prompts))
    return args.requests * args.output / seconds, statistics.median(waits), found
