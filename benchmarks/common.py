"""What the experiments share: a machine's name, models of known shapes, random requests, timing, pictures."""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

# name → (layers, hidden, inner, query heads, KV heads, head dim, vocabulary)
SHAPES = {
    "test": (2, 64, 96, 4, 2, 16, 12000),
    "28m": (6, 384, 1024, 6, 2, 64, 32000),
    "100m": (12, 768, 2048, 12, 4, 64, 32000),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
}


@dataclass
class Workload:
    """Requests of random lengths; token ids stay low, so that any vocabulary has them."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def draw(cls, args: argparse.Namespace) -> Workload:
        rng = random.Random(args.seed)
        lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
        prompts = [[rng.randint(0, 10000) for _ in range(n)] for n in lengths]
        return cls(prompts, [rng.randint(args.min_output, args.max_output) for _ in prompts])


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --shape, --dtype, --seed: what `checkpoint` reads."""
    parser.add_argument("--model", help="a model folder instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default="100m", help="of the random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {device}, {torch.get_num_threads()} threads"
    )


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[Path]:
    """The model to run: the one named, or random weights of a shape, in a folder that all sides can load."""
    if args.model is not None:
        yield Path(args.model)
        return
    layers, hidden, inner, heads, kv_heads, head_dim, vocab = SHAPES[args.shape]
    config = transformers.Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(args.seed)
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, args.dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        yield Path(folder)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds, the median; on a GPU with its second-level cache emptied before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, return_mode="median") / 1e3
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy much larger than any cache."""
    size = (2 << 30) if device.type == "cuda" else (128 << 20)
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return 2 * size / time_call(lambda: dst.copy_(src), device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    return 2 * n**3 / time_call(lambda: a @ b, device)
