"""When a beam search ends, with made-up log-probabilities. (test_sharing.py compares with transformers.)"""

from __future__ import annotations

from collections.abc import Collection

import fake_runner
import pytest
from fake_runner import fake_engine

from nanopaged import BeamSearchParams, RequestOutput
from nanopaged.sequence import Sample

PROMPT = [20] * 9
EOS = 2
Script = dict[tuple[int, ...], dict[int, float]]  # generated tokens → next token → its log-probability


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> object:
    """Beams over a script. Where it says nothing, token 5 is certain to follow; all others are unlikely."""

    def run(script: Script, **params: object) -> tuple[RequestOutput, int]:
        def proposals(token_ids: list[int], k: int, banned: Collection[int]) -> list[Sample]:
            likely = script.get(tuple(token_ids[len(PROMPT) :]), {5: 0.0})
            unlikely = {token_id: -50.0 - token_id for token_id in range(40, 40 + k)}
            assert not banned
            return [Sample(token_id, logprob) for token_id, logprob in (likely | unlikely).items()][:k]

        monkeypatch.setattr(fake_runner, "proposals", proposals)
        engine = fake_engine(num_blocks=40)
        engine.add_request("a", PROMPT, BeamSearchParams(beam_width=2, **params))
        while engine.has_unfinished_requests():
            (output,) = engine.step()
            engine.check_invariants()
            assert [completion.index for completion in output.outputs] == [0, 1][: len(output.outputs)]
        return output, engine.stats().num_steps

    return run


def texts(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize(("logprob", "expected"), [(-1.0, [[EOS], [1, EOS]]), (-0.9, [[1, 3, EOS], [EOS]])])
def test_a_beam_that_could_only_equal_the_worst_hypothesis_ends_the_search(
    search: object, logprob: float, expected: list[list[int]]
) -> None:
    """After two steps: hypotheses of scores -1 and -3 / 2, and a beam of score -3 / 2, or of a better one."""
    script = {(): {EOS: -1.0, 1: -2.0}, (1,): {EOS: -1.0, 3: logprob}, (1, 3): {EOS: 0.0}}
    output, _ = search(script, max_tokens=9)
    assert texts(output) == expected


@pytest.mark.parametrize(
    ("logprob", "expected", "num_steps"), [(-4.3, [[EOS], [1, EOS]], 2), (-4.1, [[EOS], [1, 3, 5, 5]], 4)]
)
def test_never_goes_on_while_a_beam_of_full_length_could_still_win(
    search: object, logprob: float, expected: list[list[int]], num_steps: int
) -> None:
    """The second hypothesis scores -4.1 / 2 = -2.05; the beam, at four tokens, -8.3 / 4 or -8.1 / 4.

    The full length is that of the generated text, as the score is: the prompt does not count.
    """
    script = {(): {EOS: -0.1, 1: -4.0}, (1,): {EOS: -0.1, 3: logprob}}
    assert search(script, max_tokens=4, early_stopping=False)[1] == 2, "ended now, no beam would win"
    output, steps = search(script, max_tokens=4, early_stopping="never")
    assert (texts(output), steps) == (expected, num_steps)
