"""docs/one_file.py beside the engine: the same requests, the same tokens; what does speed cost in lines?

    python docs/experiments/one_file_speed.py

Both serve the tiny model in float32 on this machine's CPU. They take turns, and the median of the rounds
counts. "small pool" has a quarter of the blocks that all requests need at once, so requests are preempted:
one_file.py computes their K/V again, and so does the engine, or it swaps them ("swap").
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import at_least, machine, make_parser

from nanopaged.terminal import run_program

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from nanopaged import LLM

# name: (requests, tokens of a prompt, tokens of an output, part of the blocks needed at once)
WORKLOADS = {
    "1 request": (1, 64, 64, 1),
    "32 requests": (32, 64, 64, 1),
    "32 requests, small pool": (32, 64, 64, 1 / 4),
    "8 long prompts": (8, 1500, 32, 1),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--shrink", type=at_least(1), default=1, help="divides all numbers of tokens")
    args = parser.parse_args()
    import one_file

    from nanopaged import LLM, SamplingParams

    rng = random.Random(args.seed)
    print(f"output tokens/s, tiny model in float32, {machine()}")
    print(f"{'':26}{'one_file':>9}{'engine':>9}{'ratio':>7}{'swap':>9}")
    for name, (num_requests, num_input, num_output, part) in WORKLOADS.items():
        num_input, num_output = num_input // args.shrink, max(2, num_output // args.shrink)
        prompts = [[rng.randrange(3, 1000) for _ in range(num_input)] for _ in range(num_requests)]
        each = -(-(num_input + num_output) // one_file.BLOCK_SIZE)
        num_blocks = max(each, int(part * num_requests * each))
        params = SamplingParams(temperature=0, max_tokens=num_output)
        sides = {"one_file": lambda: one_file.generate(prompts, num_output, num_blocks)}  # noqa: B023
        for way in ("recompute", "swap"):
            llm = LLM(dtype="float32", num_blocks=num_blocks, preemption=way, device="cpu")
            sides[way] = lambda llm=llm: serve(llm, prompts, params)  # noqa: B023
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.rounds + 1):
            outputs = {}
            for side, work in sides.items():
                began = time.perf_counter()
                outputs[side] = work()
                seconds[side].append(time.perf_counter() - began)
            assert outputs["one_file"] == outputs["recompute"] == outputs["swap"], "the tokens differ"
        num_tokens = sum(map(len, outputs["one_file"]))
        rates = {side: num_tokens / statistics.median(took[1:]) for side, took in seconds.items()}
        print(
            f"{name:26}{rates['one_file']:9.0f}{rates['recompute']:9.0f}"
            f"{rates['recompute'] / rates['one_file']:7.1f}{rates['swap']:9.0f}"
        )


def serve(llm: LLM, prompts: list[list[int]], params: object) -> list[list[int]]:
    """The engine's tokens, without blocks that an earlier round left in the cache."""
    llm.engine.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    run_program(main)
