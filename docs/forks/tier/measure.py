"""The figures of README.md: chats that come back, in a pool that holds one and a half of them.

With the patch applied: python docs/forks/tier/measure.py
"""

from __future__ import annotations

import gc
import json
import random
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanopaged import LLM, SamplingParams
from nanopaged.sequence import ScheduledBatch

# 100 million parameters, drawn at random; a block of 16 tokens is 384 KiB of K/V.
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Computed:
    """Counts the tokens that the steps compute, and the blocks that they load."""

    def __init__(self) -> None:
        self.tokens = self.blocks = 0

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        self.tokens += sum(seq.num_scheduled_tokens for seq in batch.sequences)
        self.blocks += len(batch.loaded)

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Nothing."""

    def step_failed(self, error: BaseException) -> None:
        """Nothing."""


def make_llm(folder: Path, **options: Any) -> tuple[LLM, Computed]:
    """An engine with a pool of 62 blocks; a chat has 41 after three turns."""
    gc.collect()  # the engine before it has the file open
    llm = LLM(folder, load_format="dummy", num_blocks=62, preemption="recompute", **options)
    computed = Computed()
    llm.engine.listeners.append(computed)
    return llm, computed


def serve(name: str, llm: LLM, computed: Computed, chats: list[list[int]], new: list[list[int]]) -> None:
    """One turn of each chat, one after the other. Prints a row of the table."""
    computed.tokens = computed.blocks = 0
    seconds = first = 0.0
    for chat, said in zip(chats, new, strict=True):
        chat += said
        began = time.perf_counter()
        (output,) = llm.generate([chat], PARAMS, use_tqdm=False)
        seconds += time.perf_counter() - began
        first += output.metrics.first_token_time - output.metrics.arrival_time
        chat += output.outputs[0].token_ids
    first /= len(chats)
    print(f"| {name} | {computed.tokens:,} | {computed.blocks} | {seconds:.1f} | {first:.2f} |", flush=True)


def main() -> None:
    """Three turns with each kind of tier, then a fourth with an engine that was started anew."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=200, help="said in each turn")
    args = parser.parse_args()
    rng = random.Random(0)
    turns = [[rng.choices(range(32000), k=args.new_tokens) for _ in range(args.chats)] for _ in range(4)]
    print("| tier | turn | tokens computed | blocks loaded | seconds | mean time to the first token |")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        texts = []
        kinds = {
            "none": {},
            "host memory": {"tier_bytes": 1 << 29},
            "file": {"tier_bytes": 1 << 29, "tier_file": folder / "tier.mdb"},
        }
        for kind, options in kinds.items():
            llm, computed = make_llm(folder, **options)
            chats: list[list[int]] = [[] for _ in range(args.chats)]
            for number, new in enumerate(turns[:3], start=1):
                serve(f"{kind} | {number}", llm, computed, chats, new)
            texts.append(chats)
            if kind == "host memory":
                continue
            if kind == "file":
                began = time.perf_counter()
                llm.engine.save_prefix_cache()
                print(f"saved in {time.perf_counter() - began:.2f} s")
            del llm
            began = time.perf_counter()
            llm, computed = make_llm(folder, **options)
            print(f"started in {time.perf_counter() - began:.2f} s")
            serve(f"{kind} | 4, after a restart", llm, computed, chats, turns[3])
            del llm
        assert texts[0] == texts[2], "the texts differ"
        assert [chat[: len(other)] for chat, other in zip(texts[0], texts[1], strict=True)] == texts[1]


if __name__ == "__main__":
    main()
