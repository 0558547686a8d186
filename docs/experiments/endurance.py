"""Endurance: a long run must not become slower, and must keep no memory, objects or blocks.

    python docs/experiments/endurance.py

Requests of all kinds go through the real engine: greedy, n outputs, beams, with shared beginnings. Some are
aborted. The pool is so small that others are preempted, by swapping while the host has room and else by
recomputation. First without a model, then with the tiny one. A row is printed for each tenth of the requests,
when all of them are served. Live objects are those that Python's garbage collector tracks; memory is the
process's resident set.
"""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING

import psutil
from common import at_least, machine, make_parser
from no_model import NoModel

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLMEngine, RequestOutput

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 8, 80, 6
AT_ONCE = 24  # unfinished requests
VOCAB = 1000  # the token ids of prompts and of `Pool` are below it


class Pool(NoModel):
    """A runner without a model, for the engine."""

    num_blocks, num_host_blocks = NUM_BLOCKS, NUM_HOST_BLOCKS


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=at_least(10), default=100_000, help="without a model")
    parser.add_argument("--model-requests", type=at_least(10), default=5000, help="with the tiny model")
    args = parser.parse_args()
    import torch

    from nanopaged import EngineConfig, LLMEngine

    torch.set_num_threads(1)  # the model is so small that a second thread only waits
    config = EngineConfig(
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        max_num_seqs=32,
        max_num_batched_tokens=48,
        preemption="swap",
    )
    print(f"{NUM_BLOCKS} blocks of {BLOCK_SIZE}, {NUM_HOST_BLOCKS} on the host; {machine()}")
    print(f"\n{args.requests:,} requests without a model")
    endure(LLMEngine(config, Pool(args.seed, VOCAB)), args.requests, args.seed)
    print(f"\n{args.model_requests:,} requests with the tiny model")
    endure(LLMEngine(config), args.model_requests, args.seed)


def endure(engine: LLMEngine, num_requests: int, seed: int) -> None:
    """Serve the requests in ten parts, and print a row for each."""
    rng, readings = random.Random(seed), []
    stems = [rng.choices(range(VOCAB), k=rng.randint(8, 40)) for _ in range(20)]
    print(
        "  requests    aborted    swapped recomputed   a second CPU s/1000        MiB    objects     blocks"
    )
    served = num_aborted = 0
    for part in range(1, 11):
        num = num_requests * part // 10 - served
        began, cpu_began = time.perf_counter(), time.process_time()
        num_aborted += serve(engine, num, stems, rng)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        served += num
        engine.check_invariants()
        gc.collect()
        mib, num_objects = psutil.Process().memory_info().rss / 2**20, len(gc.get_objects())
        readings.append((1000 * cpu_seconds / num, mib, num_objects))
        stats = engine.stats()
        print(
            f"{served:10,} {num_aborted:10,} {stats.num_preemptions_swap:10,} "
            f"{stats.num_preemptions_recompute:10,} {num / seconds:10.1f} {readings[-1][0]:10.2f} "
            f"{mib:10.1f} {num_objects:10,} {stats.num_used_blocks:10}",
            flush=True,
        )
    cpu_seconds, mib, num_objects = readings[0]
    print(
        f"last tenth against the first: CPU time {readings[-1][0] / cpu_seconds:.2f} times, "
        f"memory {readings[-1][1] - mib:+.1f} MiB, objects {readings[-1][2] - num_objects:+,}"
    )


def serve(engine: LLMEngine, num: int, stems: list[list[int]], rng: random.Random) -> int:
    """Serve so many requests to the end. Each must be reported once, and whole; returns how many aborted."""
    unfinished: dict[str, SamplingParams | BeamSearchParams] = {}
    num_added = num_aborted = 0
    while unfinished or num_added < num:
        while len(unfinished) < AT_ONCE and num_added < num:
            request_id, num_added = str(num_added), num_added + 1
            prompt = rng.choice(stems) + rng.choices(range(VOCAB), k=rng.randint(1, 20))
            unfinished[request_id] = draw_params(rng)
            engine.add_request(request_id, prompt, unfinished[request_id])
        if rng.random() < 0.1:
            request_id = rng.choice(list(unfinished))
            check(engine.abort_request(request_id), unfinished.pop(request_id), aborted=True)
            num_aborted += 1
        for output in engine.step():
            if output.finished:
                check(output, unfinished.pop(output.request_id))
    assert not engine.has_unfinished_requests()
    return num_aborted


def draw_params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    """Half of the requests are greedy, the others have several outputs."""
    kind, width, max_tokens = (
        rng.choice(["greedy", "greedy", "n", "beams"]),
        rng.randint(2, 4),
        rng.randint(1, 40),
    )
    if kind == "beams":
        return BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    if kind == "n":
        return SamplingParams(n=width, max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def check(output: RequestOutput, params: SamplingParams | BeamSearchParams, aborted: bool = False) -> None:
    """Every output is there, and as long as it should be."""
    lengths = [len(completion.token_ids) for completion in output.outputs]
    assert aborted or lengths == [params.max_tokens] * params.width, "a request is not whole"


if __name__ == "__main__":
    run_program(main)
