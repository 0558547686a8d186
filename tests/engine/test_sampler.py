"""Filters and penalties against transformers, draws against their distribution, seeds in any batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import KINDS, VOCAB_SIZE, Oracle, random_prompts, tokens_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanopaged import LLM, SamplingParams
from nanopaged.sampler import (
    VOCAB_CHUNK,
    Draw,
    SamplingMetadata,
    draw_samples,
    filtered_probs,
    penalize,
)
from nanopaged.sequence import NonFiniteLogits, Sequence

VOCAB = 50
CPU = torch.device("cpu")


def transformers_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = [TemperatureLogitsWarper(float(params.temperature))]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p > 0 else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 5),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 49, 50, 1000]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
)


@settings(max_examples=100, deadline=None)
@given(params=st.lists(sampling, min_size=1, max_size=6), seed=st.integers(0, 1000))
@example(params=[SamplingParams(top_k=2, top_p=0.9), SamplingParams()], seed=0)
def test_filters_equal_transformers_row_by_row(params: list[SamplingParams], seed: int) -> None:
    """Rows with different settings in one batch, each as transformers would have it alone."""
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    ours = filtered_probs(logits, metadata_of(params))
    ours /= ours.sum(-1, keepdim=True)
    for row, (p, mine) in enumerate(zip(params, ours, strict=True)):
        expected = transformers_distribution(logits[row : row + 1].clone(), p)[0]
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def metadata_of(params: list[SamplingParams]) -> SamplingMetadata:
    return SamplingMetadata([Draw(p, uniform=0.0, banned_token_ids=[]) for p in params], CPU)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.5), [0, 1, 2, 3]),
        (SamplingParams(top_k=2, top_p=0.5), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.35), [0]),
        (SamplingParams(top_k=4, top_p=0.35), [0]),
    ],
)
def test_equals_are_kept_or_dropped_together(params: SamplingParams, kept: list[int]) -> None:
    """Ties must not depend on the order of a sort."""
    logits = torch.tensor([[0.4, 0.19, 0.19, 0.19, 0.03]]).log()
    probs = filtered_probs(logits, metadata_of([params]))
    assert (probs[0] > 0).nonzero()[:, 0].tolist() == kept


FILTERS = [
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.99),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_p=0.95, top_k=20),
    SamplingParams(top_p=0.9, top_k=1000),
    SamplingParams(temperature=1.5, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize(
    ("vocab_size", "num_batches"), [(49_152, 2), pytest.param(151_936, 20, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("params", FILTERS)
def test_top_p_is_exact_in_a_large_vocabulary(
    params: SamplingParams, vocab_size: int, num_batches: int
) -> None:
    """The tokens that float64 keeps, at positions from flat to peaked, ten in a batch.

    Half of them have the logits of a bfloat16 model, with many ties. A token may differ if its sum is
    1 - top_p, or its weight `min_p`, up to the rounding of these numbers in float32. Both are rare. Past bug:
    the rounding of all probabilities was added to every sum, so that many positions lost or gained a token.
    """
    num_close = 0
    for seed in range(num_batches):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(10, vocab_size, generator=generator) * torch.tensor([1, 2, 3, 4, 6] * 2)[:, None]
        logits[5:] = logits[5:].bfloat16()
        kept = (filtered_probs(logits, metadata_of([params] * 10)) > 0).numpy()
        quotients = (logits / torch.tensor(params.temperature)).numpy()  # in float32, as the logits are
        for row, kept_in_row in zip(quotients, kept, strict=True):
            assert row[kept_in_row].min() > row[~kept_in_row].max()
            rising = np.sort(row).astype(np.float64)
            if params.top_k > 0:
                rising = rising[rising >= rising[-params.top_k]]
            weights = np.exp(rising - rising[-1])  # probabilities over that of the most likely token
            sums = weights.cumsum()[np.searchsorted(rising, rising, side="right") - 1]  # with all ties
            sums /= sums[-1]
            expected = (sums > 1 - params.top_p) & (weights >= params.min_p)
            first, last = sorted([kept_in_row.sum(), expected.sum()])
            differs = slice(len(sums) - last, len(sums) - first)
            is_rounding = np.abs(sums[differs] - (1 - params.top_p)) < 2**-25
            if params.min_p > 0:
                is_rounding |= np.abs(weights[differs] / params.min_p - 1) < 2**-22
            assert is_rounding.all()
            num_close += first != last
    assert num_close <= 0.005 * len(logits) * num_batches


@pytest.mark.parametrize(
    "vocab_size",
    [1, 2, VOCAB_CHUNK - 1, VOCAB_CHUNK, VOCAB_CHUNK + 1, 3 * VOCAB_CHUNK, 5 * VOCAB_CHUNK + 7, 151_936],
)
def test_a_draw_inverts_the_distribution(vocab_size: int) -> None:
    """Each row has drawn the token whose interval of the cumulative distribution has its number.

    For vocabularies of whole chunks and not; half the tokens have probability 0, the last are likely.
    """
    generator = torch.Generator().manual_seed(vocab_size)
    num = 300 if vocab_size < 10_000 else 20
    logits = torch.randn(num, vocab_size, generator=generator) * 3
    logits[:, -7:] += 6.0
    logits[torch.rand(logits.shape, generator=generator) < 0.5] = -math.inf
    logits[:, vocab_size // 2] = 0.0
    numbers = [0.0, (2**24 - 1) / 2**24, *torch.rand(num - 2, generator=generator).tolist()]
    draws = [Draw(SamplingParams(), uniform=u, banned_token_ids=[]) for u in numbers]
    drawn = draw_samples(logits, SamplingMetadata(draws, CPU))
    ends = logits.double().softmax(-1).cumsum(-1)
    for u, row, token_id in zip(numbers, ends, [token.token_id for token in drawn], strict=True):
        begin = row[token_id - 1] if token_id else 0.0
        assert begin < row[token_id], "a token that was filtered out was drawn"
        assert begin - 1e-6 <= u <= row[token_id] + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e4])
def test_a_greedy_row_in_a_batch_with_others(scale: float, dtype: torch.dtype) -> None:
    """It takes the first of the most likely tokens, as it does alone, however close the next ones are."""
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(5)) * scale
    logits = logits.to(dtype)
    best = logits.amax(-1)
    logits[:, 300] = best.nextafter(torch.tensor(-math.inf, dtype=dtype))
    logits[:, 600] = best
    greedy = Draw(SamplingParams(temperature=0, top_p=0.5), uniform=0.0, banned_token_ids=[])
    other = Draw(SamplingParams(top_k=30), uniform=0.5, banned_token_ids=[])
    *drawn, _ = draw_samples(logits, SamplingMetadata([greedy] * 19 + [other], CPU))
    assert [token.token_id for token in drawn] == logits.argmax(-1)[:19].tolist()


def penalised(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """vLLM's definitions. The repetition penalty is that of transformers."""
    if params.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(
            torch.tensor([prompt + output] * len(logits)), logits
        )
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=logits.shape[-1])
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_drawn_but_logprobs_stay_the_models_own(temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 10.0
    params = SamplingParams(temperature=temperature, logprobs=1)
    for i in range(20):
        draw = Draw(params, uniform=i / 20, banned_token_ids=[4, 5])
        (drawn,) = draw_samples(logits, SamplingMetadata([draw], CPU))
        assert drawn.token_id not in (4, 5)
        expected = logits.log_softmax(-1)[0]
        assert drawn.logprob == pytest.approx(expected[drawn.token_id].item(), abs=1e-5)
        assert drawn.logprobs[4] == pytest.approx(expected[4].item(), abs=1e-5)
        assert (drawn.logprobs[4].rank, drawn.logprobs[drawn.token_id].rank) == (1, 2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(),
        SamplingParams(temperature=1e-30),
        SamplingParams(top_k=3, top_p=0.9, min_p=0.1),
        SamplingParams(top_p=0.5, presence_penalty=1),
    ],
)
def test_a_row_in_which_no_token_is_allowed_changes_no_other(params: SamplingParams) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    draws = [Draw(params, uniform=u, banned_token_ids=[], token_counts={5: 1}) for u in (0.2, 0.5, 0.8)]
    alone = draw_samples(logits, SamplingMetadata(draws, CPU))
    draws[1].banned_token_ids = range(VOCAB)
    first, stuck, last = draw_samples(logits, SamplingMetadata(draws, CPU))
    assert stuck.token_id in range(VOCAB)
    assert [first, last] == [alone[0], alone[2]]
    assert math.isfinite(first.logprob + last.logprob)


@pytest.mark.parametrize("kind", ["greedy", "all filters", "penalties", "several", "beams"])
def test_a_mask_that_allows_nothing_is_an_error(
    kind: str, qwen3: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar can come to a dead end: its request is named and can be aborted, the others go on."""
    banned = Sequence.banned_token_ids

    def no_way_on(seq: Sequence) -> range | frozenset[int]:
        is_stuck = seq.request.request_id == "stuck" and seq.num_output_tokens == 2
        return range(VOCAB_SIZE) if is_stuck else banned.fget(seq)

    monkeypatch.setattr(Sequence, "banned_token_ids", property(no_way_on))
    engine = LLM(qwen3.folder, num_blocks=50).engine
    expected = qwen3.greedy([4, 5], 6)
    engine.add_request("well", [4, 5], SamplingParams(temperature=0, max_tokens=6))
    engine.add_request("stuck", [1, 2, 3], replace(KINDS[kind], max_tokens=16, ignore_eos=True))
    engine.step()
    engine.step()
    with pytest.raises(NonFiniteLogits, match="no token is allowed for request 'stuck' at position 5") as it:
        engine.step()
    engine.abort_request(it.value.request_id)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.outputs[0].token_ids == expected
    engine.check_invariants()


def test_beams_take_what_a_mask_allows(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """However unlikely the allowed tokens are: here five of the vocabulary."""
    monkeypatch.setattr(Sequence, "banned_token_ids", range(VOCAB_SIZE - 5))
    llm = LLM(qwen3.folder, num_blocks=50)
    params = replace(KINDS["beams"], max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    beams = [completion.token_ids for completion in output.outputs]
    assert len(beams) == 3
    assert min(min(beam) for beam in beams) >= VOCAB_SIZE - 5


def test_a_greedy_request_takes_the_first_of_equal_tokens(qwen3: Oracle) -> None:
    """Next to a request that draws as well, whose batch it shares."""
    engine = LLM(qwen3.folder, num_blocks=50).engine
    model = engine.runner.model
    model.logits = lambda hidden: type(model).logits(model, hidden) * 0
    engine.add_request("draws", [4, 5], seeded(1, temperature=1.0))
    engine.add_request("greedy", [1, 2, 3], seeded(1, temperature=0))
    texts = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] = output.outputs[0].token_ids
    assert texts["greedy"] == [0] * 15
    assert len(set(texts["draws"])) > 1


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_together", [1, 2, 9])
def test_greedy_reads_the_logits_in_tiles(
    dtype: torch.dtype, num_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities are those of float64, with tiles of a few rows.

    Rows of NaN, of -inf and with +inf have no finite log-probability; a part of -inf changes nothing.
    """
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(4)) * 5
    logits[3, ::2] = -math.inf
    logits[4] = math.nan
    logits[5] = -math.inf
    logits[6, 7] = math.inf
    logits = logits.to(dtype)
    monkeypatch.setattr("nanopaged.sampler.SOFTMAX_ROWS", num_together)
    metadata = metadata_of([SamplingParams(temperature=0)] * 7)
    samples = draw_samples(logits, metadata)
    expected = logits.double().log_softmax(-1)
    for row, drawn in enumerate(samples[:4]):
        assert drawn.token_id == logits[row].argmax()
        assert drawn.logprob == pytest.approx(expected[row, drawn.token_id].item(), abs=4e-6)
    assert not any(math.isfinite(drawn.logprob) for drawn in samples[4:])


# ── through the whole engine ──────────────────────────────────────────────────────────────────────


def seeded(seed: int | None, **extra: object) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 15, "ignore_eos": True}
    return SamplingParams(seed=seed, **(fields | extra))


def texts(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


def test_a_seed_gives_the_same_text_in_any_batch(qwen3: Oracle) -> None:
    """Alone, with others, in chunks of two tokens, preempted again and again: the same tokens."""
    prompts = random_prompts(5, seed=1, longest=30)
    params = [seeded(i, top_k=20, top_p=0.95) for i in range(5)]
    llm = LLM(qwen3.folder, num_blocks=200)
    alone = [texts(llm, [prompt], [p])[0] for prompt, p in zip(prompts, params, strict=True)]
    assert texts(llm, prompts, params) == alone
    assert texts(llm, prompts[::-1], params[::-1]) == alone[::-1]
    assert texts(LLM(qwen3.folder, num_blocks=200, max_num_batched_tokens=2), prompts, params) == alone
    for preemption in ("recompute", "swap"):
        tight = LLM(qwen3.folder, num_blocks=12, block_size=4, preemption=preemption)
        assert texts(tight, prompts, params) == alone
        assert getattr(tight.engine.stats(), f"num_preemptions_{preemption}") > 0


def test_different_seeds_and_no_seeds_differ(qwen3: Oracle) -> None:
    """Two random texts of 15 tokens at temperature 3 agree with a chance far below 1e-6."""
    prompt = [1, 2, 3]
    llm = LLM(qwen3.folder, num_blocks=200)
    several = texts(llm, [prompt] * 4, [seeded(s, temperature=3.0) for s in (1, 2, None, None)])
    assert len({tuple(text) for text in several}) == 4
    first, again, other = (
        texts(LLM(qwen3.folder, num_blocks=200, seed=seed), [prompt], [seeded(None, temperature=3.0)])
        for seed in (0, 0, 1)
    )
    assert first == again, "the engine's seed"
    assert first != other


def test_penalties_of_single_logits() -> None:
    """Tokens 0 and 1 were generated four times, and 2 is in the prompt."""
    logits = torch.tensor([[7.0, 7.0, 7.0, 7.0], [3.0, -3.0, -3.0, 3.0]])
    penalties = torch.tensor([[1, token_id, count, 2, 0.5, 1] for token_id, count in enumerate((4, 4, 0))])
    assert penalize(logits, penalties.T).tolist() == [[7.0] * 4, [-1.5, -9.0, -6.0, 3.0]]


@torch.no_grad()
def test_penalties_follow_the_formula(qwen3: Oracle) -> None:
    """Requests with different penalties in one batch, in a pool so small that some are preempted."""
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    penalties = [(1, 2, 0), (1, 0, 2), (1, 0.5, 1.5), (1, -0.3, -2), (0.5, 0, 0), (2.0, 0.5, 0.7), (1, 0, 0)]
    rules = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(**rules, **dict(zip(names, row, strict=True))) for row in penalties]
    prompts = random_prompts(len(params), seed=4, longest=20)
    llm = LLM(qwen3.folder, num_blocks=16, block_size=4)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    num_changed = 0
    for prompt, rule, output in zip(prompts, params, outputs, strict=True):
        (completion,) = output.outputs
        tokens: list[int] = []
        for _ in range(30):
            logits = qwen3.model(torch.tensor([prompt + tokens])).logits[:, -1]
            tokens.append(int(penalised(logits, prompt, tokens, rule).argmax()))
        assert completion.token_ids == tokens
        num_changed += tokens != qwen3.greedy(prompt, 30, ignore_eos=True)
        model = qwen3.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
        expected = model.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        got = [logprobs[token_id] for token_id, logprobs in zip(tokens, completion.logprobs, strict=True)]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=0)  # without penalties
    assert num_changed >= 4
