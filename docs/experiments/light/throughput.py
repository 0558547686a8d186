"""Output tokens per second: nano-vllm's benchmark, alone and beside other engines."""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.util import find_spec

from common import make_llm
from peers import make_job, run_job

import bench
from light import Light, NotRun, release


def arguments(light: Light) -> argparse.Namespace:
    """Those of bench.py on a GPU, which are nano-vllm's benchmark. Less of it in smaller runs."""
    full = {"requests": 256, "input": (100, 1024), "output": (100, 1024)}
    if light.no_kernels is not None:  # an older GPU, with PyTorch alone
        full = {"requests": 64, "input": (100, 512), "output": (100, 512)}
    quick = {"requests": 16, "input": (100, 200), "output": (50, 100)}
    small = {"requests": 4, "input": (4, 20), "output": (2, 9)}
    sizes = light.pick(full, quick, small)
    return argparse.Namespace(
        model=None,
        shape=light.args.shape,
        dtype=light.args.dtype,
        seed=0,
        requests=sizes["requests"],
        min_input=sizes["input"][0],
        max_input=sizes["input"][1],
        min_output=sizes["output"][0],
        max_output=sizes["output"][1],
        budget=16384 if light.on_gpu else 2048,
        max_num_seqs=256,
        peer_python=sys.executable,
    )


def workload(light: Light) -> str:
    """nanopaged alone, with random weights."""
    args = arguments(light)
    light.now("starting the engine")
    llm = make_llm(args, max_num_batched_tokens=args.budget)
    requests = bench.draw_requests(llm.engine.vocab_size, args)
    num_input = sum(len(prompt) for prompt, _ in requests)
    num_output = sum(n for _, n in requests)
    light.now(f"{len(requests)} requests")
    printed = io.StringIO()
    with redirect_stdout(printed):
        seconds = bench.measure(llm, requests)
    light.say("", "```text", *printed.getvalue().splitlines(), "```")
    amount = f"{len(requests)} requests, {num_input:,} tokens in, {num_output:,} out"
    return f"{num_output / seconds:,.0f} output tokens/s: {amount}, in {seconds:.1f} s"


def peers(light: Light) -> str:
    """The same requests and weights in nanopaged, vLLM and nano-vllm, each in a process of its own."""
    installed = [peer for peer in ("vllm", "nano-vllm") if find_spec(peer.replace("-", "")) is not None]
    if not installed:
        raise NotRun("neither vLLM nor nano-vllm is installed here")
    args = arguments(light)
    rates = {}
    requests = bench.draw_requests(1024, args)  # token ids that the tiny model's tokenizer has
    num_output = sum(n for _, n in requests)
    with tempfile.TemporaryDirectory() as folder:
        light.now("random weights")
        bench.save_random_weights(folder, args)
        release()
        light.table("", "output tokens/s")
        for name in ("nanopaged", *installed):
            with light.trying(name):
                rates[name] = num_output / run_job(make_job(name, folder, args), requests)["seconds"]
                light.row(name, f"{rates[name]:,.0f}")
    return f"output tokens/s: {', '.join(f'{name} {rate:,.0f}' for name, rate in rates.items())}"
