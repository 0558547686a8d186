"""K/V memory that holds real tokens, and requests served at once: contiguous preallocation against pages.

    python docs/experiments/memory.py --plot docs/memory.svg

Requests queue for a pool of K/V slots (15,700 in the paper: OPT-13B on an A100). Contiguous allocation
reserves one range of slots for a whole request when it is admitted, first come, first served, first fit:

    max       2,048 slots, the longest request possible
    pow2      the prompt, and the next power of two above the output's length
    oracle    the prompt and the output exactly, as if the output's length were known in advance

"paging" is the real scheduler and block manager, without a model. All figures are averages over the steps
in which the queue is not empty (PagedAttention, Fig. 2 and Fig. 13). Lengths are exponentially distributed
around the means of the paper's traces; the traces themselves are not.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable
from itertools import islice

from common import add_plot_argument, at_least, make_parser, save_bars
from no_model import TRACES, NoModel, make_request, make_scheduler
from tqdm import tqdm

from nanopaged import SamplingParams

MAX_LEN = 2048
MAX_QUEUE = 64  # requests that wait at a time
POLICIES: dict[str, Callable[[int, int], int]] = {  # (input, output) tokens → slots to reserve
    "max": lambda num_input, num_output: MAX_LEN,
    "pow2": lambda num_input, num_output: min(MAX_LEN, num_input + (1 << (num_output - 1).bit_length())),
    "oracle": lambda num_input, num_output: num_input + num_output,
}
PAPER = {"max": "20.4 %", "pow2": "26.8 %", "oracle": "38.2 %", "paging": "96.3 %"}

Lengths = list[tuple[int, int]]  # (input, output) tokens of each request
Averages = tuple[float, float] | None  # (share of the slots with a real token, running requests)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=at_least(1), default=2000, help="of each trace, up to a million")
    parser.add_argument(
        "--slots", type=at_least(MAX_LEN), default=15700, help="tokens for which there is memory"
    )
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a block")
    add_plot_argument(parser)
    args = parser.parse_args()
    print(f"{args.requests} requests a row, {args.slots} slots, blocks of {args.block_size}")
    print(
        f"{'trace':15} {'allocation':11} {'real tokens':>12} {'at once':>8}   paper's share (its own traces)"
    )
    shares: dict[str, list[float]] = {}
    for trace, means in TRACES.items():
        lengths = draw_lengths(means, args.requests, args.seed)
        for policy in (*POLICIES, "paging"):
            if policy == "paging":
                averages = run_paged(lengths, args)
            else:
                averages = run_contiguous(lengths, args.slots, POLICIES[policy])
            print_row(f"{trace:15} {policy:11}", averages, PAPER[policy])
            shares.setdefault(policy, []).append(100 * averages[0] if averages else float("nan"))
    if args.plot:
        save_bars(args.plot, list(TRACES), shares, "K/V memory with real tokens (%)")


def print_row(name: str, averages: Averages, paper: str) -> None:
    if averages is None:
        print(f"{name} all requests fit at once, no request waits: raise --requests or lower --slots")
    else:
        print(f"{name} {averages[0]:12.1%} {averages[1]:8.1f}   {paper}", flush=True)


def draw_lengths(means: tuple[int, int], num: int, seed: int) -> Lengths:
    """Exponential around the means; input and output together have at most MAX_LEN tokens."""
    rng, lengths = random.Random(seed), []
    for _ in range(num):
        num_input, num_output = (1 + int(rng.expovariate(1 / mean)) for mean in means)
        num_input = min(num_input, MAX_LEN - 1)
        lengths.append((num_input, min(num_output, MAX_LEN - num_input)))
    return lengths


# ── contiguous allocation ─────────────────────────────────────────────────────────────────────────


def run_contiguous(lengths: Lengths, num_slots: int, reserve: Callable[[int, int], int]) -> Averages:
    """Averages over the steps in which a request waits; None if there is no such step.

    Only the steps in which a request ends are visited. Between two of them each of the n running requests
    grows by a token a step, so the tokens in memory over p steps add up to p·tokens + n·(1 + 2 + … + p).
    """
    holes = [(0, num_slots)]  # (start, length) of the free ranges, in order
    running: list[tuple[int, int, int, int]] = []  # heap of (step of its end, start, reserved, tokens then)
    now = tokens = steps = token_steps = request_steps = 0
    for num_input, num_output in tqdm(lengths, leave=False):
        size = reserve(num_input, num_output)
        while (start := take(holes, size)) is None:  # it waits until enough requests have ended
            end, freed, length, final = heapq.heappop(running)
            passed, n = end - now, len(running) + 1
            token_steps += passed * tokens + n * passed * (passed + 1) // 2
            request_steps += passed * n
            steps += passed
            tokens += n * passed - final
            now = end
            give_back(holes, freed, length)
        heapq.heappush(running, (now + num_output, start, size, num_input + num_output))
        tokens += num_input
    return (token_steps / (steps * num_slots), request_steps / steps) if steps else None


def take(holes: list[tuple[int, int]], size: int) -> int | None:
    """Take `size` slots from the first free range that has them; return where they start, or None."""
    for i, (start, length) in enumerate(holes):
        if length >= size:
            holes[i : i + 1] = [(start + size, length - size)] if length > size else []
            return start
    return None


def give_back(holes: list[tuple[int, int]], start: int, length: int) -> None:
    """Free a range, and join it with its neighbours."""
    merged: list[tuple[int, int]] = []
    for hole in sorted([*holes, (start, length)]):
        if merged and sum(merged[-1]) == hole[0]:
            merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
        else:
            merged.append(hole)
    holes[:] = merged


# ── paging ────────────────────────────────────────────────────────────────────────────────────────


def run_paged(lengths: Lengths, args: argparse.Namespace) -> Averages:
    """The same averages for the real scheduler and block manager."""
    num_blocks = args.slots // args.block_size
    scheduler = make_scheduler(num_blocks, args.block_size, enable_prefix_caching=False)
    runner, steps, token_steps, request_steps, num_finished = NoModel(args.seed), 0, 0, 0, 0
    coming = enumerate(lengths)
    with tqdm(total=len(lengths), leave=False) as bar:
        while num_finished < len(lengths):
            # A short queue is as good as a long one, and a million requests need not exist at once.
            for i, (num_input, num_output) in islice(coming, max(0, MAX_QUEUE - len(scheduler.waiting))):
                params = SamplingParams(max_tokens=num_output)
                scheduler.add(make_request(str(i), [0] * num_input, params))
            batch = scheduler.schedule()
            if scheduler.waiting:
                steps += 1
                request_steps += len(scheduler.running)
                token_steps += sum(
                    seq.num_computed_tokens + seq.num_scheduled_tokens for seq in scheduler.sequences
                )
            finished = sum(request.finished for request in scheduler.update(batch, runner.execute(batch)))
            num_finished += finished
            bar.update(finished)
    return (token_steps / (steps * args.slots), request_steps / steps) if steps else None


if __name__ == "__main__":
    main()
