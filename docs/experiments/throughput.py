"""Output tokens per second on random requests, and the same requests and weights in transformers.

All requests are there from the start, greedy, and end where they should, end-of-sequence or not. On CUDA the
defaults are nano-vllm's workload on Qwen3-0.6B's shape; elsewhere a model and requests that take a minute.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from common import (
    Workload,
    add_model_arguments,
    at_least,
    checkpoint,
    copy_bandwidth,
    machine,
    model_name,
)
from roofline import head_weights, weights
from tqdm import tqdm

from nanopaged import LLM, RequestOutput, SamplingParams
from nanopaged.kv_cache import pick_device

DEFAULTS = {  # (on CUDA, elsewhere)
    "shape": ("qwen3-0.6b", "100m"),
    "dtype": ("bfloat16", "float32"),
    "requests": (256, 32),
    "min_input": (100, 16),
    "max_input": (1024, 256),
    "min_output": (100, 16),
    "max_output": (1024, 256),
    "budget": (16384, 2048),
    "static": ([64], [8, 16]),  # and all at once
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--baseline", choices=["hf"], help="also run transformers on the same requests")
    parser.add_argument("--static", type=at_least(1), nargs="*", help="sizes of transformers' static batches")
    parser.add_argument("--repeat", type=at_least(1), default=1, help="rounds, in turns; the median counts")
    parser.add_argument("--requests", type=at_least(1))
    for name in ("min-input", "max-input", "min-output", "max-output"):
        parser.add_argument(f"--{name}", type=at_least(1), metavar="TOKENS")
    parser.add_argument("--budget", type=int, help="tokens a step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--backend", default="auto", help="attention_backend")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print the last line for machines")
    parser.set_defaults(shape=None, dtype=None)  # as DEFAULTS has them


def run(args: argparse.Namespace) -> None:
    device = pick_device("auto")
    for name, (on_cuda, elsewhere) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, on_cuda if device.type == "cuda" else elsewhere)
    workload = Workload.draw(args)
    print(
        f"{args.requests} requests, {sum(map(len, workload.prompts))} prompt and {sum(workload.max_tokens)} "
        f"output tokens; {model_name(args)}; {machine()}"
    )
    rates: dict[str, list[float]] = {}
    reports: list[Report] = []
    with checkpoint(args) as folder:
        sides = {"nanopaged": lambda: run_ours(folder, workload, args, reports)}
        if args.baseline == "hf":
            for size in dict.fromkeys((*args.static, args.requests)):
                name = f"transformers, static batches of {size}"
                sides[name] = lambda size=size: run_static(folder, workload, args, size)
            sides["transformers, continuous"] = lambda: run_continuous(folder, workload, args)
        for _ in range(args.repeat):  # in turns, so that a slow minute of the machine meets all of them
            for name, side in sides.items():
                rates.setdefault(name, []).append(side())
                print(f"{name}: {rates[name][-1]:.1f} output tokens/s", flush=True)  # whatever comes after it
                gc.collect()  # or the next side finds the memory taken
                torch.cuda.empty_cache()
    best = sorted(reports, key=lambda report: report.seconds)[len(reports) // 2]  # the median run
    best.print(copy_bandwidth(device))
    report_rates(rates)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        print(json.dumps({"machine": machine(), "settings": settings, "rates": rates, **asdict(best)}))


@dataclass
class Report:
    """What one run of ours was like. Times are seconds, percentiles are p50, p95 and p99."""

    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    time_to_first_token: list[float]
    time_per_output_token: list[float]
    steps: int
    sequences_per_step: float
    slot_utilization: float
    prefix_hit_rate: float
    preemptions: int
    bytes_read: float  # weights at every step, and the K/V of every sequence that decodes

    def print(self, bandwidth: float) -> None:
        """As a table."""
        reached = self.bytes_read / self.seconds
        rows = {
            "output, total tokens/s": [self.output_tokens_per_second, self.total_tokens_per_second],
            "first token, ms (p50 p95 p99)": [1e3 * t for t in self.time_to_first_token],
            "each further, ms (p50 p95 p99)": [1e3 * t for t in self.time_per_output_token],
            "steps, sequences in each": [self.steps, self.sequences_per_step],
            "slots filled, prefix found, %": [100 * self.slot_utilization, 100 * self.prefix_hit_rate],
            "preemptions": [self.preemptions],
            "GB/s read, copied here, share %": [reached / 1e9, bandwidth / 1e9, 100 * reached / bandwidth],
        }
        for name, values in rows.items():
            print(f"{name:40} " + " ".join(f"{value:8.1f}" for value in values))


def run_ours(
    folder: Path | str, workload: Workload, args: argparse.Namespace, reports: list[Report]
) -> float:
    """Output tokens per second of all requests, prefill included; what else there is goes to `reports`."""
    llm = LLM(
        folder,
        dtype=args.dtype,
        block_size=args.block_size,
        max_num_batched_tokens=args.budget,
        max_num_seqs=args.max_num_seqs,
        attention_backend=args.backend,
        enforce_eager=args.eager,
    )
    engine = llm.engine
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
    warm_up = [[1] + prompt[1:] for prompt in workload.prompts[:4]]  # as long, but nothing to be found again
    llm.generate(warm_up, SamplingParams(max_tokens=3), use_tqdm=False)
    before, slots, done = engine.stats(), [], []
    began = time.perf_counter()
    for i, (prompt, p) in enumerate(zip(workload.prompts, params, strict=True)):
        request = engine.make_request(str(i), prompt, p)
        request.final_only = True  # as `generate` does
        engine.queue(request)
    with tqdm(total=len(workload.prompts), desc="nanopaged", unit="request") as bar:
        while engine.has_unfinished_requests():
            outputs = engine.step()
            bar.update(len(outputs))
            done += outputs
            if (engine.num_steps - before.num_steps) % 16 == 0:
                slots.append(engine.stats().slot_utilization)
    seconds = time.perf_counter() - began
    stats, num_output = engine.stats(), sum(workload.max_tokens)
    num_steps = stats.num_steps - before.num_steps
    num_prompt = sum(map(len, workload.prompts))
    firsts, gaps = latencies(done)
    report = Report(
        seconds=seconds,
        output_tokens_per_second=num_output / seconds,
        total_tokens_per_second=(num_output + num_prompt) / seconds,
        time_to_first_token=firsts,
        time_per_output_token=gaps,
        steps=num_steps,
        sequences_per_step=num_output / num_steps,
        slot_utilization=statistics.fmean(slots) if slots else 0.0,
        prefix_hit_rate=(stats.prefix_cache_hits - before.prefix_cache_hits) / num_prompt,
        preemptions=stats.num_preemptions_swap + stats.num_preemptions_recompute,
        bytes_read=bytes_read(llm, workload, num_steps),
    )
    reports.append(report)
    return report.output_tokens_per_second


def latencies(outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    """Percentiles of the time to the first token, and of the time for each further one."""
    firsts, gaps = [], []
    for output in outputs:
        metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
        firsts.append(metrics.first_token_time - metrics.arrival_time)
        if num_tokens > 1:
            gaps.append((metrics.finish_time - metrics.first_token_time) / (num_tokens - 1))
    return [np.percentile(times or [0.0], (50, 95, 99)).tolist() for times in (firsts, gaps)]


def bytes_read(llm: LLM, workload: Workload, num_steps: int) -> float:
    """What had to be read: all weights at each step, and for each token but the first its context."""
    runner = llm.engine.runner
    config = runner.model.config
    numbers = weights(config) + head_weights(config)
    keys = sum(
        (n - 1) * len(prompt) + n * (n - 1) // 2
        for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True)
    )
    return num_steps * numbers * runner.dtype.itemsize + keys * runner.kv_cache.shape.block_bytes(1)


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


def load_hf(folder: Path | str, args: argparse.Namespace) -> transformers.PreTrainedModel:
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every new length of a context
    return model.to(pick_device("auto")).eval()


@torch.inference_mode()
def run_static(folder: Path | str, workload: Workload, args: argparse.Namespace, size: int) -> float:
    """`generate` on left-padded batches in order of arrival; each runs until its longest output is done."""
    model = load_hf(folder, args)
    model.generate(
        torch.ones(4, 64, dtype=torch.int64, device=model.device), max_new_tokens=3, pad_token_id=0
    )
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


def run_continuous(folder: Path | str, workload: Workload, args: argparse.Namespace) -> float:
    """transformers' own continuous batching, on a GPU with the pool it chooses, else with room for all."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = load_hf(folder, args)
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(workload.max_tokens))
    options = {"max_batch_tokens": args.budget}
    if model.device.type != "cuda":
        known = inspect.signature(ContinuousBatchingConfig).parameters
        size_name = "page_size" if "page_size" in known else "block_size"  # as it was called before
        tokens = zip(workload.prompts, workload.max_tokens, strict=True)
        options |= {size_name: 32, "num_blocks": sum((len(p) + n) // 32 + 2 for p, n in tokens)}
    settings = ContinuousBatchingConfig(**options)
    began = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=n)
        done = 0
        while done < len(workload.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result is None and not manager.is_running():
                raise RuntimeError(
                    "transformers' continuous batching has stopped before its requests were done"
                )
            done += result is not None and result.is_finished()
    return sum(workload.max_tokens) / (time.perf_counter() - began)
