"""Decode steps of sequences that share blocks: each reads them for itself, or they are read once for all.

    OMP_NUM_THREADS=1 python docs/experiments/read_once.py --dtype bfloat16

The rows are requests with a common prefix of several lengths, samples of one prompt, and beams. Both ways
take turns, step by step, in one engine. The times are medians of CPU milliseconds a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING

from common import add_model_arguments, at_least, machine, make_llm, make_parser, model_name

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLM, BeamSearchParams, SamplingParams


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser)
    prefixes = [0, 256, 1024, 1800]
    parser.add_argument("--prefix", type=at_least(0), nargs="+", default=prefixes, help="tokens shared")
    parser.add_argument("--requests", type=at_least(1), default=32, help="with a common prefix")
    parser.add_argument("--own", type=at_least(1), default=32, help="tokens of a prompt after the prefix")
    parser.add_argument("--width", type=at_least(1), default=8, help="samples, and beams")
    parser.add_argument("--steps", type=at_least(1), default=40, help="of each way")
    args = parser.parse_args()

    from nanopaged import BeamSearchParams, SamplingParams

    llm = make_llm(args, max_num_batched_tokens=4096, attention_backend="cpp")
    num_tokens = 2 * args.steps + 2
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    samples = SamplingParams(n=args.width, max_tokens=num_tokens, ignore_eos=True, seed=args.seed)
    beams = BeamSearchParams(beam_width=args.width, max_tokens=num_tokens, ignore_eos=True)
    print(f"{model_name(args)}; {machine()}")
    print(f"{'':34} {'each':>8} {'once':>8} {'ratio':>6}")
    for prefix in args.prefix:
        for name, params, num in (
            (f"{args.requests} requests", greedy, args.requests),
            (f"{args.width} samples", samples, 1),
            (f"{args.width} beams", beams, 1),
        ):
            each, once = measure(llm, prefix, num, params, args)
            name = f"{name}, prefix of {prefix}"
            print(f"{name:34} {1e3 * each:8.1f} {1e3 * once:8.1f} {once / each:6.2f}", flush=True)


def measure(
    llm: LLM, prefix: int, num: int, params: SamplingParams | BeamSearchParams, args: argparse.Namespace
) -> tuple[float, float]:
    """CPU seconds of a decode step, reading shared blocks for each sequence, and once."""
    from nanopaged.attention import cpp_backend

    engine, rng = llm.engine, random.Random(args.seed)
    least = cpp_backend.MIN_SAVED_KEYS
    shared = rng.choices(range(engine.vocab_size), k=prefix)
    for i in range(num):
        engine.add_request(str(i), shared + rng.choices(range(engine.vocab_size), k=args.own), params)
    while engine.stats().num_waiting or any(
        s.num_output_tokens == 0 for s in engine.scheduler.running_sequences
    ):
        engine.step()
    seconds: dict[int, list[float]] = {1 << 60: [], least: []}
    for i in range(2 * args.steps):
        cpp_backend.MIN_SAVED_KEYS = (1 << 60, least)[i % 2]
        began = time.process_time()
        engine.step()
        seconds[cpp_backend.MIN_SAVED_KEYS].append(time.process_time() - began)
    cpp_backend.MIN_SAVED_KEYS = least
    for i in range(num):
        engine.abort_request(str(i))
    engine.reset_prefix_cache()
    each, once = (statistics.median(times) for times in seconds.values())
    return each, once


if __name__ == "__main__":
    run_program(main)
