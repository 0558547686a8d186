"""Throughput: output tokens per second on random requests, in nanopaged and, for comparison, in its peers.

    python bench.py                               nanopaged alone; a minute on two cores
    python bench.py --baseline hf --requests 8 --max-output 64    transformers as well; a minute, too
    python bench.py --baseline hf --repeat 3      all 32 requests, three times: ten minutes
    python bench.py --baseline PATH --repeat 5    another checkout of nanopaged: what does a change cost?
    python bench.py --fork FILE --baseline .      the engine of a fork (docs/book/13-forks.md) beside this one
    python bench.py --baseline vllm --peer-python vllm-venv/bin/python --threads 1

All requests arrive at once. Decoding is greedy and ignores end-of-sequence, so every request generates
exactly the number of tokens that was drawn for it. The rate is the sum of these numbers over the wall time,
prefill included; loading and warm-up are left out. Weights are random unless --model names a checkpoint: they
do not change the speed. On CUDA the defaults are nano-vllm's benchmark; elsewhere they suit a laptop.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent / "docs" / "experiments"))
import common  # noqa: E402
import peers  # noqa: E402

from nanopaged.terminal import load_fork, one_line, run_program  # noqa: E402

if TYPE_CHECKING:  # torch and transformers take seconds to load: after the arguments have been read
    from nanopaged import LLM, RequestOutput


def read_arguments() -> argparse.Namespace:
    """The flags. Wrong ones are refused before a model is made or loaded."""
    parser, positive = common.make_parser(__doc__), common.at_least(1)
    defaults: dict[str, tuple[Any, Any]] = {}

    def add(name: str, on_cuda: Any, elsewhere: Any, text: str, **options: Any) -> None:
        """A flag whose default depends on the machine."""
        defaults[name.replace("-", "_")] = on_cuda, elsewhere
        text += f" (default: {on_cuda} on CUDA, {elsewhere} elsewhere)"
        parser.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **options)

    parser.add_argument("--model", help="a model folder or hub id, instead of random weights")
    add("shape", "qwen3-0.6b", "100m", "sizes of the model with random weights", choices=common.SHAPES)
    add("dtype", "bfloat16", "float32", "of weights and K/V", choices=common.DTYPES)
    add("requests", 256, 32, "how many", type=positive)
    for what in ("input", "output"):
        add(f"min-{what}", 100, 16, "lengths are drawn uniformly", type=positive, metavar="TOKENS")
        add(f"max-{what}", 1024, 256, "from minimum to maximum", type=positive, metavar="TOKENS")
    shared = "tokens that all prompts begin with, before their own"
    parser.add_argument("--shared-prefix", type=common.at_least(0), default=0, metavar="TOKENS", help=shared)
    parser.add_argument("--repeat", type=positive, default=1, help="rounds; the median counts")
    side = "hf, vllm, nano-vllm, or the PATH of another checkout"
    parser.add_argument("--baseline", type=peers.baseline, help=side)
    parser.add_argument("--fork", metavar="FILE", help="a fork, whose engine is measured as nanopaged's")
    parser.add_argument("--peer-python", type=peers.program, default=sys.executable, help="for all but hf")
    add("static", [64], [8, 16], "batches of transformers' generate, and all", type=positive, nargs="*")
    add("budget", 16384, 2048, "tokens in a step (max_num_batched_tokens)", type=positive)
    parser.add_argument("--block-size", type=positive, default=16, help="tokens in a block")
    parser.add_argument("--max-num-seqs", type=positive, default=256, help="sequences in a step")
    parser.add_argument("--backend", "--attention-backend", default="auto", help="attention_backend")
    parser.add_argument("--eager", action="store_true", help="run without CUDA graphs")
    parser.add_argument("--threads", type=positive, help="of all sides, on a CPU; default: torch's choice")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    given = vars(parser.parse_args())

    import torch  # before nanopaged, which would change how OpenMP's threads wait (records/benchmarks.md)

    from nanopaged import EngineConfig
    from nanopaged.model.checkpoint import find_model

    on_cuda = torch.cuda.is_available()
    args = argparse.Namespace(**{name: both[not on_cuda] for name, both in defaults.items()} | given)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for what in ("input", "output"):
        least, most = getattr(args, f"min_{what}"), getattr(args, f"max_{what}")
        if least > most:
            parser.error(f"--min-{what} is {least}, but --max-{what} is only {most}")
    try:
        EngineConfig(**engine_options(args))
        find_model(args.model)
        if args.fork is not None:
            load_fork(args.fork)
    except (ValueError, FileNotFoundError) as error:
        parser.error(one_line(error))
    return args


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `LLM`, here and in another checkout."""
    return {
        "dtype": args.dtype,
        "block_size": args.block_size,
        "max_num_batched_tokens": args.budget,
        "max_num_seqs": args.max_num_seqs,
        "attention_backend": args.backend,
        "enforce_eager": args.eager,
    }


def save_random_weights(args: argparse.Namespace, folder: str) -> None:
    """A checkpoint that all sides load."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**common.SHAPES[args.shape], bos_token_id=None)
    torch.manual_seed(args.seed)
    with common.pick_device():
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).save_pretrained(folder)


def draw_requests(vocab_size: int, args: argparse.Namespace) -> peers.Requests:
    """Random prompts, each with the number of tokens that it generates."""
    rng = random.Random(args.seed)
    lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    prefix = [rng.randrange(vocab_size) for _ in range(args.shared_prefix)]
    return [(prefix + prompt, rng.randint(args.min_output, args.max_output)) for prompt in prompts]


def run_nanopaged(model: str, requests: peers.Requests, args: argparse.Namespace) -> dict[str, Any]:
    """One measured run of all requests, in an engine of its own."""
    from nanopaged import LLM

    engine = LLM if args.fork is None else load_fork(args.fork)
    return measure(engine(model, **engine_options(args)), requests)


def measure(llm: LLM, requests: peers.Requests) -> dict[str, Any]:
    """Run all requests; the result's names are those of --json."""
    from nanopaged import SamplingParams

    llm.generate(peers.warm_up(requests), SamplingParams(max_tokens=3), use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    before = llm.engine.stats()
    began = time.perf_counter(), time.process_time()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    times = peers.since(began)
    after = llm.engine.stats()

    num_output, num_prompt = sum(n for _, n in requests), sum(len(prompt) for prompt, _ in requests)
    num_steps = after.num_steps - before.num_steps
    first, further = latencies(outputs)
    # A request with 5 prompt tokens that generates 3 reads 6 + 7 tokens of K/V: its first token comes out of
    # the prefill, and each further one attends to everything before it and to itself. A prefix that is read
    # once for several requests counts for each of them.
    keys = sum((n - 1) * len(prompt) + n * (n - 1) // 2 for prompt, n in requests)
    return {
        **times,
        "output_tokens_per_second": num_output / times["seconds"],
        "total_tokens_per_second": (num_prompt + num_output) / times["seconds"],
        "time_to_first_token": first,
        "time_per_output_token": further,
        "steps": num_steps,
        "sequences_per_step": num_output / num_steps,
        "prefix_hit_rate": (after.prefix_cache_hits - before.prefix_cache_hits) / num_prompt,
        "preemptions": after.num_preemptions_swap + after.num_preemptions_recompute,
        "bytes_read": common.decode_bytes(llm, num_steps, keys),
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


def main() -> None:
    args = read_arguments()
    import torch

    from nanopaged.model.checkpoint import find_model
    from nanopaged.model.model_config import read_model_config

    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanopaged").setLevel(logging.INFO)  # shows the size of the KV cache, among others
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or folder
        if args.model is None:
            save_random_weights(args, folder)
        requests = draw_requests(read_model_config(find_model(model)).vocab_size, args)
        num_prompt, num_output = sum(len(prompt) for prompt, _ in requests), sum(n for _, n in requests)
        print(f"{len(requests)} requests, {num_prompt} prompt and {num_output} output tokens; ", end="")
        print(f"{common.model_name(args)}; {common.machine()}")

        sides = {"nanopaged": lambda: run_nanopaged(model, requests, args)}
        sides |= peers.sides(model, requests, engine_options(args), args)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        left = args.repeat * len(sides)
        for _ in range(args.repeat):  # the sides take turns, so that a slow minute of the machine slows all
            for name, side in sides.items():
                runs[name].append(side())
                left, seconds = left - 1, runs[name][-1]["seconds"]
                print(f"{name}: {num_output / seconds:.1f} output tokens/s", end="")
                print(f"; runs left: {left}, each {seconds:.0f} s at this rate" * bool(left), flush=True)
                gc.collect()  # free this side's memory for the next one
                torch.cuda.empty_cache()

    median = sorted(runs["nanopaged"], key=lambda run: run["seconds"])[args.repeat // 2]
    rates = {name: [num_output / run["seconds"] for run in those] for name, those in runs.items()}
    cpu_seconds = {name: [run["cpu_seconds"] for run in those] for name, those in runs.items()}
    if "steps" in median:  # not beside another checkout, where both sides are only timed
        print_run(median, common.copy_bandwidth(common.pick_device()))
    peers.print_rates(rates, cpu_seconds)
    if args.json:
        if args.model is not None:
            del args.shape
        about = common.origin() | {"settings": vars(args)}
        print(json.dumps({**about, **median, "rates": rates, "cpu_seconds_of": cpu_seconds}))


if __name__ == "__main__":
    run_program(main)
