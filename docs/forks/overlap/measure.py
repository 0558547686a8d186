"""The figures of README.md: how long the computing side is idle between two steps, before and after.

    OMP_NUM_THREADS=1 python docs/forks/overlap/measure.py

Each engine serves the same requests. The gap is the time from the end of one `Runner.execute` to the
beginning of the next; the median of the decode steps counts, of the rounds the one with the smallest gap.
Three runners: one that sleeps in place of the forward pass, as a thread that waits for a GPU does (it lays
out the batch, and returns random tokens), and two that compute on the CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from overlap import OverlappedEngine

from nanopaged import EngineConfig, LLMEngine, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.model_runner import prepare
from nanopaged.sequence import Sample, ScheduledBatch, StepResult
from nanopaged.terminal import run_program

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from common import SHAPES, machine  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, NUM_PROMPT_TOKENS = 16, 8000, 100
WAYS = {  # whether `step` reports outputs, and what each token is looked through for
    "generate": (False, ()),
    "serve": (True, ("\n\n\n\n",)),
}


class Sleeper:
    """A runner that sleeps where `ModelRunner` computes. Python's lock is free meanwhile."""

    num_blocks, num_host_blocks = NUM_BLOCKS, 0

    def __init__(self, seconds: float, vocab_size: int = 1024) -> None:
        self.seconds, self.vocab_size, self.rng = seconds, vocab_size, random.Random(0)

    def cheaper_preemption(self) -> str:
        return "recompute"

    def execute(self, batch: ScheduledBatch) -> StepResult:
        prepare(batch, BLOCK_SIZE)
        time.sleep(self.seconds)
        return StepResult(
            [
                [Sample(self.rng.randrange(3, self.vocab_size), -1.0)] * seq.needs_sample
                for seq in batch.sequences
            ]
        )


def make_engine(kind: type[LLMEngine], runner: str, seconds: float) -> LLMEngine:
    """An engine of this kind over the runner "sleep", "tiny" or the name of a shape."""
    options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "dtype": "float32", "num_host_blocks": 0}
    options |= {"max_num_batched_tokens": 1 << 16, "enable_prefix_caching": True}
    if runner in ("sleep", "tiny"):
        config = EngineConfig(model=TINY_MODEL, **options)
        return kind(config, Sleeper(seconds) if runner == "sleep" else None)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[runner]), encoding="utf-8")
        return kind(EngineConfig(model=folder, load_format="dummy", **options))


def gap_and_step(engine: LLMEngine, num_seqs: int, num_steps: int, way: str) -> tuple[float, float]:
    """The median gap and the median time from step to step, in seconds."""
    report, stop = WAYS[way]
    times: list[tuple[float, float]] = []
    execute = engine.runner.execute

    def timed(batch: ScheduledBatch) -> StepResult:
        began = time.perf_counter()
        result = execute(batch)
        times.append((began, time.perf_counter()))
        return result

    engine.runner.execute = timed
    rng = random.Random(0)
    params = SamplingParams(
        temperature=0, max_tokens=num_steps, ignore_eos=True, stop=stop if engine.tokenizer else ()
    )
    for i in range(num_seqs):
        prompt = [rng.randrange(3, 1000) for _ in range(NUM_PROMPT_TOKENS)]
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        engine.step(report or len(engine.unreported) == num_seqs)
    engine.runner.execute = execute
    engine.reset_prefix_cache()
    decodes = list(zip(times[2:], times[3:], strict=False))  # without the prefill
    gaps = statistics.median(after[0] - before[1] for before, after in decodes)
    return gaps, statistics.median(after[0] - before[0] for before, after in decodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runners", nargs="+", default=["sleep", "tiny", "28m"], help="or another shape")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=60, help="tokens of each sequence")
    parser.add_argument("--ms", type=float, default=5.0, help="that the sleeper sleeps")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(machine())
    print("runner way      sequences   gap, us: plain  overlapped   step, ms: plain  overlapped")
    for runner in args.runners:
        kinds: tuple[Callable, ...] = (LLMEngine, OverlappedEngine)
        engines = [make_engine(kind, runner, args.ms / 1e3) for kind in kinds]
        for way in WAYS:
            for num_seqs in args.sequences:
                rounds = [
                    [gap_and_step(engine, num_seqs, args.steps, way) for engine in engines]
                    for _ in range(args.rounds)
                ]
                (gap, step), (gap_after, step_after) = (min(each) for each in zip(*rounds, strict=True))
                print(
                    f"{runner:6} {way:8} {num_seqs:9} {1e6 * gap:16.0f} {1e6 * gap_after:11.0f}"
                    f" {1e3 * step:17.2f} {1e3 * step_after:11.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    run_program(main)
