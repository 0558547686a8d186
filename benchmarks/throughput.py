"""Output tokens per second on random requests, and the same requests and weights in transformers."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from benchmarks.common import Workload, add_model_arguments, checkpoint, machine
from nanopaged import LLM, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--baseline", choices=["hf"], help="also run transformers on the same requests")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, in turns; the median counts")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--min-input", type=int, default=16)
    parser.add_argument("--max-input", type=int, default=256)
    parser.add_argument("--min-output", type=int, default=16)
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step")


def run(args: argparse.Namespace) -> None:
    workload = Workload.draw(args)
    print(
        f"{args.requests} requests, {sum(map(len, workload.prompts))} prompt and "
        f"{sum(workload.max_tokens)} output tokens; shape {args.shape}, {args.dtype}; {machine()}"
    )
    rates: dict[str, list[float]] = {}
    with checkpoint(args) as folder:
        sides = {"nanopaged": lambda: run_ours(folder, workload, args)}
        if args.baseline == "hf":
            for size in dict.fromkeys((8, 16, args.requests)):
                name = f"transformers, static batches of {size}"
                sides[name] = lambda size=size: run_static(folder, workload, args, size)
            sides["transformers, continuous"] = lambda: run_continuous(folder, workload, args)
        for _ in range(args.repeat):  # in turns, so that a slow minute of the machine meets all of them
            for name, side in sides.items():
                rates.setdefault(name, []).append(side())
    report_rates(rates)


def report_rates(rates: dict[str, list[float]]) -> None:
    """Output tokens per second of each side, and the ratio to the best peer, round by round."""
    print(f"{'output tokens/s':40} {'median':>8} {'least':>8} {'most':>8}")
    for name, runs in rates.items():
        print(f"{name:40} {statistics.median(runs):8.1f} {min(runs):8.1f} {max(runs):8.1f}")
    ours, *peers = rates
    if peers:
        best = max(peers, key=lambda name: statistics.median(rates[name]))
        ratios = [mine / other for mine, other in zip(rates[ours], rates[best], strict=True)]
        rounds = f"; rounds: {', '.join(f'{r:.2f}' for r in ratios)}" if len(ratios) > 1 else ""
        print(f"nanopaged is {statistics.median(ratios):.2f} times the best of them ({best}{rounds})")


def run_ours(folder: Path, workload: Workload, args: argparse.Namespace) -> float:
    """Output tokens per second of `LLM.generate`, prefill included."""
    llm = LLM(folder, dtype=args.dtype, block_size=args.block_size, max_num_batched_tokens=args.budget)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    began = time.perf_counter()
    llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - began
    stats = llm.engine.stats()
    print(f"{stats.num_steps} steps, {seconds:.1f} s, {stats.num_preemptions_recompute} preemptions")
    return sum(workload.max_tokens) / seconds


def load_hf(folder: Path, args: argparse.Namespace) -> transformers.PreTrainedModel:
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.inference_mode()
def run_static(folder: Path, workload: Workload, args: argparse.Namespace, size: int) -> float:
    """`generate` on left-padded batches in order of arrival; each runs until its longest output is done."""
    model = load_hf(folder, args)
    began = time.perf_counter()
    for i in tqdm(range(0, len(workload.prompts), size), desc=f"static {size}"):
        prompts, max_tokens = workload.prompts[i : i + size], workload.max_tokens[i : i + size]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(max_tokens),
            do_sample=False,
            pad_token_id=0,
        )
    return sum(workload.max_tokens) / (time.perf_counter() - began)


def run_continuous(folder: Path, workload: Workload, args: argparse.Namespace) -> float:
    """transformers' own continuous batching, with a pool and a budget that hold all requests at once."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = load_hf(folder, args)
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(workload.max_tokens))
    settings = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=args.budget, page_size=32)
    began = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=n)
        done = 0
        while done < len(workload.prompts):
            result = manager.get_result(timeout=1)
            done += result is not None and result.is_finished()
    return sum(workload.max_tokens) / (time.perf_counter() - began)
