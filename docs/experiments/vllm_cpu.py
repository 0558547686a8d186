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
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peers
from common import DTYPES, SHAPES, at_least, machine, make_parser

Row = tuple[int, int, int, int, int, int]  # requests, shared prefix, own tokens from, to, output from, to
ROWS: dict[str, Row] = {
    "32 requests": (32, 0, 16, 256, 16, 256),
    "8 requests": (8, 0, 16, 256, 16, 256),
    "1 request": (1, 0, 128, 128, 128, 128),
    "8 of 1,500 tokens": (8, 0, 1500, 1500, 32, 32),
    "32, nothing shared": (32, 0, 32, 32, 64, 64),
    "32, 256 shared": (32, 256, 32, 32, 64, 64),
    "32, 1,024 shared": (32, 1024, 32, 32, 64, 64),
    "32, 1,800 shared": (32, 1800, 32, 32, 64, 64),
}


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--peer-python", type=peers.program, required=True, help="of an environment with vLLM")
    add("--shape", choices=SHAPES, default="100m", help="sizes of the model with random weights")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and K/V")
    add("--threads", type=at_least(1), default=1, help="of each side")
    add("--rounds", type=at_least(1), default=3, help="of each row")
    add("--backends", nargs="+", default=["torch", "cpp"], help="of nanopaged: attention_backend")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="kinds of requests")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        save_weights(args, folder)
        with sides(args, folder) as processes:
            print(f"shape {args.shape}, {args.dtype}; {machine()}")
            print(f"{'':20} " + "".join(f"{name:>22}" for name in processes) + "    over vLLM")
            for row in args.rows:
                compare(row, processes, args)


def save_weights(args: argparse.Namespace, folder: str) -> None:
    """Random weights that all sides load."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    config = AutoConfig.for_model(**SHAPES[args.shape], bos_token_id=None)
    torch.manual_seed(args.seed)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).save_pretrained(folder)


@contextmanager
def sides(args: argparse.Namespace, model: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each backend of nanopaged and one for vLLM, which have loaded the model."""
    options: dict[str, Any] = {"dtype": args.dtype, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
    jobs = {
        name: (sys.executable, {"package": "nanopaged", "options": options | {"attention_backend": name}})
        for name in args.backends
    }
    vllm = options | {"enable_prefix_caching": True, "skip_tokenizer_init": True}
    jobs["vLLM"] = (args.peer_python, {"package": "vllm", "options": vllm})
    environment = peers.ENVIRONMENT | {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if args.threads == 1:
        os.sched_setaffinity(0, {0})  # vLLM binds its thread to core 0: all sides have the same core
    processes = {}
    try:
        for name, (python, job) in jobs.items():
            process = subprocess.Popen(
                [python, peers.__file__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            process.stdin.write(json.dumps(job | {"model": model}) + "\n")
            processes[name] = process
        yield processes
    finally:
        for process in processes.values():
            process.kill()


def run(process: subprocess.Popen[str], requests: peers.Requests) -> peers.Times:
    """The times of these requests on one side."""
    process.stdin.write(json.dumps(requests) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("Times "):
            return json.loads(line.removeprefix("Times "))
    raise SystemExit("a side has ended: is its package installed there? Its output is above.")


def draw(row: str, rng: random.Random) -> peers.Requests:
    """The requests of a row."""
    num, shared, low, high, least, most = ROWS[row]
    prefix = [rng.randrange(12000) for _ in range(shared)]
    lengths = [rng.randint(low, high) for _ in range(num)]
    return [
        (prefix + [rng.randrange(12000) for _ in range(length)], rng.randint(least, most))
        for length in lengths
    ]


def compare(row: str, processes: dict[str, subprocess.Popen[str]], args: argparse.Namespace) -> None:
    """A round to warm up, then `--rounds` of them; prints the row."""
    rng = random.Random(args.seed)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    for i in range(args.rounds + 1):
        requests = draw(row, rng)
        num_tokens = sum(n for _, n in requests)
        for name, process in processes.items():
            times = run(process, requests)
            if i > 0:
                rates[name].append((num_tokens / times["seconds"], num_tokens / times["cpu_seconds"]))
    cells = []
    for name in processes:
        wall, cpu = (statistics.median(rate[i] for rate in rates[name]) for i in range(2))
        cells.append(f"{wall:11.1f} {cpu:10.1f}")
    ratios = [
        "/".join(
            f"{statistics.median(a[i] / b[i] for a, b in zip(rates[name], rates['vLLM'], strict=True)):.2f}"
            for i in range(2)
        )
        for name in args.backends
    ]
    print(f"{row:20} {''.join(cells)}    {'  '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
