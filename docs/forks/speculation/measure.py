"""Steps and tokens per CPU second without and with speculation, on the tiny model. Needs speculation.patch.

OMP_NUM_THREADS=1 python docs/forks/speculation/measure.py
"""

from __future__ import annotations

import time
from statistics import median

from nanopaged import LLM, SamplingParams

NUM_DRAFTS = 4
NAMES = ["ROMEO", "JULIET", "MERCUTIO", "TYBALT", "BENVOLIO", "PARIS", "ROSALINE", "ANTONIO"]
ROLL = "".join(f"{name}:\nHere, my lord, at your command.\n\n" for name in NAMES * 2)
TEXT = "Now is the winter of our discontent made glorious summer; and all the clouds, my lord {}, are gone.\n"
WORKLOADS: dict[str, tuple[list[str], float]] = {  # name → 16 prompts, temperature
    "roll-call, greedy": ([f"{ROLL}{name} {i}:\n" for i in (1, 2) for name in NAMES], 0.0),
    "roll-call, temperature 0.8": ([f"{ROLL}{name} {i}:\n" for i in (1, 2) for name in NAMES], 0.8),
    "plain text, greedy": ([TEXT.format(f"{name} {i}") for i in (1, 2) for name in NAMES], 0.0),
    "plain text, temperature 0.8": ([TEXT.format(f"{name} {i}") for i in (1, 2) for name in NAMES], 0.8),
}


def run(llm: LLM, prompts: list[str], temperature: float) -> tuple[int, float, int, int]:
    """→ (steps, output tokens per CPU second, drafts, accepted drafts), with an empty prefix cache."""
    params = SamplingParams(temperature=temperature, max_tokens=128, seed=1, ignore_eos=True)
    llm.engine.reset_prefix_cache()
    before, began = llm.engine.stats(), time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.process_time() - began, llm.engine.stats()
    return (
        after.num_steps - before.num_steps,
        (after.num_generated_tokens - before.num_generated_tokens) / seconds,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def main() -> None:
    plain, drafting = (LLM(dtype="float32", num_speculative_tokens=k) for k in (0, NUM_DRAFTS))
    print("| workload | requests | steps | accepted | tokens per CPU second |\n|---|---:|---:|---:|---:|")
    for name, (prompts, temperature) in WORKLOADS.items():
        for num in (1, 16):
            results = [[run(llm, prompts[:num], temperature) for llm in (plain, drafting)] for _ in range(4)]
            without, with_drafts = zip(*results[1:], strict=True)  # the first turn warms up
            speeds = [median(run[1] for run in runs) for runs in (without, with_drafts)]
            steps, _, num_drafts, num_accepted = with_drafts[0]
            share = num_accepted / num_drafts if num_drafts else 0
            accepted = f"{num_accepted} of {num_drafts} ({share:.0%})"
            print(f"| {name} | {num} | {without[0][0]} → {steps} | {accepted} ", end="")
            print(f"| {speeds[0]:,.0f} → {speeds[1]:,.0f} ({speeds[1] / speeds[0]:.2f}×) |", flush=True)


if __name__ == "__main__":
    main()
