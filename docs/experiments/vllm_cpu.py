"""The CPU backends of nanopaged beside vLLM's, on several kinds of requests, engines kept loaded, in turns.

    python docs/experiments/vllm_cpu.py --peer-python vllm-venv/bin/python --threads 1

Each row is a kind of requests; each round has new random prompts, so that no prefix cache helps beyond the
prefix that a row names. The rates are medians: output tokens a second of wall time, and of CPU time of all
threads. (The packages' own progress bars and messages go to the standard error.)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from common import DTYPES, ROOT, SHAPES, at_least, machine, make_parser

import bench
from nanopaged.terminal import run_program

Sides = dict[str, Callable[[bench.Requests], bench.Times]]


def kind(requests: int, own: range, output: range, shared: int = 0) -> argparse.Namespace:
    """The sizes that `bench.draw_requests` reads; the ranges include their ends."""
    sizes = {
        "min_input": own.start,
        "max_input": own.stop,
        "min_output": output.start,
        "max_output": output.stop,
    }
    return argparse.Namespace(requests=requests, shared_prefix=shared, **sizes)


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
    parser.set_defaults(
        baseline="vllm", budget=2048, max_num_seqs=256, block_size=16, backend="auto", eager=False
    )
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    if args.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})  # vLLM binds its thread to core 0: all sides have the same core
    with tempfile.TemporaryDirectory() as model, ExitStack() as stack:
        bench.save_random_weights(args, model)
        options = bench.engine_options(args)
        ours = {"package": "nanopaged", "python": sys.executable, "model": model, "folder": str(ROOT)}
        jobs = {
            name: ours | {"options": options | {"attention_backend": name}, "environment": {}}
            for name in args.backends
        }
        jobs["vLLM"] = bench.peer_job(model, args)
        sides = {name: stack.enter_context(started(name, job)) for name, job in jobs.items()}
        print(f"shape {args.shape}, {args.dtype}; {machine()}")
        print(f"{'':20} {''.join(f'{name:>22}' for name in sides)}    over vLLM, wall/CPU")
        for row in args.rows:
            compare(row, sides, args)


@contextmanager
def started(name: str, job: bench.Job) -> Iterator[Callable[[bench.Requests], bench.Times]]:
    """A process that has loaded the engine, as a function that runs requests in it.

    Between two runs it is stopped, where the system can do that: an idle vLLM takes 1 to 2 % of a core.
    """
    import torch

    process = subprocess.Popen(
        [job["python"], bench.__file__, bench.SERVE],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | job["environment"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which kills the other
    )

    def run(requests: bench.Requests) -> bench.Times:
        if os.name == "posix":
            process.send_signal(signal.SIGCONT)
        print(json.dumps(requests), file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("Times "):
                if os.name == "posix":
                    process.send_signal(signal.SIGSTOP)
                return json.loads(line.removeprefix("Times "))
        raise SystemExit(f"{name} failed in {job['python']}: is it installed there? Its output is above.")

    try:
        print(json.dumps(job), file=process.stdin, flush=True)
        yield run
    finally:
        process.kill()
        process.communicate()


def compare(row: str, sides: Sides, args: argparse.Namespace) -> None:
    """A round to warm up, then `--rounds` of them; prints the row."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(args.rounds + 1):
        sizes = argparse.Namespace(**vars(ROWS[row]), seed=args.seed + i)
        requests = bench.draw_requests(SHAPES[args.shape]["vocab_size"], sizes)
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
