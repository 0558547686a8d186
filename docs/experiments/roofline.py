"""Steps beside what this machine could do at best: bytes over bandwidth, operations over speed.

A decode step reads all weights and the K/V of every sequence, and multiplies little with them; a prompt reads
the weights once for many tokens. So the least time a step can take is the larger of

    (bytes of the weights + bytes of the K/V) / bandwidth         and          operations / speed,

with the bandwidth of a copy and the speed of a linear layer, the best that this run could measure. "model"
is the time from the start of the forward pass to the tokens' arrival, "host" the rest of the step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from common import (
    add_model_arguments,
    at_least,
    checkpoint,
    copy_bandwidth,
    machine,
    matmul_rate,
    model_name,
)

from nanopaged import LLM, SamplingParams
from nanopaged.kv_cache import pick_device
from nanopaged.model.model_config import ModelConfig
from nanopaged.model_runner import ModelRunner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--batch", type=at_least(1), nargs="+", help="default: 1 8 64 256, or 1 8 32 on a CPU"
    )
    parser.add_argument("--context", type=at_least(1), default=256, help="tokens in each prompt")
    parser.add_argument(
        "--steps", type=at_least(4), default=20, help="decode steps; the median of each count"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--backend", default="auto", help="attention_backend")


def run(args: argparse.Namespace) -> None:
    device = pick_device("auto")
    batches = args.batch or ([1, 8, 64, 256] if device.type == "cuda" else [1, 8, 32])
    bandwidth, speed = copy_bandwidth(device), matmul_rate(getattr(torch, args.dtype), device)
    print(f"{model_name(args)}, prompts of {args.context}; {machine()}")
    print(f"measured limits: {bandwidth / 1e9:.1f} GB/s, {speed / 1e9:,.0f} GFLOP/s")
    print(f"{'step':22} {'ms':>9} {'host':>7} {'model':>9} {'GB':>7} {'GFLOP':>8} {'limit':>8} {'share':>6}")
    modes = {"graphs": False, "eager": True} if device.type == "cuda" else {"": True}
    with checkpoint(args) as folder:
        for mode, enforce_eager in modes.items():
            llm = LLM(
                folder,
                dtype=args.dtype,
                block_size=args.block_size,
                attention_backend=args.backend,
                enforce_eager=enforce_eager,
                enable_prefix_caching=False,
                max_num_seqs=max(batches),
                max_num_batched_tokens=max(8192, max(batches)),
                max_model_len=args.context + args.steps + 8,
            )
            warm_up = SamplingParams(max_tokens=3)
            llm.generate([[1] * args.context] * 3, warm_up, use_tqdm=False)
            for batch in batches:
                for name, parts, num_bytes, operations in time_steps(llm, batch, args):
                    limit = max(num_bytes / bandwidth, operations / speed)
                    print_row(f"{name} {batch} {mode}", parts, num_bytes, operations, limit)
            del llm  # before the next takes the memory


def print_row(
    name: str, parts: tuple[float, float], num_bytes: float, operations: float, limit: float
) -> None:
    times = f"{1e3 * sum(parts):9.2f} {1e3 * parts[0]:7.2f} {1e3 * parts[1]:9.2f}"
    work = f"{num_bytes / 1e9:7.3f} {operations / 1e9:8.1f}"
    print(f"{name:22} {times} {work} {1e3 * limit:8.2f} {limit / sum(parts):6.1%}", flush=True)


Row = tuple[str, tuple[float, float], float, float]


def time_steps(llm: LLM, batch: int, args: argparse.Namespace) -> list[Row]:
    """(name, (host seconds, model seconds), bytes, operations) of a prefill step and a decode step."""
    engine, rng = llm.engine, random.Random(args.seed)
    params = SamplingParams(temperature=0, max_tokens=args.steps + 4, ignore_eos=True)
    for i in range(batch):
        engine.add_request(str(i), [rng.randrange(engine.vocab_size) for _ in range(args.context)], params)
    watch = Stopwatch(engine.runner)
    prompts, decodes = [], []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - began
        rows = decodes if prompts and watch.num_tokens <= batch else prompts
        rows.append((whole - watch.seconds, watch.seconds, watch.num_tokens, watch.num_keys))
    watch.stop()
    config, itemsize = engine.runner.model.config, engine.runner.dtype.itemsize
    first = prompts[0]
    # Each new token attends to half of a prompt on average, and only last tokens are projected.
    attended = first[2] * args.context / 2
    operations = 2 * first[2] * weights(config) + attention_operations(config, attended)
    rows = [("prefill", first[:2], itemsize * weights(config), operations)]
    middle = decodes[1:-1]
    parts = tuple(statistics.median(part) for part in list(zip(*middle, strict=True))[:2])
    keys = statistics.median(row[3] for row in middle)
    num_weights = weights(config) + head_weights(config)
    num_bytes = itemsize * num_weights + keys * engine.runner.kv_cache.shape.block_bytes(1)
    operations = 2 * batch * num_weights + attention_operations(config, keys)
    return [*rows, ("decode", parts, num_bytes, operations)]


def weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers; the output projection and the embedding left out."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q, o and k, v
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def head_weights(config: ModelConfig) -> int:
    """Numbers in the output projection."""
    return config.vocab_size * config.hidden_size


def attention_operations(config: ModelConfig, pairs: float) -> float:
    """For `pairs` of (query, key): a product with K and one with V, in all layers."""
    return 4 * pairs * config.num_heads * config.head_dim * config.num_layers


class Stopwatch:
    """Times the model in each step of a runner: from its forward pass to the tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.seconds, self.num_tokens, self.num_keys = 0.0, 0, 0
        self.began = 0.0
        self.execute = runner.execute
        runner.execute = self._execute
        self.hook = runner.model.register_forward_pre_hook(lambda *_: self._start())
        if runner.graphs is not None:
            self.replay = runner.graphs.run
            runner.graphs.run = self._run

    def _start(self) -> None:
        self.began = time.perf_counter()

    def _run(self, *inputs: object) -> torch.Tensor:
        self._start()
        return self.replay(*inputs)

    def _execute(self, batch: object) -> object:
        self.num_tokens = sum(seq.num_scheduled_tokens for seq in batch.sequences)
        self.num_keys = sum(seq.num_computed_tokens + seq.num_scheduled_tokens for seq in batch.sequences)
        result = self.execute(batch)
        self.seconds = time.perf_counter() - self.began
        return result

    def stop(self) -> None:
        """Leave the runner as it was."""
        self.hook.remove()
        del self.runner.execute
        if self.runner.graphs is not None:
            del self.runner.graphs.run
