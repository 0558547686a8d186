"""The CPU backends of nanopaged beside vLLM's, on several kinds of requests, engines kept loaded, in turns.

    python docs/experiments/vllm_cpu.py --peer-python vllm-venv/bin/python --threads 1

Each row is a kind of requests; each round has new random prompts, so that no prefix cache helps beyond the
prefix that a row names. The rates are medians: output tokens a second of wall time, and of CPU time of all
threads. (The packages' own progress bars and messages go to the standard error.)
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from common import DTYPES, at_least, machine, make_parser
from peers import SHAPES, Job, Requests, Times, ask, make_job, start

from nanopaged.terminal import run_program

Sides = dict[str, Callable[[Requests], Times]]


def kind(requests: int, own: range, output: range, shared: int = 0) -> argparse.Namespace:
    """The sizes of requests that begin with `shared` equal tokens; the ranges include their ends."""
    return argparse.Namespace(
        requests=requests,
        shared_prefix=shared,
        min_input=own.start,
        max_input=own.stop,
        min_output=output.start,
        max_output=output.stop,
    )


ROWS = {
    "32 requests": kind(32, range(16, 256), range(16, 256)),
    "8 requests": kind(8, range(16, 256), range(16, 256)),
    "1 request": kind(1, range(128, 128), range(128, 128)),
    "8 of 1,500 tokens": kind(8, range(1500, 1500), range(32, 32)),
    "32, nothing shared": kind(32, range(32, 32), range(64, 64)),
    "32, 256 shared": kind(32, range(32, 32), range(64, 64), shared=256),
    "32, 1,024 shared": kind(32, range(32, 32), range(64, 64), shared=1024),
    "32, 1,800 shared": kind(32, range(32, 32), range(64, 64), shared=1800),
    "8, 1,800 shared": kind(8, range(32, 32), range(64, 64), shared=1800),
}


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--peer-python", required=True, help="of an environment with vLLM")
    add("--shape", choices=SHAPES, default="100m", help="sizes of the model with random weights")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and K/V")
    add("--threads", type=at_least(1), default=1, help="of each side")
    add("--rounds", type=at_least(1), default=3, help="of each row")
    add("--backends", nargs="+", default=["torch", "cpp"], help="of nanopaged: attention_backend")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="kinds of requests")
    parser.set_defaults(budget=2048, max_num_seqs=256)
    args = parser.parse_args()

    import torch

    import bench

    torch.set_num_threads(args.threads)
    if args.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})  # vLLM binds its thread to core 0: all sides have the same core
    with tempfile.TemporaryDirectory() as model, ExitStack() as stack:
        bench.save_random_weights(model, args)
        jobs = {"vLLM": make_job("vllm", model, args)}
        for name in args.backends:
            job = make_job("nanopaged", model, args)
            jobs[name] = job | {"options": job["options"] | {"attention_backend": name}}
        sides = {name: stack.enter_context(started(job)) for name, job in jobs.items()}
        print(f"shape {args.shape}, {args.dtype}; {machine()}")
        print(f"{'':20} {''.join(f'{name:>22}' for name in sides)}    over vLLM, wall/CPU")
        for row in args.rows:
            compare(row, sides, args)


@contextmanager
def started(job: Job) -> Iterator[Callable[[Requests], Times]]:
    """A process that has loaded the engine, as a function that runs requests in it.

    Between two runs it is stopped, where the system can do that: an idle vLLM takes 1 to 2 % of a core.
    """
    process = start(job)

    def run(requests: Requests) -> Times:
        if os.name == "posix":
            process.send_signal(signal.SIGCONT)
        times = ask(process, job, requests)
        if os.name == "posix":
            process.send_signal(signal.SIGSTOP)
        return times

    try:
        yield run
    finally:
        process.kill()
        process.communicate()


def compare(row: str, sides: Sides, args: argparse.Namespace) -> None:
    """A round to warm up, then `--rounds` of them; prints the row."""
    import bench

    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(args.rounds + 1):
        sizes = argparse.Namespace(**vars(ROWS[row]), seed=args.seed + i)
        vocab_size = bench.SHAPES[args.shape][-1]
        prefix = random.Random(sizes.seed).choices(range(vocab_size), k=sizes.shared_prefix)
        requests = [(prefix + prompt, n) for prompt, n in bench.draw_requests(vocab_size, sizes)]
        num_tokens = sum(n for _, n in requests)
        for name, run in sides.items():
            times = run(requests)
            if i > 0:
                rates[name].append((num_tokens / times["seconds"], num_tokens / times["cpu_seconds"]))
    cells = ""
    for name in sides:
        wall, cpu = map(statistics.median, zip(*rates[name], strict=True))
        cells += f"{wall:11.1f} {cpu:10.1f}"
    for name in args.backends:
        ratios = [
            [mine / theirs for mine, theirs in zip(*pair, strict=True)]
            for pair in zip(rates[name], rates["vLLM"], strict=True)
        ]
        wall, cpu = map(statistics.median, zip(*ratios, strict=True))
        cells += f"    {wall:.2f}/{cpu:.2f}"
    print(f"{row:20} {cells}", flush=True)


if __name__ == "__main__":
    run_program(main)
