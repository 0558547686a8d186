"""Output tokens per second on random requests: nanopaged alone, or next to another engine.

    python bench.py                               nanopaged alone; a minute on two cores
    python bench.py --baseline hf --requests 8 --max-output 64    and transformers; a minute
    python bench.py --baseline PATH --repeat 5    and another checkout: what does a change cost?
    python bench.py --fork FILE --baseline .      a fork (docs/book/12-forks.md) next to this engine

All requests arrive together. Decoding is greedy and ignores end-of-sequence, so each request
generates the number of tokens that was drawn for it. A rate is their sum over the wall time,
prefill included, loading and warm-up excluded. Weights are random unless --model names a
checkpoint, because they do not change the speed. docs/experiments/peers.py measures vLLM and
nano-vllm.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from nanopaged import LLM, SamplingParams
from nanopaged.model.checkpoint import find_model
from nanopaged.model.model_config import read_model_config
from nanopaged.terminal import load_fork, one_line, run_program

Requests = list[tuple[list[int], int]]  # token ids of a prompt, number of tokens to generate
ON_GPU = torch.cuda.is_available()
FIELDS = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
FIELDS += ["num_key_value_heads", "head_dim", "vocab_size"]
SHAPES = {  # a Qwen3 model: its values of FIELDS
    "test": [2, 64, 96, 4, 2, 16, 12000],
    "28m": [6, 384, 1024, 6, 2, 64, 32000],
    "100m": [12, 768, 2048, 12, 4, 64, 32000],
    "qwen3-0.6b": [28, 1024, 3072, 16, 8, 128, 151936],
}


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if min(args.requests, args.repeat, args.threads, args.min_input, args.min_output) < 1:
        parser.error("--requests, --repeat, --threads and lengths must be at least 1")
    if args.min_input > args.max_input or args.min_output > args.max_output:
        parser.error("--min-input and --min-output must not exceed --max-input and --max-output")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.model is None:
                save_random_weights(folder, args)
            compare(args.model or folder, args)
        except (TypeError, ValueError, OSError) as error:
            parser.error(one_line(error))


def make_parser() -> ArgumentParser:
    """The defaults suit a laptop. On a GPU, model and lengths are those of nano-vllm's benchmark."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="qwen3-0.6b" if ON_GPU else "100m", choices=SHAPES, help="model sizes")
    add("--dtype", default="bfloat16" if ON_GPU else "float32", choices=["float32", "bfloat16", "float16"])
    add("--model", help="a model folder or hub id, instead of random weights")
    add("--requests", type=int, default=256 if ON_GPU else 32)
    add("--min-input", type=int, default=100 if ON_GPU else 16, help="tokens; lengths are drawn uniformly")
    add("--max-input", type=int, default=1024 if ON_GPU else 256)
    add("--min-output", type=int, default=100 if ON_GPU else 16)
    add("--max-output", type=int, default=1024 if ON_GPU else 256)
    add("--repeat", type=int, default=1, help="rounds; the median counts")
    add("--baseline", help="hf, or the path of another checkout")
    add("--fork", metavar="FILE", help="a fork, whose engine is measured as nanopaged's")
    add("--options", type=json.loads, default={}, help="of LLM, as JSON, such as '{\"block_size\": 32}'")
    add("--threads", type=int, default=torch.get_num_threads(), help="of all sides, on a CPU")
    add("--seed", type=int, default=0, help="of weights and requests; default: 0")
    return parser


def save_random_weights(folder: str, args: Namespace) -> None:
    """Save a checkpoint that all sides load."""
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(make_config(args.shape), dtype=getattr(torch, args.dtype))
    model.save_pretrained(folder)


def make_config(shape: str) -> PreTrainedConfig:
    """The config of a Qwen3 model."""
    sizes = dict(zip(FIELDS, SHAPES[shape], strict=True))
    return AutoConfig.for_model("qwen3", **sizes, max_position_embeddings=4096, tie_word_embeddings=True)


def compare(model: str, args: Namespace) -> None:
    """Run the same requests on all sides, and print their rates.

    Args:
        model: a folder or a hub id.
    """
    requests = draw_requests(read_model_config(find_model(model)).vocab_size, args)
    sides = make_sides(model, requests, args)
    num_prompt = sum(len(prompt) for prompt, _ in requests)
    num_output = count_output_tokens(requests)
    print(f"{len(requests)} requests, {num_prompt} prompt and {num_output} output tokens", end="; ")
    print(f"{args.model or args.shape}, {args.dtype}; torch {torch.__version__}, threads: {args.threads}")
    rates = {name: [] for name in sides}
    for _ in range(args.repeat):  # the sides take turns, so that a slow minute slows all of them
        for name, run_side in sides.items():
            rates[name].append(run_side())
    print_rates(rates)


def draw_requests(vocab_size: int, args: Namespace) -> Requests:
    """Random prompts, each with the number of tokens that it generates."""
    rng = random.Random(args.seed)
    lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return [(prompt, rng.randint(args.min_output, args.max_output)) for prompt in prompts]


def count_output_tokens(requests: Requests) -> int:
    """The tokens that all requests generate together."""
    return sum(num_tokens for _, num_tokens in requests)


def make_sides(model: str, requests: Requests, args: Namespace) -> dict[str, Callable[[], float]]:
    """The name of each side → the function that runs it, and returns output tokens per second."""
    if args.baseline and args.baseline != "hf":  # both are processes, so that each imports its own package
        if not Path(args.baseline, "nanopaged").is_dir():
            raise ValueError(f"{args.baseline} is neither hf nor a checkout of nanopaged")
        own = partial(run_checkout, model, str(Path(__file__).parent), fork=args.fork)
        other = partial(run_checkout, model, args.baseline)
        return {"nanopaged": own, f"nanopaged in {args.baseline}": other}
    make_llm = load_fork(args.fork) if args.fork else LLM
    sides = {"nanopaged": lambda: run_llm(make_llm(model, dtype=args.dtype, **args.options), requests)}
    if args.baseline == "hf":
        for size in sorted({max(1, args.requests // 4), max(1, args.requests // 2), args.requests}):
            run_side = partial(run_transformers, model, requests, dtype=args.dtype, size=size)
            sides[f"transformers, static batches of {size}"] = run_side
    return sides


def run_llm(llm: LLM, requests: Requests) -> float:
    """Run the requests, and print the number of steps. Returns output tokens per second."""
    # Another first token, so that the prefix cache does not find these prompts again.
    warm_up = [[int(prompt[0] == 0), *prompt[1:]] for prompt, _ in requests[:4]]
    llm.generate(warm_up, SamplingParams(max_tokens=3), use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    steps_before = llm.engine.num_steps
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - start
    num_steps = llm.engine.num_steps - steps_before
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != count_output_tokens(requests):
        raise ValueError(f"outputs were cut: a text has at most {llm.engine.config.max_model_len} tokens")
    print(f"{num_steps} steps, with {num_tokens / num_steps:.1f} sequences in each on average")
    return num_tokens / seconds


def run_checkout(model: str, folder: str, fork: str | None = None) -> float:
    """Run this program in a new process that imports the package `nanopaged` of the folder.

    Returns output tokens per second, as it prints them.
    """
    # Imports are looked up first in sys.path[0], which is otherwise the folder of the program.
    code = f"import runpy, sys; sys.path[0] = {folder!r}; runpy.run_path({__file__!r}, run_name='__main__')"
    options = ["--model", model, "--repeat=1", "--baseline=", f"--fork={fork or ''}"]
    command = [sys.executable, "-c", code, *sys.argv[1:], *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    rate = re.search(r"^nanopaged +([\d.]+) output tokens/s", done.stdout, re.MULTILINE)
    if rate is None:
        raise SystemExit(f"this program failed with the package in {folder}: see the error above")
    return float(rate[1])


def run_transformers(model: str, requests: Requests, dtype: str, size: int) -> float:
    """Run transformers on left-padded batches. A batch runs until its longest output is done.

    Returns output tokens per second.
    """
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to("cuda" if ON_GPU else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every new length of a context
    options = {"do_sample": False, "pad_token_id": 0}
    warm_up = torch.ones(4, 64, dtype=torch.int64, device=hf.device)
    hf.generate(warm_up, attention_mask=warm_up, max_new_tokens=3, **options)
    start = time.perf_counter()
    for i in range(0, len(requests), size):
        prompts = [torch.tensor(prompt, device=hf.device) for prompt, _ in requests[i : i + size]]
        ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left")
        longest = max(n for _, n in requests[i : i + size])
        hf.generate(ids, attention_mask=mask, min_new_tokens=longest, max_new_tokens=longest, **options)
    return count_output_tokens(requests) / (time.perf_counter() - start)


def print_rates(rates: dict[str, list[float]]) -> None:
    """The median rate of each side, and the ratio to the best peer in each round."""
    for name, values in rates.items():
        print(f"{name:40} {median(values):8.1f} output tokens/s (median of {len(values)})")
    own, *peers = rates.values()
    if peers:
        best = max(peers, key=median)
        ratios = [rate / other for rate, other in zip(own, best, strict=True)]
        rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"nanopaged is {median(ratios):.2f} times the best of them (rounds: {rounds})")


if __name__ == "__main__":
    run_program(main)
