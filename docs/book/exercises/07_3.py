"""Exercise 7.3, beam search outside of the engine: see docs/book/07-sharing.md."""

import random
from typing import Any

from nanopaged import LLM, BeamSearchParams, SamplingParams  # noqa: F401  SamplingParams for the solution


def beams_on_top(llm: LLM, prompt: list[int], width: int, num_tokens: int) -> list[list[int]]:
    """The generated tokens of the best `width` beams, best first. Each step is a `generate` call."""
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def search(prompt: list[int], width: int, num_tokens: int) -> list[list[int]]:
    """The engine's own beam search."""
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    (output,) = LLM(dtype="float32", num_blocks=64).beam_search([prompt], params, use_tqdm=False)
    return [beam.token_ids for beam in output.outputs]


def on_top(prompt: list[int], width: int, num_tokens: int) -> tuple[list[list[int]], list[tuple[int, Any]]]:
    """The reader's, and for each of its calls the number of prompts and `max_tokens`."""
    llm, calls = LLM(dtype="float32", num_blocks=64), []
    generate = llm.generate

    def counted(prompts: Any, params: Any, *args: Any, **options: Any) -> Any:
        each = params[0] if isinstance(params, list) else params
        calls.append((len(prompts), each.max_tokens))
        assert len(prompts) <= width, (
            f"With {width} beams, beams_on_top sends {len(prompts)} requests at once."
        )
        return generate(prompts, params, *args, **options)

    llm.generate = counted
    return beams_on_top(llm, prompt, width, num_tokens), calls


def test_the_beams_are_those_of_the_engine() -> None:
    rng = random.Random(1)
    for width, num_tokens in ((4, 6), (2, 4)):
        prompt = rng.choices(range(300, 900), k=7)
        got, calls = on_top(prompt, width, num_tokens)
        want = search(prompt, width, num_tokens)
        case = f"With {width} beams and {num_tokens} tokens"
        assert len(got) == width, f"{case}, beams_on_top returns {len(got)} texts."
        lengths = sorted({len(tokens) for tokens in got})
        assert lengths == [num_tokens], f"{case}, the texts that beams_on_top returns have {lengths} tokens."
        place = next((i + 1 for i in range(width) if got[i] != want[i]), None)
        assert place is None, f"{case}, text {place} of beams_on_top is not the one of the engine's search."
        expected = [(1, 1)] + [(width, 1)] * (num_tokens - 1)
        wrong = next((i + 1 for i, call in enumerate(expected) if calls[i : i + 1] != [call]), None)
        assert calls, f"{case}, beams_on_top never calls generate."
        assert wrong is None, (
            f"{case}, call {wrong} of generate is not for {expected[wrong - 1][0]} requests of one token."
        )
        assert len(calls) == num_tokens, f"{case}, beams_on_top calls generate {len(calls)} times."
