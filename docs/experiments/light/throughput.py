"""Output tokens per second: nano-vllm's benchmark, alone and beside other engines."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec

from common import ROOT, make_llm

import bench
from light import Light, NotRun, release


def arguments(light: Light) -> argparse.Namespace:
    """Those of bench.py, whose defaults on a GPU are nano-vllm's benchmark. Less of it in smaller runs."""
    full = {"requests": 256, "min-input": 100, "max-input": 1024, "min-output": 100, "max-output": 1024}
    if light.no_kernels is not None:  # an older GPU, with PyTorch alone
        full |= {"requests": 64, "max-input": 512, "max-output": 512}
    quick = {"requests": 16, "min-input": 100, "max-input": 200, "min-output": 50, "max-output": 100}
    small = {"requests": 4, "min-input": 4, "max-input": 20, "min-output": 2, "max-output": 9}
    options = {"shape": light.args.shape, "dtype": light.args.dtype} | light.pick(full, quick, small)
    sys.argv = ["bench.py", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    return bench.read_arguments()


def workload(light: Light) -> str:
    """nanopaged alone, with random weights."""
    args = arguments(light)
    light.now("starting the engine")
    options = bench.engine_options(args)
    del options["dtype"]  # make_llm reads it itself
    llm = make_llm(args, **options)
    requests = bench.draw_requests(llm.engine.vocab_size, args)
    num_input, num_output = sum(len(prompt) for prompt, _ in requests), sum(n for _, n in requests)
    light.now(f"{len(requests)} requests")
    run = bench.measure(llm, requests)
    light.table("", "")
    for name in ("output_tokens_per_second", "total_tokens_per_second", "steps", "preemptions"):
        light.row(name.replace("_", " "), f"{run[name]:,.0f}")
    for name in ("time_to_first_token", "time_per_output_token"):
        light.row(
            f"{name.replace('_', ' ')}, ms (p50, p95, p99)", ", ".join(f"{1e3 * t:.1f}" for t in run[name])
        )
    light.row("GB/s of weights and K/V that decodes read", f"{run['bytes_read'] / run['seconds'] / 1e9:,.0f}")
    amount = f"{len(requests)} requests, {num_input:,} tokens in, {num_output:,} out"
    return f"{run['output_tokens_per_second']:,.0f} output tokens/s: {amount}, in {run['seconds']:.1f} s"


def peers(light: Light) -> str:
    """The same requests and weights in nanopaged, vLLM and nano-vllm, each in a process of its own."""
    there = [peer for peer in ("vllm", "nano-vllm") if find_spec(peer.replace("-", "")) is not None]
    if not there:
        raise NotRun("neither vLLM nor nano-vllm is installed here")
    args, rates = arguments(light), {}
    requests = bench.draw_requests(1024, args)  # token ids that the tiny model's tokenizer has
    num_output = sum(n for _, n in requests)
    with tempfile.TemporaryDirectory() as folder:
        light.now("random weights")
        bench.save_random_weights(args, folder)
        release()
        light.table("", "output tokens/s")
        for args.baseline in (str(ROOT), *there):
            sides = bench.sides(folder, requests, args)
            name = "nanopaged" if args.baseline == str(ROOT) else list(sides)[-1]
            with light.trying(name):
                rates[name] = num_output / sides[name]()["seconds"]
                light.row(name, f"{rates[name]:,.0f}")
    return f"output tokens/s: {', '.join(f'{name} {rate:,.0f}' for name, rate in rates.items())}"
