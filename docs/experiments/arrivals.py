"""Throughput, latency and goodput over the rate at which requests arrive.

    python docs/experiments/arrivals.py

Requests arrive at random moments (a Poisson process) and go through the real scheduler and block manager,
without a model. Time is simulated: a step takes --step milliseconds, and --token more for each token in it.
The defaults are near a 100M model on two cores (docs/records/benchmarks.md, "Steps against the roofline"). So
the figures do not depend on the machine.

"wait" is the time from the arrival to the first token, "each" the time for each further token (the median).
A request is good if both are within their limits, and goodput is good requests a second. The row "all at
once" is a closed batch: every request is there at the beginning.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque

from common import at_least, make_parser
from no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.terminal import run_program

Lengths = tuple[int, int]  # (input, output) tokens of a request
Times = tuple[float, float, float]  # of a request: its arrival, its first and its last token

RATES = [0.5, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0]


def main() -> None:
    args = make_arguments()
    lengths = draw_lengths(args)
    mean_input, mean_output = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    print(f"{args.requests} requests, on average {mean_input:.0f} tokens in and {mean_output:.0f} out")
    print(f"good: first token within {args.first} s, each further one within {args.each} ms on average")
    print(f"{'requests/s':>11} {'served/s':>9} {'tokens/s':>9} {'wait, s (p50 p99)':>18}", end="")
    print(f" {'each, ms':>9} {'good/s':>7}")
    for rate in (*args.rate, math.inf):
        print_row(rate, lengths, simulate(rate, lengths, args), args)


def make_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The flags; with `given`, those instead of the command line's."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rate", type=float, nargs="+", default=RATES, help="requests a second; one or several"
    )
    parser.add_argument("--requests", type=at_least(1), default=300, help="of each rate")
    parser.add_argument(
        "--tokens", type=at_least(2), nargs=2, default=[16, 256], help="least and most, in and out"
    )
    parser.add_argument("--step", type=float, default=22.0, help="milliseconds of a step without tokens")
    parser.add_argument("--token", type=float, default=0.7, help="milliseconds for each token in a step")
    parser.add_argument("--max-num-seqs", type=at_least(1), default=32, help="sequences in a step")
    parser.add_argument("--budget", type=at_least(1), default=256, help="tokens in a step")
    parser.add_argument(
        "--first", type=float, default=1.0, help="limit of the time to the first token, seconds"
    )
    parser.add_argument(
        "--each", type=float, default=80.0, help="limit of the time per further token, milliseconds"
    )
    parser.add_argument("--fork", metavar="FILE", help="a fork, whose scheduler and block manager run")
    args = parser.parse_args(given)
    if args.fork is not None:
        try:
            make_scheduler(1000, 16, fork=args.fork)
        except ValueError as error:
            parser.error(str(error))
    return args


def draw_lengths(args: argparse.Namespace) -> list[Lengths]:
    """Input and output tokens, uniform between the limits."""
    rng = random.Random(args.seed)
    return [(rng.randint(*args.tokens), rng.randint(*args.tokens)) for _ in range(args.requests)]


def simulate(rate: float, lengths: list[Lengths], args: argparse.Namespace) -> list[Times]:
    """The times of all requests, in order of arrival. `rate`: arrivals a second; inf is all at once."""
    rng, now = random.Random(args.seed), 0.0
    coming: deque[tuple[float, str]] = deque()
    for i in range(len(lengths)):
        now += rng.expovariate(rate)  # gaps of a Poisson process; 0 for an infinite rate
        coming.append((now, str(i)))
    num_blocks = args.max_num_seqs * (2 * args.tokens[1] // 16 + 2)  # so that no request waits for blocks
    scheduler = make_scheduler(num_blocks, 16, args.max_num_seqs, args.budget, False, fork=args.fork)
    arrival, first, last = {name: time for time, name in coming}, {}, {}
    runner, now = NoModel(args.seed), 0.0
    while len(last) < len(lengths):
        if not (scheduler.waiting or scheduler.running):
            now = max(now, coming[0][0])  # an idle engine: nothing happens until the next arrival
        while coming and coming[0][0] <= now:
            _, name = coming.popleft()
            num_input, num_output = lengths[int(name)]
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            scheduler.add(make_request(name, [0] * num_input, params))
        batch = scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch.sequences)
        now += (args.step + args.token * num_tokens) / 1e3
        for request in scheduler.update(batch, runner.execute(batch)):
            first.setdefault(request.request_id, now)
            if request.finished:
                last[request.request_id] = now
    return [(arrival[name], first[name], last[name]) for name in map(str, range(len(lengths)))]


def summary(lengths: list[Lengths], times: list[Times], args: argparse.Namespace) -> dict[str, float]:
    """The columns of a row."""
    waits = sorted(first - arrival for arrival, first, _ in times)
    each = [(last - first) / (n - 1) for (_, first, last), (_, n) in zip(times, lengths, strict=True)]
    seconds = max(last for _, _, last in times) - times[0][0]
    good = sum(
        first - arrival <= args.first and 1e3 * further <= args.each
        for (arrival, first, _), further in zip(times, each, strict=True)
    )
    return {
        "served": len(times) / seconds,
        "tokens": sum(n for _, n in lengths) / seconds,
        "p50": waits[len(waits) // 2],
        "p99": waits[len(waits) * 99 // 100],
        "each": 1e3 * sorted(each)[len(each) // 2],
        "good": good / seconds,
    }


def print_row(rate: float, lengths: list[Lengths], times: list[Times], args: argparse.Namespace) -> None:
    row = summary(lengths, times, args)
    name = f"{rate:.1f}" if rate < math.inf else "all at once"
    print(
        f"{name:>11} {row['served']:9.2f} {row['tokens']:9.0f} {row['p50']:9.2f} {row['p99']:8.2f} "
        f"{row['each']:9.0f} {row['good']:7.2f}"
    )


if __name__ == "__main__":
    run_program(main)
