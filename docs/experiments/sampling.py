"""Milliseconds to draw tokens from logits, against transformers' filters and PyTorch's multinomial draw.

    python docs/experiments/sampling.py --repeat 21

nanopaged also returns each token's log-probability, and each row has its own seed. Both end with the tokens
on the host. The two take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import at_least, machine, make_parser, pick_device

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    import torch

    from nanopaged import SamplingParams

SETTINGS = {  # SamplingParams' fields
    "greedy": {"temperature": 0},
    "temperature 0.6": {"temperature": 0.6},
    "top-k 20": {"top_k": 20},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[1, 32], help="tokens to draw")
    vocabs = [32000, 151936]
    parser.add_argument("--vocab", type=at_least(1), nargs="+", default=vocabs, help="tokens to choose from")
    parser.add_argument("--repeat", type=at_least(1), default=9, help="rounds; the median counts")
    args = parser.parse_args()

    import torch

    from nanopaged import SamplingParams

    print(f"milliseconds, medians of {args.repeat} in turns; {machine()}")
    print(f"{'rows':>5} {'vocabulary':>10} {'':26} {'ours':>8} {'transformers':>13} {'ratio':>6}")
    generator = torch.Generator().manual_seed(args.seed)
    for num_rows in args.rows:
        for vocab_size in args.vocab:
            # As peaked as the logits of a language model: a few likely tokens, a long tail.
            logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(pick_device())
            for name, fields in SETTINGS.items():
                params = SamplingParams(**fields)
                with torch.inference_mode():
                    ours, theirs = in_turns(
                        our_draw(logits, params, args.seed), hf_draw(logits, params), args.repeat
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


def our_draw(logits: torch.Tensor, params: SamplingParams, seed: int) -> Callable[[], object]:
    """One token for each row, as a step of the engine draws it."""
    from nanopaged.sampler import Draw, SamplingMetadata, sample

    rows = [Draw(params, seed, i, 0, []) for i in range(len(logits))]
    return lambda: sample(logits, SamplingMetadata(rows, logits.device))


def hf_draw(logits: torch.Tensor, params: SamplingParams) -> Callable[[], object]:
    """The same as transformers' `generate` draws it."""
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    if params.temperature == 0:
        return lambda: logits.argmax(-1).tolist()
    filters = LogitsProcessorList()
    if params.temperature != 1:
        filters.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        filters.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        filters.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        filters.append(MinPLogitsWarper(params.min_p))

    def draw() -> list[int]:
        probs = filters(None, logits).softmax(-1)
        return torch.multinomial(probs, num_samples=1)[:, 0].tolist()

    return draw


if __name__ == "__main__":
    run_program(main)
