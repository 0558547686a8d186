"""Output tokens per second on random requests: nanopaged alone, next to transformers or to another checkout.

    python bench.py                               nanopaged alone; a minute on two cores
    python bench.py --baseline hf --requests 8 --max-output 64    transformers as well; a minute
    python bench.py --baseline PATH --repeat 5    another checkout: what does a change cost?
    python bench.py --fork FILE --baseline .      a fork (docs/book/12-forks.md) next to this engine

All requests arrive together. Decoding is greedy and ignores end-of-sequence, so each request generates the
number of tokens that was drawn for it. A rate is their sum over the wall time, prefill included, loading and
warm-up excluded. Weights are random unless --model names a checkpoint, because they do not change the speed.
On a GPU the defaults are nano-vllm's benchmark. docs/experiments/peers.py measures vLLM and nano-vllm.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.model.checkpoint import find_model
from nanopaged.model.model_config import read_model_config
from nanopaged.terminal import load_fork, one_line, run_program

HERE = Path(__file__).resolve().parent
Requests = list[tuple[list[int], int]]  # token ids of a prompt, number of tokens to generate
Run = dict[str, Any]  # seconds, and the rows of `measure`
SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size"]
SIZES += ["num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
SHAPES = {
    "test": [2, 64, 96, 4, 2, 16, 12000],
    "28m": [6, 384, 1024, 6, 2, 64, 32000],
    "100m": [12, 768, 2048, 12, 4, 64, 32000],
    "qwen3-0.6b": [28, 1024, 3072, 16, 8, 128, 151936],
}
ON_CPU = {"shape": "100m", "dtype": "float32", "requests": 32, "min": 16, "max": 256}
ON_GPU = {"shape": "qwen3-0.6b", "dtype": "bfloat16", "requests": 256, "min": 100, "max": 1024}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")  # shows the size of the KV cache
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            sides = make_sides(args)
            model = find_model(args.model or save_random_weights(folder, args)).resolve()
            requests = draw_requests(read_model_config(model).vocab_size, args)
        except (TypeError, ValueError, OSError) as error:
            parser.error(one_line(error))
        num_prompt = sum(len(prompt) for prompt, _ in requests)
        num_output = sum(length for _, length in requests)
        print(f"{len(requests)} requests, {num_prompt} prompt and {num_output} output tokens; ", end="")
        print(f"{args.model or f'shape {args.shape}'}, {args.dtype}; ", end="")
        print(f"torch {torch.__version__}, threads: {args.threads}", flush=True)
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for _ in range(args.repeat):  # the sides take turns, so that a slow minute of the machine slows all
            for name, run_side in sides.items():
                run = run_side(model, requests, args)
                runs[name].append(run)
                print(f"{name}: {num_output / run['seconds']:.1f} output tokens/s", flush=True)
                gc.collect()  # frees this side's memory for the next one
                torch.cuda.empty_cache()
    median = sorted(runs["nanopaged"], key=lambda run: run["seconds"])[args.repeat // 2]
    for name, values in median["rows"].items():
        print(f"{name:40} " + " ".join(f"{value:8.1f}" for value in values))
    print_rates({name: [num_output / run["seconds"] for run in runs[name]] for name in runs})


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    defaults = ON_GPU if DEVICE.type == "cuda" else ON_CPU
    add = parser.add_argument
    add("--shape", default=defaults["shape"], choices=SHAPES, help="sizes of the model")
    add("--dtype", default=defaults["dtype"], help="of weights and K/V")
    add("--model", help="a model folder or hub id, instead of random weights")
    add("--requests", type=int, default=defaults["requests"])
    add("--min-input", type=int, default=defaults["min"], help="tokens; lengths are drawn uniformly")
    add("--max-input", type=int, default=defaults["max"])
    add("--min-output", type=int, default=defaults["min"])
    add("--max-output", type=int, default=defaults["max"])
    add("--repeat", type=int, default=1, help="rounds; the median counts")
    add("--baseline", help="hf, or the path of another checkout")
    add("--fork", metavar="FILE", help="a fork, whose engine is measured as nanopaged's")
    add("--options", type=json.loads, default={}, help="of LLM, such as '{\"block_size\": 32}'")
    add("--threads", type=int, default=torch.get_num_threads(), help="of all sides, on a CPU")
    add("--seed", type=int, default=0, help="of weights and requests; default: 0")
    return parser


def make_sides(args: argparse.Namespace) -> dict[str, Callable[[Path, Requests, argparse.Namespace], Run]]:
    """Return the name of each side, and the function that runs it. Raises ValueError for wrong options."""
    if min(args.requests, args.repeat, args.min_input, args.min_output) < 1:
        raise ValueError("--requests, --repeat, --min-input and --min-output must be at least 1")
    if args.min_input > args.max_input or args.min_output > args.max_output:
        raise ValueError("--min-input and --min-output must not exceed --max-input and --max-output")
    EngineConfig(dtype=args.dtype, **args.options)
    if args.fork:
        load_fork(args.fork)
    if args.baseline is None:
        return {"nanopaged": run_nanopaged}
    if args.baseline == "hf":
        sides = {"nanopaged": run_nanopaged}
        for size in sorted({max(1, args.requests // 4), max(1, args.requests // 2), args.requests}):
            sides[f"transformers, static batches of {size}"] = partial(run_static, size=size)
        sides["transformers, continuous"] = run_continuous
        return sides
    if not Path(args.baseline, "nanopaged", "__init__.py").is_file():
        raise ValueError(f"{args.baseline} is neither hf nor a checkout of nanopaged")
    return {
        "nanopaged": partial(run_checkout, folder=HERE, fork=args.fork),
        f"nanopaged in {args.baseline}": partial(run_checkout, folder=Path(args.baseline), fork=None),
    }


def save_random_weights(folder: str, args: argparse.Namespace) -> str:
    """Save a checkpoint that all sides load."""
    sizes = dict(zip(SIZES, SHAPES[args.shape], strict=True))
    config = AutoConfig.for_model("qwen3", **sizes, max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(args.seed)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.save_pretrained(folder)
    return folder


def draw_requests(vocab_size: int, args: argparse.Namespace) -> Requests:
    """Return random prompts, each with the number of tokens that it generates."""
    rng = random.Random(args.seed)
    lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return [(prompt, rng.randint(args.min_output, args.max_output)) for prompt in prompts]


def run_nanopaged(model: Path, requests: Requests, args: argparse.Namespace) -> Run:
    make_llm = load_fork(args.fork) if args.fork else LLM
    return measure(make_llm(model, dtype=args.dtype, **args.options), requests)


def measure(llm: LLM, requests: Requests) -> Run:
    """Run the requests. Returns the seconds, and the rows of a table that says where they went."""
    # Another first token, so that the prefix cache does not find these prompts again.
    warm_up = [[int(prompt[0] == 0), *prompt[1:]] for prompt, _ in requests[:4]]
    llm.generate(warm_up, SamplingParams(max_tokens=3), use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    before = llm.engine.stats()
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - start
    after = llm.engine.stats()

    num_prompt = sum(len(prompt) for prompt, _ in requests)
    num_output = sum(n for _, n in requests)
    num_steps = after.num_steps - before.num_steps
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    preemptions = after.num_preemptions_swap + after.num_preemptions_recompute
    first = []
    further = []
    for output, (_, n) in zip(outputs, requests, strict=True):
        metrics = output.metrics
        first.append(1000 * (metrics.first_token_time - metrics.arrival_time))
        further.append(1000 * (metrics.finish_time - metrics.first_token_time) / max(1, n - 1))
    read = bytes_read(llm, requests, num_steps) / seconds / 1e9
    copied = copy_bandwidth(llm.engine.runner.device) / 1e9
    rows = {
        "output, total tokens/s": [num_output / seconds, (num_prompt + num_output) / seconds],
        "first token, ms (p50 p95 p99)": np.percentile(first, [50, 95, 99]),
        "each further, ms (p50 p95 p99)": np.percentile(further, [50, 95, 99]),
        "steps, sequences in each": [num_steps, num_output / num_steps],
        "prefix found %, preemptions": [100 * hits / num_prompt, preemptions],
        "GB/s read, copied here, share %": [read, copied, 100 * read / copied],
    }
    return {"seconds": seconds, "rows": rows}


def bytes_read(llm: LLM, requests: Requests, num_steps: int) -> int:
    """Return what decoding has to read: all matrices in every step, and the K/V of all earlier tokens.

    A request with 5 prompt tokens that generates 3 reads the K/V of 6 + 7 tokens. Its first token comes from
    the prefill. Each further one attends to all tokens before it and to itself.
    """
    config = llm.engine.runner.model.config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q and o, k and v
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token
    keys = sum((n - 1) * len(prompt) + n * (n - 1) // 2 for prompt, n in requests)
    return llm.engine.runner.dtype.itemsize * (num_steps * weights + keys * kv)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of copying memory that no cache holds; the best of nine.

    On a GPU the copy takes at most a quarter of the memory that other programs leave free.
    """
    size = 128 << 20
    if device.type == "cuda":
        size = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        copied.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds)


def run_checkout(
    model: Path, requests: Requests, args: argparse.Namespace, folder: Path, fork: str | None
) -> Run:
    """Run this program in a new process, in which `import nanopaged` finds the package of the folder."""
    code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, f"--model={model}", f"--options={json.dumps(args.options)}"]
    for name in [
        "dtype",
        "requests",
        "threads",
        "seed",
        "min-input",
        "max-input",
        "min-output",
        "max-output",
    ]:
        command.append(f"--{name}={getattr(args, name.replace('-', '_'))}")
    if fork is not None:
        command.append(f"--fork={Path(fork).resolve()}")
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    rate = re.search(r"^nanopaged: ([\d.]+) output tokens/s", done.stdout, re.MULTILINE)
    if rate is None:
        raise SystemExit(f"nanopaged failed in {folder}")
    return {"seconds": sum(n for _, n in requests) / float(rate[1]), "rows": {}}


def load_hf(model: Path, args: argparse.Namespace) -> AutoModelForCausalLM:
    """Return the model on its device, warmed up."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype)).eval().to(DEVICE)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every new length of a context
    ids = torch.ones(4, 64, dtype=torch.int64, device=DEVICE)
    hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0)
    return hf


def run_static(model: Path, requests: Requests, args: argparse.Namespace, size: int) -> Run:
    """Run left-padded batches. A batch runs until its longest output is done."""
    hf = load_hf(model, args)
    start = time.perf_counter()
    for i in range(0, len(requests), size):
        batch = requests[i : i + size]
        prompts = [torch.tensor(prompt, device=DEVICE) for prompt, _ in batch]
        ones = [torch.ones_like(prompt) for prompt in prompts]
        longest = max(n for _, n in batch)
        hf.generate(
            pad_sequence(prompts, batch_first=True, padding_side="left"),
            attention_mask=pad_sequence(ones, batch_first=True, padding_side="left"),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
    return {"seconds": time.perf_counter() - start}


def run_continuous(model: Path, requests: Requests, args: argparse.Namespace) -> Run:
    """Run transformers' own continuous batching."""
    hf = load_hf(model, args)
    options = {}
    if DEVICE.type == "cpu":  # on a GPU it chooses the size of its pool; here the pool has room for all
        options["num_blocks"] = sum((len(prompt) + n) // 256 + 2 for prompt, n in requests)
    longest = max(n for _, n in requests)
    start = time.perf_counter()
    with hf.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=longest),
        continuous_batching_config=ContinuousBatchingConfig(**options),
    ) as manager:
        for prompt, n in requests:
            manager.add_request(prompt, max_new_tokens=n)
        num_done = 0
        while num_done < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and manager.is_running():
                continue
            if result is None or result.error is not None:
                raise RuntimeError("transformers' continuous batching failed")
            if result.is_finished():
                num_done += 1
    return {"seconds": time.perf_counter() - start}


def print_rates(rates: dict[str, list[float]]) -> None:
    """Print the output tokens per second of each side, and the ratio to the best peer, round by round."""
    print(f"{'output tokens/s':40} {'median':>8} {'least':>8} {'most':>8}")
    for name, values in rates.items():
        print(f"{name:40} {statistics.median(values):8.1f} {min(values):8.1f} {max(values):8.1f}")
    peers = [name for name in rates if name != "nanopaged"]
    if peers:
        best = max(peers, key=lambda name: statistics.median(rates[name]))
        ratios = [rate / other for rate, other in zip(rates["nanopaged"], rates[best], strict=True)]
        rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        median = statistics.median(ratios)
        print(f"nanopaged is {median:.2f} times the best of them ({best}; rounds: {rounds})")


if __name__ == "__main__":
    run_program(main)
