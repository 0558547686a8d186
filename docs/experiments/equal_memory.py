"""Throughput at equal memory: the same requests and the same pool, contiguous against pages.

    python docs/experiments/equal_memory.py
    python docs/experiments/equal_memory.py --long 12000 --longest 12288 --slots 16384 --rounds 1

One engine serves the same requests under five rules for admission; its pool has as many slots for K/V in each
of them (PagedAttention, §6.2):

    one     one request after another
    max     a range of slots for the longest request possible is free
    pow2    a range for the prompt, and for the output's length rounded up to a power of two
    oracle  a range for exactly the prompt and the output, as if the output's length were known
    paging  the engine's own: a block is free for each of the prompt's, and more are taken as the text grows

Ranges are reserved first fit, beside the engine; K/V itself is in blocks under all five rules, so that only
the number of requests at once differs. The order of requests is the same. Steps do not depend on the machine.
Rates do; the rules take turns, and the median counts. Lengths are exponential around the two means.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from common import SHAPES, add_model_arguments, at_least, machine, make_llm, make_parser, model_name
from memory import Reserve, draw_lengths, give_back, reserve_rules, take
from tqdm import tqdm

from nanopaged import SamplingParams
from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLM


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser, shape="28m")
    parser.add_argument("--slots", type=at_least(16), default=4096, help="of the pool")
    parser.add_argument("--longest", type=at_least(2), default=1024, help="tokens of the longest request")
    parser.add_argument("--requests", type=at_least(1), default=32)
    parser.add_argument("--input", type=at_least(1), default=100, help="mean tokens of a prompt")
    parser.add_argument("--output", type=at_least(1), default=100, help="mean tokens of an output")
    parser.add_argument(
        "--long", type=at_least(0), default=0, help="prompt of one more request, amid the others"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3)
    args = parser.parse_args()
    longest = args.longest
    if longest > args.slots:
        parser.error(f"a request may have {longest} tokens, but --slots is {args.slots}")
    if args.long > 0 and args.long + args.output > longest:
        parser.error(
            f"--long {args.long} and its {args.output} tokens of output are more than --longest {longest}"
        )
    lengths = draw_lengths((args.input, args.output), args.requests, args.seed, longest)
    if args.long > 0:
        lengths.insert(len(lengths) // 2, (args.long, args.output))
    SHAPES[args.shape]["max_position_embeddings"] = longest
    rules: dict[str, Reserve | None] = {
        "one": lambda num_input, num_output: args.slots,
        **reserve_rules(longest),
        "paging": None,
    }
    llm = make_llm(
        args,
        num_blocks=args.slots // 16,
        block_size=16,
        max_model_len=longest,
        enable_prefix_caching=False,
        max_num_seqs=len(lengths),
    )
    serve(llm, lengths[:2], None, args.slots)  # the first run is slower
    steps, at_once = {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    for _ in tqdm(range(args.rounds), leave=False):
        for name, reserve in rules.items():
            steps[name], at_once[name], took = serve(llm, lengths, reserve, args.slots)
            seconds[name].append(took)
    print_table(args, lengths, steps, at_once, seconds)


def serve(
    llm: LLM, lengths: list[tuple[int, int]], reserve: Reserve | None, num_slots: int
) -> tuple[int, float, float]:
    """Serve requests of these lengths. Returns steps, the mean number of requests at once, and seconds."""
    engine, waiting = llm.engine, list(enumerate(lengths))[::-1]
    holes, ranges = [(0, num_slots)], {}  # free ranges (start, length); of each running request
    before, running, began = engine.num_steps, 0, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting:
            i, (num_input, num_output) = waiting[-1]
            if reserve is not None:
                size = reserve(num_input, num_output)
                if (start := take(holes, size)) is None:
                    break
                ranges[str(i)] = start, size
            params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
            engine.add_request(str(i), [1 + (i + j) % 100 for j in range(num_input)], params)
            waiting.pop()
        for output in engine.step():
            if output.finished and reserve is not None:
                give_back(holes, *ranges.pop(output.request_id))
        running += len(engine.scheduler.running)
    num_steps = engine.num_steps - before
    return num_steps, running / num_steps, time.perf_counter() - began


def print_table(
    args: argparse.Namespace,
    lengths: list[tuple[int, int]],
    steps: dict[str, int],
    at_once: dict[str, float],
    seconds: dict[str, list[float]],
) -> None:
    """A row for each rule; rates are compared with the best contiguous one that needs no prophecy, pow2."""
    num_output = sum(output for _, output in lengths)
    print(f"{model_name(args)}; {len(lengths)} requests, {args.slots} slots; {machine()}")
    print("rule     steps   requests at once   output tokens/s   times pow2")
    rates = {name: num_output / statistics.median(took) for name, took in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:7}{steps[name]:7}{at_once[name]:19.1f}{rate:18.0f}{rate / rates['pow2']:13.2f}")


if __name__ == "__main__":
    run_program(main)
