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
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from server import EngineThread, make_app

from nanopaged import LLM, SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult

SIZES = {"num_blocks": 800, "dtype": "float32"}
CLIENT = {"max_retries": 0, "timeout": 30, "api_key": "none"}
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}  # many seconds of work
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 24}
PENALTIES = {"temperature": 0, "max_tokens": 24, "presence_penalty": 0.5, "frequency_penalty": 1.0}
QUESTION = [{"role": "user", "content": "What is virtual memory?"}]
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


def say(offline: LLM, prompts: Any, **options: Any) -> list[str]:
    """The texts without a server."""
    outputs = offline.generate(prompts, SamplingParams(**options), use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]


def read(chunks: Iterable[Any]) -> tuple[dict[int, str], dict[int, list[str]], Any]:
    """The texts, the finish reasons and the usage of a stream."""
    texts, reasons, usage = dict[int, str](), dict[int, list[str]](), None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + text
            reasons.setdefault(choice.index, []).extend(filter(None, [choice.finish_reason]))
    return texts, reasons, usage


# ── answers ───────────────────────────────────────────────────────────────────────────────────────

MORE = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 8, "stop_token_ids": [3]}


@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALTIES, SEEDED | {"n": 2}, SEEDED | MORE])
def test_completions(client: openai.OpenAI, offline: LLM, options: dict[str, Any]) -> None:
    """The texts, their order, the finish reasons and the usage, streamed and whole."""
    outputs = offline.generate(PROMPTS, SamplingParams(**options), use_tqdm=False)
    right = [completion for output in outputs for completion in output.outputs]
    ours = {name: value for name, value in options.items() if name not in MORE}
    ours["extra_body"] = {name: value for name, value in options.items() if name in MORE}
    whole = complete(client, PROMPTS, **ours)
    answers = [(choice.index, choice.text, choice.finish_reason) for choice in whole.choices]
    assert answers == [(index, each.text, each.finish_reason) for index, each in enumerate(right)]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for completion in right)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, num_output)
    assert whole.usage.total_tokens == num_prompt + num_output
    texts, reasons, usage = read(complete(client, PROMPTS, stream=True, **ours))
    assert [(i, texts[i], *reasons[i]) for i in sorted(texts)] == answers
    assert usage is None, "it was not asked for"


@pytest.mark.parametrize("options", [{"temperature": 0}, SEEDED | {"n": 3}])
def test_chat(client: openai.OpenAI, offline: LLM, options: dict[str, Any]) -> None:
    """Without max_tokens, as many as the model allows."""
    (output,) = offline.chat(QUESTION, SamplingParams(**{"max_tokens": None} | options), use_tqdm=False)
    right = [completion.text for completion in output.outputs]
    options = {name.replace("max_tokens", "max_completion_tokens"): value for name, value in options.items()}
    whole = chat(client, **options)
    assert [choice.message.content for choice in whole.choices] == right
    assert {choice.message.role for choice in whole.choices} == {"assistant"}
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    texts, reasons, usage = read(chunks)
    assert texts == dict(enumerate(right))
    assert [reasons[index] for index in sorted(reasons)] == [[each.finish_reason] for each in output.outputs]
    assert usage.completion_tokens == whole.usage.completion_tokens > 16
    assert usage.prompt_tokens_details.cached_tokens > 0, "the same prompt was computed before"
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role]
    assert roles == ["assistant"] * len(right)


# ── refused calls ─────────────────────────────────────────────────────────────────────────────────

REFUSED: list[tuple[dict[str, Any], str]] = [  # fields of a call, and what the error says
    ({"temperature": -1}, "temperature is -1, but must lie in"),
    ({"prompt": None}, "the prompt is empty"),
    ({"prompt": 5}, "a prompt is a str or a list of token ids, got int"),
    ({"prompt": "a " * 5000}, "shorten the prompt"),
    ({"\ud800": 1}, "unexpected keyword argument '\ud800'"),
    ({"best_of": 2}, "unexpected keyword argument 'best_of'"),
    ({"logprobs": 0}, "no log-probabilities"),
    ({"stream": "yes"}, "stream is true or false"),
    ({"stream_options": 5}, "stream_options is 5"),
    ({"stream_options": {"include_usage": "false"}}, "stream_options is {'include_usage': 'false'}"),
    # Chats.
    ({"messages": []}, "the conversation is empty"),
    ({"messages": "Hi"}, "a conversation is a list of"),
    ({"messages": [{"role": "user"}]}, "needs a 'role' and a 'content'"),
    ({"messages": QUESTION, "chat_template_kwargs": {"chat_template": "a"}}, "chat_template is refused"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_calls(http: httpx.Client, options: dict[str, Any], message: str) -> None:
    path, default = ("chat/completions", {}) if "messages" in options else ("completions", {"prompt": "a"})
    answer = http.post(f"/v1/{path}", content=json.dumps({"model": "tiny"} | default | options))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_errors_of_the_client(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4': this server has 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="top_p is 7"):
        complete(client, top_p=7, stream=True)
    deep = '{"prompt": ' + "[" * 990 + "]" * 990 + "}"
    for body in ("{", "[]", "5", b"\xff", "[" * 200_000, deep):
        assert http.post("/v1/completions", content=body).status_code == 400
    answer = http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")


CALLERS = [  # Host, Origin, what is allowed, whether the call is answered
    ("127.0.0.1:8000", None, (), True),
    ("[::1]:8000", None, (), True),
    ("evil.example:8000", None, (), False),  # its name may have been given the address 127.0.0.1
    ("127.0.0.1.evil.example", None, (), False),
    ("", None, (), False),
    ("gpu-box:8000", None, ("GPU-box",), True),
    ("127.0.0.1:8000", "http://127.0.0.1:8000", (), True),
    ("127.0.0.1:8000", "http://127.0.0.1:9000", (), False),
    ("127.0.0.1:8000", "https://127.0.0.1:8000.evil.example", (), False),
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


def test_harmless_fields(client: openai.OpenAI) -> None:
    """They change no output, and null stands for a default."""
    more = {"user": "u", "store": True, "metadata": {"a": "b"}, "seed": None, "stop": None}
    texts = [complete(client, extra_body=body, **GREEDY).choices[0].text for body in ({}, more)]
    assert texts[0] == texts[1]


def test_a_cache_salt_is_a_part_of_the_prompt(client: openai.OpenAI) -> None:
    """What is cached without a salt, or with another one, is not found."""
    prompt = "To be, or not to be, that is the question: " * 3
    cached = []
    for salt in (None, None, "alice", "alice", "bob"):
        answer = complete(client, prompt, max_tokens=1, extra_body={"cache_salt": salt})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens > 0)
        answer = chat(
            client, [QUESTION[0] | {"content": prompt}], max_tokens=1, extra_body={"cache_salt": salt}
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens > 0)
    assert cached == [False, False, True, True, False, False, True, True, False, False]


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
    assert read([first, *survivor])[0] == {0: say(offline, "HAMLET:", **SEEDED)[0]}
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
        sequences = [seq for seq in batch.sequences if seq.num_output_tokens > 2]
        names = {seq.request.prompt: seq.request.request_id for seq in sequences}
        if failed or not {"ROMEO:", "JULIET:"} <= names.keys():
            return execute(batch)
        failed.append(FloatingPointError("out of luck"))
        failed[0].request_id = names["JULIET:"] if is_named else None
        raise failed[0]

    monkeypatch.setattr(engine.engine.runner, "execute", fail_once)
    stream = complete(client, "ROMEO:", temperature=0, stream=True, **LONG)
    chunks = [next(stream)]
    with pytest.raises(openai.InternalServerError, match="FloatingPointError: out of luck"):
        complete(client, "JULIET:", **GREEDY)
    if is_named:
        chunks += islice(stream, 100)
        stream.close()
        (whole,) = say(offline, "ROMEO:", temperature=0, ignore_eos=True, max_tokens=300)
        assert whole.startswith("".join(chunk.choices[0].text for chunk in chunks))
    else:
        with pytest.raises(openai.APIError, match="FloatingPointError: out of luck"):
            list(stream)
    assert complete(client, "JULIET:", **GREEDY).choices[0].text == say(offline, "JULIET:", **GREEDY)[0]


def test_ctrl_c() -> None:
    """The command line, with its limits: a running stream ends with an error, and the process without one."""
    script = Path(__file__).with_name("server.py")
    command = [sys.executable, str(script), "--port", "0", "--config", '{"num_blocks": 200}']
    command += ["--max-prompts", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = next(filter(None, (re.search(r"http://127.0.0.1:\d+", line) for line in process.stderr)))
            client = openai.OpenAI(base_url=f"{found[0]}/v1", **CLIENT)
            stream = chat(client, stream=True, **LONG)
            next(stream)
            with pytest.raises(openai.BadRequestError, match="3 prompts, but the limit is 2"):
                complete(client, ["a"] * 3)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="the server shuts down"):
                list(stream)
            log = process.stderr.read()
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert "Traceback" not in log
