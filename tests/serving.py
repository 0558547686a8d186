"""Requests that come together, served to the end; and their tokens."""

from __future__ import annotations

from collections.abc import Callable

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams

Params = SamplingParams | BeamSearchParams

# One of each kind, of what a device computes with operations of its own.
KINDS: dict[str, Params] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top_k": SamplingParams(top_k=5, seed=2),
    "top_p": SamplingParams(top_p=0.9, seed=3),
    "min_p": SamplingParams(min_p=0.1, seed=4),
    "all filters": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=5),
    "banned tokens": SamplingParams(min_tokens=3, stop_token_ids=[3, 4], seed=6),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=1, seed=7),
    "several": SamplingParams(n=3, seed=8),
    "log-probabilities": SamplingParams(temperature=0, logprobs=2),
    "beams": BeamSearchParams(beam_width=3),
    "banned beams": BeamSearchParams(beam_width=3, min_tokens=3),
}


def serve(
    llm: LLM,
    prompts: list[list[int]],
    params: Params | list[Params],
    check: Callable[[LLM], None] | None = None,
) -> list[RequestOutput]:
    """As `generate`, with the invariants checked after every step; at the end every block is free.

    Args:
        check: what else holds after every step.
    """
    engine = llm.engine
    params = params if isinstance(params, list) else [params] * len(prompts)
    requests = [
        engine.prompts.make_request(str(i), *asked)
        for i, asked in enumerate(zip(prompts, params, strict=True))
    ]
    for request in requests:
        engine.queue(request)
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()
        if check is not None:
            check(llm)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_used_blocks == 0
    return [request.output() for request in requests]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """The tokens of all completions, in order."""
    return [completion.token_ids for output in outputs for completion in output.outputs]
