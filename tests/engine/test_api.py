"""The API: errors for wrong arguments, failed steps, and what the outputs and statistics contain."""

from __future__ import annotations

import copy
import math
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import KERNELS, MAX_MODEL_LEN, VOCAB_SIZE, Oracle, tokens_of

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.sequence import NonFiniteLogits, ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=8)


@pytest.fixture(scope="module")
def llm(qwen3: Oracle) -> LLM:
    return LLM(qwen3.folder, num_blocks=8, block_size=8, enforce_eager=True)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(dtype="float32", num_blocks=64)


def generate(llm: LLM, prompts: object, params: object) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


# ── options ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "field", "value", "error", "message"),
    [
        (EngineConfig, "blok_size", 1, TypeError, "unexpected keyword argument 'blok_size'"),
        (EngineConfig, "block_size", 0, ValueError, "block_size is 0.*at least 1"),
        (EngineConfig, "memory_utilization", math.nan, ValueError, "memory_utilization is nan"),
        (EngineConfig, "dtype", torch.int8, ValueError, "dtype is 'int8', but must be one of auto, float32"),
        (EngineConfig, "enable_prefix_caching", "yes", TypeError, "enable_prefix_caching must be True or"),
        (EngineConfig, "preemption", "hope", ValueError, "preemption is 'hope'.*swap"),
        (SamplingParams, "temperature", -0.1, ValueError, "temperature is -0.1"),
        (SamplingParams, "temperature", "hot", TypeError, "temperature must be a number"),
        (SamplingParams, "top_p", 0.0, ValueError, "top_p is 0"),
        (SamplingParams, "min_tokens", 17, ValueError, "min_tokens is 17, but max_tokens is only 16"),
        (SamplingParams, "seed", 1.5, TypeError, "seed must be an int"),
        (SamplingParams, "n", None, TypeError, "n must be an int, got None"),
        (BeamSearchParams, "beam_width", None, TypeError, "beam_width must be an int, got None"),
        (SamplingParams, "stop", ["a", ""], ValueError, "empty string"),
        (SamplingParams, "stop", [3], TypeError, "stop must be a string"),
        (SamplingParams, "stop", b"x", TypeError, "stop must be a string or a list of strings, got 120"),
        (SamplingParams, "stop_token_ids", ["a"], TypeError, "stop_token_ids must be an int, got 'a'"),
        (SamplingParams, "temperature", True, TypeError, "temperature must be a number"),
        (SamplingParams, "prompt_logprobs", True, TypeError, "prompt_logprobs must be an int"),
        (SamplingParams, "repetition_penalty", 0, ValueError, "repetition_penalty is 0"),
        (BeamSearchParams, "beam_width", 0, ValueError, "beam_width is 0"),
        (BeamSearchParams, "early_stopping", 1, ValueError, "early_stopping is 1"),
        (BeamSearchParams, "length_penalty", -300, ValueError, "length_penalty is -300"),
    ],
)
def test_a_bad_option(options: type, field: str, value: object, error: type, message: str) -> None:
    needed = {"beam_width": 2} if options is BeamSearchParams else {}
    with pytest.raises(error, match=message):
        options(**needed | {field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, f"max_model_len is 5000.*{MAX_MODEL_LEN}"),
        ({"max_num_batched_tokens": 50, "enable_chunked_prefill": False}, "50.*enable_chunked_prefill"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
    ],
)
def test_a_config_that_does_not_suit_the_model(qwen3: Oracle, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(qwen3.folder, **options)


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "the prompt is empty"),
        ([1, VOCAB_SIZE], ValueError, f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ([-1], ValueError, "token id -1"),
        ([1, 2.5], TypeError, "token ids must be ints, got 2.5"),
        ("text", ValueError, "no tokenizer"),
        (b"bytes", TypeError, "a prompt is a str or a list of token ids, got bytes"),
        ({"tokens": [1]}, ValueError, "a prompt as a dict has a 'prompt' text or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, ValueError, "multi_modal_data"),
        ({"cache_salt": "x"}, TypeError, "a prompt is a str or a list of token ids, got NoneType"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, ValueError, "'cache_salt' text that is not empty"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, ValueError, "'cache_salt' text .* got .*5"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, ValueError, "surrogates not allowed"),
        ([1] * MAX_MODEL_LEN, ValueError, f"{MAX_MODEL_LEN} tokens, but max_model_len is {MAX_MODEL_LEN}"),
        ([1] * 58, ValueError, r"may need 9 blocks of 8 slots, but the whole pool has 8"),
    ],
)
def test_a_bad_prompt_leaves_the_others_alone(
    llm: LLM, qwen3: Oracle, prompt: object, error: type, message: str
) -> None:
    engine = llm.engine
    engine.add_request("good", [1, 2, 3], GREEDY)
    engine.step()
    with pytest.raises(error, match=message):
        engine.add_request("bad", prompt, SamplingParams(max_tokens=10))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        engine.check_invariants()
    assert output.outputs[0].token_ids == qwen3.greedy([1, 2, 3], 8)
    assert engine.stats().num_used_blocks == 0


NOT_7 = [token_id for token_id in range(VOCAB_SIZE) if token_id != 7]  # 7 is end-of-sequence


@pytest.mark.parametrize(
    ("request_id", "params", "error", "message"),
    [
        ("x", SamplingParams(stop="x"), ValueError, "stop strings need a tokenizer"),
        ("x", SamplingParams(logprobs=98), ValueError, "logprobs is 98, but the vocabulary has 97"),
        (
            "x",
            SamplingParams(prompt_logprobs=98),
            ValueError,
            "prompt_logprobs is 98, but the vocabulary has 97",
        ),
        ("x", SamplingParams(stop_token_ids=[97]), ValueError, "stop token id 97"),
        ("x", SamplingParams(stop_token_ids=NOT_7, min_tokens=2), ValueError, "stop_token_ids has all 97"),
        ("x", {"max_tokens": 3}, TypeError, "must be SamplingParams or BeamSearchParams, got dict"),
        (7, GREEDY, TypeError, "request_id must be a str"),
        ("taken", GREEDY, ValueError, "'taken' is taken"),
    ],
)
def test_a_bad_request(llm: LLM, request_id: object, params: object, error: type, message: str) -> None:
    llm.engine.add_request("taken", [1], GREEDY)
    with pytest.raises(error, match=message):
        llm.engine.add_request(request_id, [1], params)
    llm.engine.abort_request("taken")
    for unknown in ("taken", ["a", "b"]):
        with pytest.raises(ValueError, match="no unfinished request has the id"):
            llm.engine.abort_request(unknown)
    assert not llm.engine.has_unfinished_requests()


def test_numpy_and_torch_numbers_are_numbers(llm: LLM, qwen3: Oracle) -> None:
    """Past bug: a numpy seed passed the checks and broke every step."""
    expected = qwen3.greedy([1, 2, 3], 8)
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3), [np.int32(1), 2, 3]):
        assert generate(llm, prompt, GREEDY) == [expected]
    outputs = llm.generate([torch.tensor([1, 2, 3]), np.array([4])], GREEDY, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 1]
    texts = set()
    for seed in (np.int64(5), np.uint64(5), 5, 5 + 2**64):
        params = SamplingParams(seed=seed, max_tokens=np.int64(6), top_k=np.int32(9), ignore_eos=True)
        texts.add(str(generate(llm, [1, 2, 3], params)))
    assert len(texts) == 1


def test_keywords_and_the_order_of_results(tiny: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = tiny.generate(prompts=["A", [5, 6], "C"], sampling_params=params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["A", None, "C"]
    assert tiny.generate([], use_tqdm=False) == []
    tiny.beam_search(prompts=[{"prompt": "A"}], params=BEAMS, use_tqdm=False)
    tiny.chat(messages=[{"role": "user", "content": "Hi"}], sampling_params=GREEDY, use_tqdm=False)
    assert repr(tiny) == "LLM(model='tiny', dtype=torch.float32, device=cpu, 64 blocks of 16 tokens)"


HALF = "half a pair: \ud800"
PICTURE = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}


@pytest.mark.parametrize(
    ("call", "argument", "error", "message"),
    [
        (LLM.generate, None, TypeError, "a prompt is a str or a list of token ids, got NoneType"),
        (LLM.generate, b"bytes", TypeError, "a prompt is a str or a list of token ids, got bytes"),
        (LLM.generate, HALF, ValueError, "surrogates not allowed"),
        (LLM.generate, [[1], [], [3]], ValueError, "the prompt is empty"),
        (LLM.stream, ["a"], TypeError, "token ids must be ints, got 'a'"),
        (LLM.chat, "hello", TypeError, "a conversation is a list"),
        (LLM.chat, {"role": "user", "content": "hello"}, TypeError, "a conversation is a list"),
        (LLM.chat, [], ValueError, "the conversation is empty"),
        (LLM.chat, [{"role": "user", "content": HALF}], ValueError, "surrogates"),
        (LLM.chat, [{"role": "user"}], ValueError, "needs a 'role' and a 'content'"),
        (LLM.chat, [{"role": "user", "content": [PICTURE]}], ValueError, "may have parts .* only, got"),
        (LLM.chat, [{"role": "user", "content": ["text"]}], ValueError, "may have parts .* only, got"),
    ],
)
def test_wrong_arguments(tiny: LLM, call: object, argument: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(tiny, argument)
    assert not tiny.engine.has_unfinished_requests()


def test_arguments_that_do_not_fit_together(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling_params"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    with pytest.raises(TypeError, match="config must be an EngineConfig, got 'some/model'"):
        LLMEngine("some/model")


def test_an_end_of_sequence_outside_the_vocabulary_is_never_drawn(qwen3: Oracle, tmp_path: Path) -> None:
    shutil.copytree(qwen3.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [500]}', encoding="utf-8")
    (tokens,) = generate(LLM(tmp_path, num_blocks=8), [1, 2], SamplingParams(min_tokens=5, max_tokens=5))
    assert len(tokens) == 5


# ── failed steps, and calls that share an engine ──────────────────────────────────────────────────


def test_scores_that_are_not_finite_are_an_error(llm: LLM) -> None:
    """NaN must not become a token; the message names the request, which can then be aborted."""
    engine, model = llm.engine, llm.engine.runner.model
    model.logits = lambda hidden: type(model).logits(model, hidden) * math.nan
    for params in (GREEDY, SamplingParams(), BEAMS):
        engine.add_request("sick", [1, 2, 3], params)
        with pytest.raises(FloatingPointError, match="request 'sick' at position 3 are not finite") as caught:
            engine.step()
        engine.check_invariants()
        engine.abort_request(caught.value.request_id)
        copied = pickle.loads(pickle.dumps(caught.value))  # as between processes
        assert (str(copied), copied.request_id) == (str(caught.value), "sick")
    del model.logits


@pytest.mark.parametrize("backend", ["torch", "cpp", "reference"])
def test_nan_does_not_reach_the_tokens_before_it(
    qwen3: Oracle, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past bug: queries of a prefill read the values after them with weight 0, and 0 · NaN is NaN.

    So NaN in a prompt's last token spoiled the blocks before it, which another request shares. That one was
    blamed and aborted.
    """
    monkeypatch.setenv("NANOPAGED_CACHE", str(KERNELS))  # for backend = "cpp"
    llm = LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=40, attention_backend=backend)
    engine = llm.engine
    prompt = list(range(1, 14))
    (alone,) = generate(llm, [prompt], GREEDY)
    engine.reset_prefix_cache()
    sick = next(token for token in range(50, 60) if token not in alone)
    engine.runner.model.embed_tokens.register_forward_hook(
        lambda _, inputs, embedded: embedded.masked_fill((inputs[0] == sick)[:, None], math.nan)
    )
    engine.add_request("sick", [*prompt, sick], GREEDY)
    engine.add_request("well", prompt, GREEDY)  # shares three blocks in the same step
    with pytest.raises(NonFiniteLogits, match="request 'sick'") as caught:
        engine.step()
    engine.abort_request(caught.value.request_id)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.outputs[0].token_ids == alone


def test_logits_that_are_not_finite_fail_their_own_call_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past bug: a call that stepped the engine failed with another one's id, and aborted its own request."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = {n: generate(llm, [n, n], params)[0] for n in (1, 2)}
    well, ill = llm.stream([1, 1], params), llm.stream([3, 3], params)
    next(well)
    next(ill)
    llm.engine.add_request("theirs", [3, 3], params)
    execute = llm.engine.runner.execute

    def fail(batch: ScheduledBatch) -> StepResult:
        for seq in batch.sequences:
            if seq.request.prompt_token_ids == [3, 3]:
                raise NonFiniteLogits(f"{seq.request.request_id} is ill", seq.request.request_id)
        return execute(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", fail)
    with pytest.raises(NonFiniteLogits, match="llm-"):
        llm.generate([[3, 3], [2, 2]], params, use_tqdm=False)
    assert generate(llm, [[2, 2]], params) == [alone[2]]
    *_, last = well
    assert last.outputs[0].token_ids == alone[1]
    with pytest.raises(NonFiniteLogits, match="llm-"):
        list(ill)
    (output,) = llm.engine.step()  # the owner of a request of the engine gets it aborted
    assert (output.request_id, output.outputs[0].finish_reason) == ("theirs", "abort")
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.check_invariants()


def test_requests_of_the_engine_that_end_meanwhile_are_reported_by_its_next_step(llm: LLM) -> None:
    """Past bug: the steps of generate and stream ended them, and their outputs were lost."""
    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9))
    (expected,) = generate(llm, [[1, 2]], short)
    for serve in (
        lambda: llm.generate([[3, 4], [5]], long, use_tqdm=False),
        lambda: list(llm.stream([3, 4], long)),
    ):
        for request_id in ("a", "b"):
            llm.engine.add_request(request_id, [1, 2], short)
        serve()
        assert llm.engine.abort_request("b").finished
        (output,) = llm.engine.step()
        assert (output.request_id, output.outputs[0].token_ids) == ("a", expected)
        assert output.metrics.finish_time < time.monotonic()
        assert output.outputs[0].finish_reason == "length"
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.step() == []
        llm.engine.check_invariants()


# ── what comes back ───────────────────────────────────────────────────────────────────────────────


def test_metrics_and_stats_add_up(tiny: LLM) -> None:
    before = tiny.engine.stats()
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)
    outputs = tiny.generate(["Enter three witches, with a cauldron: " * 3] * 2, params, use_tqdm=False)
    after = tiny.engine.stats()
    num_prompt = len(outputs[0].prompt_token_ids)
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached == [0, (num_prompt - 1) // 16 * 16]
    counted = {"prefix_cache_hits": sum(cached), "prefix_cache_queries": 2 * num_prompt, "num_steps": 5}
    counted |= {"num_prompt_tokens": 2 * num_prompt, "num_generated_tokens": 10}
    assert {name: getattr(after, name) - getattr(before, name) for name in counted} == counted
    assert after.num_free_blocks == after.num_blocks
    assert after.num_cached_blocks > 0
    for output in outputs:
        assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finish_time
        assert output.metrics.num_preemptions == 0
        assert copy.deepcopy(output) == pickle.loads(pickle.dumps(output)) == output


def test_an_output_is_the_users_own(llm: LLM) -> None:
    """Changing the lists in an output does not change the request."""
    llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0))
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
        assert len(output.prompt_logprobs) == 3
        output.prompt_token_ids.clear()
        output.prompt_logprobs.clear()
        length = len(output.outputs[0].token_ids)
        output.outputs[0].token_ids.clear()
    assert length == 4


def test_generated_tokens_are_counted_alike(llm: LLM) -> None:
    for params, expected in (
        (SamplingParams(n=3, max_tokens=5, ignore_eos=True), 15),
        (BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True), 20),
    ):
        before = llm.engine.stats().num_generated_tokens
        llm.generate([1, 2], params, use_tqdm=False)
        assert llm.engine.stats().num_generated_tokens - before == expected
