"""Generation while other programs want the cores: OpenMP's threads spin, sleep, or there is only one.

    python docs/experiments/busy.py --model nanopaged/tiny

A thread that waits for another one spins, then sleeps. On a busy machine it may spin for a thread that has no
core, so it should sleep sooner. Each setting is a process of its own, as OpenMP reads its environment
once. The processes take turns, on the machine as it is and while more programs run. The rows are medians over
the rounds, without the prefill. GOMP_SPINCOUNT is for libgomp, the OpenMP of PyTorch on Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from common import add_model_arguments, at_least, machine, make_llm, make_parser, model_name

from nanopaged.terminal import run_program

SETTINGS = {
    "spin (OpenMP's default)": {"GOMP_SPINCOUNT": "300000"},
    "spin briefly": {"GOMP_SPINCOUNT": "2000"},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument("--requests", type=at_least(1), default=8, help="that decode together")
    parser.add_argument("--prompt", type=at_least(1), default=64, help="tokens of each prompt")
    parser.add_argument("--programs", type=at_least(1), default=2, help="that want a core each")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--repeat", type=at_least(1), default=7, help="rounds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    print(f"{args.requests} requests, prompts of {args.prompt} tokens; {model_name(args)}; {machine()}")
    heads = [f" {f'{when}: tokens/s':>18} {'CPU ms each':>12}" for when in ("as it is", "busy")]
    print(f"{'':24}" + "".join(heads))
    results: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(environment)) for name, environment in SETTINGS.items()}
        for _ in range(args.repeat):
            for busy in (False, True):
                with programs(args.programs if busy else 0):
                    for name, process in servers.items():
                        results.setdefault((name, busy), []).append(ask(process))
    for name in SETTINGS:
        row = ""
        for busy in (False, True):
            rate, cpu = map(statistics.median, zip(*results[name, busy], strict=True))
            row += f" {rate:18.1f} {cpu:12.2f}"
        print(f"{name:24}{row}")


@contextmanager
def programs(count: int) -> Iterator[None]:
    """Other programs that each want a core."""
    running = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def server(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """This script as a process that generates for a turn whenever it is asked."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    process = subprocess.Popen(
        [sys.executable, *sys.argv, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | environment,
    )
    try:
        ask(process)  # a warm-up
        yield process
    finally:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Tokens per second, and milliseconds of all cores for each token."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    rate, cpu = process.stdout.readline().split()
    return float(rate), float(cpu)


def serve(args: argparse.Namespace) -> None:
    """Answer each line with the rate and the CPU time of a turn."""
    from nanopaged import SamplingParams

    engine = make_llm(args, max_num_seqs=args.requests, enable_prefix_caching=False).engine
    params = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    rng = random.Random(args.seed)
    for _ in sys.stdin:
        names = [str(i) for i in range(args.requests)]
        for name in names:
            engine.add_request(name, rng.choices(range(engine.vocab_size), k=args.prompt), params)
        engine.step()
        began, cpu, num_tokens = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < began + args.seconds:
            num_tokens += len(engine.step())
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        for name in names:
            engine.abort_request(name)
        print(num_tokens / seconds, 1e3 * cpu / num_tokens, flush=True)


if __name__ == "__main__":
    run_program(main)
