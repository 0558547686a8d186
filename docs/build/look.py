"""Scenes for `python docs/build/rebuild.py look N`: the reader's engine at work. Prints; writes a page.

Run in a folder with the package, with the number of the stage and the page to write. Without arguments it
prints what the tiny model says, so that two engines can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanopaged import LLM, LLMEngine, SamplingParams
from nanopaged.sampler import SamplingMetadata
from nanopaged.terminal import run_program

ROMEO = "ROMEO:\nBut soft, what light"
PROMPTS = {"A": ROMEO, "B": "JULIET:\nO Romeo", "C": "NURSE:\nMadam"}
FIVE = [0.1, 0.4, 0.05, 0.3, 0.15]


@dataclass
class Scene:
    """A small engine of the tiny model that is stopped and drawn, and then says what it has to say.

    Fields:
        options: of the engine. params: of each request.
        is_there: whether the engine has come to the moment that is drawn.
    """

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=lambda: PROMPTS)
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_there: Callable[[LLMEngine], bool] = lambda engine: engine.num_steps == 4


def has_preempted(engine: LLMEngine) -> bool:
    return any(request.num_preemptions for request in engine.requests.values())


def has_swapped(engine: LLMEngine) -> bool:
    return any(request.is_swapped for request in engine.requests.values())


CROWDED = {"num_blocks": 14, "max_num_batched_tokens": 8, "preemption": "recompute"}
SCENES = {
    1: Scene("your attention, block by block", {"attention_backend": "reference"}, {"A": ROMEO}),
    2: Scene(
        "A has ended, and its blocks are given back; B and C grow",
        params={"A": {"max_tokens": 6}},
        is_there=lambda engine: "A" not in engine.requests,
    ),
    3: Scene(
        "a budget of 8 tokens, and the last request has given its blocks", CROWDED, is_there=has_preempted
    ),
    4: Scene(
        "B has found blocks of A",
        prompts={"A": f"{ROMEO} shines", "B": f"{ROMEO} breaks"},
        is_there=lambda engine: engine.num_steps == 2,
    ),
    5: Scene(
        "three samples of one prompt share its full blocks",
        prompts={"A": ROMEO},
        params={"A": {"n": 3, "temperature": 1.0, "seed": 1}},
    ),
    6: Scene(
        "the pool is full, and the last request has gone to the host",
        {"num_blocks": 12, "num_host_blocks": 12, "preemption": "swap"},
        is_there=has_swapped,
    ),
    7: Scene(
        "one line at three temperatures",
        prompts=dict.fromkeys(["cold", "warm", "hot"], ROMEO),
        params={"warm": {"temperature": 0.8, "seed": 1}, "hot": {"temperature": 2.0, "seed": 1}},
    ),
    8: Scene("your kernels, interpreted, read these blocks", {"attention_backend": "triton"}),
    9: Scene("two processes have these blocks", {"tensor_parallel_size": 2}, {"A": ROMEO}),
}


def show(scene: Scene, page: str) -> None:
    """Draw the moment, then print what the requests say; the page has every step."""
    options = {"dtype": "float32", "block_size": 4, "num_blocks": 24, "watermark": 0.0} | scene.options
    engine = LLM(trace=page, **options).engine
    for name, prompt in scene.prompts.items():
        params = {"temperature": 0, "max_tokens": 14, "ignore_eos": True} | scene.params.get(name, {})
        engine.add_request(name, prompt, SamplingParams(**params))
        engine.step()
    while not scene.is_there(engine):
        engine.step()
    print(f"{scene.title}:\n\n{engine.snapshot()}\n")
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(f"{output.request_id}: {[completion.text for completion in output.outputs]}")
    stats = engine.stats()
    print(f"{stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens were in the prefix cache")
    print(f"{stats.num_blocks_copied} blocks were copied on write")
    print(f"{stats.num_blocks_swapped_out} blocks moved out, {stats.num_blocks_swapped_in} came back")


def bar(share: float) -> str:
    return "█" * round(40 * share) + f" {share:.0%}"


def show_shares() -> None:
    """How much each block of a context counts, by values that name their block."""
    from nanopaged.attention.reference_backend import reference_paged_attention

    torch.manual_seed(3)
    table = [5, 2, 7, 0, 3]
    keys = torch.randn(8, 1, 4, 16)
    values = torch.zeros(8, 1, 4, 16)
    values[torch.arange(8), 0, :, torch.arange(8)] = 1.0
    shares = reference_paged_attention(torch.randn(1, 16), keys, values, table, 18, 0.5)[0]
    print(f"one query, 18 keys in the blocks {table}: what each block adds to the output")
    for block_id in table:
        print(f"  block {block_id}  {bar(float(shares[block_id]))}")


def show_draws() -> None:
    from nanopaged.sampler import Draw, draw_tokens, filtered_probs

    print("five tokens, top_k=3 and top_p=0.8; then 1,000 draws")
    params = SamplingParams(top_k=3, top_p=0.8)
    metadata = SamplingMetadata([Draw(params, 0, 0, 0, [])], torch.device("cpu"))
    probs = filtered_probs(torch.tensor([FIVE]).log(), metadata)
    drawn = draw_tokens(probs.expand(1000, -1), torch.linspace(0, 0.999, 1000)[:, None]).bincount(minlength=5)
    for token, (before, count) in enumerate(zip(FIVE, drawn.tolist(), strict=True)):
        print(f"  token {token}, {before:4.0%} before:  {bar(count / 1000)}")


def show_rows() -> None:
    from nanopaged.model.checkpoint import _share

    print("k_proj, 2 KV heads of 8 rows, on 4 ranks: the rows of each")
    for rank in range(4):
        rows, _ = _share("model.layers.0.self_attn.k_proj.weight", torch.empty(8, 64), [16, 64], rank, 4)
        print(f"  rank {rank}  {' ' * 2 * rows.start + '██' * 8}  {rows.start} to {rows.stop - 1}")


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        llm = LLM(dtype="float32", block_size=4, num_blocks=40)
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.generate([*PROMPTS.values(), ROMEO], params, use_tqdm=False)
        print(*[output.outputs[0].text.strip() for output in outputs], sep="\n")
        return
    number, page = int(sys.argv[1]), sys.argv[2]
    before = {1: show_shares, 7: show_draws, 9: show_rows}
    if number in before:
        before[number]()
    show(SCENES[number], page)
    print(f"\nevery step, in a browser: {page}")


if __name__ == "__main__":
    run_program(main)
