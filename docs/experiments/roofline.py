"""The time of a step against the roofline: the least time that memory and arithmetic of this machine allow.

    python docs/experiments/roofline.py

A decode step reads all weights and the K/V of every sequence, and does little arithmetic with them; a prefill
step reads the weights once for many tokens. The least time of a step is the larger of

    (bytes of the weights + bytes of the K/V) / bandwidth         and          operations / speed,

with the bandwidth of a copy and the speed of a large linear layer, both the best that this run measures.
"model" is the time of the model runner: to lay out the batch, compute it and draw the tokens. "host" is the
rest of the step: scheduling and bookkeeping.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from typing import TYPE_CHECKING

from common import (
    add_model_arguments,
    at_least,
    copy_bandwidth,
    machine,
    make_llm,
    make_parser,
    model_name,
    pick_device,
    time_call,
)

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLM
    from nanopaged.model.model_config import ModelConfig

Row = tuple[str, float, float, float, float]  # name, host seconds, model seconds, bytes, operations


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument(
        "--batch", type=at_least(1), nargs="+", help="sequences (default: 1 8 64 256, or 1 8 32 on a CPU)"
    )
    parser.add_argument(
        "--context", type=at_least(1), nargs="+", default=[256], help="tokens in each prompt; one or several"
    )
    parser.add_argument("--steps", type=at_least(4), default=20, help="decode steps; the median counts")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a block")
    parser.add_argument("--backend", default="auto", help="attention_backend")
    args = parser.parse_args()
    on_gpu = pick_device().type == "cuda"
    batches = args.batch or ([1, 8, 64, 256] if on_gpu else [1, 8, 32])
    bandwidth = copy_bandwidth(pick_device())
    speed = linear_speed(args.dtype)
    print(f"{model_name(args)}, prompts of {' '.join(map(str, args.context))}; {machine()}")
    print(f"measured limits: {bandwidth / 1e9:.1f} GB/s, {speed / 1e9:,.0f} GFLOP/s")
    print(f"{'step':22} {'ms':>9} {'host':>7} {'model':>9} {'GB':>7} {'GFLOP':>8} {'limit':>8} {'share':>6}")
    for mode in ("graphs", "eager") if on_gpu else ("",):
        llm = make_llm(
            args,
            block_size=args.block_size,
            attention_backend=args.backend,
            enforce_eager=mode != "graphs",
            enable_prefix_caching=False,
            max_num_seqs=max(batches) + 8,  # a larger pool, since a reserve of it stays free
            max_num_batched_tokens=max(8192, max(batches)),
            max_model_len=max(args.context) + args.steps + 8,
        )
        time_steps(llm, min(3, max(batches)), min(args.context), args)  # a warm-up
        for context, batch in itertools.product(args.context, batches):
            rows = time_steps(llm, batch, context, args)
            print_rows(rows, f"{batch} x {context} {mode}", bandwidth, speed)
        del llm  # before the next one takes the memory


def print_rows(rows: list[Row], suffix: str, bandwidth: float, speed: float) -> None:
    for name, host, model, num_bytes, operations in rows:
        limit, whole = max(num_bytes / bandwidth, operations / speed), host + model
        times = f"{1e3 * whole:9.2f} {1e3 * host:7.2f} {1e3 * model:9.2f}"
        work = f"{num_bytes / 1e9:7.3f} {operations / 1e9:8.1f}"
        print(f"{f'{name} {suffix}':22} {times} {work} {1e3 * limit:8.2f} {limit / whole:6.1%}", flush=True)


def linear_speed(dtype_name: str) -> float:
    """Floating-point operations a second of a large linear layer, the best."""
    import torch

    from nanopaged.attention import choose_backend
    from nanopaged.kv_cache import KVShape
    from nanopaged.model.decoder import Linear, allocate
    from nanopaged.model_runner import choose_operations

    device, dtype = pick_device(), getattr(torch, dtype_name)
    n = 8192 if device.type == "cuda" else 2048
    layer = Linear(n, n, bias=False)
    allocate(layer, dtype, device)
    layer.weight.data.normal_()
    backend = choose_backend("auto", device, KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype=dtype))
    layer.pack(choose_operations(backend, device, dtype=dtype, enforce_eager=True))
    x = torch.randn(n, n, device=device).to(dtype)
    with torch.inference_mode():
        return 2 * n**3 / time_call(lambda: layer(x), device, best=True)


def time_steps(llm: LLM, batch: int, context: int, args: argparse.Namespace) -> list[Row]:
    """A prefill step and the median decode step of `batch` sequences with `context` prompt tokens."""
    from nanopaged import SamplingParams

    engine, rng = llm.engine, random.Random(args.seed)
    params = SamplingParams(temperature=0, max_tokens=args.steps + 4, ignore_eos=True)
    for i in range(batch):
        engine.add_request(str(i), rng.choices(range(engine.vocab_size), k=context), params)
    steps: list[tuple[float, float, int, int]] = []  # host seconds, model seconds, tokens, keys
    runner = engine.runner
    execute = runner.execute  # replaced by a function that also takes the time

    def timed_execute(scheduled: object) -> object:
        nonlocal seconds, num_tokens, num_keys
        num_tokens = sum(seq.num_scheduled_tokens for seq in scheduled.sequences)
        num_keys = num_tokens + sum(seq.num_computed_tokens for seq in scheduled.sequences)
        began = time.perf_counter()
        result = execute(scheduled)
        seconds = time.perf_counter() - began
        return result

    seconds, num_tokens, num_keys = 0.0, 0, 0
    runner.execute = timed_execute
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - began - seconds, seconds, num_tokens, num_keys))
    runner.execute = execute

    config, itemsize = runner.model.config, runner.dtype.itemsize
    host, model, prefilled, _ = steps[0]
    # A prompt's token attends to half of the prompt on average. Only last tokens meet the output projection.
    operations = 2 * prefilled * layer_weights(config) + attention_operations(config, prefilled * context / 2)
    prefill = ("prefill", host, model, itemsize * layer_weights(config), operations)
    decodes = [step for step in steps if step[2] == batch][1:-1]
    if not decodes:
        raise SystemExit(f"{batch} x {context} were never decoded together: the KV cache is too small")
    host, model, _, keys = map(statistics.median, zip(*decodes, strict=True))
    num_weights = layer_weights(config) + config.vocab_size * config.hidden_size
    operations = 2 * batch * num_weights + attention_operations(config, keys)
    return [prefill, ("decode", host, model, decode_bytes(llm, 1, keys), operations)]


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers, without embedding and output projection."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q and o, k and v
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def decode_bytes(llm: LLM, steps: int, keys: float) -> float:
    """Bytes that decoding has to read: all matrices in every step, and the K/V of `keys` tokens in total."""
    config, itemsize = llm.engine.runner.model.config, llm.engine.runner.dtype.itemsize
    weights = layer_weights(config) + config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token
    return itemsize * (steps * weights + keys * kv)


def attention_operations(config: ModelConfig, pairs: float) -> float:
    """For `pairs` of (query, key): a product with K and one with V, in all layers."""
    return 4 * pairs * config.num_heads * config.head_dim * config.num_layers


if __name__ == "__main__":
    run_program(main)
