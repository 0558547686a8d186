"""What users of vLLM and transformers write out of habit: keywords, prompts, messages, penalties."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, fields, replace
from itertools import count
from pathlib import Path
from threading import Thread
from typing import get_type_hints

import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle, random_prompts
from faults import interrupt_at_line
from transformers import PreTrainedTokenizerBase

import nanopaged
from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.checks import foreign_names
from nanopaged.checks.engine_options import EngineOptions
from nanopaged.sequence import ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_keywords(llm: LLM) -> None:
    expected = tokens_of(llm.generate(["ROMEO:\n"], GREEDY, use_tqdm=False))
    assert tokens_of(llm.generate(prompts=["ROMEO:\n"], sampling_params=GREEDY, use_tqdm=False)) == expected
    *_, last = llm.stream("ROMEO:\n", sampling_params=GREEDY)
    assert tokens_of([last]) == expected
    llm.chat([{"role": "user", "content": "Hi"}], sampling_params=GREEDY, use_tqdm=False)
    llm.beam_search(
        prompts=[{"prompt": "ROMEO:\n"}], params=BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False
    )


@pytest.mark.parametrize(
    ("options", "name", "meant"),
    [
        (EngineConfig, "gpu_memory_utilization", "memory_utilization"),
        (EngineConfig, "num_gpu_blocks_override", "num_blocks"),
        (EngineConfig, "num_cpu_blocks", "num_host_blocks"),
        (EngineConfig, "page_size", "block_size"),
        (EngineConfig, "blok_size", "block_size"),
        (SamplingParams, "max_new_tokens", "max_tokens"),
        (BeamSearchParams, "num_beams", "beam_width"),
    ],
)
def test_an_unknown_keyword_says_what_was_meant(options: type, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{options.__name__} has no option '{name}': did you mean '{meant}'"):
        options(**{name: 1})


def test_an_unknown_keyword_is_taken_for_no_other_option() -> None:
    for options, name in (
        (SamplingParams, "allowed_tokens"),  # the opposite of stop_token_ids
        (SamplingParams, "penalty_alpha"),
        (EngineConfig, "cache_implementation"),
    ):
        with pytest.raises(TypeError, match=f"{options.__name__} has no option '{name}': its options are"):
            options(**{name: 1})


def test_an_unknown_keyword_of_llm() -> None:
    with pytest.raises(TypeError, match="EngineConfig has no option 'gpu_memory_utilization'"):
        LLM(gpu_memory_utilization=0.5)
    with pytest.raises(TypeError, match="has no option 'compilation_config': its options are model, dtype"):
        LLM(compilation_config=3)
    with pytest.raises(TypeError, match="'trust_remote_code': leave it out.*; 'tp_size': did you mean 'ten"):
        LLM(trust_remote_code=True, tp_size=2, block_size=16)


def test_every_hint_names_something_of_ours() -> None:
    """An option of ours, or a sentence; so a renamed option cannot leave a hint behind."""
    ours = {f.name for options in (EngineConfig, SamplingParams, BeamSearchParams) for f in fields(options)}
    ours |= {name for call in (LLM.generate, LLM.stream) for name in inspect.signature(call).parameters}
    for theirs, hint in (foreign_names.OPTIONS | foreign_names.BEAM_OPTIONS).items():
        assert " " in hint or hint in ours, theirs
        quoted = re.match(r"did you mean '(\w+)'", hint)
        assert quoted is None or quoted[1] in ours
        for name in re.findall(r"\b(\w+)=", hint):
            assert name in ours | {theirs, "chat_template_kwargs"}, hint


def test_keywords_of_a_call_say_where_they_belong(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for call, options, sentence in (
        (llm.generate, {"max_tokens": 5}, r"generate has no option 'max_tokens': put it into .*max_tokens=…"),
        (llm.generate, {"max_new_tokens": 5}, "generate(…, SamplingParams(max_tokens=…))"),
        (llm.generate, {"do_sample": False}, "'do_sample': did you mean 'temperature'? It is 0"),
        (llm.generate, {"stream": True}, "use llm.stream(prompt, params)"),
        (llm.generate, {"streamer": None}, "use llm.stream(prompt, params)"),
        (llm.generate, {"prompt_token_ids": [[1]]}, "token ids are prompts"),
        (llm.generate, {"lora_request": None}, "merge the adapter into the model first"),
        (llm.generate, {"use_tqm": True}, "did you mean 'use_tqdm'?"),
        (llm.generate, {"nonsense": 1}, "its options are prompts, sampling_params, use_tqdm"),
        (llm.stream, {"max_tokens": 5}, "put it into the params: stream(…, SamplingParams(max_tokens=…))"),
        (llm.stream, {"params": GREEDY}, "did you mean 'sampling_params'?"),
        (llm.beam_search, {"beam_width": 2}, "beam_search(…, BeamSearchParams(beam_width=…))"),
        (llm.beam_search, {"num_beams": 2}, "beam_search(…, BeamSearchParams(beam_width=…))"),
    ):
        with pytest.raises(TypeError, match=sentence if "*" in sentence else re.escape(sentence)):
            call("ROMEO:", **options)
    with pytest.raises(TypeError, match=re.escape("chat_template_kwargs={'chat_template': …}")):
        llm.chat(messages, chat_template="{{ messages }}")
    with pytest.raises(TypeError, match="merge the adapter"):
        llm.engine.add_request("a", "ROMEO:", GREEDY, lora_request=None)
    assert not llm.engine.has_unfinished_requests()


def test_a_dict_of_params_is_answered_with_the_class(llm: LLM) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match=re.escape("SamplingParams(**{'temperature': 0})")):
            call("ROMEO:", {"temperature": 0})
    with pytest.raises(TypeError, match=re.escape("SamplingParams(**{'temperature': 0})")):
        llm.generate(["ROMEO:"], [{"temperature": 0}])


def test_messages_are_for_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for prompts in (messages, [messages]):
        with pytest.raises(ValueError, match=r"messages are for chat: llm.chat\(messages, params\)"):
            llm.generate(prompts, GREEDY, use_tqdm=False)


def test_attributes_of_other_engines(llm: LLM) -> None:
    (output,) = llm.generate("ROMEO:", GREEDY, use_tqdm=False)
    for thing, name, sentence in (
        (llm, "llm_engine", "use llm.engine"),
        (llm, "embed", "generates text only"),
        (output, "text", "use output.outputs[0].text"),
        (output, "sequences", "use output.outputs: their text is the continuation"),
        (output.outputs[0], "tokens", "use token_ids"),
    ):
        with pytest.raises(AttributeError, match=re.escape(sentence)):
            getattr(thing, name)
        assert not hasattr(thing, "nonsense")
    with pytest.raises(TypeError, match=re.escape("use output.outputs[0].text")):
        output["text"]
    for copied in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert copied == output


def test_imports_of_other_engines() -> None:
    with pytest.raises(ImportError, match="cannot import 'EngineArgs' from 'nanopaged': use EngineConfig"):
        from nanopaged import EngineArgs  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from nanopaged import Nonsense  # noqa: F401


def test_options_do_not_change() -> None:
    for options in (EngineConfig(), SamplingParams(), BeamSearchParams(beam_width=2)):
        with pytest.raises(FrozenInstanceError, match=r"dataclasses.replace\(params, max_tokens=5\)"):
            options.max_tokens = 5
    assert hash(SamplingParams(n=2)) == hash(replace(SamplingParams(), n=2))


def test_an_editor_knows_the_keywords_of_llm() -> None:
    """`LLM(…)` takes what `EngineConfig` takes, and the names that editors complete are these."""
    theirs = {f.name: f.type for f in fields(EngineConfig) if f.name != "model"}
    assert get_type_hints(EngineOptions, localns={"Path": Path}) == {
        name: get_type_hints(EngineConfig)[name] for name in theirs
    }


def test_what_an_llm_is(llm: LLM) -> None:
    assert repr(llm) == "LLM(model='tiny', dtype='bfloat16', device='cpu', 200 blocks of 16 tokens)"
    assert re.fullmatch(r"\d+\.\d+\.\d+", nanopaged.__version__)


def test_params_can_be_copied() -> None:
    params = SamplingParams(temperature=0.5, stop="x")
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), replace(params)):
        assert other == params
    assert replace(params, n=2).n == 2


def test_prompts_as_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("ROMEO:\n")
    prompts = [
        {"prompt": "ROMEO:\n"},
        {"prompt_token_ids": ids},
        {"prompt": "shown", "prompt_token_ids": ids},
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["ROMEO:\n", None, "shown"]
    assert all(output.prompt_token_ids == ids for output in outputs)
    (output,) = llm.generate(prompts[0], GREEDY, use_tqdm=False)
    assert tokens_of([output]) * 3 == tokens_of(outputs)
    llm.engine.add_request("a dict", prompts[0], GREEDY)
    llm.engine.abort_request("a dict")


def test_prompts_with_a_cache_salt(llm: LLM) -> None:
    """The K/V of a prompt is found again with the same salt only. None is no salt."""
    llm.reset_prefix_cache()
    for salt in (None, "a long salt, number 1", "a long salt, number 2"):
        for found in (0, 32):
            prompt = {"prompt_token_ids": list(range(3, 43)), "cache_salt": salt}
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == found
    (output,) = llm.generate(list(range(3, 43)), GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32


def test_the_output_of_a_tokenizer_is_a_prompt(llm: LLM) -> None:
    """transformers' BatchEncoding, of one text or many, with padding, as lists or tensors."""
    tokenizer = llm.get_tokenizer()
    one, many = tokenizer("ROMEO:\n"), tokenizer(["ROMEO:\n", "O"])
    expected = [one["input_ids"], tokenizer.encode("O")]
    padded = {
        "input_ids": torch.tensor([expected[0], expected[1] + [0] * (len(expected[0]) - 1)]),
        "attention_mask": torch.tensor([[1] * len(expected[0]), [1] + [0] * (len(expected[0]) - 1)]),
    }
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=True)
    for prompts, token_ids in (
        (one, expected[:1]),
        ([one], expected[:1]),
        (tokenizer("ROMEO:\n", return_tensors="pt"), expected[:1]),
        (many, expected),
        (padded, expected),
        (chat, [chat["input_ids"]]),
    ):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == token_ids
    *_, last = llm.stream(one, GREEDY)
    assert last.prompt_token_ids == expected[0]
    for call in (llm.stream, lambda prompt: llm.engine.add_request("a", prompt)):
        with pytest.raises(ValueError, match="the tokens of 2 texts"):
            call(many)
    assert not llm.engine.has_unfinished_requests()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MB of text took two minutes and gigabytes to become tokens."""
    tokenizer = llm.get_tokenizer()
    most = max(map(len, tokenizer.get_vocab()), key=int) * llm.engine.max_model_len
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: pytest.fail("it is tokenised"))
    for prompt in ("x" * (8 * most), {"prompt": "é" * (8 * most)}):
        with pytest.raises(ValueError, match=r"the prompt has .* characters, but max_model_len is 2048"):
            llm.generate(prompt, GREEDY, use_tqdm=False)


def test_engine_arguments_of_other_engines(llm: LLM) -> None:
    with pytest.raises(TypeError, match="config must be an EngineConfig, got 'some/model'"):
        LLMEngine("some/model")
    with pytest.raises(ValueError, match=r"no unfinished request has the id \['a', 'b'\]"):
        llm.engine.abort_request(["a", "b"])


def test_the_tokenizer(llm: LLM, qwen3: Oracle) -> None:
    assert isinstance(llm.get_tokenizer(), PreTrainedTokenizerBase)
    assert LLM(qwen3.folder, num_blocks=8).get_tokenizer() is None


def test_max_tokens_none_is_as_many_as_the_model_allows(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder)
    for params in (
        SamplingParams(max_tokens=None, ignore_eos=True),
        BeamSearchParams(beam_width=2, max_tokens=None, min_tokens=155, ignore_eos=True),
    ):
        (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 3
        assert output.outputs[0].finish_reason == "length"


def test_a_dtype_of_torch(qwen3: Oracle) -> None:
    for dtype, name in (
        (torch.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("half", "float16"),
        (torch.half, "float16"),
        ("float", "float32"),
    ):
        llm = LLM(qwen3.folder, num_blocks=8, dtype=dtype, device=torch.device("cpu"))
        assert (llm.engine.config.dtype, llm.engine.config.device) == (name, "cpu")
        assert llm.engine.runner.dtype == getattr(torch, name)
    with pytest.raises(ValueError, match="dtype is 'int8', but must be one of auto, float32"):
        EngineConfig(dtype=torch.int8)


def test_tokens_found_in_the_cache_until_it_is_reset() -> None:
    llm = LLM(num_blocks=100, block_size=16)
    prompt, found = list(range(40)), []
    for reset in (False, False, True, False):
        if reset:
            llm.reset_prefix_cache()
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        llm.engine.check_invariants()
        found.append(output.num_cached_tokens)
    assert found == [0, 32, 0, 32]
    states = llm.stream(prompt, GREEDY)
    next(states)
    llm.reset_prefix_cache()  # blocks in use are still shared
    llm.engine.check_invariants()
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32
    *_, last = states
    assert tokens_of([last]) == tokens_of([output])


def test_an_interrupt_while_the_cache_is_reset() -> None:
    llm = LLM(num_blocks=100)
    for line in count(1):
        (output,) = llm.generate(list(range(80)), GREEDY, use_tqdm=False)
        try:
            with interrupt_at_line(line):
                llm.engine.reset_prefix_cache()
        except KeyboardInterrupt:
            llm.engine.check_invariants()
        else:
            break
    assert line > 10
    assert llm.engine.stats().num_cached_blocks == 0


# ── conversations ─────────────────────────────────────────────────────────────────────────────────


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not (enable_thinking | default(true)) %}<think></think>"
    "{% endif %}{% endif %}"
)


@pytest.fixture
def thinker(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A chat template that thinks by default, as Qwen3's does."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", THINKING)
    return llm


def test_the_prompt_of_a_chat_is_the_rendered_text(thinker: LLM) -> None:
    (output,) = thinker.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    assert output.prompt == "<user>Hi;<assistant>"
    assert thinker.get_tokenizer().decode(output.prompt_token_ids) == output.prompt


def test_options_of_the_chat_template(thinker: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = thinker.chat(
        messages, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert output.prompt == "<user>Hi;<assistant><think></think>"
    prompt = thinker.chat_prompt(messages, {"add_generation_prompt": False, "tokenize": True})
    assert prompt["prompt"] == "<user>Hi;"
    assert tokens_of(thinker.generate(thinker.chat_prompt(messages), GREEDY, use_tqdm=False))


def test_content_parts_and_tool_calls(thinker: LLM) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    before = copy.deepcopy(messages)
    (output,) = thinker.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == (
        "<user>Hi\nthere;<assistant>[weather];<tool>rain;<assistant>[weather];<assistant>"
    )
    assert messages == before


# ── penalties ─────────────────────────────────────────────────────────────────────────────────────


def test_repetition_penalty_is_transformers(oracle: Oracle) -> None:
    llm = LLM(oracle.folder, num_blocks=200)
    prompts = random_prompts(6, seed=3)
    for penalty in (1.3, 0.7):
        params = SamplingParams(temperature=0, repetition_penalty=penalty, max_tokens=30, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([prompt])
            expected = oracle.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
                repetition_penalty=penalty,
            )
            assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@torch.no_grad()
def greedy_with_penalties(oracle: Oracle, prompt: list[int], params: SamplingParams) -> list[int]:
    """vLLM's definitions, one token after the other, over the logits of transformers."""
    output: list[int] = []
    for _ in range(params.max_tokens):
        logits = oracle.model(torch.tensor([prompt + output])).logits[0, -1]
        for token_id in set(prompt + output):
            if logits[token_id] > 0:
                logits[token_id] /= params.repetition_penalty
            else:
                logits[token_id] *= params.repetition_penalty
        for token_id in set(output):
            logits[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
        output.append(int(logits.argmax()))
    return output


def test_penalties_follow_the_formula(qwen3: Oracle) -> None:
    """Requests with different penalties in one batch, in a pool so small that some are preempted."""
    every = [(1, 2, 0), (1, 0, 2), (1, 0.5, 1.5), (1, -0.3, 0), (1, 0, -2), (1.2, 0.5, 0.7), (1, 0, 0)]
    prompts = random_prompts(len(every), seed=4, longest=20)
    params = [
        SamplingParams(
            temperature=0,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            max_tokens=30,
            ignore_eos=True,
            logprobs=0,
        )
        for repetition, frequency, presence in every
    ]
    llm = LLM(qwen3.folder, num_blocks=16, block_size=4)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    num_changed = 0
    for prompt, its_params, output in zip(prompts, params, outputs, strict=True):
        (completion,) = output.outputs
        ids = completion.token_ids
        assert ids == greedy_with_penalties(qwen3, prompt, its_params)
        num_changed += ids != qwen3.greedy(prompt, 30, ignore_eos=True)
        model = qwen3.logprobs(prompt + ids)[len(prompt) - 1 : -1]
        expected = model.gather(1, torch.tensor(ids)[:, None])[:, 0]
        got = [logprobs[token_id] for token_id, logprobs in zip(ids, completion.logprobs, strict=True)]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=0)  # without penalties
    assert num_changed >= 4


def test_penalties_count_each_sample_alone(qwen3: Oracle) -> None:
    """Samples of one prompt repeat no token: each counts its own output, and the prompt is free."""
    llm = LLM(qwen3.folder, num_blocks=200)
    params = SamplingParams(
        n=3, seed=1, temperature=1.5, presence_penalty=2, frequency_penalty=2, logprobs=0, max_tokens=40
    )
    (with_penalty,) = llm.generate([1, 2, 3], params, use_tqdm=False)
    (without,) = llm.generate(
        [1, 2, 3], replace(params, presence_penalty=0, frequency_penalty=0), use_tqdm=False
    )
    firsts = [[c.token_ids[0] for c in output.outputs] for output in (with_penalty, without)]
    assert firsts[0] == firsts[1]
    repeated = [
        sum(len(c.token_ids) - len(set(c.token_ids)) for c in output.outputs)
        for output in (with_penalty, without)
    ]
    assert repeated[0] < repeated[1]


def test_penalties_of_one_request_leave_the_others_alone(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder, num_blocks=200)
    prompts = random_prompts(4, seed=9)
    plain = SamplingParams(seed=3, temperature=0.8, top_p=0.9, max_tokens=12, min_tokens=6)
    penalised = replace(plain, repetition_penalty=1.5, presence_penalty=1.0)
    alone = [tokens_of(llm.generate([p], plain, use_tqdm=False))[0] for p in prompts]
    mixed = llm.generate(prompts + prompts, [plain] * 4 + [penalised] * 4, use_tqdm=False)
    assert tokens_of(mixed)[:4] == alone
    assert tokens_of(mixed)[4:] != alone


# ── threads ───────────────────────────────────────────────────────────────────────────────────────


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [f"{name}:\n" for name in ("ROMEO", "JULIET", "HAMLET", "OPHELIA")]
    params = SamplingParams(temperature=0, max_tokens=20)

    def by_stream(prompt: str) -> list[int]:
        *_, last = llm.stream(prompt, params)
        return last.outputs[0].token_ids

    def by_generate(prompt: str) -> list[int]:
        return tokens_of(llm.generate(prompt, params, use_tqdm=False))[0]

    expected = [by_generate(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            streamed, generated = pool.map(by_stream, prompts), pool.map(by_generate, prompts)
            assert [*streamed] == expected
            assert [*generated] == expected
    assert llm.engine.stats().num_used_blocks == 0


def in_another_thread(work: Callable[[], object]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for the step that waits for it"


@pytest.mark.parametrize("run", [lambda work: work(), in_another_thread])
def test_a_stream_is_garbage_in_the_middle_of_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, run: Callable[[Callable[[], object]], None]
) -> None:
    """Past bug: its request was aborted at once, also if a step of the same thread was under way."""
    (expected,) = llm.generate("JULIET:\n", GREEDY, use_tqdm=False)
    execute, streams, num_sequences = llm.engine.runner.execute, [], []

    def collect(batch: ScheduledBatch) -> StepResult:
        num_sequences.append(len(batch.sequences))
        if streams:
            streams.clear()
            run(gc.collect)
        return execute(batch)

    def started() -> Iterator[RequestOutput]:
        stream = llm.stream("ROMEO:\n", SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        return stream

    streams.append([started()])
    streams[0].append(streams[0])  # a cycle, which the garbage collector alone can free
    monkeypatch.setattr(llm.engine.runner, "execute", collect)
    (output,) = llm.generate("JULIET:\n", GREEDY, use_tqdm=False)
    assert tokens_of([output]) == tokens_of([expected])
    assert num_sequences == [2] * 8  # it leaves with the end of the other call
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
