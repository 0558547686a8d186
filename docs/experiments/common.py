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

from nanopaged.kv_cache import pick_device
from nanopaged.model.checkpoint import find_model
from nanopaged.model.layers import Linear
from nanopaged.model.model_config import read_model_config


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, of Qwen3's architecture or Llama's."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True
    architecture: str = "Qwen3"


SHAPES = {
    "test": Shape(2, 64, 96, 4, 2, 16, 12000),
    "28m": Shape(6, 384, 1024, 6, 2, 64, 32000),
    "100m": Shape(12, 768, 2048, 12, 4, 64, 32000),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, tied=False),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, architecture="Llama"),
    "llama-3-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False, architecture="Llama"),
}


DTYPES = ["float32", "bfloat16", "float16"]


@dataclass
class Workload:
    """Requests of random lengths and tokens."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def draw(cls, args: argparse.Namespace) -> Workload:
        rng = random.Random(args.seed)
        lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
        vocab_size = read_vocab_size(args)
        prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
        return cls(prompts, [rng.randint(args.min_output, args.max_output) for _ in prompts])


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def add_model_arguments(parser: argparse.ArgumentParser, shape: str = "100m") -> None:
    """--model, --shape, --dtype, --seed: what `checkpoint` reads."""
    parser.add_argument("--model", help="a folder or a hub id, instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default=shape, help="of the random weights")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    """--plot, for `save_lines` or `save_bars`."""
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. as .svg")


def model_name(args: argparse.Namespace) -> str:
    """For a headline."""
    return f"{args.model}, {args.dtype}" if args.model else f"shape {args.shape}, {args.dtype}"


def read_vocab_size(args: argparse.Namespace) -> int:
    """How many tokens the model of these arguments knows."""
    if args.model is None:
        return SHAPES[args.shape].vocab
    return read_model_config(find_model(args.model, with_weights=False)).vocab_size


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {device}, {torch.get_num_threads()} threads"
    )


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[Path | str]:
    """The model to run: the one named, or random weights of a shape, in a folder that all sides can load."""
    if args.model is not None:
        yield args.model
        return
    config = hf_config(SHAPES[args.shape])
    torch.manual_seed(args.seed)
    with pick_device("auto"):
        dtype = getattr(torch, args.dtype)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        yield Path(folder)


def hf_config(shape: Shape) -> transformers.PreTrainedConfig:
    """A configuration of transformers with these sizes."""
    return getattr(transformers, f"{shape.architecture}Config")(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def time_call(call: Callable[[], object], device: torch.device, best: bool = False) -> float:
    """Seconds, the median or the best. On a GPU of a CUDA graph, its second-level cache emptied first."""
    if device.type == "cuda":
        from triton.testing import do_bench

        call()  # compiles what is to be compiled
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return do_bench(graph.replay, return_mode="min" if best else "median") / 1e3
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds) if best else statistics.median(seconds)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy much larger than any cache, at best."""
    size = (2 << 30) if device.type == "cuda" else (128 << 20)
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return 2 * size / time_call(lambda: dst.copy_(src), device, best=True)


@torch.inference_mode()
def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of a large linear layer, at best."""
    n = 8192 if device.type == "cuda" else 2048
    layer = Linear(n, n, False, dtype, device)
    layer.weight.data.normal_()
    layer.pack()
    x = torch.randn(n, n, device=device).to(dtype)
    return 2 * n**3 / time_call(lambda: layer(x), device, best=True)


def save_lines(
    path: str, xs: list[float], lines: dict[str, list[float]], x_label: str, y_label: str, log_y: bool = False
) -> None:
    """A picture of one line for each name over `xs` (or the first of them), which double or so each time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for name, ys in lines.items():
        axes.plot(xs[: len(ys)], ys, marker="o", label=name)
    axes.set(xscale="symlog" if min(xs) == 0 else "log", xlabel=x_label, ylabel=y_label)
    axes.set_yscale("log" if log_y else "linear")
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.minorticks_off()
    if not log_y:
        axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def save_bars(path: str, groups: list[str], bars: dict[str, list[float]], y_label: str) -> None:
    """A picture of groups of bars, one bar in each for each name."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    width = 0.8 / len(bars)
    for i, (name, heights) in enumerate(bars.items()):
        axes.bar([x + i * width for x in range(len(groups))], heights, width, label=name)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(groups))], groups)
    axes.set_ylabel(y_label)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
