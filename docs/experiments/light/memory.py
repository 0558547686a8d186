"""The memory of a GPU: what is set aside and what is used; swapping blocks to the host."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

import torch
from common import make_llm
from preemption import block_major_swap, layer_major_swap, serve_in_turns, time_prefill, time_swap

from light import Light, release
from nanopaged import SamplingParams
from nanopaged import memory as sizes

if TYPE_CHECKING:
    from nanopaged import LLMEngine


def memory(light: Light) -> str:
    """The pool that the engine chooses, filled with the costliest way to sample: does it survive?"""
    measure, peaks = sizes.peak_memory, []
    sizes.peak_memory = lambda work, device: peaks.append(measure(work, device)) or peaks[-1]
    small = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    light.now("starting the engine")
    if not light.on_gpu:
        light.cannot("compare the memory in use with the prediction")
        engine = make_llm(light.args, **small).engine
        return fill_pool(light, engine)
    free, total = torch.cuda.mem_get_info(light.device)
    engine = make_llm(light.args).engine
    before, blocks = torch.cuda.memory_allocated(light.device), engine.runner.kv_cache.data.nbytes
    torch.cuda.reset_peak_memory_stats(light.device)
    light.table("GB of GPU memory", "")
    rows = {
        "total": total,
        "in use before": total - free,
        "weights and buffers": before - blocks,
        "KV cache": blocks,
        "the largest step, as measured at the start": peaks[0],
        "free, with CUDA graphs": torch.cuda.mem_get_info(light.device)[0],
    }
    for name, size in rows.items():
        light.row(name, f"{size / 1e9:.2f}")
    filled = fill_pool(light, engine)
    used = torch.cuda.max_memory_allocated(light.device) - before
    light.row("the largest step, with a full pool", f"{used / 1e9:.2f}")
    light.row("free at the end", f"{torch.cuda.mem_get_info(light.device)[0] / 1e9:.2f}")
    return f"{filled}; {peaks[0] / 1e9:.2f} GB were set aside for a step, {used / 1e9:.2f} used"


def fill_pool(light: Light, engine: LLMEngine) -> str:
    """Serve requests of the greatest length, as many as it takes to fill all blocks."""
    num_blocks, longest, num_new, rng = engine.stats().num_blocks, engine.max_model_len, 8, random.Random(0)
    num_requests = min(engine.config.max_num_seqs, num_blocks * engine.config.block_size // longest + 1)
    options = {"top_p": 0.9, "min_p": 0.1, "presence_penalty": 1, "seed": 1, "ignore_eos": True}
    params = SamplingParams(max_tokens=num_new, **options)
    for i in range(num_requests):
        engine.add_request(str(i), rng.choices(range(engine.vocab_size), k=longest - num_new), params)
    most, num_tokens, began = 0, 0, time.perf_counter()
    while engine.has_unfinished_requests():
        light.now(f"step {engine.stats().num_steps + 1}, after {most:,} of {num_blocks:,} blocks were in use")
        num_tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        most = max(most, engine.stats().num_used_blocks)
    seconds, stats = time.perf_counter() - began, engine.stats()
    engine.check_invariants()
    if num_tokens != num_new * num_requests:
        light.wrong(f"{num_tokens} tokens came out of a full pool, not {num_new * num_requests}")
    preempted = stats.num_preemptions_swap + stats.num_preemptions_recompute
    served = f"{num_requests} requests of {longest:,} tokens in {seconds:.1f} s, {preempted} preemptions"
    return f"{most:,} of {num_blocks:,} blocks in use at most: {served}"


def swap(light: Light) -> str:
    """Swapping against recomputing: a token alone, and requests in a pool that is too small."""
    if not light.on_gpu:
        light.cannot("swap over PCIe: both sides are memory of the host")
    light.now("a prefill")
    recompute, shape = time_prefill(light.args)
    release()
    light.table("block size", "swapped out and in, µs a token", "GB/s", "µs in the paper's layout")
    fastest = math.inf
    for size in light.pick([1, 4, 16, 64, 256], [16], [16, 256]):
        with light.trying(f"blocks of {size}"):
            ours, papers = (
                time_swap(make(shape, size, light.device), size, light.device, light.args.seed)
                for make in (block_major_swap, layer_major_swap)
            )
            fastest = min(fastest, ours)
            rate = 2 * shape.block_bytes(1) / ours / 1e9  # out, and in
            light.row(size, f"{1e6 * ours:.2f}", f"{rate:.1f}", f"{1e6 * papers:.2f}")
    chosen = rates = "not known"
    with light.trying("what 'auto' picks"):
        small = {"num_blocks": 64, "num_host_blocks": 64, "max_num_seqs": 4, "max_model_len": 256}
        chosen = make_llm(light.args, **small).engine.stats().preemption
    with light.trying("a pool that is too small"):
        swapped, recomputed = serve_in_turns(48, light.args)
        rates = f"{swapped[0]:,.0f} by swapping, {recomputed[0]:,.0f} by recomputing"
        counts = f"{swapped[1]} and {recomputed[1]}"
        light.say("", f"16 requests of 160 tokens in 48 blocks of 16: {counts} were preempted.")
        if not (swapped[1] and recomputed[1]):
            light.wrong(f"{counts} requests were preempted in a pool that is too small")
    both = f"{1e6 * fastest:.2f} µs a token to swap out and in, {1e6 * recompute:.2f} µs to recompute"
    return f"{both}; 'auto' picks {chosen}; output tokens/s in a small pool: {rates}"
