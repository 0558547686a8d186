"""The API: errors for wrong arguments, failed steps, and what the outputs and statistics contain."""

from __future__ import annotations

import math
import pickle
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MAX_MODEL_LEN, VOCAB_SIZE, Oracle

from nanopaged import LLM, BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.sequence import NonFiniteLogits, Request, ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(qwen3: Oracle) -> LLM:
    return LLM(qwen3.folder, num_blocks=8, block_size=8, enforce_eager=True)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(dtype="float32", num_blocks=64)


# ── configuration ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "field", "value", "error", "message"),
    [
        (EngineConfig, "block_size", 0, ValueError, "block_size is 0.*at least 1"),
        (EngineConfig, "block_size", 2.5, TypeError, "block_size must be an int"),
        (EngineConfig, "num_blocks", -3, ValueError, "num_blocks is -3"),
        (EngineConfig, "num_host_blocks", -1, ValueError, "num_host_blocks is -1"),
        (EngineConfig, "memory_utilization", math.nan, ValueError, "memory_utilization is nan"),
        (EngineConfig, "dtype", "int8", ValueError, "dtype is 'int8'.*float32"),
        (EngineConfig, "enable_prefix_caching", "yes", TypeError, "enable_prefix_caching must be True or"),
        (EngineConfig, "preemption", "hope", ValueError, "preemption is 'hope'.*swap"),
        (EngineConfig, "watermark", -0.1, ValueError, "watermark is -0.1"),
        (EngineConfig, "seed", -1, ValueError, "seed is -1"),
        (EngineConfig, "model", 5, TypeError, "model must be a folder"),
        (SamplingParams, "n", 0, ValueError, "n is 0"),
        (SamplingParams, "temperature", -0.1, ValueError, "temperature is -0.1"),
        (SamplingParams, "temperature", "hot", TypeError, "temperature must be a number"),
        (SamplingParams, "top_k", -2, ValueError, "top_k is -2"),
        (SamplingParams, "top_p", 0.0, ValueError, "top_p is 0"),
        (SamplingParams, "top_p", 1.1, ValueError, "top_p is 1.1"),
        (SamplingParams, "min_p", 2.0, ValueError, "min_p is 2.0"),
        (SamplingParams, "max_tokens", 0, ValueError, "max_tokens is 0"),
        (SamplingParams, "min_tokens", 17, ValueError, "min_tokens is 17, but max_tokens is only 16"),
        (SamplingParams, "seed", 1.5, TypeError, "seed must be an int"),
        (SamplingParams, "stop", ["a", ""], ValueError, "empty string"),
        (SamplingParams, "stop", [3], TypeError, "stop must be a string"),
        (SamplingParams, "stop", 5, TypeError, "stop must be a list, got 5"),
        (SamplingParams, "stop_token_ids", ["a"], TypeError, "stop_token_ids must be an int, got 'a'"),
        (SamplingParams, "stop_token_ids", [-1], ValueError, "stop_token_ids is -1"),
        (SamplingParams, "prompt_logprobs", True, TypeError, "prompt_logprobs must be an int"),
        (SamplingParams, "logit_bias", {}, TypeError, "unexpected keyword argument 'logit_bias'"),
        (SamplingParams, "repetition_penalty", 0, ValueError, "repetition_penalty is 0"),
        (SamplingParams, "presence_penalty", 2.5, ValueError, "presence_penalty is 2.5"),
        (BeamSearchParams, "beam_width", 0, ValueError, "beam_width is 0"),
        (BeamSearchParams, "max_tokens", 3, TypeError, "beam_width"),
        (BeamSearchParams, "early_stopping", 1, ValueError, "early_stopping is 1"),
        (BeamSearchParams, "length_penalty", -300, ValueError, "length_penalty is -300"),
        (BeamSearchParams, "min_tokens", 20, ValueError, "min_tokens is 20"),
        (BeamSearchParams, "temperature", 1.0, TypeError, "temperature"),
    ],
)
def test_a_bad_option(options: type, field: str, value: object, error: type, message: str) -> None:
    needed = {"beam_width": 2} if options is BeamSearchParams and field != "max_tokens" else {}
    with pytest.raises(error, match=message):
        options(**needed | {field: value})


def test_a_config_that_does_not_suit_the_model(qwen3: Oracle) -> None:
    for options, message in (
        ({"max_model_len": 5000}, f"max_model_len is 5000.*{MAX_MODEL_LEN}"),
        (
            {"max_num_batched_tokens": 50, "enable_chunked_prefill": False},
            "max_num_batched_tokens is 50.*enable_chunked_prefill",
        ),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(qwen3.folder, **options)


def test_memory_that_does_not_suffice(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the numbers: blocks needed, bytes of each, blocks that fit."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(ValueError, match="needs 10 blocks of 8,192 bytes, but only 6 fit"):
        LLM(qwen3.folder, dtype="float32", block_size=16, device="cpu")
    for options, num in (({"memory_utilization": 1.0}, 12), ({"max_num_seqs": 1, "max_model_len": 33}, 3)):
        assert LLM(qwen3.folder, dtype="float32", device="cpu", **options).engine.stats().num_blocks == num


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
        ({"prompt": None}, TypeError, "a prompt is a str or a list of token ids, got NoneType"),
        ({"cache_salt": "x"}, TypeError, "a prompt is a str or a list of token ids, got NoneType"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, ValueError, "cache_salt must be a text that is not"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, ValueError, "cache_salt must be a text .* got 5"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, ValueError, "surrogates not allowed"),
        (torch.tensor(5), TypeError, "a prompt is a str or a list of token ids"),
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


def test_bad_request_params(llm: LLM) -> None:
    for request_id, params, error, message in (
        ("x", SamplingParams(stop="x"), ValueError, "stop strings need a tokenizer"),
        ("x", SamplingParams(logprobs=98), ValueError, "logprobs is 98, but the vocabulary has 97"),
        ("x", SamplingParams(stop_token_ids=[97]), ValueError, "stop token id 97"),
        ("x", {"max_tokens": 3}, TypeError, "must be SamplingParams or BeamSearchParams, got dict"),
        (7, GREEDY, TypeError, "request_id must be a str"),
    ):
        with pytest.raises(error, match=message):
            llm.engine.add_request(request_id, [1], params)
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
        texts.add(tuple(llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids))
    assert len(texts) == 1
    assert SamplingParams(stop_token_ids=np.array([3, 4]), stop=None).stop_token_ids == (3, 4)
    assert EngineConfig(seed=np.int64(3)).seed == 3
    LLM(qwen3.folder, num_blocks=8, load_format="dummy", seed=2**70)


def test_results_come_in_the_order_of_the_prompts(tiny: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = tiny.generate(["A", [5, 6], "C"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["A", None, "C"]
    assert tiny.generate([], use_tqdm=False) == []


def test_wrong_kinds_of_arguments(llm: LLM, tiny: LLM) -> None:
    for call, prompts, message in (
        (llm.generate, None, "a prompt is a str or a list of token ids, got NoneType"),
        (llm.generate, b"bytes", "a prompt is a str or a list of token ids, got bytes"),
        (llm.generate, np.array(5), "a prompt is a str or a list of token ids"),
        (tiny.stream, ["a"], "token ids must be ints, got 'a'"),
        (tiny.stream, None, "a prompt is a str or a list of token ids"),
        (tiny.stream, np.array(5), "a prompt is a str or a list of token ids"),
        (tiny.chat, "hello", "a conversation is a list"),
    ):
        with pytest.raises(TypeError, match=message):
            call(prompts)
    half, text = "half a pair: \ud800", {"type": "text", "text": "What is this?"}
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tiny.generate(half, use_tqdm=False)
    picture = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}
    conversations = [([], "the conversation is empty"), ([{"role": "user", "content": half}], "surrogates")]
    for message in ({"role": "user"}, {"content": "Hi"}, {"role": "user", "content": None}):
        conversations.append(([message], "needs a 'role' and a 'content'"))
    for part in (picture, "text", {"type": "text"}):
        conversations.append(([{"role": "user", "content": [text, part]}], "may have parts .* only, got"))
    for messages, error in conversations:
        with pytest.raises(ValueError, match=error):
            tiny.chat(messages)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


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
    """And one bad prompt among many: nothing is started."""
    for prompts, params, message in (
        ([[1], [2], [3]], [GREEDY, GREEDY], "3 prompts, but 2 sampling_params"),
        ([[1], [], [3]], GREEDY, "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params, use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()


def test_an_exception_in_the_model_leaves_the_engine_usable(
    llm: LLM, qwen3: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` raises and aborts its requests, and the next `generate` is right."""
    model, number = llm.engine.runner.model, count(1)

    def break_at_third_call(*args: object) -> object:
        if next(number) == 3:
            raise RuntimeError("out of smoke")
        return type(model).forward(model, *args)

    monkeypatch.setattr(model, "forward", break_at_third_call)
    with pytest.raises(RuntimeError, match="out of smoke"):
        llm.generate([[1, 2], [3, 4, 5]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.check_invariants()
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == qwen3.greedy([1, 2], 8)


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


@pytest.mark.parametrize("backend", ["torch", "cpp", "reference"])
def test_nan_does_not_reach_the_tokens_before_it(qwen3: Oracle, backend: str) -> None:
    """Past bug: queries of a prefill read the values after them with weight 0, and 0 · NaN is NaN.

    So NaN in a prompt's last token spoiled the blocks before it, which another request shares. That one was
    blamed and aborted.
    """
    llm = LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=40, attention_backend=backend)
    engine = llm.engine
    prompt = list(range(1, 14))
    (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    engine.reset_prefix_cache()
    sick = next(token for token in range(50, 60) if token not in alone.outputs[0].token_ids)
    engine.runner.model.embed_tokens.register_forward_hook(
        lambda _, inputs, embedded: embedded.masked_fill((inputs[0] == sick)[:, None], math.nan)
    )
    engine.add_request("sick", [*prompt, sick], GREEDY)
    engine.add_request("well", prompt, GREEDY)  # shares three blocks in the same step
    with pytest.raises(NonFiniteLogits, match="request 'sick'"):
        engine.step()
    engine.abort_request("sick")
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


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
    execute = llm.engine.runner.execute

    def fail(batch: ScheduledBatch) -> StepResult:
        for seq in batch.sequences:
            if seq.request.prompt_token_ids == [3, 3]:
                raise NonFiniteLogits(seq.request.request_id, seq.num_tokens)
        return execute(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", fail)
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
    run_step, number = llm.engine.run_step, count(1)

    def watched() -> list[Request]:
        if (num_steps := next(number)) in (3, 5):
            llm.engine.abort_request(next(iter(llm.engine.requests)))
        assert num_steps < 10, "generate does not return"
        return run_step()

    monkeypatch.setattr(llm.engine, "run_step", watched)
    outputs = llm.generate([[1, 2], [3]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 4]


def test_ids_of_the_front_end_and_of_the_user_do_not_collide(llm: LLM) -> None:
    for i in range(1000):
        llm.engine.add_request(f"llm-{i}", [1], GREEDY)
    stream = llm.stream([1, 2], GREEDY)
    for i in range(1000, 1200):
        llm.engine.add_request(f"llm-{i}", [1], GREEDY)
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    *_, last = stream
    assert last.outputs[0].token_ids == output.outputs[0].token_ids
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


# ── what comes back ───────────────────────────────────────────────────────────────────────────────


def test_metrics_and_stats_add_up(tiny: LLM) -> None:
    before = tiny.engine.stats()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
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
    for metrics in (output.metrics for output in outputs):
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


# ── where it must run ─────────────────────────────────────────────────────────────────────────────


def test_it_imports_and_runs_without_triton_and_flash_attn() -> None:
    """On a Mac, on Windows, on a CPU they are missing; `None` in sys.modules makes an import fail."""
    code = (
        "import sys; sys.modules.update(triton=None, flash_attn=None)\n"
        "from nanopaged import LLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "(out,) = LLM(num_blocks=256).generate('A', params, use_tqdm=False)\n"
        "assert len(out.outputs[0].token_ids) == 2\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=root)
