"""Blocks saved by parallel sampling and beam search: 1 - blocks in use / entries of all block tables (§6.3).

    python docs/experiments/sharing.py

Requests of exponentially distributed lengths go through the real scheduler and block manager, without a
model. "cache alone" samples in parallel without forks: each output is a request of its own with the same
prompt, and the prefix cache finds the whole blocks of that prompt. Elsewhere the prefix cache is off, so that
two requests share nothing.
"""

from __future__ import annotations

import argparse
import random

from common import add_plot_argument, at_least, make_parser, save_lines
from no_model import TRACES, NoModel, make_request, make_scheduler, serve_all

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.terminal import run_program

WIDTHS = [2, 4, 6]
PAPER = {
    ("Alpaca-like", "parallel"): "6.1 to 9.8 %",
    ("Alpaca-like", "beam"): "37.6 to 55.2 %",
    ("ShareGPT-like", "parallel"): "16.2 to 30.5 %",
    ("ShareGPT-like", "beam"): "44.3 to 66.3 %",
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=at_least(1), default=500, help="in each figure")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a block")
    add_plot_argument(parser)
    args = parser.parse_args()
    print(f"{args.requests} requests a figure, blocks of {args.block_size}")
    print(f"{'trace':15} {'sharing':12} {'n = 2':>7} {'n = 4':>7} {'n = 6':>7}   paper, 2 to 6")
    lines: dict[str, list[float]] = {}
    for trace, means in TRACES.items():
        for kind in ("parallel", "cache alone", "beam"):
            saved = [replay(kind, width, means, args) for width in WIDTHS]
            lines[f"{kind}, {trace}"] = saved
            columns = " ".join(f"{share:7.1%}" for share in saved)
            print(f"{trace:15} {kind:12} {columns}   {PAPER.get((trace, kind), '')}", flush=True)
    if args.plot:
        save_lines(args.plot, WIDTHS, lines, "sequences a request", "share of blocks saved")


def replay(kind: str, width: int, means: tuple[int, int], args: argparse.Namespace) -> float:
    """The share of block table entries that need no block of their own, over all steps."""
    rng = random.Random(args.seed)
    scheduler = make_scheduler(
        100_000,
        args.block_size,
        max_num_seqs=64 * width,
        max_num_batched_tokens=8192,
        enable_prefix_caching=kind == "cache alone",
    )
    for i in range(args.requests):
        num_input, num_output = (min(2048, 1 + int(rng.expovariate(1 / mean))) for mean in means)
        prompt = [rng.randrange(32000) for _ in range(num_input)]
        if kind == "beam":
            params = BeamSearchParams(beam_width=width, max_tokens=num_output)
        else:
            params = SamplingParams(n=width if kind == "parallel" else 1, max_tokens=num_output)
        for copy in range(width if kind == "cache alone" else 1):
            scheduler.add(make_request(f"{i}-{copy}", prompt, params))
    run = serve_all(scheduler, NoModel(args.seed))
    return 1 - run.num_used / run.num_entries if run.num_entries else 0.0


if __name__ == "__main__":
    run_program(main)
