"""The figures of README.md: what a mask costs in a decode step, and how long a grammar takes to compile.

With the patch applied: OMP_NUM_THREADS=1 python docs/forks/grammar/measure.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from nanopaged import LLM, SamplingParams
from nanopaged.sampler import Draw, SamplingMetadata, sample
from nanopaged.text.grammar import Grammar, compile_grammar, read_vocabulary

STEPS, ROUNDS, LARGE = 60, 5, 151_936  # Qwen3's vocabulary
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "roles": {"type": "array", "items": {"enum": ["king", "lord", "fool"]}},
    },
    "required": ["name", "age", "roles"],
    "additionalProperties": False,
}
GRAMMARS = {
    "400 letters": {"regex": "[a-zA-Z ,.]{400}"},
    "JSON, 3 properties": {"json_schema": PERSON},
    "JSON, a list of them": {"json_schema": {"type": "array", "items": PERSON, "minItems": 20}},
}


def timed(call: Callable[..., object], *arguments: Any) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    call(*arguments)
    return (time.perf_counter() - begin) * 1e3


def compile_times(llm: LLM) -> None:
    """Of grammars that have not been seen, over a vocabulary that has not been seen."""
    arguments = llm.engine.prompts.tokenizer, llm.engine.vocab_size, llm.engine.prompts.eos_token_ids
    read, compiled = read_vocabulary.__wrapped__, compile_grammar.__wrapped__  # without their caches
    print(f"vocabulary: {statistics.median(timed(read, *arguments) for _ in range(ROUNDS)):.1f} ms")
    for name, options in GRAMMARS.items():
        asked = SamplingParams(**options).grammar
        times = [timed(compiled, *asked, read(*arguments)) for _ in range(ROUNDS)]
        print(f"{name}: {statistics.median(times):.1f} ms")


def sampling_times(num: int, vocab_size: int) -> list[float]:
    """Milliseconds to draw a token for each of `num` rows, without masks, and with masks that are given."""
    logits, times = torch.randn(num, vocab_size), []
    for mask in (b"\1", b"\1\0" * (vocab_size // 2)):
        draws = [Draw(SamplingParams(), 0, i, 0, [], mask=mask) for i in range(num)]

        def draw() -> None:
            sample(logits, SamplingMetadata(draws, logits.device))  # noqa: B023

        times.append(statistics.median(timed(draw) for _ in range(ROUNDS)))
    return times


def decode(llm: LLM, num: int, options: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a decode step with `num` requests, and of it in `follow` and `mask`."""
    inside = 0.0

    def count(method: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            nonlocal inside
            begin = time.perf_counter()
            result = method(*arguments)
            inside += (time.perf_counter() - begin) * 1e3
            return result

        return call

    params = SamplingParams(seed=1, max_tokens=STEPS + 10, ignore_eos=True, **options)
    for i in range(num):
        llm.engine.add_request(str(i), "KING HENRY:\n" + "x" * i, params)
    while any(not request.sequences[0].num_output_tokens for request in llm.engine.requests.values()):
        llm.engine.step()
    methods = Grammar.follow, Grammar.mask
    Grammar.follow, Grammar.mask = map(count, methods)
    times = []
    for _ in range(STEPS):
        inside = 0.0
        times.append((timed(llm.engine.step), inside))
    Grammar.follow, Grammar.mask = methods
    assert len(llm.engine.requests) == num, "a request has ended"
    for i in range(num):
        llm.engine.abort_request(str(i))
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


if __name__ == "__main__":
    llm = LLM(dtype="float32", num_blocks=400)
    compile_times(llm)
    cases = {"no grammar": {}} | {name: GRAMMARS[name] for name in list(GRAMMARS)[::2]}
    for num in (1, 8, 32):
        rounds = [{name: decode(llm, num, options) for name, options in cases.items()} for _ in range(ROUNDS)]
        for name in cases:
            columns = zip(*(each[name] for each in rounds), strict=True)
            step, inside = map(statistics.median, columns)
            share, each = inside / step, inside / num * 1e3
            print(f"{num} requests, {name}: step {step:.2f} ms, grammar {share:.1%}, {each:.0f} µs a token")
    for vocab_size in (1024, LARGE):
        without, with_masks = sampling_times(32, vocab_size)
        print(f"sampling 32 rows of {vocab_size}: {without:.2f} ms, with masks {with_masks:.2f} ms")
