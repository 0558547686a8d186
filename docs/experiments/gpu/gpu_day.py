"""One part of gpu_day.sh: `python docs/experiments/gpu/gpu_day.py PART`.

    machine    the GPU, what "auto" picks on it, its speed
    varlen     flash attention of prefills beside PyTorch's attention, one sequence after another
    decode     the decode kernel beside a copy, over batches, contexts and block sizes
    settings   the decode kernel with other tiles, stages, warps and cuts than the engine's
    swap       swapping a block out and in, beside computing it again, for several block sizes
    engine     nano-vllm's workload, its steps by kind, profiles of 50 decode steps
    plain      the workload with prefills in plain PyTorch
    eager      the workload without CUDA graphs and without torch.compile

Without a GPU the sizes are small, and the kernels are interpreted. Lines that begin with !! have failed.
"""

from __future__ import annotations

import logging
import random
import sys
import sysconfig
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lib.common import copy_bandwidth, device_name, make_llm, product_speed, time_call
from lib.decode_case import DecodeCase, KVSizes
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import bench
from nanopaged import LLM, SamplingParams
from nanopaged.attention import choose_backend, why_unavailable
from nanopaged.attention.flash_backend import load_varlen
from nanopaged.kernels import paged_attention as kernels
from nanopaged.kv_cache import KVShape

if TYPE_CHECKING:
    from nanopaged import LLMEngine

ON_GPU = torch.cuda.is_available()
DEVICE = torch.empty(0, device="cuda" if ON_GPU else "cpu").device
CAPABILITY = torch.cuda.get_device_capability(DEVICE) if ON_GPU else (9, 0)
HALF = torch.bfloat16 if CAPABILITY >= (8, 0) else torch.float16
# Qwen3-0.6B has 8 KV heads of dimension 128, each for 2 query heads.
SIZES = KVSizes(num_layers=1, num_kv_heads=8 if ON_GPU else 2, group=2, head_dim=128, dtype=HALF)
SHAPE = KVShape(num_layers=1, num_kv_heads=8, head_dim=128, dtype=HALF)
SMALL = ["--shape=test", "--requests=4", "--min-input=4", "--max-input=20"]
SMALL += ["--min-output=2", "--max-output=9"]
FAILED: list[str] = []


def say(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """An exception in the block is printed, and the part goes on."""
    try:
        yield
    except Exception as error:
        FAILED.append(what)
        lines = str(error).strip().splitlines() or [""]
        say(f"!! {what}: {type(error).__name__}: {lines[0][:300]}")
        traceback.print_exc(limit=-4)


def seconds_of(call: Callable[[], object], in_graph: bool = True) -> float:
    """Median seconds on a GPU, in a CUDA graph; those of one call on a CPU."""
    if ON_GPU:
        return time_call(call, DEVICE, in_graph=in_graph)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def machine() -> None:
    """What the other parts depend on."""
    say(f"device: {device_name()}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    if ON_GPU:
        free, total = torch.cuda.mem_get_info(DEVICE)
        say(f"memory: {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
        say(f"capability: {torch.cuda.get_device_capability(DEVICE)}; built for {torch.cuda.get_arch_list()}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        say("!! Triton needs Python's headers: install python3-dev")
    for backend in ("flash", "triton"):
        say(f"{backend}: {why_unavailable(backend, DEVICE, SHAPE) or 'can run'}")
    say(f"auto: {choose_backend('auto', DEVICE, SHAPE)}")
    say(f"copy: {copy_bandwidth(DEVICE) / 1e9:,.0f} GB/s, read and written")
    dtype = str(HALF).removeprefix("torch.")
    say(f"product: {product_speed(dtype) / 1e12:,.1f} TFLOP/s of a large linear layer in {dtype}")


# ── prefills ──────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def varlen() -> None:
    """`new` last tokens of contexts of `length` tokens: error and speed."""
    shapes = [(16, 562, 562), (16, 1024, 1024), (4, 512, 4096)] if ON_GPU else [(2, 24, 24), (2, 7, 40)]
    for num_seqs, new, length in shapes:
        q = torch.randn(num_seqs, new, 16, 128, device=DEVICE).to(HALF)
        k, v = torch.randn(2, num_seqs, length, 8, 128, device=DEVICE).to(HALF)
        mask = torch.ones(new, length, device=DEVICE, dtype=torch.bool).tril(length - new)
        exact = attend(q.double(), k.double(), v.double(), mask)
        pairs = num_seqs * new * (length - (new - 1) / 2)
        causal = None if new == length else mask
        ways = {"one after another": lambda q=q, k=k, v=v, mask=causal: each_alone(q, k, v, mask)}
        reason = why_unavailable("flash", DEVICE, SHAPE)
        if reason is None:
            ways["flash attention"] = lambda q=q, k=k, v=v: all_at_once(q, k, v)
        else:
            say(f"flash: {reason}")
        for name, way in ways.items():
            with attempt(f"{name}, {num_seqs} x {new} of {length}"):
                error = (way() - exact).abs().max().item()
                seconds = seconds_of(way, in_graph=False)
                rate = 4 * pairs * 16 * 128 / seconds / 1e12
                what = f"{num_seqs:3} x {new:5} of {length:5}  {name:18}"
                say(f"{what} {1e3 * seconds:8.3f} ms {rate:7.1f} TFLOP/s  error {error:.1e}")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's attention: q [num_seqs, new, heads, dim], k and v [num_seqs, length, heads, dim].

    Without a mask, each query reads the keys up to its own.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def each_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Sequence by sequence, as if their lengths differed."""
    return torch.cat([attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask) for i in range(len(q))])


def all_at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The function that the backend "flash" calls."""
    ends = torch.arange(len(q) + 1, dtype=torch.int32, device=DEVICE)
    out = load_varlen()(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ends * q.shape[1],
        ends * k.shape[1],
        q.shape[1],
        k.shape[1],
        softmax_scale=128**-0.5,
        causal=True,
    )
    return out.view(q.shape)


# ── the decode kernel ─────────────────────────────────────────────────────────────────────────────


def make_case(lens: list[int], block_size: int) -> DecodeCase:
    """Contexts of these lengths, with the heads of Qwen3-0.6B."""
    return DecodeCase(lens, block_size, SIZES, DEVICE, seed=0)


@torch.inference_mode()
def decode() -> None:
    """The share of a copy's speed. The goal is 85 % from 32 x 2,048 on."""
    bandwidth = copy_bandwidth(DEVICE)
    say(f"copy: {bandwidth / 1e9:,.0f} GB/s")
    cases = product([16, 256], [512, 2048, 8192, 32768], [1, 8, 32, 64, 256])
    for block_size, context, batch in cases if ON_GPU else [(16, 40, 1), (16, 40, 3)]:
        what = f"{batch:3} x {context:5}, blocks of {block_size:3}"
        if ON_GPU:
            torch.cuda.empty_cache()
            if 1.3 * batch * context * SIZES.bytes_per_token() > torch.cuda.mem_get_info(DEVICE)[0]:
                say(f"{what}: does not fit")
                continue
        with attempt(f"decode {what}"):
            case = make_case([context] * batch, block_size)
            call = case.paged("triton")
            error = (call()[batch - 1] - case.exact(batch - 1)).abs().max().item()
            seconds = seconds_of(call)
            rate = case.num_bytes / seconds
            speed = f"{1e6 * seconds:9.1f} us {rate / 1e9:6.0f} GB/s {rate / bandwidth:6.1%}"
            say(f"{what} {speed}  error {error:.1e}")


@torch.inference_mode()
def settings() -> None:
    """One context, 32 of one length, and 128 of 100 to 2,000 keys. Each row is one compilation."""
    rng = random.Random(0)
    lengths = [[32768], [2048] * 32, [rng.randint(100, 2000) for _ in range(128)]]
    cases = [make_case(lens, 16) for lens in (lengths if ON_GPU else [[70, 70]])]
    usual = kernels.decode_settings
    ours = usual(CAPABILITY, 2, 128, HALF)
    first = ours["TILE"], ours["num_stages"], ours["num_warps"]
    others = [*product((16, 32, 64), (2, 3, 4), (4,)), (64, 2, 8), (128, 2, 8)]
    for tile, stages, warps in [first, *others] if ON_GPU else [first, (16, 2, 4)]:
        tried = ours | {"TILE": tile, "num_stages": stages, "num_warps": warps}
        kernels.decode_settings = lambda *_, tried=tried: tried
        with attempt(f"tile {tile}, stages {stages}, warps {warps}"):
            show_times(f"tile {tile:3} stages {stages} warps {warps}", cases, None)
    kernels.decode_settings = usual
    for cuts in (33, 66, 132, 264, 528) if ON_GPU else (2, 4):
        with attempt(f"cuts {cuts}"):
            show_times(f"cuts {cuts:3}", cases, cuts)


def show_times(name: str, cases: list[DecodeCase], cuts: int | None) -> None:
    columns = []
    for case in cases:
        seconds = seconds_of(case.paged("triton", cuts))
        columns.append(f"{1e6 * seconds:8.1f} us {case.num_bytes / seconds / 1e9:5.0f} GB/s")
    say(f"{name:26}", *columns)


# ── preemption ────────────────────────────────────────────────────────────────────────────────────


def swap() -> None:
    """What `preemption="auto"` measures when an engine starts, which it writes to the log."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanopaged").setLevel(logging.INFO)
    shape = "qwen3-0.6b" if ON_GPU else "test"
    for block_size in (1, 16, 64, 256):
        with attempt(f"blocks of {block_size}"):
            say(f"blocks of {block_size}")
            options = {"num_blocks": 8192 // block_size, "num_host_blocks": 8, "max_model_len": 2048}
            make_llm(
                shape, str(HALF).removeprefix("torch."), block_size=block_size, enforce_eager=True, **options
            )


# ── the engine ────────────────────────────────────────────────────────────────────────────────────


def run_workload(**options: Any) -> LLM:
    """bench.py's requests, which are nano-vllm's on a GPU, and the time of each kind of step."""
    words = ["--dtype", str(HALF).removeprefix("torch.")]
    if not ON_GPU:
        words += SMALL
        options["attention_backend"] = "torch"  # the kernels would be interpreted
    args = bench.make_parser().parse_args(words)
    began = time.perf_counter()
    options = {"preemption": "recompute"} | options  # else 4 GiB of the host are pinned
    llm = make_llm(args.shape, args.dtype, args.model or "", seed=args.seed, **options)
    runner = llm.engine.runner
    num_graphs = len(runner.graphs.graphs) if runner.graphs is not None else 0
    say(
        f"engine: {type(runner.attention).__name__}, {num_graphs} graphs, {runner.num_blocks:,} blocks,"
        f" started in {time.perf_counter() - began:.1f} s"
    )
    llm.generate([[1] * 16] * 4, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # compiles
    decodes: dict[int, list[float]] = defaultdict(list)  # sequences, rounded up → seconds
    mixed: list[float] = []
    execute = runner.execute

    def timed(batch: Any) -> Any:
        began = time.perf_counter()
        result = execute(batch)
        num_seqs = len(batch.sequences)
        times = decodes[-(-num_seqs // 32) * 32] if batch.num_decodes == num_seqs else mixed
        times.append(time.perf_counter() - began)
        return result

    runner.execute = timed
    requests = bench.draw_requests(llm.engine.prompts.vocab_size, args)
    rate = bench.run_llm(llm, requests)
    del runner.execute
    say(f"workload: {rate:,.0f} output tokens/s in {sum(n for _, n in requests) / rate:.1f} s")
    say(f"steps with prefills: {len(mixed)}, {sum(mixed):.2f} s")
    for most, times in sorted(decodes.items()):
        usual = f"median {1e3 * median(times):.2f} ms, {sum(times):.2f} s together"
        say(f"decodes of up to {most}: {len(times)} steps, {usual}")
    if ON_GPU:
        say(torch.cuda.memory_summary(abbreviated=True))
    return llm


def engine() -> None:
    """The workload, then profiles."""
    llm = run_workload()
    for batch in (256, 32, 1) if ON_GPU else (3, 1):
        with attempt(f"profile of {batch}"):
            profile(llm.engine, batch)


def profile(core: LLMEngine, batch: int) -> None:
    """50 decode steps of some 700 tokens each: timed alone, then under torch's profiler."""
    rng = random.Random(batch)
    num, length = (50, 640) if ON_GPU else (4, 8)
    # The first sequences already decode while the last ones are prefilled, and none may end too early.
    params = SamplingParams(temperature=0, max_tokens=40 * num, ignore_eos=True)
    for i in range(batch):
        core.add_request(str(i), rng.choices(range(core.prompts.vocab_size), k=length), params)
    while core.scheduler.waiting or any(
        seq.num_computed_tokens < length for seq in core.scheduler.running_sequences
    ):
        core.step()
    times = []
    for _ in range(num):
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
    say(f"== {batch} sequences: {1e3 * median(times):.3f} ms a step, the median of {num}, not profiled")
    kinds = [ProfilerActivity.CPU]
    if ON_GPU:
        kinds.append(ProfilerActivity.CUDA)
    with profiler(activities=kinds) as found:
        for _ in range(num):
            core.step()
    # An operation of PyTorch is listed with the time of its kernels, which are listed as well.
    launched = [event for event in found.key_averages() if event.device_type == DeviceType.CUDA]
    launched.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in launched)
    say(f"== kernels and copies: {busy / 1e3 / num:.3f} ms a step")
    for event in launched[:32]:
        us = event.self_device_time_total
        count = f"{event.count / num:7.1f} a step, {us / event.count:8.2f} us each"
        say(f"{event.key[:90]:90} {count}, {us / num:9.1f} us a step")
    say(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=60))
    for i in range(batch):
        core.abort_request(str(i))


PARTS: dict[str, Callable[[], object]] = {
    "machine": machine,
    "varlen": varlen,
    "decode": decode,
    "settings": settings,
    "swap": swap,
    "engine": engine,
    "plain": lambda: run_workload(attention_backend="triton"),
    "eager": lambda: run_workload(enforce_eager=True),
}

if __name__ == "__main__":
    began = time.monotonic()
    PARTS[sys.argv[1]]()
    say(f"{sys.argv[1]}: {time.monotonic() - began:.1f} s, {len(FAILED)} failed")
    sys.exit(bool(FAILED))
