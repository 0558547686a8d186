"""K/V memory that holds real tokens, and requests served at once: contiguous preallocation against pages.

Requests wait in line for a pool of K/V slots (the paper's OPT-13B on an A100: 15,700). Contiguous allocation
reserves one run of slots for a whole request when it is admitted, first come, first served, first fit:

    max       2,048 slots, the longest there can be
    pow2      the prompt, and the next power of two above the output
    oracle    the prompt and the output exactly, known from a crystal ball

Paging is the real scheduler and block manager, without a model. Averages over the steps in which somebody
waits (PagedAttention, Fig. 2 and Fig. 13). Lengths are exponential with the traces' means, which the traces
are not.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable
from itertools import islice

from common import add_plot_argument, at_least, save_bars
from no_model import TRACES, NoModel, make_request
from tqdm import tqdm

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler

MAX_LEN = 2048
LINE = 64  # requests that wait at a time
POLICIES: dict[str, Callable[[int, int], int]] = {
    "max": lambda num_input, num_output: MAX_LEN,
    "pow2": lambda num_input, num_output: min(MAX_LEN, num_input + (1 << (num_output - 1).bit_length())),
    "oracle": lambda num_input, num_output: num_input + num_output,
}
PAPER = {"max": "20.4 %", "pow2": "26.8 %", "oracle": "38.2 %", "paging": "96.3 %"}

Lengths = list[tuple[int, int]]
"""(input, output) tokens of each request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=at_least(1), default=2000, help="of each trace; up to a million")
    parser.add_argument("--slots", type=at_least(1), default=15700, help="tokens for which there is memory")
    parser.add_argument("--block-size", type=at_least(1), default=16)
    add_plot_argument(parser)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    print(f"{args.requests} requests a row, {args.slots} slots, blocks of {args.block_size}")
    print(
        f"{'trace':15} {'allocation':11} {'real tokens':>12} {'at once':>8}   paper's share (its own trace)"
    )
    shares: dict[str, list[float]] = {}
    for trace, means in TRACES.items():
        lengths = draw_lengths(means, args.requests, args.seed)
        for policy in (*POLICIES, "paging"):
            if policy == "paging":
                share, at_once = paged(lengths, args.slots, args.block_size, args.seed)
            else:
                share, at_once = contiguous(lengths, args.slots, POLICIES[policy])
            shares.setdefault(policy, []).append(share)
            print(f"{trace:15} {policy:11} {share:12.1%} {at_once:8.1f}   {PAPER[policy]}", flush=True)
    if args.plot:
        save_bars(args.plot, list(TRACES), shares, "share of K/V memory with real tokens in it")


def draw_lengths(means: tuple[int, int], num: int, seed: int) -> Lengths:
    """Exponential around the means, input and output together no longer than MAX_LEN."""
    rng, lengths = random.Random(seed), []
    for _ in range(num):
        num_input, num_output = (1 + int(rng.expovariate(1 / mean)) for mean in means)
        num_input = min(num_input, MAX_LEN - 1)
        lengths.append((num_input, min(num_output, MAX_LEN - num_input)))
    return lengths


def contiguous(lengths: Lengths, num_slots: int, reserve: Callable[[int, int], int]) -> tuple[float, float]:
    """(share of the slots with a real token in it, requests running), averaged while somebody waits.

    A step adds a token to every running request, so between two events the sums are those of a ramp.
    """
    holes = [(0, num_slots)]  # (start, length) of the free runs, in order
    running: list[tuple[int, int, int, int]] = []  # heap of (step of its end, start, reserved, tokens then)
    now = tokens = steps = token_steps = request_steps = 0
    for num_input, num_output in tqdm(lengths, leave=False):
        size = min(num_slots, reserve(num_input, num_output))
        while (start := take(holes, size)) is None:  # it waits until enough have ended
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
    return token_steps / (steps * num_slots), request_steps / steps


def take(holes: list[tuple[int, int]], size: int) -> int | None:
    """The start of the first free run of `size` slots, which is taken; None if there is none."""
    for i, (start, length) in enumerate(holes):
        if length >= size:
            holes[i : i + 1] = [(start + size, length - size)] if length > size else []
            return start
    return None


def give_back(holes: list[tuple[int, int]], start: int, length: int) -> None:
    """Free a run, and join it with its neighbours."""
    merged: list[tuple[int, int]] = []
    for hole in sorted([*holes, (start, length)]):
        if merged and sum(merged[-1]) == hole[0]:
            merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
        else:
            merged.append(hole)
    holes[:] = merged


def paged(lengths: Lengths, num_slots: int, block_size: int, seed: int) -> tuple[float, float]:
    """The same by the real scheduler and block manager."""
    manager = BlockManager(num_slots // block_size, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(manager, max_num_seqs=1 << 20, max_num_batched_tokens=MAX_LEN)
    runner, steps, token_steps, request_steps = NoModel(seed), 0, 0, 0
    coming = enumerate(lengths)
    with tqdm(total=len(lengths), leave=False) as bar:
        while scheduler.has_unfinished or bar.n < len(lengths):
            # A short line of waiting requests is as good as a long one, and a million need not exist at once.
            for i, (num_input, num_output) in islice(coming, max(0, LINE - len(scheduler.waiting))):
                params = SamplingParams(max_tokens=num_output)
                scheduler.add(make_request(str(i), [0] * num_input, params))
            batch = scheduler.schedule()
            if scheduler.waiting:
                steps += 1
                request_steps += len(scheduler.running)
                token_steps += sum(
                    seq.num_computed_tokens + seq.num_scheduled_tokens for seq in scheduler.sequences
                )
            for request in scheduler.update(batch, runner.execute(batch)):
                bar.update(request.finished)
    return token_steps / max(1, steps * num_slots), request_steps / max(1, steps)
