"""The API: errors for wrong arguments, failed steps, and what the outputs and statistics contain."""

from __future__ import annotations

import math
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MAX_MODEL_LEN, VOCAB_SIZE, Oracle
from faults import interrupt_second_append

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.checks.failures import NonFiniteLogits
from nanopaged.sequence import ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(qwen3: Oracle) -> LLM:
    return LLM(qwen3.folder, num_blocks=8, block_size=8, enforce_eager=True)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(dtype="float32", num_blocks=64)


# ── configuration ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("block_size", 0, ValueError, "block_size is 0.*at least 1"),
        ("block_size", 2.5, TypeError, "block_size must be an int"),
        ("num_blocks", -3, ValueError, "num_blocks is -3"),
        ("max_num_seqs", 0, ValueError, "max_num_seqs is 0"),
        ("max_num_batched_tokens", 0, ValueError, "max_num_batched_tokens is 0"),
        ("max_model_len", 0, ValueError, "max_model_len is 0"),
        ("memory_utilization", 1.5, ValueError, "memory_utilization is 1.5"),
        ("memory_utilization", math.nan, ValueError, "memory_utilization is nan"),
        ("dtype", "int8", ValueError, "dtype is 'int8'.*float32"),
        ("attention_backend", "magic", ValueError, "attention_backend is 'magic'.*torch"),
        ("load_format", "gguf", ValueError, "load_format is 'gguf'"),
        ("enable_prefix_caching", "yes", TypeError, "enable_prefix_caching must be True or False"),
        ("preemption", "hope", ValueError, "preemption is 'hope'.*swap"),
        ("watermark", -0.1, ValueError, "watermark is -0.1"),
        ("num_host_blocks", -1, ValueError, "num_host_blocks is -1"),
        ("tensor_parallel_size", 0, ValueError, "tensor_parallel_size is 0"),
        ("enforce_eager", 1, TypeError, "enforce_eager must be True or False"),
        ("seed", -1, ValueError, "seed is -1"),
        ("model", 5, TypeError, "model must be a folder"),
        ("no_such_field", 1, TypeError, "no_such_field"),
    ],
)
def test_a_bad_engine_config(field: str, value: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(**{field: value})


def test_a_config_that_does_not_suit_the_model(qwen3: Oracle) -> None:
    with pytest.raises(ValueError, match=f"max_model_len is 5000.*{MAX_MODEL_LEN}"):
        LLM(qwen3.folder, max_model_len=5000)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 50.*enable_chunked_prefill"):
        LLM(qwen3.folder, max_num_batched_tokens=50, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="device 'abacus' cannot be used"):
        LLM(qwen3.folder, device="abacus")
    with pytest.raises(TypeError, match="no_such_field"):
        LLM(qwen3.folder, no_such_field=1)


def test_memory_that_does_not_suffice(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the numbers: blocks needed, bytes of each, blocks that fit."""
    monkeypatch.setattr("nanopaged.model.sizing.available_memory", lambda: 100_000)
    with pytest.raises(ValueError, match=r"needs 10 blocks of 8,192 bytes.*only 6 fit in the 50,000 bytes"):
        LLM(qwen3.folder, dtype="float32", block_size=16, device="cpu")
    llm = LLM(qwen3.folder, dtype="float32", memory_utilization=1.0, device="cpu")
    assert llm.engine.stats().num_blocks == 12


def test_the_pool_is_never_larger_than_useful(qwen3: Oracle) -> None:
    engine = LLM(qwen3.folder, max_num_seqs=3, max_model_len=33, block_size=16).engine
    assert engine.stats().num_blocks == 3 * 3


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("n", 0, ValueError, "n is 0"),
        ("temperature", -0.1, ValueError, "temperature is -0.1"),
        ("temperature", math.nan, ValueError, "temperature is nan"),
        ("temperature", "hot", TypeError, "temperature must be a number"),
        ("top_k", -2, ValueError, "top_k is -2"),
        ("top_p", 0.0, ValueError, "top_p is 0"),
        ("top_p", 1.1, ValueError, "top_p is 1.1"),
        ("min_p", -0.5, ValueError, "min_p is -0.5"),
        ("min_p", 2.0, ValueError, "min_p is 2.0"),
        ("max_tokens", 0, ValueError, "max_tokens is 0"),
        ("min_tokens", 17, ValueError, "min_tokens is 17, but max_tokens is only 16"),
        ("seed", 1.5, TypeError, "seed must be an int"),
        ("stop", ["a", ""], ValueError, "empty string"),
        ("stop", [3], TypeError, "stop must be a string"),
        ("stop", 5, TypeError, "stop must be a list, got 5"),
        ("stop_token_ids", 5, TypeError, "stop_token_ids must be a list, got 5"),
        ("stop_token_ids", ["a"], TypeError, "stop_token_ids must be ints, got 'a'"),
        ("stop_token_ids", [-1], ValueError, "stop_token_ids has -1"),
        ("logprobs", -1, ValueError, "logprobs is -1"),
        ("prompt_logprobs", True, TypeError, "prompt_logprobs must be an int"),
        ("ignore_eos", 1, TypeError, "ignore_eos must be True or False"),
        ("best_of", 2, TypeError, "SamplingParams has no option 'best_of': did you mean 'n'"),
        ("temprature", 1, TypeError, "has no option 'temprature': did you mean 'temperature'"),
        (
            "logit_bias",
            {},
            TypeError,
            "'logit_bias': the place to change logits is nanopaged/sampler.py",
        ),
        ("repetition_penalty", 0, ValueError, "repetition_penalty is 0"),
        ("presence_penalty", 2.5, ValueError, "presence_penalty is 2.5"),
        ("frequency_penalty", "a", TypeError, "frequency_penalty must be a number"),
    ],
)
def test_bad_sampling_params(field: str, value: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**{field: value})


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "the prompt is empty"),
        ([1, VOCAB_SIZE], ValueError, f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ([-1], ValueError, "token id -1"),
        ([1, 2.5], TypeError, "token ids must be ints, got 2.5"),
        ("text", ValueError, "no tokenizer"),
        (None, TypeError, "a prompt is a str or a list of token ids"),
        (b"bytes", TypeError, "a prompt is a str or a list of token ids, got bytes"),
        ({"tokens": [1]}, ValueError, "a prompt as a dict has a 'prompt' text or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, ValueError, "multi_modal_data"),
        ({}, ValueError, "a prompt as a dict has"),
        ({"prompt": None}, TypeError, "a prompt is a str or a list of token ids, got NoneType"),
        ({"prompt": 5, "prompt_token_ids": [1]}, ValueError, "a prompt as a dict has"),
        ({"cache_salt": "x"}, TypeError, "a prompt is a str or a list of token ids, got NoneType"),
        (
            {"prompt_token_ids": [1], "cache_salt": ""},
            ValueError,
            "cache_salt must be a text that is not empty",
        ),
        ({"prompt_token_ids": [1], "cache_salt": 5}, ValueError, "cache_salt must be a text .* got 5"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, ValueError, "surrogates not allowed"),
        (torch.tensor(5), TypeError, "a prompt is a str or a list of token ids"),
        ([1] * MAX_MODEL_LEN, ValueError, f"{MAX_MODEL_LEN} tokens, but max_model_len is {MAX_MODEL_LEN}"),
        ([1] * 60, ValueError, r"may need 9 blocks of 8 slots, but the whole pool has 8"),
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


def test_a_request_that_just_fits_the_pool(llm: LLM) -> None:
    """8 blocks of 8 slots: 57 + 8 tokens are 65, but the last one generated needs no slot."""
    (output,) = llm.generate([1] * 57, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


def test_bad_request_params(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(ValueError, match="logprobs is 98, but the vocabulary has 97"):
        llm.generate([1], SamplingParams(logprobs=98), use_tqdm=False)
    with pytest.raises(ValueError, match="stop token id 97"):
        llm.generate([1], SamplingParams(stop_token_ids=[97]), use_tqdm=False)
    with pytest.raises(TypeError, match="must be SamplingParams or BeamSearchParams, got dict"):
        llm.engine.add_request("x", [1], {"max_tokens": 3})
    with pytest.raises(TypeError, match="request_id must be a str"):
        llm.engine.add_request(7, [1])
    assert not llm.engine.has_unfinished_requests()


def test_ids_must_be_unique_among_the_unfinished(llm: LLM) -> None:
    llm.engine.add_request("a", [1], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(ValueError, match="'a' is taken"):
        llm.engine.add_request("a", [2])
    with pytest.raises(ValueError, match="'b'"):
        llm.engine.abort_request("b")
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.engine.add_request("a", [1], GREEDY)
    llm.engine.abort_request("a")
    with pytest.raises(ValueError, match="'a'"):
        llm.engine.abort_request("a")


def test_numpy_and_torch_numbers_are_numbers(llm: LLM, qwen3: Oracle) -> None:
    """Past bug: a numpy seed passed the checks and broke every step."""
    expected = qwen3.greedy([1, 2, 3], 8)
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3), [np.int32(1), 2, 3]):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
    outputs = llm.generate([torch.tensor([1, 2, 3]), np.array([4])], GREEDY, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 1]
    texts = set()
    for seed in (np.int64(5), np.uint64(5), 5, 5 + 2**64):
        params = SamplingParams(seed=seed, max_tokens=np.int64(6), top_k=np.int32(9), ignore_eos=True)
        (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
        texts.add(tuple(output.outputs[0].token_ids))
    assert len(texts) == 1
    params = SamplingParams(stop_token_ids=np.array([3, 4]), stop=None)
    assert params.stop_token_ids == (3, 4)
    assert EngineConfig(seed=np.int64(3)).seed == 3
    LLM(qwen3.folder, num_blocks=8, load_format="dummy", seed=2**70)


def test_wrong_kinds_of_arguments(llm: LLM, tiny: LLM) -> None:
    with pytest.raises(TypeError, match="prompts are a str"):
        llm.generate(None, use_tqdm=False)
    with pytest.raises(TypeError, match="prompts are a str"):
        llm.generate(b"bytes", use_tqdm=False)
    with pytest.raises(TypeError, match="a prompt is a str or a list of token ids"):
        llm.generate(np.array(5), use_tqdm=False)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tiny.generate("half a pair: \ud800", use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params are SamplingParams"):
        llm.generate([1], {"temperature": 0}, use_tqdm=False)
    with pytest.raises(TypeError, match="stream takes one prompt"):
        tiny.stream(["a", "b"])
    for prompt in (None, 5, np.array(5)):
        with pytest.raises(TypeError, match="a prompt is a str or a list of token ids"):
            tiny.stream(prompt)
    with pytest.raises(TypeError, match="a conversation is a list"):
        tiny.chat("hello")
    for message in ({"role": "user"}, {"content": "Hi"}, {"role": "user", "content": None}):
        with pytest.raises(ValueError, match="needs a 'role' and a 'content'"):
            tiny.chat([message])
    picture = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}
    for part in (picture, "text", {"type": "text"}):
        with pytest.raises(ValueError, match="may have parts .* only, got"):
            tiny.chat([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tiny.chat([{"role": "user", "content": "half a pair: \ud800"}])
    with pytest.raises(ValueError, match="device 'meta' cannot be used"):
        LLM(device="meta")


def test_all_tokens_stop_but_none_may(llm: LLM) -> None:
    everything = range(llm.engine.vocab_size)
    for stop_token_ids in (everything, set(everything) - llm.engine.prompts.eos_token_ids):
        params = SamplingParams(stop_token_ids=stop_token_ids, min_tokens=2)
        with pytest.raises(ValueError, match="min_tokens is 2, but stop_token_ids has all 97 tokens"):
            llm.generate([[1]], params, use_tqdm=False)


def test_an_end_of_sequence_outside_the_vocabulary_is_never_drawn(qwen3: Oracle, tmp_path: Path) -> None:
    shutil.copytree(qwen3.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [500]}', encoding="utf-8")
    params = SamplingParams(min_tokens=5, max_tokens=5)
    (output,) = LLM(tmp_path, num_blocks=8).generate([1, 2], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_mismatched_lists(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling_params"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_one_bad_prompt_among_many_starts_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate([[1], [], [3]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_an_exception_in_the_model_leaves_the_engine_usable(llm: LLM, qwen3: Oracle) -> None:
    """`generate` raises and aborts its requests, and the next `generate` is right."""
    model, calls = llm.engine.runner.model, []

    def break_at_third_call(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of smoke")
        return type(model).forward(model, *args)

    model.forward = break_at_third_call
    with pytest.raises(RuntimeError, match="out of smoke"):
        llm.generate([[1, 2], [3, 4, 5]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.check_invariants()
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == qwen3.greedy([1, 2], 8)
    del model.forward


def test_scores_that_are_not_finite_are_an_error(llm: LLM) -> None:
    """NaN must not become a token; the message names the request, which can then be aborted."""
    engine, model = llm.engine, llm.engine.runner.model
    model.logits = lambda hidden: type(model).logits(model, hidden) * math.nan
    for params in (GREEDY, SamplingParams(), BeamSearchParams(beam_width=2)):
        engine.add_request("sick", [1, 2, 3], params)
        with pytest.raises(FloatingPointError, match="request 'sick' at position 3 are not finite") as caught:
            engine.step()
        engine.check_invariants()
        engine.abort_request(caught.value.request_id)
        copy = pickle.loads(pickle.dumps(caught.value))  # as between processes
        assert (str(copy), copy.request_id) == (str(caught.value), "sick")
    model.logits = lambda hidden: type(model).logits(model, hidden) * torch.tensor([[1.0], [math.nan]])
    for request_id in ("well", "sick"):
        engine.add_request(request_id, [1, 2, 3], GREEDY)
    with pytest.raises(NonFiniteLogits) as caught:
        engine.step()
    assert engine.abort_request(caught.value.request_id).request_id == "sick"
    del model.logits
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert (output.request_id, output.finished) == ("well", True)
    assert engine.stats().num_used_blocks == 0


def sick(llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, the logits of requests with this prompt are not finite."""
    execute = llm.engine.runner.execute

    def fail(batch: ScheduledBatch) -> StepResult:
        for seq in batch.sequences:
            if seq.request.prompt_token_ids == prompt:
                raise NonFiniteLogits(seq.request.request_id, seq.num_tokens)
        return execute(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", fail)


def test_logits_that_are_not_finite_fail_their_own_call_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past bug: a call that stepped the engine failed with another one's id, and aborted its own request."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = {n: llm.generate([n, n], params, use_tqdm=False)[0].outputs[0].token_ids for n in (1, 2)}
    well, ill = llm.stream([1, 1], params), llm.stream([3, 3], params)
    next(well)
    next(ill)
    llm.engine.add_request("theirs", [3, 3], params)
    sick(llm, [3, 3], monkeypatch)
    with pytest.raises(NonFiniteLogits, match="llm-"):
        llm.generate([[3, 3], [2, 2]], params, use_tqdm=False)
    (output,) = llm.generate([[2, 2]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == alone[2]
    *_, last = well
    assert last.outputs[0].token_ids == alone[1]
    with pytest.raises(NonFiniteLogits, match="llm-"):
        list(ill)
    (output,) = llm.engine.step()  # the owner of a request of the engine gets it aborted
    assert (output.request_id, output.outputs[0].finish_reason) == ("theirs", "abort")
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.check_invariants()


def test_an_interrupt_while_a_step_is_booked(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two sequences: the next step reports the one that had finished, the others go on."""
    engine = tiny.engine
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = ("ROMEO:", "JULIET:", "NURSE:")
    expected = {prompt: tiny.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in prompts}
    for prompt in prompts:
        engine.add_request(prompt, prompt, params)
    engine.step()
    interrupt_second_append(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_invariants()
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = output.outputs[0]
    for prompt, completion in expected.items():
        assert (done[prompt].token_ids, done[prompt].text) == (completion.token_ids, completion.text)
    assert engine.stats().num_used_blocks == 0


def test_generate_returns_its_own_requests_and_serves_the_others(llm: LLM) -> None:
    """A request that was added to the engine directly advances in the same steps."""
    llm.engine.add_request("theirs", [1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    (ours,) = llm.generate([[3, 4]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(ours.outputs[0].token_ids) == 5
    (theirs,) = llm.engine.step()
    assert (theirs.request_id, len(theirs.outputs[0].token_ids)) == ("theirs", 6)
    llm.engine.abort_request("theirs")


def test_requests_of_the_engine_that_end_meanwhile_are_reported_by_its_next_step(llm: LLM) -> None:
    """Past bug: the steps of generate and stream ended them, and their outputs were lost."""
    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9))
    ((expected, *_),) = [output.outputs for output in llm.generate([[1, 2]], short, use_tqdm=False)]
    for serve in (
        lambda: llm.generate([[3, 4], [5]], long, use_tqdm=False),
        lambda: list(llm.stream([3, 4], long)),
    ):
        for request_id in ("a", "b"):
            llm.engine.add_request(request_id, [1, 2], short)
        serve()
        assert llm.engine.has_unfinished_requests()
        assert llm.engine.abort_request("b").finished
        serve()
        (output,) = llm.engine.step()
        assert (output.request_id, output.outputs[0].token_ids) == ("a", expected.token_ids)
        assert output.metrics.finish_time < time.monotonic()
        assert output.outputs[0].finish_reason == "length"
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.step() == []
        llm.engine.check_invariants()


def test_generate_ends_when_others_abort_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """First one request is aborted, then the other: their outputs so far are returned."""
    step, num_steps = llm.engine.step, 0

    def watched(**options: bool) -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 10, "generate does not return"
        if num_steps in (3, 5):
            llm.engine.abort_request(next(iter(llm.engine.requests)))
        return step(**options)

    monkeypatch.setattr(llm.engine, "step", watched)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = llm.generate([[1, 2], [3]], params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 4]


def test_generate_ends_though_others_take_the_place_of_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many requests after every step as before it."""
    step, num_steps = llm.engine.step, 0

    def watched(**options: bool) -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 20, "generate does not return"
        before, outputs = len(llm.engine.requests), step(**options)
        for i in range(before - len(llm.engine.requests)):
            llm.engine.add_request(f"{num_steps}-{i}", [1], SamplingParams(max_tokens=1))
        return outputs

    monkeypatch.setattr(llm.engine, "step", watched)
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    monkeypatch.undo()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_a_second_interrupt_leaves_nothing_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    abort, num_interrupts = llm.engine.abort_request, []

    def interrupted(*args: object, **kwargs: object) -> None:
        if len(num_interrupts) < 3:
            num_interrupts.append(1)
            raise KeyboardInterrupt
        return abort(*args)

    monkeypatch.setattr(llm.engine, "abort_request", interrupted)
    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
    assert len(num_interrupts) == 3
    assert not llm.engine.has_unfinished_requests()


def test_ids_of_the_front_end_and_of_the_user_do_not_collide(llm: LLM) -> None:
    for i in range(1000):
        llm.engine.add_request(f"llm-{i}", [1], GREEDY)
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.finished
    stream = llm.stream([1, 2], GREEDY)
    for i in range(1000, 1200):
        llm.engine.add_request(f"llm-{i}", [1], GREEDY)
    *_, last = stream
    assert last.outputs[0].token_ids == output.outputs[0].token_ids
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


# ── what comes back ───────────────────────────────────────────────────────────────────────────────


def test_prompts_of_all_kinds(tiny: LLM) -> None:
    """A text, ids, a list of either; results come in the order of the prompts, not of their ends."""
    ids = tiny.engine.tokenizer.encode("ROMEO:\n")
    (from_text,) = tiny.generate("ROMEO:\n", GREEDY, use_tqdm=False)
    (from_ids,) = tiny.generate(ids, GREEDY, use_tqdm=False)
    assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids
    assert (from_text.prompt, from_ids.prompt) == ("ROMEO:\n", None)
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == ids
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = tiny.generate(["A", ids, "C"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["A", None, "C"]
    assert tiny.generate([], use_tqdm=False) == []


def test_chat_is_generate_on_the_template(tiny: LLM) -> None:
    messages = [{"role": "user", "content": "Who goes there?"}]
    text = tiny.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    (from_chat,) = tiny.chat(messages, GREEDY, use_tqdm=False)
    (from_text,) = tiny.generate(text, GREEDY, use_tqdm=False)
    assert from_chat.prompt_token_ids == from_text.prompt_token_ids
    assert from_chat.outputs[0].text == from_text.outputs[0].text
    assert len(tiny.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    with pytest.raises(ValueError, match="the conversation is empty"):
        tiny.chat([], GREEDY)


def test_a_model_without_a_chat_template(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_metrics_and_stats_add_up(tiny: LLM) -> None:
    before = tiny.engine.stats()
    prompt = "Enter three witches, with a cauldron: " * 3
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    outputs = tiny.generate([prompt, prompt], params, use_tqdm=False)
    after = tiny.engine.stats()
    num_prompt = len(outputs[0].prompt_token_ids)
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached == [0, (num_prompt - 1) // 16 * 16]
    assert after.prefix_cache_hits - before.prefix_cache_hits == sum(cached)
    assert after.prefix_cache_queries - before.prefix_cache_queries == 2 * num_prompt
    assert after.num_prompt_tokens - before.num_prompt_tokens == 2 * num_prompt
    assert after.num_generated_tokens - before.num_generated_tokens == 10
    assert after.num_steps - before.num_steps == 5
    assert after.num_free_blocks == after.num_blocks
    assert after.num_cached_blocks > 0
    for output in outputs:
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time
        assert metrics.num_preemptions == 0


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
        (SamplingParams(max_tokens=5, ignore_eos=True), 5),
        (SamplingParams(n=3, max_tokens=5, ignore_eos=True), 15),
        (BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True), 20),
    ):
        before = llm.engine.stats().num_generated_tokens
        llm.generate([1, 2], params, use_tqdm=False)
        assert llm.engine.stats().num_generated_tokens - before == expected


def test_stats_while_running(qwen3: Oracle) -> None:
    """20 tokens in blocks of 8: three blocks, 20 of 24 slots filled."""
    engine = LLMEngine(EngineConfig(model=qwen3.folder, block_size=8, num_blocks=10, max_num_seqs=1))
    engine.add_request("a", [1] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add_request("b", [2] * 9, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_used_blocks, stats.num_free_blocks) == (3, 7)
    assert stats.slot_utilization == pytest.approx(20 / 24)


# ── where it must run ─────────────────────────────────────────────────────────────────────────────


def run_python(code: str) -> None:
    """In a fresh interpreter, from the project's root."""
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=root)


def test_it_imports_and_runs_without_triton_and_flash_attn() -> None:
    """On a Mac, on Windows, on a CPU they are missing; `None` in sys.modules makes an import fail."""
    code = (
        "import sys; sys.modules.update(triton=None, flash_attn=None)\n"
        "from nanopaged import LLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "(out,) = LLM(num_blocks=256).generate('A', params, use_tqdm=False)\n"
        "assert len(out.outputs[0].token_ids) == 2\n"
    )
    run_python(code)


def test_the_bookkeeping_imports_no_torch() -> None:
    """Block manager, scheduler and sequences can be tested and timed without it."""
    code = (
        "import sys\n"
        "import nanopaged.scheduler, nanopaged.block_manager, nanopaged.sequence, nanopaged.beam_search\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert nanopaged.LLMEngine and nanopaged.LLM and 'torch' in sys.modules\n"
    )
    run_python(code)
