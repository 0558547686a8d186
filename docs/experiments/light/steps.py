"""Decode and prefill steps against the roofline: with graphs and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from common import copy_bandwidth, make_llm
from roofline import Row, linear_speed, time_steps

from light import Light, release


def steps(light: Light) -> str:
    """Decode and prefill steps with graphs and without, and with torch alone."""
    modes: dict[str, dict[str, Any]] = {}
    if light.no_graphs is None:
        modes["graphs"] = {}
    if light.no_kernels is None:
        modes["eager"] = {"enforce_eager": True, "attention_backend": "auto" if light.on_gpu else "triton"}
    modes["torch"] = {"attention_backend": "torch"}
    light.say_what_is_missing()
    large = light.on_gpu and torch.cuda.mem_get_info(light.device)[1] > 60e9  # 256 of 1,024 tokens: 31 GB
    context = light.pick(1024 if large else 256, 256, 9)
    batches = light.pick([1, 8, 64, 256], [1, 64], [1, 3])
    light.now("the limits of the machine")
    bandwidth = copy_bandwidth(light.device)
    speed = linear_speed(light.args.dtype)
    light.say(f"Shape {light.args.shape} in {light.args.dtype}, prompts of {context:,} tokens.")
    light.say(f"The least times follow from {bandwidth / 1e9:,.0f} GB/s and {speed / 1e12:,.1f} TFLOP/s.")
    light.table("how", "sequences", "step", "ms", "host's share", "GB", "GFLOP", "least ms", "reached")
    seconds: dict[tuple[str, int], float] = {}
    reached: dict[int, float] = {}
    for name, options in modes.items():
        with light.trying(name):
            for batch, row in time_mode(light, name, options, batches, context):
                step, host, model, num_bytes, operations = row
                whole, least = host + model, max(num_bytes / bandwidth, operations / speed)
                work = f"{num_bytes / 1e9:.3f}", f"{operations / 1e9:,.1f}", f"{1e3 * least:.2f}"
                times = f"{1e3 * whole:.2f}", f"{host / whole:.0%}"
                light.row(name, batch, step, *times, *work, f"{least / whole:.0%}")
                if step == "decode":
                    seconds[name, batch] = whole
                    reached[batch] = max(least / whole, reached.get(batch, 0.0))
        release()
    best = ", ".join(f"{share:.0%} at {batch}" for batch, share in reached.items())
    both = [batch for batch in batches if ("graphs", batch) in seconds and ("eager", batch) in seconds]
    gain = ", ".join(f"{seconds['eager', batch] / seconds['graphs', batch]:.2f} at {batch}" for batch in both)
    gain = gain and f"; speed of graphs over eager: {gain}"
    return f"decodes reach of the roofline {best} sequences{gain}"


def time_mode(
    light: Light, name: str, options: dict[str, Any], batches: list[int], context: int
) -> Iterator[tuple[int, Row]]:
    """(sequences, the row of roofline.py) of prefills and decodes, for one way to run the model."""
    longest = context + light.args.steps + 8
    llm = make_llm(
        light.args,
        **options,
        enable_prefix_caching=False,
        preemption="recompute",
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(256, max(batches) * context // 4),
        max_model_len=longest,
        num_blocks=max(batches) * (longest // 16 + 1) * 11 // 10 + 8,  # with the watermark's reserve
    )
    time_steps(llm, min(3, max(batches)), context, light.args)  # a warm-up
    for batch in batches:
        light.now(f"{name}, {batch} sequences")
        for row in time_steps(llm, batch, context, light.args):
            yield batch, row
