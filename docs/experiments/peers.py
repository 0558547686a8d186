"""Output tokens per second of other engines next to nanopaged, on the random requests of bench.py.

    python docs/experiments/peers.py transformers             its continuous batching
    python docs/experiments/peers.py vllm --peer-python vllm-venv/bin/python --threads 1
    python docs/experiments/peers.py nano-vllm --peer-python nano-venv/bin/python --requests 256

Each side runs in a process of its own, because an engine is slower in a process that has freed memory. All
sides load the same random weights. nano-vllm has no greedy decoding, so it samples as in its own benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

from common import DTYPES, ROOT, at_least, machine, make_parser

from nanopaged.terminal import one_line, run_program

Requests = list[tuple[list[int], int]]  # token ids of a prompt, number of tokens to generate
Times = dict[str, float]  # seconds, and cpu_seconds of all threads
Job = dict[str, Any]  # what `serve` loads, and in which Python
SERVE = "serve"  # the argument of a process that `run_job` starts
SHAPES = ["test", "28m", "100m", "qwen3-0.6b"]  # those of bench.py


def main() -> None:
    parser = make_parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    if shutil.which(args.peer_python) is None:
        parser.error(f"{args.peer_python} is not a program that can be run")

    import torch

    import bench

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rates: dict[str, list[float]] = {"nanopaged": [], args.peer: []}
    with tempfile.TemporaryDirectory() as folder:
        bench.save_random_weights(folder, args)
        try:
            requests = bench.draw_requests(bench.SHAPES[args.shape][-1], args)
        except ValueError as error:
            parser.error(one_line(error))
        num_output = sum(n for _, n in requests)
        print(f"{len(requests)} requests, {num_output} output tokens; ", end="")
        print(f"shape {args.shape}, {args.dtype}; {machine()}", flush=True)
        for _ in range(args.repeat):
            for name, runs in rates.items():
                times = run_job(make_job(name, folder, args), requests)
                runs.append(num_output / times["seconds"])
                print(f"{name}: {runs[-1]:.1f} output tokens/s, {times['cpu_seconds']:.1f} CPU seconds")
    for name, runs in rates.items():
        print(f"{name:10} median {statistics.median(runs):8.1f}, {min(runs):8.1f} to {max(runs):8.1f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("peer", choices=["vllm", "nano-vllm", "transformers"])
    add("--peer-python", default=sys.executable, help="of an environment with the peer")
    add("--shape", choices=SHAPES, default="100m", help="sizes of the model with random weights")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and K/V")
    add("--requests", type=at_least(1), default=32, help="how many")
    add("--min-input", type=at_least(1), default=16, metavar="TOKENS", help="lengths are drawn uniformly")
    add("--max-input", type=at_least(1), default=256, metavar="TOKENS", help="from minimum to maximum")
    add("--min-output", type=at_least(1), default=16, metavar="TOKENS", help="lengths are drawn uniformly")
    add("--max-output", type=at_least(1), default=256, metavar="TOKENS", help="from minimum to maximum")
    add("--budget", type=at_least(1), default=2048, help="tokens in a step (max_num_batched_tokens)")
    add("--max-num-seqs", type=at_least(1), default=256, help="sequences in a step")
    add("--threads", type=at_least(1), help="of each side, on a CPU; default: torch's choice")
    add("--repeat", type=at_least(1), default=1, help="rounds; the sides take turns")


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


def start(job: Job) -> subprocess.Popen[str]:
    """Start a process that loads the engine of a job. Each line of requests is answered by their times."""
    import torch

    process = subprocess.Popen(
        [job["python"], __file__, SERVE],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | job["environment"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which ends the other
    )
    print(json.dumps(job), file=process.stdin, flush=True)
    return process


def ask(process: subprocess.Popen[str], job: Job, requests: Requests) -> Times:
    """Let a process run the requests."""
    print(json.dumps(requests), file=process.stdin, flush=True)
    for line in process.stdout:  # among those of the engine itself
        if line.startswith("Times "):
            return json.loads(line.removeprefix("Times "))
    raise SystemExit(f"{job['package']} failed in {job['python']}: is it installed? Its output is above.")


def run_job(job: Job, requests: Requests) -> Times:
    """Return the time of the requests in a new process."""
    process = start(job)
    try:
        return ask(process, job, requests)
    finally:
        process.kill()
        process.communicate()


class ContinuousBatching:
    """transformers' own continuous batching, called like the other engines."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")

    def generate(self, prompts: list[list[int]], params: dict | list[dict]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        params = params if isinstance(params, list) else [params] * len(prompts)
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
        llm.generate(warm_up, package.SamplingParams(max_tokens=3, **options))
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
