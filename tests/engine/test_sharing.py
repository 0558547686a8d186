"""Several sequences of one request: parallel sampling and beam search through the whole engine."""

from __future__ import annotations

import pytest
import torch
from conftest import EOS, VOCAB_SIZE, Oracle, random_prompts, serve

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams


def texts(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def sampling(n: int, **extra: object) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 12, "seed": 5, "ignore_eos": True}
    return SamplingParams(n=n, **(fields | extra))


# ── parallel sampling ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("block_size", "budget"), [(1, 3), (7, 3), (4, 2048)])
def test_n_outputs_share_the_prompt_and_differ(qwen3: Oracle, block_size: int, budget: int) -> None:
    """The prompt is computed once for any n; the outputs differ, and are the same the next time."""
    (prompt,) = random_prompts(1, seed=2, longest=40)
    llm = LLM(qwen3.folder, block_size=block_size, max_num_batched_tokens=budget, num_blocks=300)
    (first,) = serve(llm, [prompt], sampling(4))
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts(first)}) == 4
    assert llm.engine.stats().num_prompt_tokens == len(prompt)
    assert texts(serve(llm, [prompt], sampling(4))[0]) == texts(first)
    assert texts(serve(llm, [prompt], sampling(1))[0])[0] == texts(first)[0]
    (greedy,) = serve(llm, [prompt], SamplingParams(n=3, temperature=0, max_tokens=9))
    assert texts(greedy) == [qwen3.greedy(prompt, 9)] * 3


def test_siblings_kv_is_untouched_by_a_copy(qwen3: Oracle) -> None:
    """When one sibling writes, the bytes that the others read stay bit for bit what they were."""
    engine = LLM(qwen3.folder, block_size=8, num_blocks=40).engine
    data = engine.runner.kv_cache.data
    engine.add_request("a", list(range(1, 12)), sampling(3, max_tokens=6))
    engine.step()
    live = engine.requests["a"].live
    (shared,) = {seq.block_table[1] for seq in live}
    before = data[shared].clone()
    engine.step()
    tables = {seq.block_table[1] for seq in live}
    assert shared in tables
    assert (len(tables), engine.stats().num_blocks_copied) == (3, 2)
    for block_id in tables:  # 11 tokens in blocks of 8: three slots of the second one are shared past
        torch.testing.assert_close(data[block_id][..., :3, :], before[..., :3, :], rtol=0, atol=0)


def test_what_can_never_fit_is_refused(qwen3: Oracle) -> None:
    """9 prompt tokens: 2 full blocks are shared, each of 3 sequences needs 4 more for 24 tokens: 14."""
    llm = LLM(qwen3.folder, num_blocks=11, block_size=4, max_num_seqs=4)
    for params, message in (
        (sampling(5), "5 sequences, but max_num_seqs is 4"),
        (BeamSearchParams(beam_width=5), "5 sequences, but max_num_seqs is 4"),
        (sampling(3, max_tokens=16), "3 sequences may need 14 blocks of 4 slots, but the whole pool has 11"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate([1] * 9, params, use_tqdm=False)
    (fits,) = serve(llm, [[1] * 9], sampling(3, max_tokens=12))  # 2 + 3 * 3 blocks: all
    assert len(texts(fits)) == 3


# ── beam search ───────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def transformers_beams(
    oracle: Oracle, prompt: list[int], params: BeamSearchParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """[(generated tokens, score), …] of `generate(num_beams=…)`, best first."""
    ids = torch.tensor([prompt])
    out = oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=VOCAB_SIZE - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows, results = out.sequences[:, len(prompt) :].tolist(), []
    for row, score in zip(rows, out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), params.max_tokens)
        results.append((row[:end], score))
    return results


ENDS = [EOS, *range(30, 53)]  # a quarter of the vocabulary


@pytest.fixture(scope="module")
def beams(qwen3: Oracle) -> LLM:
    return LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=400)


def check_beams(
    oracle: Oracle, llm: LLM, prompts: list[list[int]], params: BeamSearchParams, ends: list[int]
) -> list[RequestOutput]:
    """The prompts together have the hypotheses, order and scores that each has alone in transformers."""
    outputs = serve(llm, prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = transformers_beams(oracle, prompt, params, ends)
        assert texts(output) == [token_ids for token_ids, _ in expected]
        for completion, (token_ids, score) in zip(output.outputs, expected, strict=True):
            assert completion.score == pytest.approx(score, abs=1e-4)
            ours = completion.cumulative_logprob / len(token_ids) ** params.length_penalty
            assert ours == pytest.approx(score, abs=1e-4)
            assert completion.finish_reason == ("stop" if token_ids[-1] in ends else "length")
    return outputs


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(2, 0.0, True), (5, 1.0, True), (5, 0.0, False), (2, 2.0, False), (2, 1.0, "never"), (5, 2.0, "never")],
)
def test_beams_equal_transformers(
    beams: LLM, qwen3: Oracle, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    """Six prompts in one batch."""
    rules = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    prompts = random_prompts(6, seed=width, longest=20)
    check_beams(qwen3, beams, prompts, BeamSearchParams(beam_width=width, max_tokens=12, **rules), [EOS])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_with_likely_ends(beams: LLM, qwen3: Oracle, early_stopping: bool | str) -> None:
    """Hypotheses come early, late, and several in a step."""
    rules = {"early_stopping": early_stopping, "stop_token_ids": ENDS, "length_penalty": 0.6}
    params = BeamSearchParams(beam_width=4, max_tokens=15, **rules)
    outputs = check_beams(qwen3, beams, random_prompts(12, seed=1, longest=10), params, ENDS)
    lengths = {len(text) for output in outputs for text in texts(output)}
    assert {1, 2, 3} <= lengths
    assert max(lengths) > 6


@pytest.mark.parametrize(
    ("ends", "rules"),
    [([], {"ignore_eos": True}), (ENDS, {"min_tokens": 6, "stop_token_ids": ENDS})],
)
def test_beams_without_ends_or_with_late_ones(
    beams: LLM, qwen3: Oracle, ends: list[int], rules: dict[str, object]
) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, **rules)
    (output,) = check_beams(qwen3, beams, random_prompts(1, seed=7), params, ends)
    assert min(map(len, texts(output))) > params.min_tokens


def test_beams_that_all_end(beams: LLM, qwen3: Oracle) -> None:
    """Where every token of the vocabulary ends a text, the first ones are the hypotheses."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, stop_token_ids=range(VOCAB_SIZE))
    (output,) = serve(beams, [[1, 2, 3]], params)
    best = qwen3.logprobs([1, 2, 3])[-1].topk(3).indices.tolist()
    assert texts(output) == [[token_id] for token_id in best]


def test_unfinished_beams_are_reported_once_a_token(qwen3: Oracle) -> None:
    """Budget 1: three steps for one token of each of three beams, and one report."""
    llm = LLM(qwen3.folder, num_blocks=40, max_num_batched_tokens=1)
    states = list(llm.stream([1, 2], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)))
    assert [len(state.outputs[0].token_ids) for state in states] == list(range(1, 9))
    assert [state.finished for state in states] == [False] * 7 + [True]
    for state in states[:-1]:
        scores = [completion.cumulative_logprob for completion in state.outputs]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)


def test_the_text_of_beams() -> None:
    llm = LLM(dtype="float32", num_blocks=300)
    params = BeamSearchParams(beam_width=3, max_tokens=20)
    (output,) = llm.beam_search("ROMEO:\n", params, use_tqdm=False)
    for completion in output.outputs:
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert llm.generate("ROMEO:\n", params, use_tqdm=False)[0].outputs == output.outputs
    with pytest.raises(TypeError, match="must be BeamSearchParams, got SamplingParams"):
        llm.beam_search("A", SamplingParams())
