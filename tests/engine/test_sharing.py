"""Several sequences of one request: parallel sampling and beam search through the whole engine."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import EOS, VOCAB_SIZE, Oracle, random_prompts
from serving import Params, serve

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams


@pytest.fixture(autouse=True)
def read_shared_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few: by default that is done only if it saves time."""
    monkeypatch.setattr("nanopaged.attention.torch_backend.MIN_SAVED", 0)


def texts(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def sampling(n: int, **extra: object) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 12, "seed": 5, "ignore_eos": True}
    return SamplingParams(n=n, **(fields | extra))


# ── parallel sampling ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("budget", [3, 2048])
def test_n_outputs_share_the_prompt_and_differ(qwen3: Oracle, block_size: int, budget: int) -> None:
    """The prompt is computed once for any n; the outputs differ, and are the same the next time."""
    (prompt,) = random_prompts(1, seed=2, longest=40)
    llm = LLM(qwen3.folder, block_size=block_size, max_num_batched_tokens=budget, num_blocks=300)
    (first,) = serve(llm, [prompt], [sampling(4)])
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts(first)}) == 4
    assert llm.engine.stats().num_prompt_tokens == len(prompt)
    (again,) = serve(llm, [prompt], [sampling(4)])
    assert texts(again) == texts(first)


def test_n_outputs_say_what_n_requests_with_the_same_noise_say(
    qwen3: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of output i, given to a request of its own: the shared K/V must make no difference."""
    (prompt,) = random_prompts(1, seed=3)
    llm = LLM(qwen3.folder, block_size=4, num_blocks=300)
    (together,) = serve(llm, [prompt], [sampling(4, logprobs=2)])
    from nanopaged import sampler

    original = sampler.uniform
    for index, completion in enumerate(together.outputs):
        monkeypatch.setattr(
            sampler, "uniform", lambda seed, _, position, i=index: original(seed, i, position)
        )
        (alone,) = serve(llm, [prompt], [sampling(1, logprobs=2)])
        assert alone.outputs[0].token_ids == completion.token_ids
        assert alone.outputs[0].cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-4)


def test_one_output_is_the_first_of_several(qwen3: Oracle) -> None:
    (prompt,) = random_prompts(1, seed=4)
    llm = LLM(qwen3.folder, num_blocks=300)
    (one,) = serve(llm, [prompt], [sampling(1)])
    (three,) = serve(llm, [prompt], [sampling(3)])
    assert texts(one)[0] == texts(three)[0]


def test_greedy_outputs_are_all_the_same(qwen3: Oracle) -> None:
    (prompt,) = random_prompts(1, seed=4)
    llm = LLM(qwen3.folder, num_blocks=300, block_size=4)
    (output,) = serve(llm, [prompt], [SamplingParams(n=3, temperature=0, max_tokens=9)])
    assert texts(output) == [qwen3.greedy(prompt, 9)] * 3


def test_each_output_stops_on_its_own_and_gives_its_blocks_back(qwen3: Oracle) -> None:
    """Eight outputs meet a stop token at different times; what is in use is always what the others need."""
    llm = LLM(qwen3.folder, block_size=1, num_blocks=400)
    engine = llm.engine
    params = sampling(8, max_tokens=40, stop_token_ids=list(range(12)), temperature=3.0)
    engine.add_request("a", [1, 2, 3], params)
    request = engine.requests["a"]
    seen_live = set()
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        engine.check_invariants()
        seen_live.add(len(request.live))
        # Blocks of one token: 3 shared ones of the prompt, and what each live sequence has computed since.
        own = [{*seq.block_table[3:]} for seq in request.live]
        assert engine.stats().num_used_blocks == (3 + len(set().union(*own)) if own else 0)
    assert len(seen_live) > 3, "they should not all end together"
    for completion in output.outputs:
        stopped = completion.token_ids[-1] < 12
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert completion.stop_reason == (completion.token_ids[-1] if stopped else None)


def test_siblings_kv_is_untouched_by_a_copy(qwen3: Oracle) -> None:
    """When one sibling writes, the bytes that the others read stay bit for bit what they were."""
    llm = LLM(qwen3.folder, block_size=8, num_blocks=40)
    engine, cache = llm.engine, llm.engine.runner.kv_cache
    engine.add_request("a", list(range(1, 12)), sampling(3, max_tokens=6))
    engine.step()
    request = engine.requests["a"]
    shared = request.live[0].block_table[1]
    assert all(seq.block_table[1] == shared for seq in request.live)
    before = cache.data[shared].clone()
    engine.step()
    tables = [seq.block_table[1] for seq in request.live]
    assert len(set(tables)) == 3
    assert shared in tables
    assert engine.stats().num_blocks_copied == 2
    for block_id in tables:  # 11 tokens in blocks of 8: three slots of the second one are shared past
        torch.testing.assert_close(cache.data[block_id][..., :3, :], before[..., :3, :], rtol=0, atol=0)
    engine.abort_request("a")


def test_stop_strings_and_text_of_several_outputs() -> None:
    """Each output has text of its own, cut at its own stop string."""
    llm = LLM(dtype="float32", num_blocks=200)
    params = SamplingParams(n=5, max_tokens=60, seed=1, temperature=0.9, stop="\n", ignore_eos=True)
    (output,) = llm.generate("ROMEO:\nI", params, use_tqdm=False)
    assert len({completion.text for completion in output.outputs}) == 5
    for completion in output.outputs:
        assert "\n" not in completion.text
        decoded = llm.engine.tokenizer.decode(completion.token_ids)
        assert decoded.startswith(completion.text)
        if completion.stop_reason == "\n":
            assert decoded[len(completion.text)] == "\n"
    assert any(completion.stop_reason == "\n" for completion in output.outputs)


def test_a_request_counts_for_all_its_sequences(qwen3: Oracle) -> None:
    """max_num_seqs = 4: a request of 3 and one of 2 never run together, two of 2 do."""
    llm = LLM(qwen3.folder, num_blocks=200, max_num_seqs=4)
    engine = llm.engine
    for name, n in (("a", 3), ("b", 2), ("c", 2)):
        engine.add_request(name, [n, 5, 6], sampling(n, max_tokens=5))
    running = []
    while engine.has_unfinished_requests():
        engine.step()
        running.append([r.request_id for r in engine.scheduler.running])
        assert sum(len(r.live) for r in engine.scheduler.running) <= 4
    assert ["a", "b"] not in running
    assert ["b", "c"] in running


def test_what_can_never_fit_is_refused(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder, num_blocks=10, block_size=4, max_num_seqs=4)
    with pytest.raises(ValueError, match="5 sequences, but max_num_seqs is 4"):
        llm.generate([1, 2], sampling(5), use_tqdm=False)
    with pytest.raises(ValueError, match="5 sequences, but max_num_seqs is 4"):
        llm.beam_search([1, 2], BeamSearchParams(beam_width=5), use_tqdm=False)
    # 9 prompt tokens: 2 full blocks are shared, each of 3 sequences needs 3 more for 20 tokens: 11.
    with pytest.raises(
        ValueError, match="3 sequences may need 11 blocks of 4 slots, but the whole pool has 10"
    ):
        llm.generate([1] * 9, sampling(3, max_tokens=12), use_tqdm=False)
    (fits,) = serve(llm, [[1] * 9], [sampling(3, max_tokens=8)])  # 2 + 3 * 2 blocks
    assert len(texts(fits)) == 3


# ── beam search ───────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def transformers_beams(
    oracle: Oracle, prompt: list[int], params: BeamSearchParams, eos: int | list[int] | None
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
        eos_token_id=eos,
        pad_token_id=VOCAB_SIZE - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    results = []
    for row, score in zip(
        out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True
    ):
        end = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), params.max_tokens)
        results.append((row[:end], score))
    return results


def check_beams(
    output: RequestOutput, expected: list[tuple[list[int], float]], length_penalty: float
) -> None:
    assert texts(output) == [token_ids for token_ids, _ in expected]
    for completion, (token_ids, score) in zip(output.outputs, expected, strict=True):
        assert completion.score == pytest.approx(score, abs=1e-4)
        ours = completion.cumulative_logprob / len(token_ids) ** length_penalty
        assert ours == pytest.approx(score, abs=1e-4)
        assert completion.finish_reason == ("stop" if token_ids[-1] == EOS else "length")


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_beams_equal_transformers(
    oracle: Oracle, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    """Six prompts in one batch, each with the hypotheses, order and scores that it has alone."""
    prompts = random_prompts(6, seed=width, longest=20)
    params = BeamSearchParams(
        beam_width=width, max_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping
    )
    llm = LLM(oracle.folder, dtype="float32", block_size=4, num_blocks=400)
    for prompt, output in zip(prompts, serve(llm, prompts, [params] * 6), strict=True):
        check_beams(output, transformers_beams(oracle, prompt, params, EOS), length_penalty)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_with_likely_ends(qwen3: Oracle, early_stopping: bool | str) -> None:
    """A quarter of the vocabulary ends a text: hypotheses come early, late, and several in a step."""
    ends = [EOS, *range(30, 53)]
    params = BeamSearchParams(
        beam_width=4, max_tokens=15, early_stopping=early_stopping, stop_token_ids=ends, length_penalty=0.6
    )
    prompts = random_prompts(12, seed=1, longest=10)
    llm = LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=400)
    lengths = set()
    for prompt, output in zip(prompts, serve(llm, prompts, [params] * 12), strict=True):
        expected = transformers_beams(qwen3, prompt, params, ends)
        assert texts(output) == [token_ids for token_ids, _ in expected]
        for completion, (_, score) in zip(output.outputs, expected, strict=True):
            assert completion.score == pytest.approx(score, abs=1e-4)
        lengths |= {len(text) for text in texts(output)}
    assert {1, 2, 3} <= lengths
    assert max(lengths) > 6


def test_beams_with_min_tokens_and_without_ends(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=400)
    (prompt,) = random_prompts(1, seed=7)
    never = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    (output,) = serve(llm, [prompt], [never])
    assert texts(output) == [t for t, _ in transformers_beams(qwen3, prompt, never, None)]
    ends = [EOS, *range(30, 53)]
    late = BeamSearchParams(beam_width=3, max_tokens=12, min_tokens=6, stop_token_ids=ends)
    (output,) = serve(llm, [prompt], [late])
    assert texts(output) == [t for t, _ in transformers_beams(qwen3, prompt, late, ends)]
    assert min(map(len, texts(output))) >= 7


def test_beams_that_all_end(qwen3: Oracle) -> None:
    """Where every token of the vocabulary ends a text, the first ones are the hypotheses."""
    llm = LLM(qwen3.folder, num_blocks=100)
    params = BeamSearchParams(beam_width=3, max_tokens=5, stop_token_ids=range(VOCAB_SIZE))
    (output,) = serve(llm, [[1, 2, 3]], [params])
    best = qwen3.logprobs([1, 2, 3])[-1].topk(3).indices.tolist()
    assert texts(output) == [[token_id] for token_id in best]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_beam_proposes_no_token_that_may_not_come_yet(qwen3: Oracle, early_stopping: bool | str) -> None:
    """Only token 5 may come before min_tokens: until then there are fewer beams than the width."""
    llm = LLM(qwen3.folder, num_blocks=100)
    stop = [token_id for token_id in range(VOCAB_SIZE) if token_id != 5]
    params = BeamSearchParams(
        beam_width=3, max_tokens=6, min_tokens=3, early_stopping=early_stopping, stop_token_ids=stop
    )
    (output,) = serve(llm, [[1, 2, 3]], [params])
    assert len(output.outputs) == 3
    for completion in output.outputs:
        assert completion.token_ids[:3] == [5, 5, 5]
        logprobs = qwen3.logprobs([1, 2, 3, *completion.token_ids])[2:-1]
        expected = sum(float(row[t]) for row, t in zip(logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_one_beam_is_greedy(qwen3: Oracle, early_stopping: bool | str) -> None:
    prompts = random_prompts(8, seed=9, longest=8)
    llm = LLM(qwen3.folder, dtype="float32", num_blocks=200)
    params = BeamSearchParams(beam_width=1, max_tokens=30, early_stopping=early_stopping)
    for prompt, output in zip(prompts, serve(llm, prompts, [params] * 8), strict=True):
        assert texts(output) == [qwen3.greedy(prompt, 30)]


def mixed_params(rng: random.Random) -> Params:
    kind = rng.choice(["greedy", "sampled", "several", "beams"])
    max_tokens = rng.randint(1, 14)
    if kind == "beams":
        return BeamSearchParams(beam_width=rng.randint(2, 4), max_tokens=max_tokens)
    if kind == "greedy":
        return SamplingParams(temperature=0, max_tokens=max_tokens)
    n = rng.randint(2, 4) if kind == "several" else 1
    return SamplingParams(n=n, temperature=1.0, seed=rng.randint(0, 99), max_tokens=max_tokens)


Alone = list[tuple[list[int], Params, RequestOutput]]


@pytest.fixture(scope="module")
def alone(qwen3: Oracle) -> Alone:
    """Prompts that often begin alike, params of all kinds, and the output of each request alone."""
    rng = random.Random(6)
    stem = random_prompts(1, seed=1, longest=9)[0]
    prompts = [stem[: rng.randint(0, len(stem))] + p for p in random_prompts(14, seed=2, longest=16)]
    params = [mixed_params(rng) for _ in prompts]
    ample = LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=400, enable_prefix_caching=False)
    return [(prompt, p, serve(ample, [prompt], p)[0]) for prompt, p in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize(("num_blocks", "budget"), [(300, 2048), (300, 5), (46, 2048), (23, 7)])
def test_all_kinds_mixed_give_what_each_gives_alone(
    qwen3: Oracle, alone: Alone, num_blocks: int, budget: int, preemption: str, prefix_caching: bool
) -> None:
    """Greedy, sampled, n > 1 and beams in one batch, in pools that force preemption of whole families."""
    llm = LLM(
        qwen3.folder,
        dtype="float32",
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
        preemption=preemption,
    )
    prompts, params, expected = map(list, zip(*alone, strict=True))
    for one, other in zip(expected, serve(llm, prompts, params), strict=True):
        assert texts(one) == texts(other)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
            assert a.finish_reason == b.finish_reason
    assert llm.engine.stats().num_blocks_copied > 0
    stats = llm.engine.stats()
    counts = {"recompute": stats.num_preemptions_recompute, "swap": stats.num_preemptions_swap}
    counts["auto"] = sum(counts.values())
    assert (counts[preemption] > 0) == (num_blocks < 100)


@pytest.mark.parametrize("beams", [True, False])
def test_a_preempted_family_comes_back_without_chunked_prefill(qwen3: Oracle, beams: bool) -> None:
    """Past bug: the family's tokens together exceed any step's budget, and it waited for ever."""
    llm = LLM(
        qwen3.folder,
        num_blocks=20,
        block_size=8,
        max_model_len=100,
        max_num_batched_tokens=100,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        preemption="recompute",
    )
    engine = llm.engine
    engine.add_request("early", [1] * 8, SamplingParams(max_tokens=90, ignore_eos=True))
    for _ in range(50):
        engine.step()
    family = (
        BeamSearchParams(beam_width=4, max_tokens=26, ignore_eos=True)
        if beams
        else sampling(4, max_tokens=26)
    )
    engine.add_request("family", [2] * 30, family)
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
        engine.check_invariants()
    assert last.request_id == "family"
    assert last.metrics.num_preemptions > 0
    assert [len(text) for text in texts(last)] == [26] * 4


def test_unfinished_beams_are_reported_once_a_token(qwen3: Oracle) -> None:
    """Budget 1: three steps for one token of each of three beams, and one report."""
    llm = LLM(qwen3.folder, num_blocks=40, max_num_batched_tokens=1)
    llm.engine.add_request("a", [1, 2], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    reports = []
    while llm.engine.has_unfinished_requests():
        reports += llm.engine.step()
    assert [len(report.outputs[0].token_ids) for report in reports] == [1, 2, 3, 4]


def test_beams_are_streamed_and_aborted(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder, num_blocks=200)
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    states = list(llm.stream([1, 2, 3], params))
    assert [state.finished for state in states] == [False] * 7 + [True]
    assert all(len(state.outputs) == 3 for state in states)
    for state in states[:-1]:
        scores = [completion.cumulative_logprob for completion in state.outputs]
        assert scores == sorted(scores, reverse=True)
    for _ in llm.stream([1, 2, 3], params):
        break
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.check_invariants()


def test_beam_search_text_and_types() -> None:
    llm = LLM(dtype="float32", num_blocks=300)
    params = BeamSearchParams(beam_width=3, max_tokens=20)
    (output,) = llm.beam_search("ROMEO:\n", params, use_tqdm=False)
    for completion in output.outputs:
        tokens = completion.token_ids
        assert completion.text == llm.engine.tokenizer.decode(tokens, skip_special_tokens=True)
    assert llm.generate("ROMEO:\n", params, use_tqdm=False)[0].outputs == output.outputs
    stop_id = output.outputs[0].token_ids[6]
    stopping = BeamSearchParams(beam_width=3, max_tokens=20, stop_token_ids=[stop_id])
    (stopped,) = llm.beam_search("ROMEO:\n", stopping, use_tqdm=False)
    ended = [completion for completion in stopped.outputs if completion.stop_reason == stop_id]
    assert ended
    for completion in ended:
        assert completion.text == llm.engine.tokenizer.decode(completion.token_ids[:-1])
    with pytest.raises(TypeError, match="must be BeamSearchParams, got SamplingParams"):
        llm.beam_search("A", SamplingParams())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"beam_width": 0}, ValueError, "beam_width is 0"),
        ({}, TypeError, "beam_width"),
        ({"beam_width": 2, "early_stopping": "maybe"}, ValueError, "early_stopping is 'maybe'"),
        ({"beam_width": 2, "early_stopping": 1}, ValueError, "early_stopping is 1"),
        ({"beam_width": 2, "length_penalty": float("nan")}, ValueError, "length_penalty is nan"),
        ({"beam_width": 2, "length_penalty": -300}, ValueError, "length_penalty is -300"),
        ({"beam_width": 2, "max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"beam_width": 2, "min_tokens": 20}, ValueError, "min_tokens is 20"),
        ({"beam_width": 2, "temperature": 1.0}, TypeError, "temperature"),
    ],
)
def test_bad_beam_search_params(fields: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        BeamSearchParams(**fields)
