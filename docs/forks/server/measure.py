"""What HTTP costs, and what becomes of the blocks of clients that go.

    python docs/forks/server/measure.py

The server is a process of its own; its clients are in this one. Each round serves the same requests offline,
then over HTTP, and the median of the rounds counts. CPU seconds are those of the process that has the engine:
other programs on the machine change them less than the speed.
"""

import argparse
import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from nanopaged import LLM, SamplingParams
from nanopaged.terminal import run_program

CONFIG = {"num_blocks": 2000}


@contextmanager
def running_server() -> Iterator[tuple[str, psutil.Process]]:
    """The address and the process of a new server."""
    script = Path(__file__).with_name("server.py")
    command = [sys.executable, str(script), "--port", "0", "--config", json.dumps(CONFIG)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = next(filter(None, (re.search(r"http://[\d.:]+", line) for line in process.stderr)))
            yield found[0], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def body_of(prompt: str, num_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        **{"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
        **{"stream": stream, "stream_options": {"include_usage": True}},
    }


async def whole(http: httpx.AsyncClient, prompt: str, num_tokens: int) -> None:
    answer = await http.post("/v1/completions", json=body_of(prompt, num_tokens, False))
    assert answer.json()["usage"]["completion_tokens"] == num_tokens


async def streamed(http: httpx.AsyncClient, prompt: str, num_tokens: int) -> None:
    body = body_of(prompt, num_tokens, True)
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        *_, usage, done = [line async for line in answer.aiter_lines() if line]
    assert json.loads(usage[len("data: ") :])["usage"]["completion_tokens"] == num_tokens
    assert done == "data: [DONE]"


async def call_all(
    url: str, call: Callable[..., Awaitable[None]], prompts: list[str], num_tokens: int
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        await asyncio.gather(*(call(http, prompt, num_tokens) for prompt in prompts))


def cost_of(work: Callable[[], object], process: psutil.Process) -> tuple[float, float]:
    """Seconds, and CPU seconds of the process."""
    cpu_before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    work()
    return time.perf_counter() - began, sum(process.cpu_times()[:2]) - cpu_before


def compare_speeds(llm: LLM, url: str, server: psutil.Process, num_streams: int, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    rounds: list[list[tuple[float, float]]] = []
    for i in range(4):  # the first one warms up
        prompts = [f"{i}.{k} ROMEO:" for k in range(num_streams)]
        costs = [cost_of(partial(llm.generate, prompts, params, use_tqdm=False), psutil.Process())]
        for call in (whole, streamed):
            work = partial(call_all, url, call, prompts, num_tokens)
            costs.append(cost_of(lambda work=work: asyncio.run(work()), server))
        rounds.append(costs)
    print(f"{num_streams} requests of {num_tokens} tokens, median of 3 rounds")
    print(f"{'':24}tokens/s   ratio  CPU seconds")
    ways = ("offline, LLM.generate", "HTTP, whole", "HTTP, streamed")
    offline = 0.0
    for name, costs in zip(ways, zip(*rounds[1:], strict=True), strict=True):
        seconds, cpu = (statistics.median(column) for column in zip(*costs, strict=True))
        offline = offline or seconds
        print(f"  {name:22}{num_streams * num_tokens / seconds:8.0f}{offline / seconds:8.0%}{cpu:13.2f}")


async def watch_blocks(url: str, num_clients: int) -> None:
    """Clients come together, and go one after the other in the middle of their streams."""
    print(f"{num_clients} clients that would stream 1900 tokens each; one goes every 0.2 s")
    print("  seconds  clients  requests  used blocks")
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        clients = [asyncio.create_task(streamed(http, f"JULIET {i}:", 1900)) for i in range(num_clients)]
        began = time.perf_counter()
        for i in range(num_clients + 5):
            if i >= 4 and clients:
                clients.pop().cancel()  # which closes its connection
            await asyncio.sleep(0.2)
            stats = (await http.get("/health")).json()
            line = f"  {time.perf_counter() - began:7.2f}  {len(clients):7}  {stats['num_running']:8}"
            print(f"{line}  {stats['num_used_blocks']:11}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    args = parser.parse_args()
    with running_server() as (url, server):
        compare_speeds(LLM(**CONFIG), url, server, args.streams, args.tokens)
        asyncio.run(watch_blocks(url, 8))


if __name__ == "__main__":
    run_program(main)
