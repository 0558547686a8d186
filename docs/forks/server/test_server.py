"""The server, called by OpenAI's own client, gives the answers of the engine without a server."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi.testclient import TestClient
from server import MAX_BODY_BYTES, MAX_CHARACTERS, MAX_ENTRIES, MAX_PROMPTS, EngineThread, make_app

from nanopaged import LLM, RequestOutput, SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult

SIZES = {"num_blocks": 800, "dtype": "float32"}
CLIENT = {"max_retries": 0, "timeout": 30, "api_key": "none"}
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}  # many seconds of work
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 24}
QUESTION = [{"role": "user", "content": "What is virtual memory?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PROMPTS = ["ROMEO:", "To be, or not to be", "JULIET:\nO", "First Citizen:"]


@pytest.fixture(scope="module")
def offline() -> LLM:
    """The engine without a server."""
    return LLM(**SIZES)


@pytest.fixture(scope="module")
def engine() -> EngineThread:
    return EngineThread(LLM(**SIZES))


@pytest.fixture(scope="module")
def url(engine: EngineThread) -> Iterator[str]:
    """The server runs in a thread. It takes calls as soon as its socket listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(make_app(engine, "tiny"), log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", **CLIENT)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """For what OpenAI's client does not send."""
    with httpx.Client(base_url=url, timeout=30) as http:
        yield http


@pytest.fixture(autouse=True)
def all_blocks_are_free_afterwards(engine: EngineThread, http: httpx.Client) -> Iterator[None]:
    yield
    wait_until_idle(http)
    engine.pool.submit(engine.engine.check_invariants).result()
    assert not engine.unread
    assert not engine.engine.requests


def stats_of(http: httpx.Client) -> dict[str, Any]:
    return http.get("/health").json()


def wait_until_idle(http: httpx.Client) -> None:
    deadline = time.monotonic() + 10
    while stats_of(http)["num_used_blocks"] > 0:
        assert time.monotonic() < deadline, "blocks are in use"
        time.sleep(0.01)


def complete(client: openai.OpenAI, prompt: Any = "a", **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **options)


def chat(client: openai.OpenAI, messages: Any = QUESTION, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def say(offline: LLM, prompt: Any, **options: Any) -> str:
    """The text without a server."""
    (output,) = offline.generate(prompt, SamplingParams(**options), use_tqdm=False)
    return output.outputs[0].text


def read(chunks: Iterable[Any]) -> tuple[dict[int, tuple[str, str | None]], Any]:
    """The choices of a stream, or of [a whole answer]: index → text and finish reason. And the usage."""
    choices, usage = dict[int, tuple[str, str | None]](), None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message = getattr(choice, "delta", None) or getattr(choice, "message", None)
            text, reason = choices.get(choice.index, ("", None))
            assert reason is None, "it has ended"
            assert message is None or (message.role == "assistant") == (text == "")
            text += message.content if message else choice.text
            choices[choice.index] = (text, choice.finish_reason)
    return choices, usage


# ── answers ───────────────────────────────────────────────────────────────────────────────────────

MORE = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 8, "stop_token_ids": [3]}
ANSWERED: list[tuple[Any, dict[str, Any]]] = [  # prompts and options
    (PROMPTS, GREEDY),
    (PROMPTS, SEEDED),
    (PROMPTS, SEEDED | {"n": 2}),
    (PROMPTS, SEEDED | MORE),
    ([540, 14, 332], GREEDY),
    ([[540, 14, 332], [35, 277]], GREEDY),
    (PROMPTS[0], GREEDY | {"stop": "the world"}),  # several tokens, none of which is streamed
    (PROMPTS[0], GREEDY | {"stop": ["no such text", "wind"]}),
    (QUESTION, GREEDY | {"max_tokens": None}),  # as many as the model allows
    (QUESTION, SEEDED | {"n": 3}),
]


@pytest.mark.parametrize(("prompt", "options"), ANSWERED)
def test_answers(client: openai.OpenAI, offline: LLM, prompt: Any, options: dict[str, Any]) -> None:
    """The texts, their order, the finish reasons and the usage, streamed and whole."""
    generate = offline.chat if prompt is QUESTION else offline.generate
    outputs = generate(prompt, SamplingParams(**options), use_tqdm=False)
    completions = [completion for output in outputs for completion in output.outputs]
    right = [(completion.text, completion.finish_reason) for completion in completions]
    assert "stop" not in options or right[0][1] == "stop"
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for completion in completions)

    ask = partial(complete if prompt is not QUESTION else chat, client, prompt)
    ours = {name: value for name, value in options.items() if name not in MORE}
    ours["extra_body"] = {name: value for name, value in options.items() if name in MORE}
    if prompt is QUESTION:
        ours["max_completion_tokens"] = ours.pop("max_tokens")
    whole = ask(**ours)
    assert [choice.index for choice in whole.choices] == list(range(len(right)))
    for answer in ([whole], ask(stream=True, stream_options={"include_usage": True}, **ours)):
        choices, usage = read(answer)
        assert choices == dict(enumerate(right))
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_output)
        assert usage.total_tokens == num_prompt + num_output
    assert read(ask(stream=True, **ours)) == (choices, None), "no usage was asked for"


@pytest.mark.parametrize(("owner", "name"), [("runner", "execute"), ("prompts", "encode")])
def test_others_go_on_meanwhile(
    client: openai.OpenAI, engine: EngineThread, owner: str, name: str, monkeypatch: Any
) -> None:
    """The event loop answers while a step runs. While a prompt becomes tokens, streams go on, too."""
    entered, go_on = threading.Event(), threading.Event()
    function = getattr(getattr(engine.engine, owner), name)

    def wait(*args: Any, **options: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return function(*args, **options)

    stream = complete(client, stream=True, **GREEDY) if name == "encode" else iter(())
    next(stream, None)
    monkeypatch.setattr(getattr(engine.engine, owner), name, wait)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, client, "b", **GREEDY)
        assert entered.wait(10)
        assert [model.id for model in client.models.list()] == ["tiny"]
        list(stream)
        assert not answer.done()
        go_on.set()
        assert answer.result().usage.completion_tokens == 24


def test_a_slow_reader_gets_the_latest_output(engine: EngineThread) -> None:
    """Not all that it has missed, whose tokens add up to the square of the length."""

    async def read_late() -> list[RequestOutput]:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        requests = [engine.engine.prompts.make_request(name, "a", params) for name in "ab"]
        outputs = engine.serve(requests, receive=asyncio.Event().wait)  # the client stays
        first = await anext(outputs)
        while engine.unread:
            await asyncio.sleep(0.01)
        return [first, *[output async for output in outputs]]

    first, *rest = asyncio.run(read_late())
    assert not first.finished
    assert 2 <= len(rest) <= 3, "of the step of the first output there may be another"
    assert [output.request_id for output in rest if output.finished] == ["a", "b"]
    assert all(len(output.outputs[0].token_ids) == 30 for output in rest if output.finished)


# ── refused calls ─────────────────────────────────────────────────────────────────────────────────

REFUSED: list[tuple[dict[str, Any], str]] = [  # fields of a call, and what the error says
    ({"prompt": 5}, "a prompt is a str or a list of token ids, got int"),
    ({"prompt": "\ud800"}, "surrogates not allowed"),
    ({"prompt": "a " * 5000}, "shorten the prompt"),
    ({"\ud800": 1}, "\ud800 is 1, but this server does not have it: leave it out"),
    ({"logprobs": 0}, "logprobs is 0, but this server does not have it"),
    ({"top_p": 7, "stream": True}, "top_p is 7"),
    ({"stream": "yes"}, "stream is true or false"),
    ({"stream_options": {"include_usage": "false"}}, 'stream_options is {"include_usage": "false"}'),
    ({"stream_options": {"continuous_usage_stats": True}}, "this server does not have it"),
    # What would cost other clients time in each step.
    ({"prompt": [[5]] * 1025}, "the list of prompts has 1025 entries, but the limit is 1024: shorten it"),
    ({"stop": ["x"] * 5}, "stop has 5 entries, but the limit is 4: shorten it"),
    ({"stop": dict.fromkeys("abcde")}, "stop has 5 entries, but the limit is 4"),
    ({"stop": "x" * 257}, "a stop string has 257 characters, but the limit is 256: shorten it"),
    ({"stop": {"x" * 5000: 1}}, "a stop string has 5000 characters, but the limit is 256"),
    ({"stop_token_ids": [5] * 65}, "stop_token_ids has 65 entries, but the limit is 64: shorten it"),
    ({"cache_salt": "x" * 257}, "cache_salt has 257 characters, but the limit is 256: shorten it"),
    # Chats.
    ({"messages": "Hi"}, "a conversation is a list of"),
    ({"messages": 5}, "not iterable"),
    ({"messages": QUESTION * 1025}, "messages has 1025 entries, but the limit is 1024: shorten it"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, 'a message has [{"id": "1", '),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "", "function_call": CALL}]}, "no tools"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "but this server has no tools"),
    ({"messages": QUESTION, "chat_template_kwargs": {"chat_template": "a"}}, "chat_template is refused"),
]
ABSENT = ["tools", "tool_choice", "functions", "function_call", "response_format", "modalities", "logit_bias"]
ABSENT += ["echo", "best_of", "top_logprobs", "prompt_logprobs"]
REFUSED += [({name: "x"}, f'{name} is "x", but this server does not have it') for name in ABSENT]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_calls(http: httpx.Client, options: dict[str, Any], message: str) -> None:
    path, default = ("chat/completions", {}) if "messages" in options else ("completions", {"prompt": "a"})
    answer = http.post(f"/v1/{path}", content=json.dumps({"model": "tiny"} | default | options))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_every_list_has_a_limit_and_may_reach_it(client: openai.OpenAI) -> None:
    lists = {field.name for field in fields(SamplingParams) if isinstance(field.default, tuple)}
    assert lists == MAX_ENTRIES.keys()
    most = {"stop": ["x" * MAX_CHARACTERS] * MAX_ENTRIES["stop"], "cache_salt": "s" * MAX_CHARACTERS}
    most["stop_token_ids"] = [5] * MAX_ENTRIES["stop_token_ids"]
    answer = complete(client, ["a"] * MAX_PROMPTS, extra_body=most, max_tokens=1)
    assert len(answer.choices) == MAX_PROMPTS


def test_errors_of_the_client(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4': this server has 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    deep = '{"prompt": ' + "[" * 990 + "]" * 990 + "}"
    for body in ("{", "[]", "5", b"\xff", "[" * 200_000, deep):
        assert http.post("/v1/completions", content=body).status_code == 400
    answer = http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")


@pytest.mark.parametrize(("num_more", "status"), [(0, 200), (1, 413), (40 * MAX_BODY_BYTES, 413)])
def test_the_largest_body(http: httpx.Client, num_more: int, status: int) -> None:
    """As one piece, and in chunks of unknown number. The client is told the limit when it has sent it all."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
    content = body.ljust(MAX_BODY_BYTES + num_more).encode()
    message = f"the body has {len(content)} bytes, but the limit is {MAX_BODY_BYTES}: send less"
    for pieces in (content, (content[i : i + 50_000] for i in range(0, len(content), 50_000))):
        answer = http.post("/v1/completions", content=pieces)
        assert answer.status_code == status
        if status == 413:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", 413)
            assert error["message"].startswith(message)


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

    http = TestClient(make_app(engine, "tiny", allowed=allowed), base_url="http://127.0.0.1")
    headers = {"host": host, "content-type": "text/plain"} | ({"origin": origin} if origin else {})
    response = http.post("/v1/completions", content='{"max_tokens": 0}', headers=headers)
    assert response.status_code == (400 if answered else 403), "400: the call was read"
    assert answered == ("max_tokens is 0" in response.text)


def test_harmless_fields(client: openai.OpenAI) -> None:
    """They change no output, and null stands for a default."""
    more = {"user": "u", "store": True, "metadata": {"a": "b"}, "seed": None, "stop": None, "logit_bias": {}}
    more |= {"echo": False, "response_format": {"type": "text"}, "modalities": ["text"], "tools": []}
    more |= {"tool_choice": "none", "parallel_tool_calls": True, "functions": [], "function_call": "auto"}
    answers = []
    calls = [({}, {}), (more, {"tool_calls": None, "function_call": None, "refusal": None})]
    for body, unused in [*calls, (more, {"tool_calls": []})]:
        messages = [QUESTION[0], {"role": "assistant", "content": "A", **unused}, *QUESTION]
        answer = chat(client, messages, extra_body=body, **GREEDY)
        answers.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert answers == [answers[0]] * 3


def test_a_cache_salt_is_a_part_of_the_prompt(client: openai.OpenAI) -> None:
    """What is cached without a salt, or with another one, is not found."""
    text = "To be, or not to be, that is the question: " * 3
    for ask, prompt in ((complete, text), (chat, [{"role": "user", "content": text}])):
        cached = []
        for salt in (None, None, "alice", "alice", "bob"):
            usage = ask(client, prompt, max_tokens=1, extra_body={"cache_salt": salt}).usage
            cached.append(usage.prompt_tokens_details.cached_tokens > 0)
        assert cached == [False, True, False, True, False]


# ── clients that go, and steps that fail ──────────────────────────────────────────────────────────


def test_clients_that_go(http: httpx.Client, client: openai.OpenAI, offline: LLM) -> None:
    """Their requests are aborted and their blocks are free, while another client gets the right answer."""
    tokens_before = stats_of(http)["num_generated_tokens"]
    streams = [complete(client, PROMPTS, stream=True, **LONG) for _ in range(2)]
    streams.append(chat(client, n=4, stream=True, **LONG))
    for stream in streams:
        next(stream)
    assert stats_of(http)["num_running"] == 9
    survivor = complete(client, "HAMLET:", stream=True, **SEEDED)
    first = next(survivor)
    for stream in streams:
        stream.close()
    assert read([first, *survivor])[0][0][0] == say(offline, "HAMLET:", **SEEDED)
    with pytest.raises(openai.APITimeoutError):
        complete(client.with_options(timeout=0.3), PROMPTS, **LONG)
    wait_until_idle(http)
    num_tokens = stats_of(http)["num_generated_tokens"] - tokens_before
    assert num_tokens < 1900 * 8, "they were aborted, not finished"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_failed_step(
    client: openai.OpenAI, engine: EngineThread, offline: LLM, is_named: bool, monkeypatch: Any
) -> None:
    """If the error names a request, only its call ends with the error, else all do. The server goes on."""
    execute, failed = engine.engine.runner.execute, []

    def fail_once(batch: ScheduledBatch) -> StepResult:
        if failed or batch.num_decodes < 2:
            return execute(batch)
        failed.append(FloatingPointError("out of luck"))
        if is_named:
            failed[0].request_id = batch.sequences[-1].request.request_id
        raise failed[0]

    monkeypatch.setattr(engine.engine.runner, "execute", fail_once)
    stream = complete(client, "ROMEO:", temperature=0, stream=True, **LONG)
    chunks = [next(stream)]
    with pytest.raises(openai.InternalServerError, match="FloatingPointError: out of luck"):
        complete(client, "JULIET:", **GREEDY)
    if is_named:
        chunks += islice(stream, 100)
        stream.close()
        whole = say(offline, "ROMEO:", temperature=0, ignore_eos=True, max_tokens=300)
        assert whole.startswith(read(chunks)[0][0][0])
    else:
        with pytest.raises(openai.APIError, match="FloatingPointError: out of luck"):
            list(stream)
    assert complete(client, "JULIET:", **GREEDY).choices[0].text == say(offline, "JULIET:", **GREEDY)


def test_ctrl_c() -> None:
    """The command line, with its limits: a running stream ends with an error, and the process without one."""
    script = Path(__file__).with_name("server.py")
    command = [sys.executable, str(script), "--port", "0", "--config", '{"num_blocks": 200}']
    command += ["--max-prompts", "2", "--max-body-bytes", "500"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = next(filter(None, (re.search(r"http://127.0.0.1:\d+", line) for line in process.stderr)))
            client = openai.OpenAI(base_url=f"{found[0]}/v1", **CLIENT)
            stream = chat(client, stream=True, **LONG)
            next(stream)
            with pytest.raises(openai.BadRequestError, match="prompts has 3 entries, but the limit is 2"):
                complete(client, ["a"] * 3)
            with pytest.raises(openai.APIStatusError, match="the limit is 500: send less") as refused:
                complete(client, "a" * 500)
            assert refused.value.status_code == 413
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="the server shuts down"):
                list(stream)
            log = process.stderr.read()
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert "Traceback" not in log
