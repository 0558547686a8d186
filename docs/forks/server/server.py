"""An HTTP server with OpenAI's API: completions and chat, streamed or whole.

    python docs/forks/server/server.py Qwen/Qwen3-0.6B --port 8000 --config '{"block_size": 32}'

`EngineThread` decides when the engine is used. The functions after it translate JSON to requests, and outputs
to JSON. Nothing here knows blocks or tensors.
"""

import argparse
import asyncio
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import uvicorn
from fastapi import Depends, FastAPI
from fastapi import Request as Call  # a call may have several prompts; a request of the engine has one
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nanopaged import LLM, EngineStats, RequestOutput, SamplingParams
from nanopaged.sequence import Request
from nanopaged.terminal import run_program

Json = dict[str, Any]
MAX_BODY_BYTES = 1 << 20  # of a call
MAX_PROMPTS = 1024
MAX_MESSAGES = 1024
MAX_ENTRIES = {"stop": 4, "stop_token_ids": 64}  # each of them costs all clients time in each step
MAX_CHARACTERS = 256  # of a stop string, and of the cache_salt
# Many clients send fields that this server does not have. Some of them change no output; the others are
# refused unless they ask for nothing.
HARMLESS = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS |= {"parallel_tool_calls"}
NOTHING: list[Any] = [[], {}, "none", "auto", ["text"], {"type": "text"}, {"include_usage": False}]
USAGE = {"include_usage": True}
TEXT_KEYS = {"text_completion": "text", "chat.completion": "message", "chat.completion.chunk": "delta"}


@dataclass
class Unread:
    """What a call has not read yet: of each request the latest output, which has all tokens so far.

    A client may read slowly, or not at all. All outputs of a long text, kept for it, would fill the memory.
    """

    outputs: dict[str, RequestOutput | HTTPException] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, request_id: str, output: RequestOutput | HTTPException) -> None:
        self.outputs[request_id] = output
        self.arrived.set()

    async def take(self) -> Collection[RequestOutput | HTTPException]:
        await self.arrived.wait()
        self.arrived.clear()
        outputs, self.outputs = self.outputs, {}
        return outputs.values()


class EngineThread:
    """The one thread that uses the engine, and the way of its outputs to the event loop.

    Each use of the engine is a job of a pool with one thread, so adds and aborts wait until a step is done.
    Prompts become tokens on another thread, because a long one takes longer than many steps. Everything else
    here happens on the event loop, and needs no lock.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine, self.pool = llm, llm.engine, ThreadPoolExecutor(max_workers=1)
        self.prompt_pool = ThreadPoolExecutor(max_workers=1)
        self.unread: dict[str, Unread] = {}  # of the unfinished requests; those of a call share one
        self.stepper: asyncio.Task | None = None

    async def run(self, function: Callable, *args: Any) -> Any:
        """The result of `function(*args)`, called between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *args)

    async def serve(self, requests: list[Request], receive: Callable) -> AsyncIterator[RequestOutput]:
        """The outputs of a call's requests, as the steps make them. If one is dropped, an HTTPException."""
        unread = Unread()
        for request in requests:
            self.unread[request.request_id] = unread
            self.pool.submit(self.engine.queue, request)
        if self.stepper is None or self.stepper.done():  # it ends in the instant that it finds no requests
            self.stepper = asyncio.create_task(self._step())
        asyncio.create_task(self._drop_with_call(requests, receive))  # the connection keeps it alive
        num_unfinished = len(requests)
        while num_unfinished > 0:
            for output in await unread.take():
                if isinstance(output, HTTPException):
                    raise output
                num_unfinished -= output.finished
                yield output

    async def _step(self) -> None:
        """Step until all requests are finished."""
        while self.unread:
            request_ids = list(self.unread)
            try:
                outputs = await self.run(self.engine.step)
            except Exception as error:
                culprit = getattr(error, "request_id", None)  # the others wait again, and lose no token
                self.drop(request_ids if culprit is None else [culprit], f"{type(error).__name__}: {error}")
                continue
            for output in outputs:
                if output.request_id in self.unread:  # else it was dropped while the step ran
                    self.unread[output.request_id].put(output.request_id, output)
                    if output.finished:
                        del self.unread[output.request_id]

    async def _drop_with_call(self, requests: list[Request], receive: Callable) -> None:
        """ASGI's "disconnect" comes when the client has gone, or has its answer: nothing is left then."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.drop([request.request_id for request in requests], "the client has gone")

    def drop(self, request_ids: Collection[str], reason: str) -> None:
        """Abort those that are unfinished, and end their calls with an error."""
        for request_id in request_ids:
            if request_id in self.unread:
                self.pool.submit(self.engine.abort_request, request_id)
                self.unread.pop(request_id).put(request_id, HTTPException(500, reason))


async def read_json(call: Call, max_bytes: int) -> Any:
    """The body. A longer one is read to its end, not kept: a client that still sends would read no answer."""
    body, num_bytes = bytearray(), 0
    async for chunk in call.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            body += chunk
    if num_bytes > max_bytes:
        raise HTTPException(
            413,
            f"the body has {num_bytes} bytes, but the limit is {max_bytes}: send less in a call, or raise "
            "--max-body-bytes of the server",
        )
    return json.loads(body)


def check_length(name: str, value: Any, most: int) -> None:
    """Raise ValueError if a text or a list is longer."""
    if isinstance(value, str | list | tuple) and len(value) > most:
        unit = "characters" if isinstance(value, str) else "entries"
        raise ValueError(f"{name} has {len(value)} {unit}, but the limit is {most}: shorten it")


def make_params(options: Json) -> SamplingParams:
    """The params of a call. Raises ValueError for unknown fields, and for long lists and texts."""
    known = {each.name for each in fields(SamplingParams)} - {"logprobs", "prompt_logprobs"}
    for name in options.keys() - known:
        value = options.pop(name)
        if value is not False and value not in NOTHING:
            given = json.dumps(value)[:80]
            raise ValueError(f"{name} is {given}, but this server does not have it: leave it out")
    params = SamplingParams(**options)
    for name, most in MAX_ENTRIES.items():
        check_length(name, getattr(params, name), most)
    for text in params.stop:
        check_length("a stop string", text, MAX_CHARACTERS)
    return params


def chat_prompt(llm: LLM, options: Json) -> Json:
    """The prompt of a chat, taken out of its options. Raises ValueError for tools, and for a template."""
    messages = options.pop("messages", ())
    check_length("messages", messages, MAX_MESSAGES)
    for message in messages:
        if isinstance(message, dict):  # else `LLM.chat_prompt` refuses it
            calls = message.pop("tool_calls", None) or message.pop("function_call", None)
            if calls or message.get("role") in ("tool", "function"):
                given = json.dumps(calls or message)[:80]
                raise ValueError(f"a message has {given}, but this server has no tools: leave it out")
    template_options = options.pop("chat_template_kwargs", {})
    if "chat_template" in template_options:
        raise ValueError("chat_template is refused: a template is a program, which may run for long")
    return llm.chat_prompt(messages, template_options)


def text_prompts(options: Json, max_prompts: int) -> list[Json]:
    """The prompts of a completion, texts or lists of token ids, taken out of its options."""
    prompt = options.pop("prompt", "")
    is_one = not isinstance(prompt, list) or all(isinstance(each, int) for each in prompt)
    prompts = [prompt] if is_one else prompt
    check_length("the list of prompts", prompts, max_prompts)
    return [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in prompts]


def make_requests(llm: LLM, call_id: str, is_chat: bool, body: Json, max_prompts: int) -> list[Request]:
    """A request for each prompt, whose id ends in the index of its first choice: 0, n, 2n, …"""
    options = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    salt = options.pop("cache_salt", None)
    check_length("cache_salt", salt, MAX_CHARACTERS)
    prompts = [chat_prompt(llm, options)] if is_chat else text_prompts(options, max_prompts)
    max_tokens = options.pop("max_tokens", None if is_chat else 16)  # None: as many as the model allows
    options["max_tokens"] = options.pop("max_completion_tokens", max_tokens)
    params = make_params(options)
    requests = []
    for i, prompt in enumerate(prompts):
        prompt["cache_salt"] = salt
        requests.append(llm.engine.prompts.make_request(f"{call_id}-{i * params.n}", prompt, params))
    return requests


def new_choices(output: RequestOutput, key: str, sent: dict[int, tuple]) -> Iterator[Json]:
    """A choice for each completion that is longer, or ended, since its state was `sent`; that is updated."""
    for index, completion in enumerate(output.outputs, int(output.request_id.rpartition("-")[2])):
        before, state = sent.get(index, (0, None)), (len(completion.text), completion.finish_reason)
        if state != before:
            sent[index], text = state, completion.text[before[0] :]
            message = {"content": text} if before[0] else {"role": "assistant", "content": text}
            value = text if key == "text" else message
            yield {"index": index, key: value, "finish_reason": completion.finish_reason}


def usage_of(outputs: Collection[RequestOutput]) -> Json:
    """Tokens of the prompts and of the completions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return counts | {"prompt_tokens_details": cached}


def error_of(error: HTTPException) -> Json:
    """An error in OpenAI's format."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return {"error": {"message": error.detail, "type": kind, "param": None, "code": error.status_code}}


async def events(outputs: AsyncIterator[RequestOutput], head: Json, with_usage: bool) -> AsyncIterator[str]:
    """The answer as server-sent events: a chunk for each choice that has something new."""
    last, sent = {}, {}
    try:
        async for output in outputs:
            last[output.request_id] = output
            for choice in new_choices(output, TEXT_KEYS[head["object"]], sent):
                yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
        if with_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': usage_of(last.values())})}\n\n"
    except HTTPException as error:  # too late for a status
        yield f"data: {json.dumps(error_of(error))}\n\n"
    yield "data: [DONE]\n\n"


def is_foreign(headers: Mapping[str, str], allowed: Collection[str]) -> bool:
    """Whether another site's web page makes the call: the browser that shows it can reach 127.0.0.1.

    A site can give its own name any address, so names of the Host must be allowed. Browsers add the Origin.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        known = name in ("localhost", *allowed) or bool(ipaddress.ip_address(name))
    except ValueError:  # no name that is known, and no address
        known = False
    own = (None, f"http://{host}", f"https://{host}")
    return "*" not in allowed and not (known and origin in (*own, *allowed))


def make_app(
    engine: EngineThread,
    model: str,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_prompts: int = MAX_PROMPTS,
    allowed: Collection[str] = (),
) -> FastAPI:
    """The routes. Clients know `model`; `allowed` are hosts, and origins of web pages, or "*"."""
    known = {each.lower().rstrip("/") for each in allowed}

    async def refuse_foreign(call: Call) -> None:
        if is_foreign(call.headers, known):
            given = f"Host {call.headers.get('host')!r}, Origin {call.headers.get('origin')!r}"
            raise HTTPException(403, f"a call from another site ({given}): allow it by --allow of the server")

    app = FastAPI(dependencies=[Depends(refuse_foreign)], docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(CORSMiddleware, allow_origins=[*known], allow_methods=["*"], allow_headers=["*"])
    app.state.engine = engine

    @app.exception_handler(HTTPException)
    async def refuse(_: Call, error: HTTPException) -> Response:
        # In ASCII: a message may quote half of a surrogate pair, which JSONResponse cannot encode.
        return Response(json.dumps(error_of(error)), error.status_code, media_type="application/json")

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(call: Call) -> Response:
        is_chat = call.url.path == "/v1/chat/completions"
        call_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
        try:
            body = await read_json(call, max_body_bytes)
            if not isinstance(body, dict) or body.get("stream") not in (None, False, True):
                raise TypeError("the body must be a JSON object, in which stream is true or false")
            if (name := body.pop("model", model)) != model:
                raise HTTPException(404, f"there is no model {name!r}: this server has {model!r}")
            stream = body.pop("stream", None)
            with_usage = body.get("stream_options") == USAGE
            if with_usage:
                del body["stream_options"]
            make = partial(make_requests, engine.llm, call_id, is_chat, body, max_prompts)
            requests = await asyncio.get_running_loop().run_in_executor(engine.prompt_pool, make)
        except (TypeError, ValueError, RecursionError, TemplateError, ClientDisconnect) as error:
            raise HTTPException(400, str(error)) from error
        kind = "chat.completion" + ".chunk" * bool(stream) if is_chat else "text_completion"
        head = {"id": call_id, "object": kind, "created": int(time.time()), "model": model}
        outputs = engine.serve(requests, call.receive)
        if stream:
            return StreamingResponse(events(outputs, head, with_usage), media_type="text/event-stream")
        last = {output.request_id: output async for output in outputs}
        choices = [choice for output in last.values() for choice in new_choices(output, TEXT_KEYS[kind], {})]
        choices.sort(key=lambda choice: choice["index"])
        return JSONResponse(head | {"choices": choices, "usage": usage_of(last.values())})

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "nanopaged"}]}

    @app.get("/health")
    async def health() -> EngineStats:
        return await engine.run(engine.engine.stats)

    return app


class Server(uvicorn.Server):
    """Ctrl-C ends all calls; uvicorn alone would wait for their last tokens."""

    async def shutdown(self, sockets: Any = None) -> None:
        engine = self.config.app.state.engine
        engine.drop(list(engine.unread), "the server shuts down")
        await super().shutdown(sockets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or a hub id; without it, the model in the box")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--config", type=json.loads, default={}, help="options of EngineConfig, as JSON")
    parser.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES, help="of a call: %(default)s")
    parser.add_argument("--max-prompts", type=int, default=MAX_PROMPTS, help="of a call: %(default)s")
    parser.add_argument("--allow", action="append", default=[], help="a host or a page's origin; * is all")
    args = parser.parse_args()
    if min(args.max_body_bytes, args.max_prompts) < 1:
        parser.error("--max-body-bytes and --max-prompts must be at least 1")
    engine, model = EngineThread(LLM(args.model, **args.config)), args.model or "tiny"
    app = make_app(engine, model, args.max_body_bytes, args.max_prompts, args.allow)
    with suppress(KeyboardInterrupt):  # which uvicorn raises after the shutdown
        Server(uvicorn.Config(app, args.host, args.port, timeout_graceful_shutdown=5)).run()


if __name__ == "__main__":
    run_program(main)
