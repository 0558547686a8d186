"""How long running requests wait for their next token when a long prompt arrives, in chunks and whole.

A prompt computed in one step holds everybody up for as long as it takes. In chunks that fit into the token
budget beside the decodes it takes more steps, and nobody stops.
"""

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
    parser.add_argument("--running", type=at_least(1), default=8, help="requests that decode")
    parser.add_argument("--prompt", type=at_least(1), default=1500, help="tokens of the prompt that arrives")
    parser.add_argument(
        "--budget", type=at_least(1), nargs="+", default=[64, 128, 256, 512], help="tokens a step, in chunks"
    )
    add_plot_argument(parser)


def run(args: argparse.Namespace) -> None:
    print(f"{args.running} requests decode, a prompt of {args.prompt} arrives; {machine()}")
    print("usual and longest time between two tokens of a running request; time to the prompt's first token")
    print(
        f"{'budget':>8} {'usual, ms':>10} {'longest, ms':>12} {'prompt done, ms':>16}   (between two tokens)"
    )
    longest: list[float] = []
    with checkpoint(args) as folder:
        for budget in (*args.budget, None):
            usual, worst, done = serve(folder, budget, args)
            longest.append(1e3 * worst)
            name = budget or "whole"
            print(f"{name:>8} {1e3 * usual:10.1f} {1e3 * worst:12.1f} {1e3 * done:16.1f}", flush=True)
    if args.plot:
        lines = {"in chunks": longest[:-1], "whole": longest[-1:] * len(args.budget)}
        save_lines(
            args.plot, args.budget, lines, "tokens a step", "longest wait for a token (ms)", log_y=True
        )


def serve(folder: Path | str, budget: int | None, args: argparse.Namespace) -> tuple[float, float, float]:
    """(median seconds between tokens before, the longest while the prompt is there, its time to a token)."""
    rng = random.Random(args.seed)
    room = args.prompt + args.running + 8
    llm = LLM(
        folder,
        dtype=args.dtype,
        enable_prefix_caching=False,
        enable_chunked_prefill=budget is not None,
        max_num_batched_tokens=budget or room,
        max_model_len=room,
    )
    engine, steps = llm.engine, 12 + args.prompt // max(1, (budget or room) - args.running)
    params = SamplingParams(temperature=0, max_tokens=2 * steps + 20, ignore_eos=True)
    for i in range(args.running):
        engine.add_request(str(i), [rng.randrange(llm.engine.vocab_size) for _ in range(20)], params)
    for _ in range(5):
        engine.step()
    usual = [time_step(llm) for _ in range(10)]
    prompt = [rng.randrange(engine.vocab_size) for _ in range(args.prompt)]
    long = engine.make_request("long", prompt, SamplingParams(max_tokens=1))
    began = time.perf_counter()
    engine.queue(long)
    waits = []
    while not long.finished:
        waits.append(time_step(llm))
    return statistics.median(usual), max(waits), time.perf_counter() - began


def time_step(llm: LLM) -> float:
    """Seconds of a step: every running request gets a token in it."""
    began = time.perf_counter()
    llm.engine.step()
    return time.perf_counter() - began
