"""Requests that come together, served to the end; and their tokens."""

from __future__ import annotations

from collections.abc import Callable

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams

Params = SamplingParams | BeamSearchParams


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
