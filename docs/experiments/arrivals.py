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

from lib.common import at_least, make_parser
from lib.no_model import Lengths, NoModel, make_request, make_scheduler, scheduler_of_fork

from nanopaged import SamplingParams
from nanopaged.scheduler import Scheduler
from nanopaged.terminal import run_program

Times = tuple[float, float, float]  # of a request: its arrival, its first and its last token

RATES = [0.5, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0]


def main() -> None:
    args = make_arguments()
    lengths = draw_lengths(args)
    mean_input, mean_output = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    print(f"{args.requests} requests, on average {mean_input:.0f} tokens in and {mean_output:.0f} out")
    print(f"good: first token within {args.first} s, each further one within {args.each} ms on average")
    print(" requests/s  served/s  tokens/s  wait, s (p50 p99)  each, ms  good/s")
    for rate in (*args.rate, math.inf):
        row = summary(lengths, simulate(rate, lengths, args), args)
        name = f"{rate:.1f}" if rate < math.inf else "all at once"
        print(
            f"{name:>11} {row['served']:9.2f} {row['tokens']:9.0f} {row['p50']:9.2f} {row['p99']:8.2f}",
            end="",
        )
        print(f" {row['each']:9.0f} {row['good']:7.2f}")


def make_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The flags; with `given`, those instead of the command line's."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--rate", type=float, nargs="+", default=RATES, help="requests a second; one or several")
    add("--requests", type=at_least(1), default=300, help="of each rate")
    add("--tokens", type=at_least(2), nargs=2, default=[16, 256], help="least and most, in and out")
    add("--step", type=float, default=22.0, help="milliseconds of a step without tokens")
    add("--token", type=float, default=0.7, help="milliseconds for each token in a step")
    add("--max-num-seqs", type=at_least(1), default=32, help="sequences in a step")
    add("--budget", type=at_least(1), default=256, help="tokens in a step")
    add("--first", type=float, default=1.0, help="limit of the time to the first token, seconds")
    add("--each", type=float, default=80.0, help="limit of the time per further token, milliseconds")
    add("--seed", type=int, default=0, help="of everything random")
    add("--fork", metavar="FILE", help="a fork, whose scheduler and block manager run")
    args = parser.parse_args(given)
    if args.fork is not None:
        try:
            make_pool(args)
        except ValueError as error:
            parser.error(str(error))
    return args


def make_pool(args: argparse.Namespace) -> Scheduler:
    """A scheduler whose pool is so large that no request waits for blocks."""
    limits = {
        "num_blocks": args.max_num_seqs * (2 * args.tokens[1] // 16 + 2),
        "block_size": 16,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.budget,
        "enable_prefix_caching": False,
    }
    return make_scheduler(**limits) if args.fork is None else scheduler_of_fork(args.fork, **limits)


def draw_lengths(args: argparse.Namespace) -> Lengths:
    """Input and output tokens, uniform between the limits."""
    rng = random.Random(args.seed)
    return [(rng.randint(*args.tokens), rng.randint(*args.tokens)) for _ in range(args.requests)]


def simulate(rate: float, lengths: Lengths, args: argparse.Namespace) -> list[Times]:
    """The times of all requests, in order of arrival. `rate`: arrivals a second; inf is all at once."""
    rng = random.Random(args.seed)
    now = 0.0
    arrival = []
    for _ in lengths:
        now += rng.expovariate(rate)  # gaps of a Poisson process; 0 for an infinite rate
        arrival.append(now)
    scheduler = make_pool(args)
    runner = NoModel(args.seed)
    coming = deque(range(len(lengths)))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    now = 0.0
    while len(last) < len(lengths):
        if not (scheduler.waiting or scheduler.running):
            now = max(now, arrival[coming[0]])  # an idle engine: nothing happens until the next arrival
        while coming and arrival[coming[0]] <= now:
            number = coming.popleft()
            num_input, num_output = lengths[number]
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            scheduler.add(make_request(str(number), [0] * num_input, params))
        batch = scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch.sequences)
        now += (args.step + args.token * num_tokens) / 1e3
        for request in scheduler.update(batch, runner.execute(batch)):
            first.setdefault(int(request.request_id), now)
            if request.finished:
                last[int(request.request_id)] = now
    return [(arrival[number], first[number], last[number]) for number in range(len(lengths))]


def summary(lengths: Lengths, times: list[Times], args: argparse.Namespace) -> dict[str, float]:
    """The columns of a row."""
    waits = [first - arrival for arrival, first, _ in times]
    each = [(last - first) / (n - 1) for (_, first, last), (_, n) in zip(times, lengths, strict=True)]
    seconds = max(last for _, _, last in times) - times[0][0]
    pairs = zip(waits, each, strict=True)
    good = [wait for wait, further in pairs if wait <= args.first and 1e3 * further <= args.each]
    return {
        "served": len(times) / seconds,
        "tokens": sum(n for _, n in lengths) / seconds,
        "p50": sorted(waits)[len(waits) // 2],
        "p99": sorted(waits)[len(waits) * 99 // 100],
        "each": 1e3 * sorted(each)[len(each) // 2],
        "good": len(good) / seconds,
    }


if __name__ == "__main__":
    run_program(main)
