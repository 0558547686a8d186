"""Output tokens a second of nanopaged and of another engine, on several kinds of random requests.

    python docs/experiments/peers.py transformers             its continuous batching
    python docs/experiments/peers.py vllm --peer-python vllm-venv/bin/python --threads 1 --kinds mixed long
    python docs/experiments/peers.py nano-vllm --peer-python nano-venv/bin/python --kinds large

Each side has a process of its own, because an engine is slower in a process that has freed memory, and all
sides load the same random weights. They take turns: a round that warms up, then --rounds of them with new
prompts, so that no prefix cache helps beyond the prefix that a kind has. The rates are medians: output tokens
a second of wall time, and of CPU time of all threads. (The packages' own messages go to the standard error.)
nano-vllm has no greedy decoding, so it samples as in its own benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

from lib.common import DTYPES, ROOT, SHAPES, at_least, machine, make_parser, medians

from nanopaged.terminal import run_program

Requests = list[tuple[list[int], int]]  # token ids of a prompt, number of tokens to generate
Times = dict[str, float]  # seconds, and cpu_seconds of all threads
Job = dict[str, Any]  # what `serve` loads, and in which Python
SERVE = "serve"  # the argument of a process that `Side` starts

# Number of requests, the tokens that all begin with, least and most tokens of their own, of the output
KINDS = {
    "mixed": (32, 0, 16, 256, 16, 256),
    "mixed-8": (8, 0, 16, 256, 16, 256),
    "one": (1, 0, 128, 128, 128, 128),
    "long": (8, 0, 1500, 1500, 32, 32),
    "shared-0": (32, 0, 32, 32, 64, 64),
    "shared-1024": (32, 1024, 32, 32, 64, 64),
    "shared-1800": (32, 1800, 32, 32, 64, 64),
    "large": (256, 0, 100, 1024, 100, 1024),
}


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("peer", choices=["vllm", "nano-vllm", "transformers"])
    add("--peer-python", default=sys.executable, help="of an environment with the peer")
    add("--kinds", nargs="+", choices=KINDS, default=["mixed"], help="of requests")
    add("--backends", nargs="+", default=["auto"], help="of nanopaged: attention_backend")
    add("--shape", choices=SHAPES, default="100m", help="sizes of the model with random weights")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and K/V")
    add("--budget", type=at_least(1), default=2048, help="tokens in a step (max_num_batched_tokens)")
    add("--max-num-seqs", type=at_least(1), default=256, help="sequences in a step")
    add("--threads", type=at_least(1), help="of each side, on a CPU; without it, torch's choice")
    add("--seed", type=int, default=0, help="of everything random")
    add("--rounds", type=at_least(1), default=3, help="of each kind")
    args = parser.parse_args()
    if shutil.which(args.peer_python) is None:
        parser.error(f"{args.peer_python} is not a program that can be run")

    import torch

    import bench

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})  # vLLM binds its thread to core 0: all sides have the same core
    with tempfile.TemporaryDirectory() as model, ExitStack() as stack:
        bench.save_random_weights(model, args)
        sides = {args.peer: stack.enter_context(closing(Side(make_job(args.peer, model, args))))}
        for backend in args.backends:
            job = make_job("nanopaged", model, args)
            job["options"]["attention_backend"] = backend
            sides[f"nanopaged, {backend}"] = stack.enter_context(closing(Side(job)))
        print(f"shape {args.shape}, {args.dtype}; {machine()}")
        print(f"{'':12}" + "".join(f"{name:>22}" for name in sides) + f"    over {args.peer}, wall and CPU")
        for kind in args.kinds:
            print(f"{kind:12}{compare(kind, sides, args)}", flush=True)


def compare(kind: str, sides: dict[str, Side], args: argparse.Namespace) -> str:
    """The medians of each side, and of the ratios of each round."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(args.rounds + 1):
        requests = draw_requests(kind, args.shape, args.seed + i)
        num_tokens = sum(n for _, n in requests)
        for name, side in sides.items():
            times = side.run(requests)
            if i > 0:
                rates[name].append((num_tokens / times["seconds"], num_tokens / times["cpu_seconds"]))
    cells = "".join(f"{median:11.1f}" for rounds in rates.values() for median in medians(rounds))
    peer, *engines = rates.values()
    for rounds in engines:
        ratios = []
        for (wall, cpu), (peer_wall, peer_cpu) in zip(rounds, peer, strict=True):
            ratios.append((wall / peer_wall, cpu / peer_cpu))
        cells += "".join(f"{median:8.2f}" for median in medians(ratios))
    return cells


def draw_requests(kind: str, shape: str, seed: int) -> Requests:
    """Those of bench.py, after a common beginning."""
    import bench

    num_requests, num_shared, *lengths = KINDS[kind]
    names = ["min_input", "max_input", "min_output", "max_output"]
    sizes = argparse.Namespace(requests=num_requests, seed=seed, **dict(zip(names, lengths, strict=True)))
    vocab_size = bench.make_config(shape).vocab_size
    shared = random.Random(seed).choices(range(vocab_size), k=num_shared)
    return [(shared + prompt, n) for prompt, n in bench.draw_requests(vocab_size, sizes)]


def make_job(name: str, model: str, args: argparse.Namespace) -> Job:
    """Return what `serve` needs to load an engine."""
    import torch

    options = {"max_num_batched_tokens": args.budget, "max_num_seqs": args.max_num_seqs}
    job: Job = {"model": model, "options": options, "environment": {}, "python": args.peer_python}
    if name == "nanopaged":
        job["package"] = "nanopaged"
        job["python"] = sys.executable
        options["dtype"] = args.dtype
    elif name == "nano-vllm":
        job["package"] = "nanovllm"
        for file in (ROOT / "nanopaged" / "tiny").glob("tokenizer*.json"):
            shutil.copy(file, model)  # it reads a tokenizer
    elif name == "transformers":
        job["package"] = "transformers"
        job["options"] = {"dtype": args.dtype}
    else:
        job["package"] = "vllm"
        options |= {"dtype": args.dtype, "enable_prefix_caching": True, "skip_tokenizer_init": True}
        job["environment"] = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{torch.get_num_threads() - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB, as nanopaged's default
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its CPU seconds are all
        }
    return job


class Side:
    """An engine in a process of its own.

    On a CPU the process stays, and is stopped between two runs where the system can do that: an idle vLLM
    takes 1 to 2 % of a core. On a GPU it ends, because the other side needs its memory.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.process: subprocess.Popen[str] | None = None

    def run(self, requests: Requests) -> Times:
        import torch

        if self.process is None:
            self.process = self._start()
        elif os.name == "posix":
            self.process.send_signal(signal.SIGCONT)
        times = self._ask(self.process, requests)
        if torch.cuda.is_available():
            self.close()
        elif os.name == "posix":
            self.process.send_signal(signal.SIGSTOP)
        return times

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _start(self) -> subprocess.Popen[str]:
        import torch

        process = subprocess.Popen(
            [self.job["python"], __file__, SERVE],
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | self.job["environment"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
        )
        print(json.dumps(self.job), file=process.stdin, flush=True)
        return process

    def _ask(self, process: subprocess.Popen[str], requests: Requests) -> Times:
        print(json.dumps(requests), file=process.stdin, flush=True)
        for line in process.stdout:  # among those of the engine itself
            if line.startswith("Times "):
                return json.loads(line.removeprefix("Times "))
        failed = f"{self.job['package']} failed in {self.job['python']}"
        raise SystemExit(f"{failed}: is it installed? Its output is above.")


# ── the process of a side ─────────────────────────────────────────────────────────────────────────


class ContinuousBatching:
    """transformers' own continuous batching, called like the other engines."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")

    def generate(self, prompts: list[list[int]], params: list[dict]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        lengths = [options["max_tokens"] for options in params]
        batching = ContinuousBatchingConfig()
        if self.model.device.type == "cpu":  # a GPU chooses the size of its pool; here it has room for all
            batching.num_blocks = sum((len(prompt) + max(lengths)) // 256 + 2 for prompt in prompts)
        with self.model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=max(lengths)),
            continuous_batching_config=batching,
        ) as manager:
            for prompt, length in zip(prompts, lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=length)
            num_done = 0
            while num_done < len(prompts):
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise RuntimeError("transformers' continuous batching failed")
                if result.is_finished():
                    num_done += 1


def serve() -> None:
    """Read a line with a job, then lines with requests. Run them, and print their times."""
    job = json.loads(sys.stdin.readline())
    package = importlib.import_module(job["package"])
    if job["package"] == "transformers":
        package = SimpleNamespace(LLM=ContinuousBatching, SamplingParams=dict)
    options: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    if job["package"] == "nanovllm":
        options["temperature"] = 0.6
    if job["package"] == "vllm":
        options["detokenize"] = False
    llm = package.LLM(job["model"], **job["options"])
    for line in sys.stdin:
        requests: Requests = json.loads(line)
        prompts: list[Any] = [prompt for prompt, _ in requests]
        # Another first token, so that the prefix cache does not find these prompts again.
        warm_up: list[Any] = [[int(prompt[0] == 0), *prompt[1:]] for prompt in prompts[:4]]
        if job["package"] == "vllm":
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
            warm_up = [{"prompt_token_ids": prompt} for prompt in warm_up]
        llm.generate(warm_up, [package.SamplingParams(max_tokens=3, **options)] * len(warm_up))
        params = [package.SamplingParams(max_tokens=n, **options) for _, n in requests]
        wall = time.perf_counter()
        cpu = time.process_time()
        llm.generate(prompts, params)
        times = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print("Times", json.dumps(times), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        sys.exit(serve())
    run_program(main)
