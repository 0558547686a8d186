"""Tensor parallelism: time of a decode step, bytes of its message, and memory of each rank.

    python docs/experiments/ranks.py --ranks 1 2 4 --plot ranks.svg

All ranks are on this machine and share its cores, so several are slower than one on a CPU. `added` is the
share of the step in which rank 0 waits for the others and adds up partial results (all-reduce).
"""

from __future__ import annotations

import argparse
import pickle
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
    model_name,
    save_lines,
)

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLM


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument("--sequences", type=at_least(1), nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--input", type=at_least(1), default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=at_least(2), default=20, help="decode steps that are timed")
    add_plot_argument(parser)
    args = parser.parse_args()
    print(f"{model_name(args)}; prompts of {args.input} tokens, {args.steps} decode steps; {machine()}")
    print(f"{'ranks':>5} {'sequences':>9} {'step, ms':>9} {'added':>6} {'message, bytes':>14}", end="")
    print(f" {'weights, MB':>11} {'K/V, MB':>8}   (of a rank)")
    lines: dict[str, list[float]] = {}
    for size in args.ranks:
        blocks = max(args.sequences) * -(-(args.input + args.steps + 4) // 16)
        llm = make_llm(
            args,
            tensor_parallel_size=size,
            num_blocks=blocks,
            num_host_blocks=0,
            max_num_seqs=max(args.sequences),
        )
        runner = llm.engine.runner
        weights = sum({id(w): w.nbytes for w in tensors(runner.model)}.values()) / 1e6
        for num_seqs in args.sequences:
            seconds, added, message = measure(llm, num_seqs, args)
            lines.setdefault(f"{size} ranks" if size > 1 else "1 rank", []).append(1e3 * seconds)
            print(f"{size:5} {num_seqs:9} {1e3 * seconds:9.1f} {added:6.1%} {message:14}", end="")
            print(f" {weights:11.1f} {runner.kv_cache.data.nbytes / 1e6:8.1f}", flush=True)
        del llm, runner
    if args.plot:
        save_lines(args.plot, args.sequences, lines, "sequences", "decode step (ms)")


def tensors(model: object) -> list:
    """The weights of a model, in the layout in which they are read."""
    from nanopaged.model.decoder import Linear

    linears = [module for module in model.modules() if isinstance(module, Linear)]
    packed = [linear.packed.packed for linear in linears if linear.packed is not None]
    return [*model.parameters(), *packed]


def measure(llm: LLM, num_seqs: int, args: argparse.Namespace) -> tuple[float, float, int]:
    """Medians of decode steps: seconds, share of the all-reduces, bytes of the message."""
    from nanopaged import SamplingParams

    engine, ranks = llm.engine, llm.engine.runner.ranks
    params = SamplingParams(temperature=0, max_tokens=args.steps + 3, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), [1 + i] + [2] * (args.input - 1), params)
    while engine.stats().num_generated_tokens % ((args.steps + 3) * num_seqs) < 2 * num_seqs:
        engine.step()
    adding = [0.0]
    if ranks is not None:
        all_reduce = ranks.all_reduce

        def timed(x: object) -> object:
            began = time.perf_counter()
            all_reduce(x)
            adding[0] += time.perf_counter() - began
            return x

        ranks.all_reduce = timed
        send, sent = ranks.send, [0]

        def counted(message: object) -> None:
            sent[0] = len(pickle.dumps(message))
            send(message)

        ranks.send = counted
    steps: list[tuple[float, float, int]] = []
    while engine.scheduler.running:
        adding[0], began = 0.0, time.perf_counter()
        engine.run_step()
        seconds = time.perf_counter() - began
        steps.append((seconds, adding[0] / seconds, sent[0] if ranks is not None else 0))
    engine.step()  # returns the outputs of the requests that have ended
    if ranks is not None:
        del ranks.all_reduce, ranks.send
    seconds, added, message = zip(*steps[: args.steps], strict=True)
    return statistics.median(seconds), statistics.median(added), int(statistics.median(message))


if __name__ == "__main__":
    run_program(main)
