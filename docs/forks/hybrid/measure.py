"""The figures of README.md: bytes of K/V held with groups of layers, and without them.

With the patch applied: python docs/forks/hybrid/measure.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from nanopaged import LLM, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL

LAYERS = 12  # of which every sixth is full
WINDOWS = (None, 512, 128, 32)
LENGTHS = (128, 512, 1024, 2000)
POOL = 12 << 20  # bytes: 2,048 tokens without groups


def make_llm(folder: Path, window: int | None, num_bytes: int = 64 << 20, budget: int = 256) -> LLM:
    """A model of the tiny one's sizes with random weights; without a window all layers are full."""
    config = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8"))
    kinds = ["full_attention" if window is None or i % 6 == 5 else "sliding_attention" for i in range(LAYERS)]
    config |= {"num_hidden_layers": LAYERS, "layer_types": kinds}
    config |= {"use_sliding_window": window is not None, "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = {"load_format": "dummy", "dtype": "float32", "max_num_batched_tokens": budget}
    one = LLM(folder, num_blocks=1 << 10, **options)
    num_blocks = num_bytes // block_bytes(one)
    return LLM(folder, num_blocks=num_blocks, preemption="recompute", **options)


def block_bytes(llm: LLM) -> int:
    return llm.engine.runner.kv_cache.data[0].nbytes


class Peak:
    """The most blocks in use. The listener looks when a batch is scheduled, before anything is given back."""

    def __init__(self, llm: LLM) -> None:
        self.manager, self.num_blocks = llm.engine.block_manager, 0
        llm.engine.listeners.append(self)

    def batch_scheduled(self, batch: object) -> None:
        self.num_blocks = max(self.num_blocks, self.manager.num_blocks - self.manager.num_free_blocks)

    def step_ended(self, batch: object) -> None:
        """Nothing."""


def held(llm: LLM, num_tokens: int) -> tuple[int, int]:
    """Bytes of a sequence: the most while its prompt is computed, and with the prompt computed."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.engine.add_request("held", {"prompt_token_ids": [i % 1000 for i in range(num_tokens)]}, params)
    peak = Peak(llm)
    while llm.engine.stats().num_generated_tokens == 0:
        llm.engine.step()
    last = llm.engine.stats().num_used_blocks
    llm.engine.abort_request("held")
    return peak.num_blocks * block_bytes(llm), last * block_bytes(llm)


def serve(llm: LLM, requests: list[tuple[list[int], int]]) -> dict[str, object]:
    """Requests of (prompt, output tokens) that arrive together."""
    engine = llm.engine
    for i, (prompt, num_output) in enumerate(requests):
        each = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=i)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, each)
    running, steps = 0, 0
    while engine.has_unfinished_requests():
        engine.step(with_outputs=False)
        running, steps = running + len(engine.scheduler.running), steps + 1
    stats = engine.stats()
    share = stats.prefix_cache_hits / stats.prefix_cache_queries
    return {
        "steps": steps,
        "running, mean": f"{running / steps:.1f}",
        "preemptions": stats.num_preemptions_recompute,
        "prompt tokens found": f"{share:.0%}",
    }


def mixed_lengths() -> list[tuple[list[int], int]]:
    """40 requests, of prompts with a mean of 300 tokens and outputs with a mean of 150."""
    rng = random.Random(0)

    def draw(mean: int) -> int:
        return min(1000, 1 + int(rng.expovariate(1 / mean)))

    return [([rng.randrange(1000) for _ in range(draw(300))], draw(150)) for _ in range(40)]


def turns() -> list[tuple[list[int], int]]:
    """Four conversations of six turns: each turn is the text before it, and 150 tokens more."""
    rng = random.Random(1)
    texts = [[rng.randrange(1000) for _ in range(100 + 150 * 6)] for _ in range(4)]
    return [(text[: 100 + 150 * turn], 1) for turn in range(1, 7) for text in texts]


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        folder = Path(name)
        print("window", *(f"{n} tokens" for n in LENGTHS), sep=" | ")
        for window in WINDOWS:
            row = [held(make_llm(folder, window), n) for n in LENGTHS]
            cells = [f"{last >> 10:,} ({most >> 10:,})" for most, last in row]
            print(window or "without groups", *cells, sep=" | ", flush=True)
        for name, workload in (("lengths", mixed_lengths()), ("turns", turns())):
            for window in WINDOWS:
                figures = serve(make_llm(folder, window, POOL), workload)
                print(name, window or "without groups", figures, sep=" | ", flush=True)
