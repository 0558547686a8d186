"""Throughput: output tokens per second on random requests, in nanopaged and, for comparison, in its peers.

    python bench.py                             nanopaged alone; a minute or two on a CPU
    python bench.py --baseline hf --repeat 3    transformers as well, on the same requests and weights
    python bench.py --baseline vllm --peer-python vllm-venv/bin/python --threads 1    vLLM, on the same

All requests arrive at once. Decoding is greedy and ignores end-of-sequence, so every request generates
exactly the number of tokens that was drawn for it. The rate is the sum of these numbers over the wall time,
prefill included; loading and warm-up are left out. Weights are random unless --model names a checkpoint: they
do not change the speed. On CUDA the defaults are nano-vllm's benchmark; elsewhere they suit a laptop.

The experiments of the PagedAttention paper are in docs/experiments.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch and transformers take seconds to load, so they are imported once the arguments have been read.
if TYPE_CHECKING:
    import transformers

    from nanopaged import RequestOutput

SIZES = (  # of a model, by transformers' names; a row of SHAPES has them in this order
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
SHAPES = {
    "test": ("qwen3", 2, 64, 96, 4, 2, 16, 12000, True),
    "100m": ("qwen3", 12, 768, 2048, 12, 4, 64, 32000, True),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True),
    "llama-3-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False),
}
DEFAULTS: dict[str, tuple[Any, Any]] = {  # on CUDA, elsewhere
    "shape": ("qwen3-0.6b", "100m"),
    "dtype": ("bfloat16", "float32"),
    "requests": (256, 32),
    "min_input": (100, 16),
    "max_input": (1024, 256),
    "min_output": (100, 16),
    "max_output": (1024, 256),
    "budget": (16384, 2048),
    "static": ([64], [8, 16]),
}
Requests = list[tuple[list[int], int]]  # (prompt's token ids, tokens to generate)
Times = tuple[float, float]  # (seconds, CPU seconds of all threads)


# ── the command line ──────────────────────────────────────────────────────────────────────────────


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring unchanged, and every default but None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def read_arguments() -> argparse.Namespace:
    """The flags, with DEFAULTS for this machine filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)

    def add(name: str, text: str, **options: Any) -> None:
        """A flag whose default depends on the machine."""
        on_cuda, elsewhere = DEFAULTS[name.replace("-", "_")]
        text += f" (default: {on_cuda} on CUDA, {elsewhere} elsewhere)"
        parser.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **options)

    parser.add_argument("--model", help="a model folder or hub id, instead of random weights")
    add("shape", "sizes of the model with random weights", choices=SHAPES)
    add("dtype", "of weights and K/V", choices=["float32", "bfloat16", "float16"])
    add("requests", "how many", type=positive)
    for name in ("min-input", "max-input", "min-output", "max-output"):
        add(name, "lengths are drawn uniformly between minimum and maximum", type=positive, metavar="TOKENS")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the weights")
    parser.add_argument("--repeat", type=positive, default=1, help="rounds; the median counts")
    parser.add_argument("--baseline", choices=["hf", "vllm"], help="also run transformers, or vLLM")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has vLLM installed")
    add("static", "batch sizes for transformers' generate, and all at once", type=positive, nargs="*")
    add("budget", "tokens in a step (max_num_batched_tokens)", type=positive)
    parser.add_argument("--block-size", type=positive, default=16, help="tokens in a block")
    parser.add_argument("--max-num-seqs", type=positive, default=256, help="sequences in a step")
    parser.add_argument("--backend", default="auto", help="attention_backend")
    parser.add_argument("--eager", action="store_true", help="run without CUDA graphs")
    parser.add_argument("--threads", type=positive, help="of all sides, on a CPU; default: torch's choice")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    given = vars(parser.parse_args())

    import torch

    column = 0 if torch.cuda.is_available() else 1
    args = argparse.Namespace(**{name: both[column] for name, both in DEFAULTS.items()} | given)
    for what in ("input", "output"):
        least, most = getattr(args, f"min_{what}"), getattr(args, f"max_{what}")
        if least > most:
            parser.error(f"--min-{what} is {least}, but --max-{what} is only {most}")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def times() -> Times:
    """What the two clocks show now."""
    return time.perf_counter(), time.process_time()


def since(began: Times) -> Times:
    """What has passed since then."""
    return time.perf_counter() - began[0], time.process_time() - began[1]


def positive(text: str) -> int:
    """A type for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


# ── what is run ───────────────────────────────────────────────────────────────────────────────────


def make_config(args: argparse.Namespace) -> transformers.PreTrainedConfig:
    """The model's sizes, in transformers' own form."""
    import transformers

    if args.model is not None:
        return transformers.AutoConfig.from_pretrained(args.model)
    sizes = dict(zip(SIZES, SHAPES[args.shape], strict=True))
    others = {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None}
    return transformers.AutoConfig.for_model(**sizes, **others)


def save_random_weights(config: transformers.PreTrainedConfig, args: argparse.Namespace, folder: str) -> None:
    """A checkpoint that nanopaged and transformers both load."""
    import torch
    import transformers

    torch.manual_seed(args.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        dtype = getattr(torch, args.dtype)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def draw_requests(vocab_size: int, args: argparse.Namespace) -> Requests:
    """Random prompts, each with the number of tokens that it generates."""
    rng = random.Random(args.seed)
    lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return [(prompt, rng.randint(args.min_output, args.max_output)) for prompt in prompts]


# ── nanopaged ─────────────────────────────────────────────────────────────────────────────────────


def run_nanopaged(model: str, requests: Requests, args: argparse.Namespace) -> dict[str, Any]:
    """One measured run of all requests; the result's names are those of --json."""
    from nanopaged import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=args.dtype,
        block_size=args.block_size,
        max_num_batched_tokens=args.budget,
        max_num_seqs=args.max_num_seqs,
        attention_backend=args.backend,
        enforce_eager=args.eager,
    )
    # The warm-up's prompts are as long as the first ones, but differ in their first token: the prefix cache
    # does not find their blocks again.
    warm_up = [[(prompt[0] + 1) % llm.engine.vocab_size, *prompt[1:]] for prompt, _ in requests[:4]]
    llm.generate(warm_up, SamplingParams(max_tokens=3), use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    before = llm.engine.stats()
    began = times()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    seconds, cpu_seconds = since(began)
    after = llm.engine.stats()

    num_output, num_prompt = sum(n for _, n in requests), sum(len(prompt) for prompt, _ in requests)
    num_steps = after.num_steps - before.num_steps
    first, further = latencies(outputs)
    preemptions = after.num_preemptions_swap + after.num_preemptions_recompute
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
        "time_to_first_token": first,
        "time_per_output_token": further,
        "steps": num_steps,
        "sequences_per_step": num_output / num_steps,
        "prefix_hit_rate": (after.prefix_cache_hits - before.prefix_cache_hits) / num_prompt,
        "preemptions": preemptions,
    }


def latencies(outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and for each further one: p50, p95 and p99 over the requests."""
    import numpy as np

    first, further = [], []
    for output in outputs:
        metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
        first.append(metrics.first_token_time - metrics.arrival_time)
        if num_tokens > 1:
            further.append((metrics.finish_time - metrics.first_token_time) / (num_tokens - 1))
    return tuple(np.percentile(times or [0.0], (50, 95, 99)).tolist() for times in (first, further))


def bytes_read(config: transformers.PreTrainedConfig, requests: Requests, steps: int, itemsize: int) -> int:
    """Bytes that decoding has to read: all matrices in every step, and each token's context.

    A request with 5 prompt tokens that generates 3 reads 6 + 7 tokens of K/V: its first token comes out of
    the prefill, and each further one attends to everything before it and to itself.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    context = sum((n - 1) * len(prompt) + n * (n - 1) // 2 for prompt, n in requests)
    return itemsize * (steps * weights + context * 2 * config.num_hidden_layers * kv)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy much larger than any cache; the best of nine."""
    import torch

    on_cuda = torch.cuda.is_available()
    source = torch.ones((2 << 30) if on_cuda else (128 << 20), dtype=torch.uint8)
    source = source.to("cuda" if on_cuda else "cpu")
    target, seconds = torch.empty_like(source), []
    for _ in range(9):
        began = time.perf_counter()
        target.copy_(source)
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * source.numel() / min(seconds)


# ── transformers ──────────────────────────────────────────────────────────────────────────────────


def load_hf(model: str, args: argparse.Namespace) -> transformers.PreTrainedModel:
    """The model on its device, warmed up."""
    import torch
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype)).eval()
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
    began = times()
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
    began = times()
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


# ── vLLM ──────────────────────────────────────────────────────────────────────────────────────────


def run_vllm(model: str, requests: Requests, args: argparse.Namespace) -> Times:
    """The time of vLLM, in a process of --peer-python."""
    import torch

    settings = {name: getattr(args, name) for name in ("dtype", "budget", "max_num_seqs", "eager")}
    threads = torch.get_num_threads()
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB, as nanopaged's default
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its CPU seconds are all
    }
    job = json.dumps({"model": str(model), "requests": requests, "settings": settings})
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench; bench.serve_vllm()"
    try:
        done = subprocess.run(
            [args.peer_python, "-c", code],
            env=os.environ | environment,
            input=job,
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise SystemExit(f"--peer-python {args.peer_python} cannot be run: {error}") from error
    results = [line for line in done.stdout.splitlines() if line.startswith("Times ")]
    if done.returncode != 0 or not results:
        raise SystemExit(f"vLLM failed in {args.peer_python}: is it installed there? Its output is above.")
    seconds, cpu_seconds = map(float, results[-1].split()[1:])
    return seconds, cpu_seconds


def serve_vllm() -> None:
    """In the process of `run_vllm`: read a job, run it, and print a line with its `Times`."""
    import vllm

    job = json.load(sys.stdin)
    settings, requests = job["settings"], job["requests"]
    llm = vllm.LLM(
        job["model"],
        dtype=settings["dtype"],
        max_num_batched_tokens=settings["budget"],
        max_num_seqs=settings["max_num_seqs"],
        enforce_eager=settings["eager"],
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    warm_up = [{"prompt_token_ids": [1, *prompt[1:]]} for prompt, _ in requests[:4]]
    llm.generate(warm_up, vllm.SamplingParams(max_tokens=3, detokenize=False))
    options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = [vllm.SamplingParams(max_tokens=n, **options) for _, n in requests]
    began = times()
    llm.generate(prompts, params)
    print("Times", *since(began), flush=True)


# ── the report ────────────────────────────────────────────────────────────────────────────────────


def print_run(run: dict[str, Any], bandwidth: float) -> None:
    """One run of nanopaged as a table."""
    read = run["bytes_read"] / run["seconds"]
    rows = {
        "output, total tokens/s": [run["output_tokens_per_second"], run["total_tokens_per_second"]],
        "first token, ms (p50 p95 p99)": [1e3 * t for t in run["time_to_first_token"]],
        "each further, ms (p50 p95 p99)": [1e3 * t for t in run["time_per_output_token"]],
        "steps, sequences in each": [run["steps"], run["sequences_per_step"]],
        "prefix found %, preemptions": [100 * run["prefix_hit_rate"], run["preemptions"]],
        "GB/s read, copied here, share %": [read / 1e9, bandwidth / 1e9, 100 * read / bandwidth],
    }
    for name, values in rows.items():
        print(f"{name:40} " + " ".join(f"{value:8.1f}" for value in values))


def print_rates(rates: dict[str, list[float]], cpu_seconds: dict[str, list[float]]) -> None:
    """Output tokens per second of each side, and the ratio to the best peer, round by round."""
    print(f"{'output tokens/s':40} {'median':>8} {'least':>8} {'most':>8} {'CPU seconds':>12}")
    for name, runs in rates.items():
        cpu = statistics.median(cpu_seconds[name])
        print(f"{name:40} {statistics.median(runs):8.1f} {min(runs):8.1f} {max(runs):8.1f} {cpu:12.1f}")
    ours, *peers = rates
    if peers:
        best = max(peers, key=lambda name: statistics.median(rates[name]))
        ratios = [mine / other for mine, other in zip(rates[ours], rates[best], strict=True)]
        rounds = f"; rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}" if len(ratios) > 1 else ""
        print(f"nanopaged is {statistics.median(ratios):.2f} times the best of them ({best}{rounds})")


def machine() -> str:
    """The versions and the device that a figure belongs to."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {device}, {torch.get_num_threads()} threads"
    )


def main() -> None:
    args = read_arguments()
    import torch

    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanopaged").setLevel(logging.INFO)  # shows the size of the KV cache, among others
    config = make_config(args)
    requests = draw_requests(config.vocab_size, args)
    num_prompt, num_output = sum(len(prompt) for prompt, _ in requests), sum(n for _, n in requests)
    model_name = args.model or f"shape {args.shape}"
    print(f"{len(requests)} requests, {num_prompt} prompt and {num_output} output tokens; ", end="")
    print(f"{model_name}, {args.dtype}; {machine()}")

    runs: list[dict[str, Any]] = []
    rates: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or folder
        if args.model is None:
            save_random_weights(config, args, folder)

        def run_ours() -> Times:
            runs.append(run_nanopaged(model, requests, args))
            return runs[-1]["seconds"], runs[-1]["cpu_seconds"]

        sides: dict[str, Callable[[], Times]] = {"nanopaged": run_ours}
        if args.baseline == "hf":
            # Sizes of at least the number of requests all give the same single batch: it is run once.
            for size in sorted({min(size, len(requests)) for size in (*args.static, len(requests))}):
                name = f"transformers, static batches of {size}"
                sides[name] = lambda size=size: run_static(model, requests, args, size)
            sides["transformers, continuous"] = lambda: run_continuous(model, requests, args)
        elif args.baseline == "vllm":
            sides["vLLM"] = lambda: run_vllm(model, requests, args)
        for _ in range(args.repeat):  # the sides take turns, so that a slow minute of the machine slows all
            for name, side in sides.items():
                seconds, cpu = side()
                rates.setdefault(name, []).append(num_output / seconds)
                cpu_seconds.setdefault(name, []).append(cpu)
                print(f"{name}: {rates[name][-1]:.1f} output tokens/s", flush=True)
                gc.collect()  # free this side's memory for the next one
                torch.cuda.empty_cache()

    run = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
    run["bytes_read"] = bytes_read(config, requests, run["steps"], getattr(torch, args.dtype).itemsize)
    print_run(run, copy_bandwidth())
    print_rates(rates, cpu_seconds)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        all_sides = {"rates": rates, "cpu_seconds_of": cpu_seconds}
        print(json.dumps({"machine": machine(), "settings": settings, **run, **all_sides}))


if __name__ == "__main__":
    main()
