"""What a step of decodes costs on the host: to schedule it and book its results, and all but the model.

The first table has scheduler and block manager alone, over the size of the pool. The second has the whole
path of a step on a GPU with a model that returns at once and a vocabulary of 32. The device waits while a
step is scheduled, prepared (laid out; block tables brought up to date; a graph's buffers filled) and booked.
The drawing of tokens is prepared while it computes, so it stands apart; here, it is also carried out. Beside
it, if a checkout is given, nano-vllm's scheduler and batch preparation on the same sequences.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time

import nano_vllm
import torch
from common import add_plot_argument, at_least, machine, save_lines
from no_model import NoModel, make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.block_pool import blocks_needed
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model_runner import prepare
from nanopaged.sampler import sample_next_tokens
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import ScheduledBatch, StepResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=at_least(1), nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--nano-vllm", metavar="CHECKOUT", help="a folder to compare with")
    parser.add_argument("--steps", type=at_least(4), default=100, help="the median of so many counts")
    parser.add_argument("--block-size", type=at_least(1), default=16)
    add_plot_argument(parser)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    print(f"blocks of {args.block_size}, prompts of 100 tokens; median of {args.steps} steps; {machine()}")
    print(f"{'blocks':>9} {'sequences':>9} {'us a step':>10} {'us a sequence':>14}")
    lines: dict[str, list[float]] = {}
    for num_blocks in (1000, 10_000, 100_000, 1_000_000):
        for num_seqs in args.sequences:
            if num_seqs * ((100 + args.steps) // args.block_size + 2) <= num_blocks:
                schedule, _, update = time_parts(num_blocks, num_seqs, args, NoModel(args.seed))
                us = 1e6 * (schedule + update)
                lines.setdefault(f"{num_blocks:,} blocks", []).append(us)
                print(f"{num_blocks:9,} {num_seqs:9,} {us:10.1f} {us / num_seqs:14.3f}")
    if args.plot:
        save_lines(args.plot, args.sequences, lines, "running sequences", "microseconds a step", log_y=True)
    host_table(args)


def host_table(args: argparse.Namespace) -> None:
    """The whole host path of a step, over the number of sequences; with a peer, the ratio to it."""
    if importlib.util.find_spec("triton") is None:
        print("\nThe host path of a step on a GPU needs Triton, which is not installed here.")
        return
    columns = ("schedule", "prepare", "update", "together", "(draw)")
    print(f"\n{'sequences':>9}" + "".join(f" {column:>9}" for column in columns), end="")
    peers = {f"nano-vllm, blocks of {size}": size for size in (16, 256)} if args.nano_vllm else {}
    print("".join(f" {name:>24} {'ratio':>6}" for name in peers))
    for num_seqs in args.sequences:
        schedule, prepare, draw, update = time_host(num_seqs, args)
        ours = schedule + prepare + update
        parts = (schedule, prepare, update, ours, draw)
        print(f"{num_seqs:9,} " + " ".join(f"{1e6 * part:9.1f}" for part in parts), end="")
        for size in peers.values():
            theirs = nano_vllm.time_host(args.nano_vllm, num_seqs, args.steps, size, args.seed)
            print(f" {1e6 * theirs:24.1f} {ours / theirs:6.2f}", end="")
        print(flush=True)


class HostPath:
    """A runner that does all a GPU's runner does on the host; the model is missing, and so is the GPU."""

    VOCAB = 32

    def __init__(self, block_size: int, max_num_seqs: int, max_context_len: int) -> None:
        from nanopaged.attention.triton_backend import TritonAttention
        from nanopaged.model.cuda_graphs import DecodeGraphs

        cache = KVCache(KVShape(1, 1, 8, torch.float32), 1, block_size, torch.device("cpu"))
        self.block_size = block_size
        self.hidden = torch.zeros(max_num_seqs, 8)
        self.scores = torch.randn(max_num_seqs, self.VOCAB)
        self.graphs = DecodeGraphs(
            model=lambda input_ids, positions, attend: self.hidden[: len(input_ids)],
            attention=TritonAttention(cache, 1.0),
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            capture=lambda work: (work(), lambda: None),
        )
        self.prepare_seconds: list[float] = []

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """As `ModelRunner.execute`, with prompts answered without being prepared."""
        began = time.perf_counter()
        if batch.num_decodes < len(batch.sequences):
            rows = sum(seq.num_scheduled_tokens for seq in batch.sequences)
            hidden = torch.zeros(1, 8).expand(rows, 8)
        else:
            hidden = self.graphs.run(*prepare(batch, self.block_size))
            self.prepare_seconds.append(time.perf_counter() - began)
        return StepResult(sample_next_tokens(batch, hidden, lambda rows: self.scores[: len(rows)]))


def time_host(num_seqs: int, args: argparse.Namespace) -> list[float]:
    """Seconds to schedule, to prepare the launch, to draw tokens after it, to update, the medians."""
    runner = HostPath(args.block_size, num_seqs, 4096)
    num_blocks = num_seqs * (blocks_needed(100 + args.steps, args.block_size) + 1)
    schedule, execute, update = time_parts(num_blocks, num_seqs, args, runner)
    prepare = statistics.median(runner.prepare_seconds)
    return [schedule, prepare, execute - prepare, update]


def time_parts(
    num_blocks: int, num_seqs: int, args: argparse.Namespace, runner: NoModel | HostPath
) -> list[float]:
    """Seconds to schedule, execute and update a step of `num_seqs` decodes, the medians."""
    rng = random.Random(args.seed)
    scheduler = Scheduler(BlockManager(num_blocks, args.block_size), num_seqs, 1 << 20)
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True)
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), [rng.randrange(32000) for _ in range(100)], params))
    seconds: list[tuple[float, float, float]] = []
    while scheduler.has_unfinished:
        began = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = runner.execute(batch)
        answered = time.perf_counter()
        scheduler.update(batch, result)
        seconds.append((scheduled - began, answered - scheduled, time.perf_counter() - answered))
    return [statistics.median(part) for part in zip(*seconds[1:-1], strict=True)]  # neither prefill nor end
