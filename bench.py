"""Throughput: output tokens per second on random requests, in nanopaged and, for comparison, in its peers.

    python bench.py                               nanopaged alone; a minute on two cores
    python bench.py --baseline hf --requests 8 --max-output 64    transformers as well; a minute, too
    python bench.py --baseline hf --repeat 3      all 32 requests, three times: ten minutes
    python bench.py --baseline PATH --repeat 5    another checkout of nanopaged: what does a change cost?
    python bench.py --fork FILE --baseline .      the engine of a fork (docs/book/12-forks.md) beside this one
    python bench.py --baseline vllm --peer-python vllm-venv/bin/python --threads 1

All requests arrive at once. Decoding is greedy and ignores end-of-sequence, so every request generates
exactly the number of tokens that was drawn for it. The rate is the sum of these numbers over the wall time,
prefill included; loading and warm-up are left out. Weights are random unless --model names a checkpoint: they
do not change the speed. On CUDA the defaults are nano-vllm's benchmark; elsewhere they suit a laptop.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import logging
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch, transformers and nanopaged are imported in functions: --help does not wait for them, and a process
# that runs another engine does without.
if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from nanopaged import LLM, RequestOutput
    from nanopaged.model.model_config import ModelConfig

ROOT = Path(__file__).resolve().parent
Requests = list[tuple[list[int], int]]  # (prompt's token ids, tokens to generate)
Times = dict[str, float]  # seconds, and cpu_seconds of all threads
Job = dict[str, Any]  # which engine `serve` loads, and in which Python
SERVE = "serve"  # the argument of a process that `run_job` starts
DTYPES = ["float32", "bfloat16", "float16"]
NAMES = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size")
NAMES += ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SIZES = {
    "test": ("qwen3", 2, 64, 96, 4, 2, 16, 12000),
    "28m": ("qwen3", 6, 384, 1024, 6, 2, 64, 32000),
    "100m": ("qwen3", 12, 768, 2048, 12, 4, 64, 32000),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-4b": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936),
    "llama-3.2-1b": ("llama", 16, 2048, 8192, 32, 8, 64, 128256),
    "llama-3-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256),
}
SHAPES: dict[str, dict[str, Any]] = {}  # name → config.json
for name, sizes in SIZES.items():
    SHAPES[name] = {
        **dict(zip(NAMES, sizes, strict=True)),
        "tie_word_embeddings": sizes[2] <= 2560,  # the larger ones have an output projection of their own
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": None,
    }


# ── the command line ─────────────────────────────────────────────────────────────────────────────────


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, []) else action.help


def make_parser(docstring: str) -> argparse.ArgumentParser:
    """A parser with --seed. Its --help shows the docstring as it is, and all defaults."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=_HelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def add_flags(parser: argparse.ArgumentParser) -> dict[str, tuple[Any, Any]]:
    """Returns the defaults that depend on the machine: name → (on CUDA, elsewhere)."""
    defaults: dict[str, tuple[Any, Any]] = {}
    positive, plain = at_least(1), parser.add_argument

    def add(name: str, on_cuda: Any, elsewhere: Any, text: str, **options: Any) -> None:
        defaults[name.replace("-", "_")] = on_cuda, elsewhere
        text += f" (default: {on_cuda} on CUDA, {elsewhere} elsewhere)"
        parser.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **options)

    plain("--model", help="a model folder or hub id, instead of random weights")
    add("shape", "qwen3-0.6b", "100m", "sizes of the model with random weights", choices=SHAPES)
    add("dtype", "bfloat16", "float32", "of weights and K/V", choices=DTYPES)
    add("requests", 256, 32, "how many", type=positive)
    for what in ("input", "output"):
        add(f"min-{what}", 100, 16, "lengths are drawn uniformly", type=positive, metavar="TOKENS")
        add(f"max-{what}", 1024, 256, "from minimum to maximum", type=positive, metavar="TOKENS")
    shared = "tokens that all prompts begin with, before their own"
    plain("--shared-prefix", type=at_least(0), default=0, metavar="TOKENS", help=shared)
    plain("--repeat", type=positive, default=1, help="rounds; the median counts")
    plain("--baseline", help="hf, vllm, nano-vllm, or the PATH of another checkout")
    plain("--fork", metavar="FILE", help="a fork, whose engine is measured as nanopaged's")
    plain("--peer-python", default=sys.executable, help="for all but hf")
    add("static", [64], [8, 16], "batches of transformers' generate, and all", type=positive, nargs="*")
    add("budget", 16384, 2048, "tokens in a step (max_num_batched_tokens)", type=positive)
    plain("--block-size", type=positive, default=16, help="tokens in a block")
    plain("--max-num-seqs", type=positive, default=256, help="sequences in a step")
    plain("--backend", "--attention-backend", default="auto", help="attention_backend")
    plain("--eager", action="store_true", help="run without CUDA graphs")
    plain("--threads", type=positive, help="of all sides, on a CPU; default: torch's choice")
    plain("--json", action="store_true", help="print the results as JSON in the last line")
    return defaults


def read_arguments() -> argparse.Namespace:
    """The flags. Wrong ones are refused before a model is made or loaded."""
    parser = make_parser(__doc__)
    defaults = add_flags(parser)
    given = vars(parser.parse_args())
    peer, python = given["baseline"], given["peer_python"]
    if peer not in (None, "hf", "vllm", "nano-vllm") and not Path(peer, "nanopaged", "__init__.py").is_file():
        parser.error(f"{peer} is neither hf, vllm nor nano-vllm, nor a checkout of nanopaged")
    if shutil.which(python) is None:
        parser.error(f"{python} is not a program that can be run")

    import torch  # before nanopaged, which would change how OpenMP's threads wait (records/benchmarks.md)

    from nanopaged import EngineConfig
    from nanopaged.model.checkpoint import find_model
    from nanopaged.terminal import load_fork, one_line

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


# ── the requests, and nanopaged ─────────────────────────────────────────────────────────────────────


def save_random_weights(args: argparse.Namespace, folder: str) -> None:
    """A checkpoint that all sides load."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[args.shape], bos_token_id=None)
    torch.manual_seed(args.seed)
    with pick_device():
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).save_pretrained(folder)


def draw_requests(vocab_size: int, args: argparse.Namespace) -> Requests:
    """Random prompts, each with the number of tokens that it generates."""
    rng = random.Random(args.seed)
    lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    prefix = [rng.randrange(vocab_size) for _ in range(args.shared_prefix)]
    return [(prefix + prompt, rng.randint(args.min_output, args.max_output)) for prompt in prompts]


def warm_up(requests: Requests) -> list[list[int]]:
    """As long as the first prompts, with another first token: the prefix cache does not find them again."""
    return [[int(prompt[0] == 0), *prompt[1:]] for prompt, _ in requests[:4]]


def measure(llm: LLM, requests: Requests) -> dict[str, Any]:
    """Run all requests; the result's names are those of --json."""
    from nanopaged import SamplingParams

    llm.generate(warm_up(requests), SamplingParams(max_tokens=3), use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    before = llm.engine.stats()
    began = time.perf_counter(), time.process_time()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    times = since(began)
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
        "bytes_read": decode_bytes(llm, num_steps, keys),
    }


def latencies(outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and for each further one: p50, p95 and p99 over the requests."""
    import numpy as np

    runs = [(output.metrics, len(output.outputs[0].token_ids) - 1) for output in outputs]
    first = [run.first_token_time - run.arrival_time for run, _ in runs]
    further = [(run.finish_time - run.first_token_time) / n for run, n in runs if n > 0]
    return tuple(np.percentile(times or [0.0], (50, 95, 99)).tolist() for times in (first, further))


def since(began: tuple[float, float]) -> Times:
    """The time since the two clocks were read."""
    return {"seconds": time.perf_counter() - began[0], "cpu_seconds": time.process_time() - began[1]}


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers, without embedding and output projection."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q and o, k and v
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def decode_bytes(llm: LLM, steps: int, keys: float) -> float:
    """Bytes that decoding has to read: all matrices in every step, and the K/V of `keys` tokens in total."""
    config, itemsize = llm.engine.runner.model.config, llm.engine.runner.dtype.itemsize
    weights = layer_weights(config) + config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token
    return itemsize * (steps * weights + keys * kv)


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────


def load_hf(model: str, args: argparse.Namespace) -> PreTrainedModel:
    """The model on its device, warmed up."""
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype)).eval()
    hf.to(pick_device())
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every new length of a context
    ids = torch.ones(4, 64, dtype=torch.int64, device=hf.device)
    hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0)
    return hf


def run_static(model: str, requests: Requests, args: argparse.Namespace, size: int) -> Times:
    """The time of `generate` on left-padded batches, in order of arrival.

    A batch runs until its longest output is done; tokens beyond a request's own length do not count.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from tqdm import tqdm

    hf = load_hf(model, args)
    began = time.perf_counter(), time.process_time()
    for i in tqdm(range(0, len(requests), size), desc=f"static {size}"):
        prompts = [torch.tensor(prompt, device=hf.device) for prompt, _ in requests[i : i + size]]
        ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left")
        n = max(n for _, n in requests[i : i + size])
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        hf.generate(ids, attention_mask=mask, **options)
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


# ── an engine in a process of its own ────────────────────────────────────────────────────────────────


def peer_job(model: str, args: argparse.Namespace) -> Job:
    """For vLLM or nano-vllm, as --baseline says."""
    import torch

    names = ("max_num_batched_tokens", "max_num_seqs", "enforce_eager")
    options = {name: engine_options(args)[name] for name in names}
    job = {"python": args.peer_python, "model": model, "options": options, "environment": {}}
    if args.baseline == "nano-vllm":
        if args.model is None:  # it reads a tokenizer, and is given that of our tiny model
            for file in (ROOT / "nanopaged" / "tiny").glob("tokenizer*.json"):
                shutil.copy(file, model)
        return job | {"package": "nanovllm"}
    options |= {"dtype": args.dtype, "enable_prefix_caching": True, "skip_tokenizer_init": True}
    job["environment"] = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{torch.get_num_threads() - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB, as nanopaged's default
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its CPU seconds are all
    }
    return job | {"package": "vllm"}


def run_job(name: str, job: Job, requests: Requests) -> Times:
    """The time of the requests in a new process. (In one that has freed memory, an engine is slower.)"""
    import torch

    done = subprocess.run(
        [job["python"], __file__, SERVE],
        input=f"{json.dumps(job)}\n{json.dumps(requests)}\n",
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | job["environment"],
        start_new_session=True,  # it does not hear Ctrl-C, which ends this process; this one ends it
    )
    for line in done.stdout.splitlines():  # among those of the engine itself
        if line.startswith("Times "):
            return json.loads(line.removeprefix("Times "))
    raise SystemExit(f"{name} failed in {job['python']}: is it installed there? Its output is above.")


def serve() -> None:
    """In that process: a line with a job, then lines with requests, which are run. Prints their times."""
    job = json.loads(sys.stdin.readline())
    if job["package"] == "nanopaged":
        import torch  # noqa: F401 (first, as in read_arguments)

        sys.path.insert(0, job["folder"])  # before the folder of this file, which has a nanopaged as well
    package = importlib.import_module(job["package"])
    if "folder" in job and not Path(package.__file__).resolve().is_relative_to(job["folder"]):
        raise SystemExit(f"{package.__file__} was imported, not the package in {job['folder']}")
    engine = package.LLM
    if job.get("fork") is not None:
        engine = importlib.import_module("nanopaged.terminal").load_fork(job["fork"])
    options: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    if job["package"] == "nanovllm":
        options["temperature"] = 0.6  # that of its own benchmark; it has no greedy decoding
    if job["package"] == "vllm":
        options["detokenize"] = False
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


def origin() -> dict[str, Any]:
    """What a figure belongs to. (torch's own number names the build, such as +cpu.)"""
    import torch

    versions = {"torch": str(torch.__version__), "transformers": version("transformers")}
    return {
        "commit": commit_of(ROOT),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "versions": versions | {"Python": platform.python_version()},
    }


def machine() -> str:
    """The versions and the device, for a headline."""
    about = origin()
    named = [f"{name} {number}" for name, number in about["versions"].items()]
    return ", ".join([*named, about["device"], f"{about['threads']} threads"])


def pick_device() -> torch.device:
    """CUDA if there is any, else the CPU."""
    import torch

    return torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device


def device_name() -> str:
    """The name of the GPU, or of the CPU as far as the system tells it."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with suppress(OSError):  # Linux has this file; on a processor that is not x86 it may have no such line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, with "-dirty" if a file has changed since; None outside git."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() or None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy much larger than any cache; the best of nine.

    Of a GPU's memory it takes at most a quarter of what other programs leave free.
    """
    import torch

    on_gpu, seconds = device.type == "cuda", []
    size = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 8) if on_gpu else 128 << 20
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    for _ in range(9):
        began = time.perf_counter()
        dst.copy_(src)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size / min(seconds)


def sides(
    model: str, requests: Requests, args: argparse.Namespace
) -> dict[str, Callable[[], dict[str, Any]]]:
    """The name of a side → a function that runs the requests, and returns at least its `Times`."""
    from nanopaged import LLM
    from nanopaged.terminal import load_fork

    engine, options = LLM if args.fork is None else load_fork(args.fork), engine_options(args)
    ours = {"nanopaged": lambda: measure(engine(model, **options), requests)}
    if args.baseline is None:
        return ours
    if args.baseline in ("vllm", "nano-vllm"):
        name = "vLLM" if args.baseline == "vllm" else "nano-vllm"
        return ours | {name: lambda: run_job(name, peer_job(model, args), requests)}
    if args.baseline != "hf":  # both checkouts in processes of their own
        job = {"package": "nanopaged", "model": model, "options": options, "environment": {}}
        here = job | {"python": sys.executable, "folder": str(ROOT), "fork": args.fork}
        there = job | {"python": args.peer_python, "folder": str(Path(args.baseline).resolve())}
        jobs = {"nanopaged": here, f"nanopaged in {args.baseline}": there}
        return {name: lambda name=name, job=job: run_job(name, job, requests) for name, job in jobs.items()}
    # Sizes of at least the number of requests all give the same single batch: it is run once.
    for size in sorted({min(size, len(requests)) for size in (*args.static, len(requests))}):
        name = f"transformers, static batches of {size}"
        ours[name] = lambda size=size: run_static(model, requests, args, size)
    return ours | {"transformers, continuous": lambda: run_continuous(model, requests, args)}


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
    ours, *others = rates
    if others:
        best = max(others, key=lambda name: statistics.median(rates[name]))
        ratios = [mine / other for mine, other in zip(rates[ours], rates[best], strict=True)]
        rounds = f"; rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}" if len(ratios) > 1 else ""
        print(f"nanopaged is {statistics.median(ratios):.2f} times the best of them ({best}{rounds})")


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
        print(f"{args.model or f'shape {args.shape}'}, {args.dtype}; {machine()}")

        run_side = sides(model, requests, args)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in run_side}
        left = args.repeat * len(runs)
        for _ in range(args.repeat):  # the sides take turns, so that a slow minute of the machine slows all
            for name, side in run_side.items():
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
        print_run(median, copy_bandwidth(pick_device()))
    print_rates(rates, cpu_seconds)
    if args.json:
        if args.model is not None:
            del args.shape
        about = origin() | {"settings": vars(args)}
        print(json.dumps({**about, **median, "rates": rates, "cpu_seconds_of": cpu_seconds}))


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        sys.exit(serve())
    from nanopaged.terminal import run_program

    run_program(main)
