"""Host time of a decode step: scheduling and bookkeeping, and everything else but the model.

    python docs/experiments/overhead.py --nano-vllm CHECKOUT

The first table has scheduler and block manager alone, over the size of the pool. The second has the whole
host path of a step on a GPU, with a model that computes nothing and a vocabulary of 32. The GPU is idle while
a step is scheduled, prepared (the batch is laid out, block tables and a graph's inputs are updated) and
booked. Drawing tokens is prepared while the GPU computes, so it is a column of its own; here it is carried
out as well. With a checkout of nano-vllm (github.com/GeeeekExplorer/nano-vllm), its scheduler and batch
preparation are timed as well, on the same sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from common import add_plot_argument, at_least, machine, make_parser, save_lines
from no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from host_path import HostPath

POOLS = [1000, 10_000, 100_000, 1_000_000]  # blocks
PROMPT = 100  # tokens


def main() -> None:
    parser = make_parser(__doc__)
    counts = [1, 16, 64, 256, 1024, 4096]
    parser.add_argument("--sequences", type=at_least(1), nargs="+", default=counts, help="that decode")
    parser.add_argument("--steps", type=at_least(4), default=100, help="the median counts")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a block")
    parser.add_argument(
        "--nano-vllm", type=nano_vllm_folder, metavar="CHECKOUT", help="a folder to compare with"
    )
    add_plot_argument(parser)
    args = parser.parse_args()
    print(
        f"blocks of {args.block_size}, prompts of {PROMPT} tokens; median of {args.steps} steps; {machine()}"
    )
    print(f"{'blocks':>9} {'sequences':>9} {'us a step':>10} {'us a sequence':>14}")
    lines: dict[str, list[float]] = {}
    for num_blocks in POOLS:
        for num_seqs in args.sequences:
            if num_seqs * ((PROMPT + args.steps) // args.block_size + 2) <= num_blocks:
                schedule, _, update = time_parts(num_blocks, num_seqs, args, NoModel(args.seed))
                us = 1e6 * (schedule + update)
                lines.setdefault(f"{num_blocks:,} blocks", []).append(us)
                print(f"{num_blocks:9,} {num_seqs:9,} {us:10.1f} {us / num_seqs:14.3f}", flush=True)
    if args.plot:
        save_lines(args.plot, args.sequences, lines, "running sequences", "microseconds per step", log_y=True)
    print_host_table(args)


def nano_vllm_folder(text: str) -> Path:
    """A type for argparse: a checkout of nano-vllm."""
    file = Path(text) / "nanovllm" / "engine" / "scheduler.py"
    if not file.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of nano-vllm: there is no {file}")
    return Path(text)


def time_parts(
    num_blocks: int, num_seqs: int, args: argparse.Namespace, runner: NoModel | HostPath
) -> list[float]:
    """Seconds to schedule, execute and update a step of `num_seqs` decodes, the medians."""
    rng = random.Random(args.seed)
    scheduler = make_scheduler(num_blocks, args.block_size, max_num_seqs=num_seqs)
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True)
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), rng.choices(range(32000), k=PROMPT), params))
    seconds: list[tuple[float, float, float]] = []
    while scheduler.running or scheduler.waiting:
        began = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = runner.execute(batch)
        executed = time.perf_counter()
        scheduler.update(batch, result)
        seconds.append((scheduled - began, executed - scheduled, time.perf_counter() - executed))
    return [statistics.median(part) for part in zip(*seconds[1:-1], strict=True)]  # without prefill and end


def print_host_table(args: argparse.Namespace) -> None:
    """The whole host path of a step, over the number of sequences; with a peer, the ratio to it."""
    if find_spec("triton") is None:
        print("\nThe host path of a step on a GPU needs Triton, which is not installed here.")
        return
    from host_path import HostPath
    from nano_vllm import time_nano_vllm

    columns = ("schedule", "prepare", "update", "together", "(draw)")
    print(f"\n{'sequences':>9}" + "".join(f" {column:>9}" for column in columns), end="")
    peer_sizes = (16, 256) if args.nano_vllm else ()
    print("".join(f" {f'nano-vllm, blocks of {size}':>24} {'ratio':>6}" for size in peer_sizes))
    for num_seqs in args.sequences:
        runner = HostPath(args.block_size, num_seqs, max_context_len=4096)
        num_blocks = num_seqs * ((PROMPT + args.steps) // args.block_size + 2)
        schedule, execute, update = time_parts(num_blocks, num_seqs, args, runner)
        prepare = statistics.median(runner.prepare_seconds)
        ours = schedule + prepare + update
        parts = (schedule, prepare, update, ours, execute - prepare)
        print(f"{num_seqs:9,} " + " ".join(f"{1e6 * part:9.1f}" for part in parts), end="")
        for size in peer_sizes:
            theirs = time_nano_vllm(args.nano_vllm, num_seqs, args.steps, size, args.seed)
            print(f" {1e6 * theirs:24.1f} {ours / theirs:6.2f}", end="")
        print(flush=True)


if __name__ == "__main__":
    run_program(main)
