"""The server, called by OpenAI's own client, gives the answers of the engine without a server.

python -m pytest docs/forks/server/test_server.py
"""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn
from server import MAX_BODY_BYTES, MAX_CHARACTERS, MAX_ENTRIES, MAX_PROMPTS, EngineThread, make_app

from nanopaged import LLM, RequestOutput, SamplingParams
from nanopaged.sequence import Sample, ScheduledBatch, StepResult

torch.set_num_threads(1)  # the model is so small that a second thread only waits

NUM_BLOCKS = 800
CLIENT = {"max_retries": 0, "timeout": 30}
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}  # many seconds of work
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 24}
PENALTIES = {"temperature": 0, "max_tokens": 24, "presence_penalty": 0.5, "frequency_penalty": 1.0}
QUESTION = [{"role": "user", "content": "What is virtual memory?"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PROMPTS = ["ROMEO:", "To be, or not to be", "JULIET:\nO", "First Citizen:"]


@pytest.fixture(scope="module")
def offline() -> LLM:
    """The engine without a server."""
    return LLM(num_blocks=NUM_BLOCKS, dtype="float32")


@pytest.fixture(scope="module")
def engine() -> EngineThread:
    return EngineThread(LLM(num_blocks=NUM_BLOCKS, dtype="float32"))


@pytest.fixture(scope="module")
def url(engine: EngineThread) -> Iterator[str]:
    """The server runs in a thread. It takes calls as soon as its socket listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(
            uvicorn.Config(make_app(engine, "tiny"), log_level="critical", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **CLIENT)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """For what OpenAI's client does not send."""
    with httpx.Client(base_url=url, timeout=30) as http:
        yield http


@pytest.fixture(autouse=True)
def _all_blocks_are_free_afterwards(engine: EngineThread, http: httpx.Client) -> Iterator[None]:
    yield
    wait_until(lambda: stats_of(http)["num_used_blocks"] == 0)
    engine.pool.submit(engine.engine.check_invariants).result()
    assert not engine.unread
    assert not engine.engine.requests


def stats_of(http: httpx.Client) -> dict[str, Any]:
    return http.get("/health").json()


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def texts_of(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def read(chunks: Iterable[Any]) -> tuple[dict[int, str], dict[int, list[str]], Any]:
    """The texts, the finish reasons and the usage of a stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + text
            reasons.setdefault(choice.index, [])
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    return texts, reasons, usage


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALTIES, SEEDED | {"n": 2}])
def test_completions(client: openai.OpenAI, offline: LLM, options: dict[str, Any]) -> None:
    """The texts, their order, the finish reasons and the usage, streamed and whole."""
    outputs = offline.generate(PROMPTS, SamplingParams(**options), use_tqdm=False)
    completions = [completion for output in outputs for completion in output.outputs]
    whole = client.completions.create(model="tiny", prompt=PROMPTS, **options)
    assert [choice.text for choice in whole.choices] == texts_of(outputs)
    assert [choice.index for choice in whole.choices] == list(range(len(completions)))
    assert [choice.finish_reason for choice in whole.choices] == [each.finish_reason for each in completions]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for completion in completions)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, num_output)
    assert whole.usage.total_tokens == num_prompt + num_output
    texts, reasons, usage = read(
        client.completions.create(model="tiny", prompt=PROMPTS, stream=True, **options)
    )
    assert texts == dict(enumerate(texts_of(outputs)))
    assert reasons == {index: [each.finish_reason] for index, each in enumerate(completions)}
    assert usage is None, "it was not asked for"


def test_forms_of_a_prompt(client: openai.OpenAI, offline: LLM) -> None:
    """A text, token ids, or a list of texts or of token ids."""
    texts = texts_of(offline.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False))
    ids = [offline.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    for prompt, expected in ((PROMPTS[0], texts[:1]), (ids[0], texts[:1]), (ids, texts)):
        answer = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected


@pytest.mark.parametrize("options", [GREEDY, SEEDED | {"n": 3}])
def test_chat(client: openai.OpenAI, offline: LLM, options: dict[str, Any]) -> None:
    (output,) = offline.chat(QUESTION, SamplingParams(**options), use_tqdm=False)
    options = dict(options)
    options["max_completion_tokens"] = options.pop("max_tokens")
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, **options)
    assert [choice.message.content for choice in whole.choices] == texts_of([output])
    assert {choice.message.role for choice in whole.choices} == {"assistant"}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    texts, reasons, usage = read(chunks)
    assert texts == dict(enumerate(texts_of([output])))
    assert [reasons[index] for index in sorted(reasons)] == [
        [completion.finish_reason] for completion in output.outputs
    ]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0, "the same prompt was computed before"
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role]
    assert roles == ["assistant"] * len(output.outputs)


def test_a_chat_has_no_limit_but_the_models(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None)
    (output,) = offline.chat(QUESTION, params, use_tqdm=False)
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    assert [answer.choices[0].message.content] == texts_of([output])
    assert len(output.outputs[0].token_ids) > 16


def test_vllm_options(client: openai.OpenAI, offline: LLM) -> None:
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 8, "stop_token_ids": [3]}
    outputs = offline.generate(PROMPTS[0], SamplingParams(**SEEDED, **more), use_tqdm=False)
    answer = client.completions.create(model="tiny", prompt=PROMPTS[0], extra_body=more, **SEEDED)
    assert [answer.choices[0].text] == texts_of(outputs)


def test_stop_strings(client: openai.OpenAI, offline: LLM) -> None:
    """No part of a stop string is streamed."""
    (text,) = texts_of(offline.generate(PROMPTS[0], SamplingParams(**GREEDY), use_tqdm=False))
    for stop in (text[9:12], [text[20:25], "no such text"]):
        options = GREEDY | {"stop": stop}
        (expected,) = texts_of(offline.generate(PROMPTS[0], SamplingParams(**options), use_tqdm=False))
        whole = client.completions.create(model="tiny", prompt=PROMPTS[0], **options)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
        texts, reasons, _ = read(
            client.completions.create(model="tiny", prompt=PROMPTS[0], stream=True, **options)
        )
        assert (texts, reasons) == ({0: expected}, {0: ["stop"]})
        assert len(expected) < len(text)


def test_a_character_of_several_tokens(
    client: openai.OpenAI, engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has whole characters only. The model is made to say them."""
    text = "naïve — 🙂 €5"
    script = engine.llm.get_tokenizer().encode(text)
    assert len(script) > len(text)

    def say(batch: ScheduledBatch) -> StepResult:
        return StepResult([[Sample(script[seq.num_output_tokens], 0.0)] for seq in batch.sequences])

    monkeypatch.setattr(engine.engine.runner, "execute", say)
    options = {"model": "tiny", "prompt": "x", "max_tokens": len(script)}
    assert client.completions.create(**options).choices[0].text == text
    texts = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
    assert "".join(texts) == text
    assert len(texts) > 5


def test_32_streams(url: str, offline: LLM) -> None:
    prompts = [f"{prompt} {i}" for i in range(8) for prompt in PROMPTS]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20 + i) for i in range(32)]
    expected = texts_of(offline.generate(prompts, params, use_tqdm=False))

    async def stream(client: openai.AsyncOpenAI, i: int) -> str:
        chunks = await client.completions.create(
            model="tiny", prompt=prompts[i], temperature=0.8, seed=i, max_tokens=20 + i, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def stream_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", **CLIENT) as client:
            return await asyncio.gather(*(stream(client, i) for i in range(32)))

    assert asyncio.run(stream_all()) == expected


def test_the_event_loop_answers_while_a_step_runs(
    client: openai.OpenAI, engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on, execute = threading.Event(), threading.Event(), engine.engine.runner.execute

    def wait(batch: ScheduledBatch) -> StepResult:
        entered.set()
        assert go_on.wait(10)
        return execute(batch)

    monkeypatch.setattr(engine.engine.runner, "execute", wait)
    answers: list[Any] = []
    call = threading.Thread(
        target=lambda: answers.append(client.completions.create(model="tiny", prompt="a", **GREEDY))
    )
    call.start()
    assert entered.wait(10)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert not answers
    go_on.set()
    call.join()
    assert answers[0].usage.completion_tokens == 24


def test_a_slow_reader_gets_the_latest_output(engine: EngineThread) -> None:
    """Not all that it has missed, whose tokens add up to the square of the length."""

    async def connected() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def read_late() -> list[RequestOutput]:
        make = engine.engine.prompts.make_request
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        outputs = engine.serve([make(name, "a", params) for name in "ab"], connected)
        first = await anext(outputs)
        while engine.unread:
            await asyncio.sleep(0.01)
        return [first, *[output async for output in outputs]]

    first, *rest = asyncio.run(read_late())
    assert not first.finished
    assert 2 <= len(rest) <= 3, "of the step of the first output there may be another"
    assert [output.request_id for output in rest if output.finished] == ["a", "b"]
    assert all(len(output.outputs[0].token_ids) == 30 for output in rest if output.finished)


def test_streams_go_on_while_a_prompt_becomes_tokens(
    client: openai.OpenAI, engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on, prompts = threading.Event(), threading.Event(), engine.engine.prompts
    encode = prompts.encode

    def wait(text: str, **options: bool) -> list[int]:
        entered.set()
        assert go_on.wait(10)
        return encode(text, **options)

    stream = client.completions.create(model="tiny", prompt="a", stream=True, **GREEDY)
    next(stream)
    monkeypatch.setattr(prompts, "encode", wait)
    answers: list[Any] = []
    call = threading.Thread(
        target=lambda: answers.append(client.completions.create(model="tiny", prompt="b", **GREEDY))
    )
    call.start()
    assert entered.wait(10)
    _, reasons, _ = read(stream)
    assert reasons == {0: ["length"]}
    assert not answers
    go_on.set()
    call.join()
    assert answers[0].usage.completion_tokens == 24


# ── refused calls ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1, but must lie in"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "many"}, "max_tokens must be an int"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": None}, "the prompt is empty"),
        ({"prompt": [[1, 2], []]}, "the prompt is empty"),
        ({"prompt": [1, -2]}, "token id -2 is outside the vocabulary"),
        ({"prompt": 5}, "a prompt is a str or a list of token ids, got int"),
        ({"prompt": {"text": "a"}}, "a prompt is a str or a list of token ids, got dict"),
        ({"prompt": "\ud800"}, "surrogates not allowed"),
        ({"\ud800": 1}, "unexpected keyword argument '\ud800'"),
        ({"echo": True}, "echo is true, but this server takes only false: leave it out"),
        ({"best_of": 2}, "unexpected keyword argument 'best_of'"),
        ({"logprobs": 0}, "no log-probabilities"),
        ({"suffix": "b"}, "unexpected keyword argument 'suffix'"),
        ({"prompt_logprobs": 1}, "no log-probabilities"),
        ({"stream": "yes"}, "stream is true or false"),
        ({"stream_options": 5}, "stream_options is 5"),
        ({"stream_options": {"include_usage": "false"}}, "stream_options is {'include_usage': 'false'}"),
        ({"stream_options": {"continuous_usage_stats": True}}, "may have include_usage, true or false, only"),
    ],
)
def test_refused_completions(http: httpx.Client, options: dict[str, Any], message: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a"} | options)
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "the conversation is empty"),
        ({"messages": "Hi"}, "a conversation is a list of"),
        ({"messages": 5}, "not iterable"),
        ({"messages": [{"role": "user"}]}, "needs a 'role' and a 'content'"),
        ({"logprobs": True}, "no log-probabilities"),
        (
            {"response_format": {"type": "json_object"}},
            'this server takes only {"type": "text"}: leave it out',
        ),
        ({"modalities": ["text", "audio"]}, 'but this server takes only ["text"]: leave it out'),
        ({"tools": [TOOL]}, "but this server takes only []: leave it out"),
        ({"functions": [{"name": "f"}]}, "but this server takes only []: leave it out"),
        (
            {"tool_choice": "required"},
            'tool_choice is "required", but this server takes only "none" or "auto"',
        ),
        ({"tool_choice": TOOL}, 'but this server takes only "none" or "auto": leave it out'),
        ({"function_call": {"name": "f"}}, 'but this server takes only "none" or "auto": leave it out'),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [CALL]}]}, 'calls [{"id": "1", '),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "", "function_call": CALL}]}, "no tools"),
        (
            {"messages": [*QUESTION, {"role": "tool", "content": "5"}]},
            "the role 'tool', but this server has no",
        ),
        ({"messages": [*QUESTION, {"role": "function", "content": "5"}]}, "the role 'function', but this"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is refused"),
        ({"chat_template_kwargs": 5}, "not iterable"),
    ],
)
def test_refused_chats(http: httpx.Client, options: dict[str, Any], message: str) -> None:
    body = {"model": "tiny", "messages": QUESTION} | options
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


TOO_MUCH = [  # each list or text of a call that would cost other clients time in each step
    ("stop", ["x"] * 5, "stop has 5 entries, but the limit is 4: send fewer"),
    ("stop", [f"{i}" * 80 for i in range(2000)], "stop has 2000 entries, but the limit is 4"),
    ("stop", dict.fromkeys("abcde"), "stop has 5 entries, but the limit is 4"),
    ("stop", "x" * 257, "a stop string has 257 characters, but the limit is 256: shorten it"),
    ("stop", ["a", "x" * 5000], "a stop string has 5000 characters, but the limit is 256"),
    ("stop", {"x" * 5000: 1}, "a stop string has 5000 characters, but the limit is 256"),
    ("stop_token_ids", [5] * 65, "stop_token_ids has 65 entries, but the limit is 64: send fewer"),
    ("cache_salt", "x" * 257, "cache_salt has 257 characters, but the limit is 256: shorten it"),
    ("logit_bias", {"5": 100}, 'logit_bias is {"5": 100}, but this server takes only {}: leave it out'),
    ("top_logprobs", 20, "no log-probabilities"),
    ("n", 1000, "the request is for 1000 sequences, but max_num_seqs is 256"),
    ("prompt", "a " * 5000, "shorten the prompt"),
    ("prompt", [5] * 5000, "shorten the prompt"),
    ("messages", QUESTION * 1025, "messages has 1025 entries, but the limit is 1024: send fewer"),
]


@pytest.mark.parametrize(("field", "value", "message"), TOO_MUCH)
def test_too_much(http: httpx.Client, field: str, value: Any, message: str) -> None:
    is_chat = field == "messages"
    prompt = {} if is_chat else {"prompt": "a"}
    answer = http.post("/v1/chat/completions" if is_chat else "/v1/completions", json=prompt | {field: value})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_every_list_has_a_limit_and_may_reach_it(client: openai.OpenAI) -> None:
    lists = {field.name for field in fields(SamplingParams) if isinstance(field.default, tuple)}
    assert lists == MAX_ENTRIES.keys() - {"messages"}
    most = {"stop": ["x" * MAX_CHARACTERS] * MAX_ENTRIES["stop"], "cache_salt": "s" * MAX_CHARACTERS}
    most["stop_token_ids"] = [5] * MAX_ENTRIES["stop_token_ids"]
    client.completions.create(model="tiny", prompt="a", extra_body=most, **GREEDY)


def test_errors_of_the_client(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4': this server has 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="top_p is 7"):
        client.completions.create(model="tiny", prompt="a", top_p=7, stream=True)
    deep = '{"prompt": ' + "[" * 990 + "]" * 990 + "}"
    for body in ("{", "[]", "5", b"\xff", "[" * 200_000, deep):
        assert http.post("/v1/completions", content=body).status_code == 400
    answer = http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")


def test_the_largest_body(http: httpx.Client) -> None:
    """As one piece, and in chunks of unknown number. The client is told the limit when it has sent it all."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).ljust(MAX_BODY_BYTES).encode()
    for num_more, status in ((0, 200), (1, 413), (40 * MAX_BODY_BYTES, 413)):
        longer = body + b" " * num_more
        in_chunks = (longer[i : i + 50_000] for i in range(0, len(longer), 50_000))
        for content in (longer, in_chunks):
            answer = http.post("/v1/completions", content=content)
            assert answer.status_code == status
            if status == 413:
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", 413)
                assert error["message"].startswith(
                    f"the body has {len(longer)} bytes, but the limit is {MAX_BODY_BYTES}: send less"
                )


CALLERS = [  # Host, Origin, what is allowed, whether the call is answered
    ("127.0.0.1:8000", None, (), True),
    ("[::1]:8000", None, (), True),
    ("localhost", None, (), True),
    ("192.168.0.7:8000", None, (), True),
    ("evil.example:8000", None, (), False),  # its name may have been given the address 127.0.0.1
    ("localhost.evil.example", None, (), False),
    ("127.0.0.1.evil.example", None, (), False),
    ("[", None, (), False),
    ("", None, (), False),
    ("gpu-box:8000", None, ("GPU-box",), True),
    ("127.0.0.1:8000", "http://127.0.0.1:8000", (), True),
    ("127.0.0.1:8000", "http://127.0.0.1:9000", (), False),
    ("127.0.0.1:8000", "https://evil.example", (), False),
    ("127.0.0.1:8000", "https://127.0.0.1:8000.evil.example", (), False),
    ("127.0.0.1:8000", "null", (), False),
    ("evil.example", "http://evil.example", (), False),
    ("127.0.0.1:8000", "https://my.page", ("https://my.page/",), True),
    ("evil.example", "https://evil.example", ("*",), True),
]


@pytest.mark.parametrize(("host", "origin", "allowed", "answered"), CALLERS)
def test_a_web_page_of_another_site_is_refused(
    engine: EngineThread, host: str, origin: str | None, allowed: tuple[str, ...], answered: bool
) -> None:
    """A browser sends a form, or a text, to any address, without asking the server before."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(engine, "tiny", allowed=allowed))
        headers = {"host": host, "content-type": "text/plain"} | ({"origin": origin} if origin else {})
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.post("/v1/completions", content='{"max_tokens": 0}', headers=headers)

    response = asyncio.run(call())
    assert response.status_code == (400 if answered else 403), "400: the call was read"
    assert answered == ("max_tokens is 0" in response.text)


@pytest.mark.parametrize("prompt", ["a", [5]])
def test_the_most_prompts(client: openai.OpenAI, prompt: str | list[int]) -> None:
    answer = client.completions.create(model="tiny", prompt=[prompt] * MAX_PROMPTS, max_tokens=1)
    assert len(answer.choices) == MAX_PROMPTS
    message = f"the call has {MAX_PROMPTS + 1} prompts, but the limit is {MAX_PROMPTS}: make several calls"
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="tiny", prompt=[prompt] * (MAX_PROMPTS + 1), max_tokens=1)


def test_harmless_fields(client: openai.OpenAI) -> None:
    """They change no output, and null stands for a default."""
    expected = client.completions.create(model="tiny", prompt="a", **GREEDY).choices[0].text
    more = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "seed": None,
        "stop": None,
        "logit_bias": {},
        "echo": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "functions": [],
        "function_call": "auto",
    }
    assert (
        client.completions.create(model="tiny", prompt="a", extra_body=more, **GREEDY).choices[0].text
        == expected
    )
    answers = []
    for unused in ({}, {"tool_calls": None, "function_call": None, "refusal": None}, {"tool_calls": []}):
        messages = [QUESTION[0], {"role": "assistant", "content": "A", **unused}, *QUESTION]
        answer = client.chat.completions.create(model="tiny", messages=messages, extra_body=more, **GREEDY)
        answers.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert answers == [answers[0]] * 3


def test_a_cache_salt_is_a_part_of_the_prompt(
    client: openai.OpenAI, engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, make_request = [], engine.engine.prompts.make_request

    def spy(request_id: str, prompt: dict[str, Any], params: SamplingParams) -> object:
        prompts.append(prompt)
        return make_request(request_id, {k: v for k, v in prompt.items() if k != "cache_salt"}, params)

    monkeypatch.setattr(engine.engine.prompts, "make_request", spy)
    for salt in ({"cache_salt": "alice"}, {}):
        client.completions.create(model="tiny", prompt="a", extra_body=salt, **GREEDY)
        client.chat.completions.create(model="tiny", messages=QUESTION, extra_body=salt, **GREEDY)
    assert [prompt.get("cache_salt") for prompt in prompts] == ["alice", "alice", None, None]
    assert ["cache_salt" in prompt for prompt in prompts] == [True, True, False, False]


# ── clients that go, and steps that fail ──────────────────────────────────────────────────────────


def test_clients_that_go(http: httpx.Client, client: openai.OpenAI, offline: LLM) -> None:
    """Their requests are aborted and their blocks are free, while another client gets the right answer."""
    (expected,) = texts_of(offline.generate("HAMLET:", SamplingParams(**SEEDED), use_tqdm=False))
    tokens_before = stats_of(http)["num_generated_tokens"]
    streams = [client.completions.create(model="tiny", prompt=PROMPTS, stream=True, **LONG) for _ in range(2)]
    chat = client.chat.completions.create(model="tiny", messages=QUESTION, n=4, stream=True, **LONG)
    for stream in (*streams, chat):
        next(stream)
    assert stats_of(http)["num_running"] == 9
    survivor = client.completions.create(model="tiny", prompt="HAMLET:", stream=True, **SEEDED)
    first = next(survivor)
    for stream in (*streams, chat):
        stream.close()
    texts, _, _ = read([first, *survivor])
    assert texts == {0: expected}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="tiny", prompt=PROMPTS, **LONG)
    wait_until(lambda: stats_of(http)["num_used_blocks"] == 0)
    num_tokens = stats_of(http)["num_generated_tokens"] - tokens_before
    assert num_tokens < 1900 * 8, "they were aborted, not finished"


class FailOnce:
    """A runner's `execute` that raises when the prompts are all in the batch."""

    def __init__(self, engine: EngineThread, error: Exception, prompts: set[str]) -> None:
        self.execute, self.error, self.prompts = engine.engine.runner.execute, error, prompts
        self.num_tokens = 0  # of the longest output then

    def __call__(self, batch: ScheduledBatch) -> StepResult:
        sequences = {seq.request.prompt: seq for seq in batch.sequences if seq.num_output_tokens > 2}
        if self.prompts and self.prompts <= sequences.keys():
            if hasattr(self.error, "request_id"):
                self.error.request_id = sequences[min(self.prompts)].request.request_id
            self.prompts = set()
            self.num_tokens = max(seq.num_output_tokens for seq in batch.sequences)
            raise self.error
        return self.execute(batch)


def test_a_failed_step(
    client: openai.OpenAI, engine: EngineThread, offline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call ends with an error, in its own way, and the server goes on."""
    failing = FailOnce(engine, RuntimeError("out of luck"), {"ROMEO:", "JULIET:"})
    monkeypatch.setattr(engine.engine.runner, "execute", failing)
    stream = client.completions.create(model="tiny", prompt=["ROMEO:", "HAMLET:"], stream=True, **LONG)
    next(stream)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: out of luck"):
        client.completions.create(model="tiny", prompt="JULIET:", **GREEDY)
    with pytest.raises(openai.APIError, match="RuntimeError: out of luck"):
        list(stream)
    (expected,) = texts_of(offline.generate("JULIET:", SamplingParams(**GREEDY), use_tqdm=False))
    answer = client.completions.create(model="tiny", prompt="JULIET:", **GREEDY)
    assert answer.choices[0].text == expected


class NonFinite(FloatingPointError):
    request_id: str | None = None


def test_a_request_that_makes_a_step_fail(
    client: openai.OpenAI, engine: EngineThread, offline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own call ends with an error; another one in the same batch goes on."""
    failing = FailOnce(engine, NonFinite("not finite"), {"A bad one", "ROMEO:"})
    monkeypatch.setattr(engine.engine.runner, "execute", failing)
    stream = client.completions.create(model="tiny", prompt="ROMEO:", temperature=0, stream=True, **LONG)
    chunks = [next(stream)]
    with pytest.raises(openai.InternalServerError, match="NonFinite: not finite"):
        client.completions.create(model="tiny", prompt="A bad one", **GREEDY)
    chunks += islice(stream, failing.num_tokens + 8)
    stream.close()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(chunks))
    (expected,) = texts_of(offline.generate("ROMEO:", params, use_tqdm=False))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_ctrl_c() -> None:
    """The command line, with its limits: a running stream ends with an error, and the process without one."""
    script = Path(__file__).with_name("server.py")
    command = [sys.executable, str(script), "--port", "0", "--config", '{"num_blocks": 200}']
    command += ["--max-prompts", "2", "--max-body-bytes", "500"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = next(filter(None, (re.search(r"http://127.0.0.1:\d+", line) for line in process.stderr)))
            client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", **CLIENT)
            stream = client.chat.completions.create(model="tiny", messages=QUESTION, stream=True, **LONG)
            next(stream)
            with pytest.raises(openai.BadRequestError, match="3 prompts, but the limit is 2"):
                client.completions.create(model="tiny", prompt=["a"] * 3)
            with pytest.raises(openai.APIStatusError, match="the limit is 500: send less") as refused:
                client.completions.create(model="tiny", prompt="a" * 500)
            assert refused.value.status_code == 413
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="the server shuts down"):
                list(stream)
            log = process.stderr.read()
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert "Traceback" not in log
