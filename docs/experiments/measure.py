"""Times and rates of the engine on this machine, one subject at a time.

    python docs/experiments/measure.py roofline
    OMP_NUM_THREADS=1 python docs/experiments/measure.py kernel batch=1,32 context=1500,64-1024

What is compared takes turns, the first round warms up, and a figure is the median of the rounds. Without
`model=FOLDER` the weights are random. The subjects, and their options with the defaults:
"""

from __future__ import annotations

import inspect
import random
import textwrap
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

from lib.common import (
    copy_bandwidth,
    machine,
    make_llm,
    make_parser,
    medians,
    pick_device,
    product_speed,
    seconds_of,
    time_call,
)

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLMEngine

Numbers = tuple[int, ...]
Subject = Callable[..., None]


def kernel(
    batch: Numbers = (1, 8, 32),
    context: tuple[str, ...] = ("128", "64-1024"),
    kv_heads: int = 8,
    group: int = 4,
    head_dim: int = 128,
    dtype: str = "float32",
) -> None:
    """One layer's decode over blocks, in PyTorch and (in place) in C++, and over dense K/V.

    A context is a number of keys, or a range. On a GPU the decode over blocks is the Triton kernel.
    """
    import torch
    from lib.decode_case import DecodeCase, KVSizes

    from nanopaged.kernels import build

    device = pick_device()
    on_gpu = device.type == "cuda"
    bandwidth = copy_bandwidth(device)
    print(f"copying memory: {bandwidth / 1e9:.1f} GB/s, read and written; the shares are of it")
    print(f"{'decode':10} {'batch':>5} {'context':>10} {'us':>9} {'GB/s':>7} {'share':>6}")
    sizes = KVSizes(2, kv_heads, group, head_dim, getattr(torch, dtype))
    for num_seqs, keys in product(batch, context):
        low, _, high = keys.partition("-")
        if not 1 <= int(low) <= int(high or low):
            raise ValueError(f"{keys} is not a length, or a range from low to high")
        rng = random.Random(0)
        lens = [rng.randint(int(low), int(high or low)) for _ in range(num_seqs)]
        case = DecodeCase(lens, 16, sizes, device, seed=0)
        calls = {"paged": case.paged("triton" if on_gpu else "torch"), "dense": case.dense()}
        if not on_gpu and build.can_build_or_load():
            calls["in place"] = case.paged("cpp")
        for name, call in calls.items():
            with torch.inference_mode():
                seconds = time_call(call, device)
            rate = case.num_bytes / seconds
            figures = f"{1e6 * seconds:9.1f} {rate / 1e9:7.1f} {rate / bandwidth:6.1%}"
            print(f"{name:10} {num_seqs:5} {keys:>10} {figures}", flush=True)


def roofline(
    batch: Numbers = (1, 8, 32),
    context: Numbers = (256,),
    steps: int = 20,
    shape: str = "100m",
    dtype: str = "float32",
    model: str = "",
) -> None:
    """A prefill and a decode step against the least time that this machine's memory and arithmetic allow.

    The limit is the larger of bytes of weights and K/V / bandwidth of a copy, and operations / speed of a
    large product. Milliseconds; host is scheduling and bookkeeping.
    """
    bandwidth = copy_bandwidth(pick_device())
    speed = product_speed(dtype)
    print(f"measured limits: {bandwidth / 1e9:.1f} GB/s, {speed / 1e9:,.0f} GFLOP/s")
    print(f"{'step':22} {'ms':>9} {'host':>7} {'model':>9} {'GB':>7} {'GFLOP':>8} {'limit':>8} {'share':>6}")
    engine = make_llm(
        shape,
        dtype,
        model,
        enable_prefix_caching=False,
        max_num_seqs=max(batch) + 8,  # a larger pool, since a reserve of it stays free
        max_num_batched_tokens=max(8192, *batch),
        max_model_len=max(context) + steps + 8,
    ).engine
    time_steps(engine, min(3, *batch), min(context), steps)  # a warm-up
    for num_keys, num_seqs in product(context, batch):
        rows = time_steps(engine, num_seqs, num_keys, steps)
        decodes = [row for row in rows if row[-1] == num_seqs][1:-1]
        if not decodes:
            raise ValueError(f"{num_seqs} x {num_keys} never decode together: the KV cache is too small")
        shown = {"prefill": rows[0], "decode": medians(decodes)}
        for name, (host, in_model, num_bytes, operations, _) in shown.items():
            limit = max(num_bytes / bandwidth, operations / speed)
            times = f"{1e3 * (host + in_model):9.2f} {1e3 * host:7.2f} {1e3 * in_model:9.2f}"
            work = f"{num_bytes / 1e9:7.3f} {operations / 1e9:8.1f}"
            share = f"{1e3 * limit:8.2f} {limit / (host + in_model):6.1%}"
            print(f"{f'{name} {num_seqs} x {num_keys}':22} {times} {work} {share}", flush=True)


def time_steps(engine: LLMEngine, batch: int, context: int, num_steps: int) -> list[tuple[float, ...]]:
    """Of each step, a prefill first: seconds of the host and of the model, bytes, operations, tokens."""
    from nanopaged import SamplingParams

    runner = engine.runner
    config = runner.model.config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q and o, k and v
    in_layers = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    output = config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token
    pair = 4 * config.num_layers * config.num_heads * config.head_dim  # operations for a query and a key
    execute = runner.execute  # replaced by a function that also takes the time
    steps = []

    def timed_execute(scheduled: Any) -> Any:
        num_tokens = sum(seq.num_scheduled_tokens for seq in scheduled.sequences)
        num_keys = num_tokens + sum(seq.num_computed_tokens for seq in scheduled.sequences)
        if num_tokens > batch:
            # A prompt's token attends to half of the prompt on average; only last tokens meet the output.
            num_bytes = runner.dtype.itemsize * in_layers
            operations = 2 * num_tokens * in_layers + pair * num_tokens * context / 2
        else:
            num_bytes = runner.dtype.itemsize * (in_layers + output + kv * num_keys)
            operations = 2 * num_tokens * (in_layers + output) + pair * num_keys
        began = time.perf_counter()
        result = execute(scheduled)
        steps.append((time.perf_counter() - began, num_bytes, operations, num_tokens))
        return result

    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 4, ignore_eos=True)
    for i in range(batch):
        engine.add_request(str(i), rng.choices(range(engine.prompts.vocab_size), k=context), params)
    runner.execute = timed_execute
    rows = []
    while engine.has_unfinished_requests():
        whole = seconds_of(engine.step)
        in_model, *work = steps[-1]
        rows.append((whole - in_model, in_model, *work))
    runner.execute = execute
    return rows


# ── the program ───────────────────────────────────────────────────────────────────────────────────

SUBJECTS: dict[str, Subject] = {subject.__name__: subject for subject in (kernel, roofline)}


def main() -> None:
    parser = make_parser(__doc__ + "".join(f"\n{describe(subject)}" for subject in SUBJECTS.values()))
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE")
    args = parser.parse_args()
    subject = SUBJECTS[args.subject]
    try:
        options = dict(read_option(subject, option) for option in args.options)
        print(machine())
        subject(**options)
    except ValueError as error:
        parser.error(str(error))


def describe(subject: Subject) -> str:
    """The options of a subject with their defaults, and its docstring."""
    options = []
    for option in inspect.signature(subject).parameters.values():
        values = option.default if isinstance(option.default, tuple) else [option.default]
        options.append(f"{option.name}={','.join(map(str, values))}")
    text = textwrap.indent(inspect.cleandoc(subject.__doc__), " " * 4)
    return f"  {subject.__name__} {' '.join(options)}\n{text}\n"


def read_option(subject: Subject, text: str) -> tuple[str, Any]:
    """An option of the command line, with a value of its default's type."""
    name, _, value = text.partition("=")
    option = inspect.signature(subject).parameters.get(name)
    if option is None:
        raise ValueError(f"{subject.__name__} has no option {name}")
    several = isinstance(option.default, tuple)
    kind = type(option.default[0] if several else option.default)
    values = [kind(part) for part in (value.split(",") if several else [value])]
    if kind is int and min(values) < 1:
        raise ValueError(f"{name} must be at least 1")
    return name, tuple(values) if several else values[0]


if __name__ == "__main__":
    run_program(main)
