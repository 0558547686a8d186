"""Throughput and time to first token when all prompts share a prefix, with the prefix cache and without it.

    python docs/experiments/prefix.py --plot docs/book/figures/prefix.svg

The two engines, one with the cache and one without, take turns. Each round has a new prefix, so that nothing
is found of the rounds before; the first round of both is a warm-up and is not counted. The rows are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING

from common import (
    add_model_arguments,
    add_plot_argument,
    at_least,
    machine,
    make_llm,
    make_parser,
    save_lines,
)

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLM

Result = tuple[float, float, float]  # output tokens per second, seconds to the first token, share found


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser, shape="28m")
    prefixes = [0, 128, 512, 1024, 2048]
    parser.add_argument("--prefix", type=at_least(0), nargs="+", default=prefixes, help="tokens shared")
    parser.add_argument("--requests", type=at_least(1), default=16, help="in a round")
    parser.add_argument("--own", type=at_least(1), default=32, help="tokens of a prompt after the prefix")
    parser.add_argument("--output", type=at_least(1), default=32, help="tokens that a request generates")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a block")
    parser.add_argument("--repeat", type=at_least(1), default=3, help="rounds")
    add_plot_argument(parser)
    args = parser.parse_args()
    print(f"{args.requests} requests, {args.own} tokens of their own, {args.output} out; {machine()}")
    print(f"{'prefix':>6} {'cache':>5} {'output tokens/s':>15} {'first token, s':>15} {'found':>6}")
    lines: dict[str, list[float]] = {"cache on": [], "cache off": []}
    for prefix in args.prefix:
        for name, results in in_turns(prefix, args).items():
            rate, first, found = map(statistics.median, zip(*results, strict=True))
            lines[f"cache {name}"].append(rate)
            print(f"{prefix:6} {name:>5} {rate:15.1f} {first:15.3f} {found:6.1%}", flush=True)
    if args.plot:
        x_label, y_label = "shared prefix (tokens)", "output tokens per second"
        save_lines(args.plot, args.prefix, lines, x_label, y_label, to_scale=True)


def in_turns(prefix: int, args: argparse.Namespace) -> dict[str, list[Result]]:
    """The rounds of both engines."""
    longest = prefix + args.own + args.output
    llms = {
        name: make_llm(
            args,
            block_size=args.block_size,
            enable_prefix_caching=name == "on",
            max_model_len=longest,
            num_blocks=args.requests * -(-longest // args.block_size),
        )
        for name in ("on", "off")
    }
    rng, results = random.Random(args.seed), {name: [] for name in llms}
    for i in range(args.repeat + 1):
        vocab = range(llms["on"].engine.vocab_size)
        shared = rng.choices(vocab, k=prefix)
        prompts = [shared + rng.choices(vocab, k=args.own) for _ in range(args.requests)]
        for name, llm in llms.items():
            result = serve(llm, prompts, args.output)
            if i > 0:
                results[name].append(result)
    return results


def serve(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Result:
    from nanopaged import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    found = sum(output.metrics.num_cached_tokens for output in outputs) / sum(map(len, prompts))
    return len(prompts) * max_tokens / seconds, statistics.median(waits), found


if __name__ == "__main__":
    run_program(main)
