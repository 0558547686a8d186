"""What it takes to draw tokens from scores, beside transformers' filters and PyTorch's multinomial draw.

Ours also gives each token's log-probability, and a row its own seed; both end with the tokens on the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import at_least, machine
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanopaged import SamplingParams
from nanopaged.kv_cache import pick_device
from nanopaged.sampler import SampleRow, SamplingMetadata, sample

SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "top-k 20": SamplingParams(top_k=20),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "0.6, top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[1, 32])
    parser.add_argument("--vocab", type=at_least(1), nargs="+", default=[32000, 151936])
    parser.add_argument("--repeat", type=at_least(1), default=9, help="the median of so many counts")
    parser.add_argument("--seed", type=int, default=0)


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    device = pick_device("auto")
    print(f"milliseconds, medians of {args.repeat}, in turns; {machine()}")
    print(f"{'rows':>5} {'vocabulary':>10} {'':26} {'ours':>8} {'transformers':>13} {'ratio':>6}")
    generator = torch.Generator().manual_seed(args.seed)
    for num_rows in args.rows:
        for vocab_size in args.vocab:
            # As peaked as those of a language model: a few likely tokens, a long tail.
            logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(device)
            for name, params in SETTINGS.items():
                rows = [SampleRow(params, args.seed, i, 0, []) for i in range(num_rows)]
                ours, theirs = in_turns(
                    lambda rows=rows, logits=logits: sample(logits, SamplingMetadata(rows, device)),
                    lambda params=params, logits=logits: sample_hf(logits, params),
                    args.repeat,
                )
                times = f"{1e3 * ours:8.2f} {1e3 * theirs:13.2f} {theirs / ours:6.2f}"
                print(f"{num_rows:5} {vocab_size:10,} {name:26} {times}", flush=True)


def in_turns(one: Callable[[], object], other: Callable[[], object], repeat: int) -> list[float]:
    """Median seconds of both."""
    seconds: list[list[float]] = [[], []]
    for i in range(repeat + 1):
        for times, call in zip(seconds, (one, other), strict=True):
            began = time.perf_counter()
            call()
            if i > 0:  # the first round warms up
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in seconds]


def sample_hf(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """As transformers' `generate` does."""
    if params.is_greedy:
        return logits.argmax(-1).tolist()
    warpers = LogitsProcessorList()
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    probs = warpers(None, logits).softmax(-1)
    return torch.multinomial(probs, num_samples=1)[:, 0].tolist()
