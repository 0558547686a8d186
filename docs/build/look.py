"""Scenes for `python docs/build/rebuild.py look N`: the reader's engine at work. Prints; writes a page.

Run in a folder with the package, with the number of the stage and the page to write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from nanopaged import LLM, LLMEngine, SamplingParams
from nanopaged.sampler import SamplingMetadata
from nanopaged.terminal import run_program

PROMPTS = ["ROMEO:\nBut soft, what light", "JULIET:\nO Romeo", "NURSE:\nMadam"]
FIVE = [0.1, 0.4, 0.05, 0.3, 0.15]


def bar(share: float) -> str:
    return "█" * round(40 * share) + f" {share:.0%}"


def engine_of(page: str, **options: object) -> LLMEngine:
    """A small engine of the tiny model that draws each step on the page."""
    options = {"dtype": "float32", "block_size": 4, "num_blocks": 24, "watermark": 0.0} | options
    return LLM(trace=page, **options).engine


def serve(engine: LLMEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def attention(page: str) -> None:
    """How much each block of a context counts, by values that name their block."""
    from nanopaged.attention.reference_backend import reference_paged_attention

    torch.manual_seed(3)
    table, size = [5, 2, 7, 0, 3], 4
    keys, values = torch.randn(8, 1, size, 16), torch.zeros(8, 1, size, 16)
    values[torch.arange(8), 0, :, torch.arange(8)] = 1.0
    shares = reference_paged_attention(torch.randn(1, 16), keys, values, table, 18, 0.5)[0]
    print(f"one query, 18 keys in the blocks {table}: what each block adds to the output")
    for block_id in table:
        print(f"  block {block_id}  {bar(float(shares[block_id]))}")
    engine = engine_of(page, attention_backend="reference")
    engine.add_request("A", PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))
    finish(engine)


def blocks(page: str) -> None:
    engine = engine_of(page)
    for name, prompt, length in zip("ABC", PROMPTS, (6, 20, 14), strict=True):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    serve(engine, 9)
    print("A has ended, and its blocks are given back; B and C grow:\n")
    print(engine.snapshot())
    finish(engine)


def scheduling(page: str) -> None:
    engine = engine_of(page, max_num_batched_tokens=8, num_blocks=14, enable_prefix_caching=False)

    class Rows:
        """A listener that prints what each step computes."""

        def batch_scheduled(self, batch: object) -> None:
            got = {seq.request.request_id: seq.num_scheduled_tokens for seq in batch.sequences}
            out = "".join(f"  preempted: {request.request_id}" for request, _ in batch.preempted)
            print(f"{engine.num_steps + 1:6}" + "".join(f"{got.get(name, ''):>5}" for name in "ABC") + out)

        def step_ended(self, batch: object) -> None:
            """Nothing to print."""

        def step_failed(self, error: BaseException) -> None:
            """The error ends the program."""

    engine.listeners.append(Rows())
    print("a budget of 8 tokens, 14 blocks of 4 slots; the tokens that each request computes\n")
    print("  step" + "".join(f"{name:>5}" for name in "ABC"))
    for name, prompt in zip("ABC", PROMPTS, strict=True):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
        serve(engine, 2)
    finish(engine)


def prefixes(page: str) -> None:
    engine = engine_of(page)
    for name, end in (("A", " shines"), ("B", " breaks")):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add_request(name, PROMPTS[0] + end, params)
        serve(engine, 1)
        request = engine.requests[name]
        print(f"{name}: {request.num_cached_tokens} of {request.num_prompt_tokens} prompt tokens were found")
    print(f"\n{engine.snapshot()}")
    finish(engine)
    print(f"\nBoth have ended, and what they filled can still be found:\n\n{engine.snapshot()}")


def forks(page: str) -> None:
    engine = engine_of(page)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    engine.add_request("A", PROMPTS[0], params)
    serve(engine, 4)
    print(f"three samples of one prompt: they share its full blocks\n\n{engine.snapshot()}")
    print(f"\n{engine.stats().num_blocks_copied} blocks were copied on write")
    finish(engine)


def swapping(page: str) -> None:
    engine = engine_of(page, num_blocks=12, num_host_blocks=12, preemption="swap")
    for name, prompt in zip("ABC", PROMPTS, strict=True):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=18, ignore_eos=True))
    while not any(request.is_swapped for request in engine.requests.values()):
        engine.step()
    print(f"the pool is full, and the last request has gone to the host:\n\n{engine.snapshot()}")
    finish(engine)
    stats = engine.stats()
    print(f"\n{stats.num_blocks_swapped_out} blocks moved out, {stats.num_blocks_swapped_in} came back")


def sampling(page: str) -> None:
    from nanopaged.sampler import Draw, draw_tokens, filtered_probs

    print("five tokens, top_k=3 and top_p=0.8; then 1,000 draws")
    params = SamplingParams(top_k=3, top_p=0.8)
    metadata = SamplingMetadata([Draw(params, 0, 0, 0, [])], torch.device("cpu"))
    probs = filtered_probs(torch.tensor([FIVE]).log(), metadata)
    drawn = draw_tokens(probs.expand(1000, -1), torch.linspace(0, 0.999, 1000)[:, None]).bincount(minlength=5)
    for token, (before, count) in enumerate(zip(FIVE, drawn.tolist(), strict=True)):
        print(f"  token {token}, {before:4.0%} before:  {bar(count / 1000)}")
    engine = engine_of(page)
    for name, temperature in (("cold", 0.0), ("warm", 0.8), ("hot", 2.0)):
        engine.add_request(name, PROMPTS[0], SamplingParams(temperature=temperature, max_tokens=16, seed=1))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(f"{output.request_id}: {output.outputs[0].text!r}")


def kernels(page: str) -> None:
    engine = engine_of(page, attention_backend="triton")
    for name, prompt in zip("AB", PROMPTS, strict=False):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    serve(engine, 4)
    print(f"your kernels, interpreted, read these blocks:\n\n{engine.snapshot()}")
    finish(engine)


def ranks(page: str) -> None:
    """The rows of q_proj and of the embedding that each rank reads, then two processes."""
    from nanopaged.model.checkpoint import _share

    name = "model.layers.0.self_attn.k_proj.weight"
    print("k_proj, 2 KV heads of 8 rows, on 4 ranks: the rows of each")
    for rank in range(4):
        rows, _ = _share(name, torch.empty(8, 64), [16, 64], rank, 4)
        marks = " " * 2 * rows.start + "██" * (rows.stop - rows.start)
        print(f"  rank {rank}  {marks}  {rows.start} to {rows.stop - 1}")
    engine = engine_of(page, tensor_parallel_size=2)
    engine.add_request("A", PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    print(f"two processes say {outputs[0].outputs[0].text!r}")


SCENES: list[Callable[[str], None]] = [
    attention,
    blocks,
    scheduling,
    prefixes,
    forks,
    swapping,
    sampling,
    kernels,
    ranks,
]


def main() -> None:
    torch.set_num_threads(1)
    SCENES[int(sys.argv[1]) - 1](sys.argv[2])
    print(f"\nevery step, in a browser: {sys.argv[2]}")


if __name__ == "__main__":
    run_program(main)
