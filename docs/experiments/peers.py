"""What bench.py compares with: transformers in two ways, vLLM, nano-vllm, and another checkout of nanopaged.

Each runs the same requests with the same weights. All but transformers run in a process of their own. This
file is the script of that process, so it imports nothing of this checkout.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).parents[2]
Requests = list[tuple[list[int], int]]  # (prompt's token ids, tokens to generate)
Times = dict[str, float]  # seconds, and cpu_seconds of all threads


# ── the command line ──────────────────────────────────────────────────────────────────────────────


def baseline(text: str) -> str:
    """A type for argparse: hf, vllm, nano-vllm, or a folder with nanopaged in it."""
    if text not in ("hf", "vllm", "nano-vllm") and not Path(text, "nanopaged", "__init__.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is neither hf, vllm nor nano-vllm, nor a checkout of nanopaged"
        )
    return text


def program(text: str) -> str:
    """A type for argparse: a program that can be run."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text} is not a program that can be run")
    return text


# ── all sides ─────────────────────────────────────────────────────────────────────────────────────


def sides(
    model: str, requests: Requests, options: dict[str, Any], args: argparse.Namespace
) -> dict[str, Callable[[], Times]]:
    """What --baseline names: the name of a side → a function that runs the requests.

    Args:
        model: the folder of the checkpoint, or its hub id.
        options: nanopaged's, for another checkout of it.
    """
    if args.baseline is None:
        return {}
    if args.baseline == "vllm":
        return {"vLLM": lambda: run_vllm(model, requests, args)}
    if args.baseline == "nano-vllm":
        return {"nano-vllm": lambda: run_nano_vllm(model, requests, args)}
    if args.baseline != "hf":
        # Both run in new processes: in this one, memory that was freed before slows an engine down.
        def run(folder: str | Path, python: str, fork: str | None = None) -> Times:
            return run_checkout(folder, python, model, requests, options, fork)

        return {
            "nanopaged": lambda: run(ROOT, sys.executable, args.fork),
            f"nanopaged in {args.baseline}": lambda: run(args.baseline, args.peer_python),
        }
    runs: dict[str, Callable[[], Times]] = {}
    # Sizes of at least the number of requests all give the same single batch: it is run once.
    for size in sorted({min(size, len(requests)) for size in (*args.static, len(requests))}):
        name = f"transformers, static batches of {size}"
        runs[name] = lambda size=size: run_static(model, requests, args, size)
    runs["transformers, continuous"] = lambda: run_continuous(model, requests, args)
    return runs


def warm_up(requests: Requests) -> list[list[int]]:
    """As long as the first prompts, with another first token: the prefix cache does not find them again."""
    return [[int(prompt[0] == 0), *prompt[1:]] for prompt, _ in requests[:4]]


def since(began: tuple[float, float]) -> Times:
    """The time since the two clocks were read."""
    return {"seconds": time.perf_counter() - began[0], "cpu_seconds": time.process_time() - began[1]}


def print_rates(rates: dict[str, list[float]], cpu_seconds: dict[str, list[float]]) -> None:
    """Output tokens per second of each side, and the ratio to the best peer, round by round."""
    print(f"{'output tokens/s':40} {'median':>8} {'least':>8} {'most':>8} {'CPU seconds':>12}")
    for name, runs in rates.items():
        cpu = statistics.median(cpu_seconds[name])
        print(f"{name:40} {statistics.median(runs):8.1f} {min(runs):8.1f} {max(runs):8.1f} {cpu:12.1f}")
    ours, *others = rates
    if others:
        best = max(others, key=lambda name: statistics.median(rates[name]))
        ratios = [mine / other for mine, other in zip(rates[ours], rates[best], strict=True)]
        rounds = f"; rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}" if len(ratios) > 1 else ""
        print(f"nanopaged is {statistics.median(ratios):.2f} times the best of them ({best}{rounds})")


# ── transformers ──────────────────────────────────────────────────────────────────────────────────


def load_hf(model: str, args: argparse.Namespace) -> PreTrainedModel:
    """The model on its device, warmed up."""
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype)).eval()
    hf.to("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every new length of a context
    ids = torch.ones(4, 64, dtype=torch.int64, device=hf.device)
    hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0)
    return hf


def run_static(model: str, requests: Requests, args: argparse.Namespace, size: int) -> Times:
    """The time of `generate` on left-padded batches, in order of arrival.

    A batch runs until its longest output is done; tokens beyond a request's own length do not count.
    """
    import torch
    from tqdm import tqdm

    hf = load_hf(model, args)
    began = time.perf_counter(), time.process_time()
    for i in tqdm(range(0, len(requests), size), desc=f"static {size}"):
        prompts, lengths = zip(*requests[i : i + size], strict=True)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=hf.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=hf.device)
        hf.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            do_sample=False,
            pad_token_id=0,
        )
    return since(began)


def run_continuous(model: str, requests: Requests, args: argparse.Namespace) -> Times:
    """The time of transformers' own continuous batching.

    On a GPU it chooses the size of its pool; elsewhere the pool has room for all requests.
    """
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    hf = load_hf(model, args)
    options: dict[str, int] = {"max_batch_tokens": args.budget}
    if hf.device.type != "cuda":
        known = inspect.signature(ContinuousBatchingConfig).parameters
        size_name = "page_size" if "page_size" in known else "block_size"  # its name in earlier versions
        options |= {size_name: 32, "num_blocks": sum((len(p) + n) // 32 + 2 for p, n in requests)}
    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(n for _, n in requests))
    began = time.perf_counter(), time.process_time()
    with hf.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**options)
    ) as manager:
        for prompt, n in requests:
            manager.add_request(prompt, max_new_tokens=n)
        num_done = 0
        while num_done < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before the requests were done")
            num_done += result is not None and result.is_finished()
    return since(began)


# ── in another process ────────────────────────────────────────────────────────────────────────────


def run_vllm(model: str, requests: Requests, args: argparse.Namespace) -> Times:
    """The time of vLLM, in a process of --peer-python."""
    import torch

    return run_elsewhere("vLLM", *vllm_job(model, args, torch.get_num_threads()), requests, args.peer_python)


def vllm_job(model: str, args: argparse.Namespace, num_threads: int) -> tuple[dict[str, Any], dict[str, str]]:
    """vLLM's job for `serve`, and the environment of its process."""
    options = {
        "dtype": args.dtype,
        "max_num_batched_tokens": args.budget,
        "max_num_seqs": args.max_num_seqs,
        "enforce_eager": args.eager,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
    }
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB, as nanopaged's default
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its CPU seconds are all
    }
    return {"package": "vllm", "model": model, "options": options}, environment


def run_nano_vllm(model: str, requests: Requests, args: argparse.Namespace) -> Times:
    """The time of nano-vllm, in a process of --peer-python.

    It reads a tokenizer. Where the weights are random, it is given that of our tiny model.
    """
    if args.model is None:
        for file in (Path(__file__).parents[2] / "nanopaged" / "tiny").glob("tokenizer*.json"):
            shutil.copy(file, model)
    options = {
        "max_num_batched_tokens": args.budget,
        "max_num_seqs": args.max_num_seqs,
        "enforce_eager": args.eager,
    }
    job = {"package": "nanovllm", "model": model, "options": options}
    return run_elsewhere("nano-vllm", job, {}, requests, args.peer_python)


def run_checkout(
    folder: str | Path,
    python: str,
    model: str,
    requests: Requests,
    options: dict[str, Any],
    fork: str | None = None,
) -> Times:
    """The time of the nanopaged in a folder, or of a fork of it."""
    folder = str(Path(folder).resolve())
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    job = {"package": "nanopaged", "folder": folder, "model": model, "options": options, "fork": fork}
    return run_elsewhere(f"nanopaged of {folder}", job, {"PYTHONPATH": path}, requests, python)


def run_elsewhere(
    name: str, job: dict[str, Any], environment: dict[str, str], requests: Requests, python: str
) -> Times:
    """Run the requests in a process of that Python."""
    import torch

    with started(name, python, job, environment, torch.get_num_threads()) as run:
        return run(requests)


@contextmanager
def started(
    name: str, python: str, job: dict[str, Any], environment: dict[str, str], num_threads: int
) -> Iterator[Callable[[Requests], Times]]:
    """A process of `python` with the function `serve`, as a function that runs requests in it.

    Between two runs it is stopped, where the system can do that: an idle vLLM takes 1 to 2 % of a core.
    """
    process = subprocess.Popen(
        [python, __file__],
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads)} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=getattr(os, "setpgrp", None),  # Ctrl-C is for this process, which kills the other
    )

    def send(message: object) -> None:
        with suppress(BrokenPipeError):  # it has failed, which is told below
            process.stdin.write(f"{json.dumps(message)}\n")
            process.stdin.flush()

    def run(requests: Requests) -> Times:
        if os.name == "posix":
            process.send_signal(signal.SIGCONT)
        send(requests)
        for line in process.stdout:
            if line.startswith("Times "):
                if os.name == "posix":
                    process.send_signal(signal.SIGSTOP)
                return json.loads(line.removeprefix("Times "))
        raise SystemExit(f"{name} failed in {python}: is it installed there? Its output is above.")

    try:
        send(job)
        yield run
    finally:
        process.kill()
        process.communicate()


def serve() -> None:
    """In that process: a line with a job, then lines with requests, which are run. Prints their times."""
    job = json.loads(sys.stdin.readline())
    if job["package"] == "nanopaged":
        import torch  # noqa: F401 (before nanopaged, as bench.py does, so that OpenMP's threads wait alike)
    package = importlib.import_module(job["package"])
    if "folder" in job and not Path(package.__file__).resolve().is_relative_to(job["folder"]):
        raise SystemExit(f"{package.__file__} was imported, not the package in {job['folder']}")
    options: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    if job["package"] == "nanovllm":
        options["temperature"] = 0.6  # that of its own benchmark; it has no greedy decoding
    if job["package"] == "vllm":
        options["detokenize"] = False
    engine = package.LLM
    if job.get("fork") is not None:
        engine = importlib.import_module("nanopaged.terminal").load_fork(job["fork"])
    llm = engine(job["model"], **job["options"])
    for line in sys.stdin:
        requests: Requests = json.loads(line)
        prompts, first = [prompt for prompt, _ in requests], warm_up(requests)
        if job["package"] == "vllm":
            prompts, first = ([{"prompt_token_ids": prompt} for prompt in each] for each in (prompts, first))
        llm.generate(first, package.SamplingParams(max_tokens=3, **options))
        params = [package.SamplingParams(max_tokens=n, **options) for _, n in requests]
        began = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        print("Times", json.dumps(since(began)), flush=True)


if __name__ == "__main__":
    serve()
