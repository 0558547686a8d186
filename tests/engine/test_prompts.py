"""Prompts in all their forms, conversations, and what the prefix cache finds of them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle, tokens_of
from tokenizers import processors

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.prompts import MAX_TOKEN_LENGTH

GREEDY = SamplingParams(temperature=0, max_tokens=8)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def test_what_is_no_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages; and 40 MB of text, which took two minutes and gigabytes to become tokens."""
    for prompts, error in ((HI, ValueError), ([HI], TypeError)):
        with pytest.raises(error, match=r"messages are for chat: llm.chat\(messages, params\)"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    longest = MAX_TOKEN_LENGTH * llm.engine.config.max_model_len
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: pytest.fail("it is tokenised"))
    for prompt in ("x" * (longest + 1), {"prompt": "é" * (longest + 1)}):
        with pytest.raises(ValueError, match=r"the prompt has .* characters, but max_model_len is 2048"):
            llm.generate(prompt, GREEDY, use_tqdm=False)
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: [1])
    assert llm.engine.prompts.encode("x" * longest) == [1]


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
    assert tokens_of(llm.generate(prompts[0], GREEDY, use_tqdm=False)) * 5 == tokens_of(outputs)


def test_the_output_of_a_tokenizer_is_a_prompt(llm: LLM) -> None:
    """transformers' BatchEncoding, of one text or many, with padding, as lists or tensors."""
    tokenizer = llm.get_tokenizer()
    one, many = tokenizer("ROMEO:\n"), tokenizer(["ROMEO:\n", "O"])
    first, second = one["input_ids"], tokenizer.encode("O")
    zeros = [0] * (len(first) - 1)
    padded = {"input_ids": [first, second + zeros], "attention_mask": [[1] * len(first), [1] + zeros]}
    chat = tokenizer.apply_chat_template(HI, return_dict=True)
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


@pytest.mark.parametrize(("key", "is_in_list"), [("prompt_token_ids", True), ("input_ids", False)])
def test_tokens_found_in_the_cache_until_it_is_reset(llm: LLM, key: str, is_in_list: bool) -> None:
    """And with the same salt only. None is no salt."""
    ids = list(range(3, 43))

    def num_cached(salt: str | None = None) -> int:
        prompt = {key: ids, "cache_salt": salt}
        (output,) = llm.generate([prompt] if is_in_list else prompt, GREEDY, use_tqdm=False)
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


# ── conversations ─────────────────────────────────────────────────────────────────────────────────


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not (enable_thinking | default(true)) %}<think></think>"
    "{% endif %}{% endif %}"
)


def set_template(llm: LLM, monkeypatch: pytest.MonkeyPatch, template: object) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (None, "<user>Hi;<assistant>"),
        ({"enable_thinking": False}, "<user>Hi;<assistant><think></think>"),
        ({"add_generation_prompt": False}, "<user>Hi;"),
        ({"tools": None, "chat_template": "{{ messages[0].content }}"}, "Hi"),
        ({"tools": [{"name": "x"}], "chat_template": "{% generation %}{{ tools }}{% endgeneration %}"}, None),
    ],
)
def test_the_prompt_of_a_chat_is_the_rendered_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict | None, text: str | None
) -> None:
    """With options of the template, which thinks by default, as Qwen3's does."""
    set_template(llm, monkeypatch, THINKING)
    (output,) = llm.chat(HI, GREEDY, use_tqdm=False, chat_template_kwargs=options)
    assert output.prompt == (text or str(options["tools"]))
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == output.prompt


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system') }}", "{{ 1 / 0 }}", "{% if", "{{ messages.__class__.__mro__ }}", 5]
    + ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[9].role.x }}"],
)
def test_a_chat_template_that_fails(llm: LLM, template: object, monkeypatch: pytest.MonkeyPatch) -> None:
    set_template(llm, monkeypatch, template)
    with pytest.raises(ValueError, match="the chat template fails: "):
        llm.chat_prompt(HI)


CONVERSATION = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "user"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]},
    {"role": "tool", "content": "rain"},
]
TEXTS = ["Be kind.", "Hi\nuser", "", "rain"]
LOOP = "{% for part in m.content %}[{{ part.text | trim }}]{% endfor %}"


@pytest.mark.parametrize(
    ("content", "takes_parts"),
    [
        ("{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}", True),
        (
            "{% if m.content is not defined %}none{% elif m.content is not string %}" + LOOP + "{% endif %}",
            True,
        ),
        ("{{ m.content }}", False),  # prints the list
        ("{{ m.content | tojson }}", False),
        ("{{ m['content'].strip() }}", False),  # raises
        ("{% if m.content is string %}{{ m.content }}{% endif %}", False),  # drops it
        ("{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content }}{% endif %}", False),  # of the system
        ("{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}", False),
    ],
)
def test_a_template_gets_parts_or_texts(
    llm: LLM, content: str, takes_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts become lines and a missing content an empty text, for all messages, if it takes no parts."""
    template = "{% for m in messages %}{{ m.role }}: " + content + ";{% endfor %}"
    set_template(llm, monkeypatch, template)
    texts = [m | {"content": text} for m, text in zip(CONVERSATION, TEXTS, strict=True)]
    before = copy.deepcopy(CONVERSATION)
    expected = llm.get_tokenizer().apply_chat_template(CONVERSATION if takes_parts else texts, tokenize=False)
    assert llm.chat_prompt(CONVERSATION)["prompt"] == expected
    assert before == CONVERSATION


def test_a_chat_has_only_the_special_tokens_of_its_template(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that begins each text with a token adds none to a chat."""
    begin = llm.get_tokenizer().all_special_tokens[0]
    (begin_id,) = llm.get_tokenizer().encode(begin)
    processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, begin_id)])
    monkeypatch.setattr(llm.get_tokenizer().backend_tokenizer, "post_processor", processor)
    assert llm.engine.prompts.encode("Hi")[0] == begin_id
    prompt = llm.chat_prompt(HI)
    assert llm.get_tokenizer().decode(prompt["prompt_token_ids"]) == prompt["prompt"]


def test_an_answer_that_was_begun(llm: LLM) -> None:
    """It goes on where its beginning ends, without a new header."""
    messages = [{"role": "user", "content": "What news?"}, {"role": "assistant", "content": "My lord, the"}]
    (output,) = llm.chat(
        messages, GREEDY, use_tqdm=False, chat_template_kwargs={"continue_final_message": True}
    )
    assert output.prompt.endswith("<|im_start|>assistant\nMy lord, the")
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    contradiction = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(ValueError, match="continue_final_message and add_generation_prompt"):
        llm.chat_prompt(messages, contradiction)


@pytest.mark.parametrize(
    ("template", "options", "name"),
    [
        ("no tools: {{ messages[0].content }}{# tools #}", {"tools": [{"name": "weather"}]}, "tools"),
        (THINKING, {"enable_thinking": False, "documents": []}, "documents"),
        ("{{ messages[0].content }}{{ messages[0]['thinking'] }}", {"thinking": True}, "thinking"),
        (THINKING, {"tokenize": True}, "tokenize"),
        ("{{ tools }}", {"tools": [], "chat_template": THINKING}, "tools"),
    ],
)
def test_an_option_that_the_template_does_not_use(
    llm: LLM, template: str, options: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past bug: tools were dropped without a word."""
    set_template(llm, monkeypatch, template)
    with pytest.raises(ValueError, match=f"the chat template does not use '{name}': leave it out"):
        llm.chat_prompt(HI, options)


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
