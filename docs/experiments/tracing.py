"""What a trace costs: steps of two equal engines in turns, one with a trace, one without.

    python docs/experiments/tracing.py

Both serve the same requests with the tiny model, and take steps in turns, in changing order. All steps are
decodes. The median step counts, and the median of the differences between the two engines' steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import at_least, machine, make_parser

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLMEngine


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sequences", type=at_least(1), nargs="+", default=[1, 8, 32, 128], help="that decode"
    )
    parser.add_argument("--steps", type=at_least(4), default=300, help="of each engine")
    parser.add_argument("--num-blocks", type=at_least(1), default=4096, help="in the pool")
    args = parser.parse_args()
    print(f"the tiny model, {args.num_blocks:,} blocks of 16 slots; {args.steps} steps each; {machine()}")
    print(f"{'sequences':>9} {'without, us':>12} {'with, us':>9} {'difference, us':>15} {'share':>6}")
    for num_seqs in args.sequences:
        without, traced, difference = time_steps(num_seqs, args.steps, args.num_blocks, args.seed)
        print(
            f"{num_seqs:9} {1e6 * without:12.0f} {1e6 * traced:9.0f} {1e6 * difference:15.0f} "
            f"{difference / without:6.1%}",
            flush=True,
        )


def time_steps(num_seqs: int, num_steps: int, num_blocks: int, seed: int) -> tuple[float, float, float]:
    """Seconds of a step without and with a trace (medians), and the median of the differences."""
    from nanopaged import EngineConfig, LLMEngine, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        engines = []
        for trace in (None, Path(folder, "run.html")):
            engine = LLMEngine(EngineConfig(num_blocks=num_blocks, num_host_blocks=0, trace=trace, seed=seed))
            params = SamplingParams(max_tokens=num_steps + 10, ignore_eos=True)
            for i in range(num_seqs):
                engine.add_request(str(i), f"{i}. Once more unto the breach, dear friends, once more", params)
            while engine.scheduler.waiting or engine.scheduler.running[-1].awaits_fork:
                engine.run_step()
            engines.append(engine)
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(num_steps):
            for which in (0, 1) if i % 2 else (1, 0):
                times[which].append(time_step(engines[which]))
        difference = statistics.median(b - a for a, b in zip(*times, strict=True))
        return statistics.median(times[0]), statistics.median(times[1]), difference


def time_step(engine: LLMEngine) -> float:
    """Seconds."""
    start = time.perf_counter()
    engine.run_step()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_program(main)
