"""Prompts in all their forms, conversations, and what the prefix cache finds of them."""

from __future__ import annotations

import copy
from itertools import count

import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle
from faults import interrupt_at_line
from serving import tokens_of
from transformers import PreTrainedTokenizerBase

from nanopaged import LLM, BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def test_messages_are_for_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for prompts in (messages, [messages]):
        with pytest.raises(ValueError, match=r"messages are for chat: llm.chat\(messages, params\)"):
            llm.generate(prompts, GREEDY, use_tqdm=False)


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
