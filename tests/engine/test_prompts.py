"""Prompts in all their forms, conversations, and what the prefix cache finds of them."""

from __future__ import annotations

import copy
import re
import unicodedata
from itertools import count

import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle
from faults import FailAtLine
from serving import tokens_of
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from nanopaged import LLM, BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.prompts import PromptProcessor

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def test_what_is_no_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages; and 40 MB of text, which took two minutes and gigabytes to become tokens.

    A token stands for at most 4 times the characters of the longest one: normalisation may join 4.
    """
    messages = [{"role": "user", "content": "Hi"}]
    for prompts in (messages, [messages]):
        with pytest.raises(ValueError, match=r"messages are for chat: llm.chat\(messages, params\)"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    long = 4 * max(map(len, tokenizer.get_vocab())) * llm.engine.max_model_len + 1
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: pytest.fail("it is tokenised"))
    for prompt in ("x" * long, {"prompt": "é" * long}):
        with pytest.raises(ValueError, match=r"the prompt has .* characters, but max_model_len is 2048"):
            llm.generate(prompt, GREEDY, use_tqdm=False)


def test_normalisation_makes_one_character_of_four() -> None:
    """The longest text that may fit is tokenised: each token is a letter with three accents.

    No character of Unicode is the normal form of more than four.
    """
    letter = "\u1f82"
    longest = max((unicodedata.normalize("NFD", chr(i)) for i in range(0x110000)), key=len)
    assert len(longest) == 4
    assert len(unicodedata.normalize("NFD", letter)) == 4
    backend = Tokenizer(models.BPE({letter: 0}, []))
    backend.normalizer = normalizers.NFC()
    prompts = PromptProcessor(
        config=EngineConfig(),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend),
        vocab_size=1,
        num_blocks=10,
        max_model_len=20,
        eos_token_ids=frozenset(),
    )
    accents = unicodedata.normalize("NFD", letter)
    assert prompts.encode(accents * 20) == [0] * 20
    with pytest.raises(ValueError, match="the prompt has 84 characters, but max_model_len is 20 tokens"):
        prompts.encode(accents * 21)


def test_prompts_as_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("ROMEO:\n")
    prompts = [
        {"prompt": "ROMEO:\n"},
        {"prompt_token_ids": ids},
        {"prompt": "shown", "prompt_token_ids": ids},
    ]
    outputs = llm.generate([*prompts, "ROMEO:\n", ids], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["ROMEO:\n", None, "shown", "ROMEO:\n", None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    (output,) = llm.generate(prompts[0], GREEDY, use_tqdm=False)
    assert tokens_of([output]) * 5 == tokens_of(outputs)
    llm.engine.add_request("a dict", prompts[0], GREEDY)
    llm.engine.abort_request("a dict")


def test_the_output_of_a_tokenizer_is_a_prompt(llm: LLM) -> None:
    """transformers' BatchEncoding, of one text or many, with padding, as lists or tensors."""
    tokenizer = llm.get_tokenizer()
    one, many = tokenizer("ROMEO:\n"), tokenizer(["ROMEO:\n", "O"])
    first, second = one["input_ids"], tokenizer.encode("O")
    zeros = [0] * (len(first) - 1)
    padded = {"input_ids": [first, second + zeros], "attention_mask": [[1] * len(first), [1] + zeros]}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=True)
    for prompts, token_ids in (
        (one, [first]),
        ([one], [first]),
        (tokenizer("ROMEO:\n", return_tensors="pt"), [first]),
        (many, [first, second]),
        ({name: torch.tensor(rows) for name, rows in padded.items()}, [first, second]),
        (chat, [chat["input_ids"]]),
    ):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == token_ids
    *_, last = llm.stream(one, GREEDY)
    assert last.prompt_token_ids == first
    for call in (llm.stream, lambda prompt: llm.engine.add_request("a", prompt)):
        with pytest.raises(ValueError, match="the tokens of 2 texts"):
            call(many)
    assert not llm.engine.has_unfinished_requests()


def test_max_tokens_none_is_as_many_as_the_model_allows(qwen3: Oracle) -> None:
    llm = LLM(qwen3.folder)
    assert llm.get_tokenizer() is None
    rules = {"max_tokens": None, "min_tokens": 155, "ignore_eos": True}
    for params in (SamplingParams(**rules), BeamSearchParams(beam_width=2, **rules)):
        (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 3
        assert output.outputs[0].finish_reason == "length"


def test_tokens_found_in_the_cache_until_it_is_reset(llm: LLM) -> None:
    """And with the same salt only. None is no salt."""
    ids = list(range(3, 43))

    def num_cached(salt: str | None = None) -> int:
        (output,) = llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, GREEDY, use_tqdm=False)
        llm.engine.check_invariants()
        return output.num_cached_tokens

    for _ in range(2):
        llm.reset_prefix_cache()
        for salt in (None, "a long salt, number 1", "a long salt, number 2"):
            assert [num_cached(salt), num_cached(salt)] == [0, 32]
    (expected,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert expected.num_cached_tokens == 32, "without a dict"
    states = llm.stream(ids, GREEDY)
    next(states)
    llm.reset_prefix_cache()  # blocks in use are still shared
    assert num_cached() == 32
    *_, last = states
    assert tokens_of([last]) == tokens_of([expected])


def test_an_interrupt_while_the_cache_is_reset(llm: LLM) -> None:
    for line in count(1):
        llm.generate(list(range(80)), GREEDY, use_tqdm=False)
        try:
            with FailAtLine(line):
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
    """With options of the template."""
    messages = [{"role": "user", "content": "Hi"}]
    for options, text in (
        (None, "<user>Hi;<assistant>"),
        ({"enable_thinking": False}, "<user>Hi;<assistant><think></think>"),
        ({"add_generation_prompt": False}, "<user>Hi;"),
        ({"tools": None, "chat_template": "{{ messages[0].content }}"}, "Hi"),
    ):
        (output,) = thinker.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs=options)
        assert output.prompt == thinker.chat_prompt(messages, options)["prompt"] == text
        assert thinker.get_tokenizer().decode(output.prompt_token_ids) == text


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system') }}", "{{ 1 / 0 }}", "{% if", "{{ messages.__class__.__mro__ }}", 5]
    + ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[9].role.x }}", "{{ x.y.z }}"],
)
def test_a_chat_template_that_fails(llm: LLM, template: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="the chat template fails: "):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    assert llm.generate("Hi", GREEDY, use_tqdm=False)


def test_content_parts_and_tool_calls(thinker: LLM) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    before = copy.deepcopy(messages)
    prompt = thinker.chat_prompt(messages)["prompt"]
    assert prompt == "<user>Hi\nthere;<assistant>[weather];<tool>rain;<assistant>[weather];<assistant>"
    assert messages == before


CONVERSATION = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "user"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]},
    {"role": "tool", "content": "rain"},
]
LOOP = "{% for part in m.content %}[{{ part.text | trim }}]{% endfor %}"
SEVERAL = "{% for m in messages %}{{ m.role }}: %s;{% endfor %}"


@pytest.mark.parametrize(
    "content",
    [
        "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
        "{% if m.content is not defined %}none{% elif m.content is not string %}" + LOOP + "{% endif %}",
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{{ m.content | map(attribute='text') | join('+') }}{% endif %}",
    ],
)
def test_a_template_that_takes_parts_gets_them(
    llm: LLM, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no content where a message has none. The text is that of transformers."""
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", SEVERAL.replace("%s", content))
    expected = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert llm.chat_prompt(CONVERSATION)["prompt"] == expected


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",  # prints the list
        "{{ m.content | tojson }}",
        "{{ m.content + '' }}",  # raises
        "{{ m['content'].strip() }}",
        "{% if m.content is string %}{{ m.content }}{% endif %}",  # drops it
        "{% if m.role == 'user' and m.content is not string %}"  # prints that of the system
        + LOOP
        + "{% else %}{{ m.content }}{% endif %}",
    ],
)
def test_a_template_that_takes_texts_gets_them(
    llm: LLM, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts become lines, and a missing content an empty text, for all messages alike."""
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", SEVERAL.replace("%s", content))
    contents = ["Be kind.", "Hi\nuser", "", "rain"]
    texts = [m | {"content": text} for m, text in zip(CONVERSATION, contents, strict=True)]
    expected = tokenizer.apply_chat_template(texts, tokenize=False)
    assert llm.chat_prompt(CONVERSATION)["prompt"] == expected


def test_a_chat_has_only_the_special_tokens_of_its_template(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that begins each text with a token adds none to a chat."""
    begin = llm.get_tokenizer().all_special_tokens[0]
    (begin_id,) = llm.get_tokenizer().encode(begin)
    processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, begin_id)])
    monkeypatch.setattr(llm.get_tokenizer().backend_tokenizer, "post_processor", processor)
    assert llm.engine.prompts.encode("Hi")[0] == begin_id
    prompt = llm.chat_prompt([{"role": "user", "content": "Hi"}])
    assert llm.get_tokenizer().decode(prompt["prompt_token_ids"]) == prompt["prompt"]


def test_an_answer_that_was_begun(llm: LLM) -> None:
    """It goes on where its beginning ends, without a new header."""
    messages = [{"role": "user", "content": "What news?"}, {"role": "assistant", "content": "My lord, the"}]
    (output,) = llm.chat(
        messages, GREEDY, use_tqdm=False, chat_template_kwargs={"continue_final_message": True}
    )
    assert output.prompt.endswith("<|im_start|>assistant\nMy lord, the")
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(ValueError, match="continue_final_message and add_generation_prompt"):
        llm.chat_prompt(messages, both)


@pytest.mark.parametrize(
    ("template", "options", "name"),
    [
        ("no tools: {{ messages[0].content }}{# tools #}", {"tools": [{"name": "weather"}]}, "tools"),
        (THINKING, {"enable_thinking": False, "documents": []}, "documents"),
        ("{{ messages[0].content }}{{ messages[0]['thinking'] }}", {"thinking": True}, "thinking"),
        (THINKING, {"tokenize": True}, "tokenize"),
        (THINKING, {"max_length": 5}, "max_length"),
        ("{{ tools }}", {"tools": [], "chat_template": THINKING}, "tools"),
    ],
)
def test_an_option_that_the_template_does_not_use(
    llm: LLM, template: str, options: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past bug: tools were dropped without a word."""
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match=f"the chat template does not use '{name}': leave it out"):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs=options)


def test_tools_reach_a_template_that_uses_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% generation %}{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template + "{% endgeneration %}")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompt = llm.chat_prompt([{"role": "user", "content": "Hi"}], {"tools": tools})
    assert prompt["prompt"] == str(tools)


# ── stop strings ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stop", ["<|im_end|>", "So be it.<|im_end|>\n", ["\n", "<|im_start|>user"]])
def test_a_stop_string_with_a_special_token(llm: LLM, stop: str | list[str]) -> None:
    """No text has one, so it would never stop. Its id does."""
    with pytest.raises(ValueError, match=r"has the special token '<\|im_\w+\|>' in it") as error:
        llm.generate("Hi", SamplingParams(stop=stop), use_tqdm=False)
    (token_id,) = re.findall(r"use stop_token_ids=\[(\d+)\]$", str(error.value))
    assert llm.get_tokenizer().decode([int(token_id)]) in str(stop)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        llm.generate("Hi", SamplingParams(stop="half a pair: \ud83d"), use_tqdm=False)


@pytest.mark.parametrize("stop", ["<|im_end|", "|im_end|>", "<", "|>", "im_end"])
def test_a_stop_string_with_a_part_of_a_special_token(llm: LLM, stop: str) -> None:
    """It stops a text in which ordinary tokens spell it."""
    request = llm.engine.prompts.make_request("a", "Hi", SamplingParams(stop=stop))
    assert request.live[0].detokenizer.find_stop(llm.get_tokenizer().encode(f"So {stop}")) == stop
