"""What experiments share: their options, models of known shapes, the machine, timing, figures.

torch, transformers and matplotlib take seconds to load. They are imported in the functions that need them, so
that `--help` and a mistake in the arguments are answered immediately.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

    from nanopaged import LLM

ROOT = Path(__file__).parents[2]  # of the checkout
sys.path.append(str(ROOT))  # for bench.py and nanopaged

DTYPES = ["float32", "bfloat16", "float16"]
NAMES = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size"]
NAMES += ["num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
SIZES = {
    "test": ["qwen3", 2, 64, 96, 4, 2, 16, 12000],
    "28m": ["qwen3", 6, 384, 1024, 6, 2, 64, 32000],
    "100m": ["qwen3", 12, 768, 2048, 12, 4, 64, 32000],
    "qwen3-0.6b": ["qwen3", 28, 1024, 3072, 16, 8, 128, 151936],
    "qwen3-4b": ["qwen3", 36, 2560, 9728, 32, 8, 128, 151936],
    "qwen3-8b": ["qwen3", 36, 4096, 12288, 32, 8, 128, 151936],
    "llama-3.2-1b": ["llama", 16, 2048, 8192, 32, 8, 64, 128256],
    "llama-3-8b": ["llama", 32, 4096, 14336, 32, 8, 128, 128256],
}
SHAPES: dict[str, dict[str, Any]] = {}  # name → config.json
for name, sizes in SIZES.items():
    SHAPES[name] = {
        **dict(zip(NAMES, sizes, strict=True)),
        "tie_word_embeddings": sizes[2] <= 2560,  # the larger ones have an output projection of their own
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": None,
    }

# ── the command line ──────────────────────────────────────────────────────────────────────────────


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, []) else action.help


def make_parser(docstring: str) -> argparse.ArgumentParser:
    """A parser with --seed. Its --help shows the docstring as it is, and all defaults."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=_HelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    return parser


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from `minimum` on."""

    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return number


def add_model_arguments(parser: argparse.ArgumentParser, shape: str = "100m") -> None:
    """What `make_llm` reads."""
    parser.add_argument("--model", help="a model folder or hub id, instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default=shape, help="sizes of the random model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and K/V")


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    """For a `save_` function. A file that cannot be written is refused before the work starts."""
    parser.add_argument("--plot", type=figure_file, metavar="FILE", help="save a figure as .svg or .png")


def figure_file(text: str) -> Path:
    """A type for argparse: a path to which a figure can be saved."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{path.name} does not end in .svg or .png")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('a figure needs matplotlib: pip install -e ".[bench]"')
    return path


# ── the model and the machine ─────────────────────────────────────────────────────────────────────


def make_llm(args: argparse.Namespace, **config: Any) -> LLM:
    """The model that the arguments name, or one of random weights."""
    from nanopaged import LLM

    if args.model is not None:
        return LLM(args.model, dtype=args.dtype, **config)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
        return LLM(folder, dtype=args.dtype, load_format="dummy", seed=args.seed, **config)


def model_name(args: argparse.Namespace) -> str:
    """For a headline."""
    return f"{args.model or f'shape {args.shape}'}, {args.dtype}"


def machine() -> str:
    """The versions and the device, for a headline. (torch's own number names the build, such as +cpu.)"""
    import torch

    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    versions += f", Python {platform.python_version()}"
    return f"{versions}, {device_name()}, {torch.get_num_threads()} threads"


def pick_device() -> torch.device:
    """CUDA if there is any, else the CPU."""
    import torch

    return torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device


def device_name() -> str:
    """The name of the GPU, or of the CPU as far as the system tells it."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with suppress(OSError):  # Linux has this file; on a processor that is not x86 it may have no such line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, with "-dirty" if a file has changed since; None outside git."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() or None


# ── timing ────────────────────────────────────────────────────────────────────────────────────────


def time_call(
    call: Callable[[], object], device: torch.device, best: bool = False, in_graph: bool = True
) -> float:
    """Seconds, the median or the best of nine. On a GPU: of a CUDA graph, with an empty L2 cache.

    Args:
        in_graph: if False, a GPU launches the kernels one by one, for a call that cannot be captured.
    """
    if device.type == "cuda":
        import torch
        from triton.testing import do_bench

        call()  # compiles the kernels
        torch.cuda.synchronize()
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
        return do_bench(call, return_mode="min" if best else "median") / 1e3
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds) if best else statistics.median(seconds)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy much larger than any cache; the best of nine.

    On a GPU it takes at most a quarter of the memory that other programs leave free.
    """
    import torch

    on_gpu = device.type == "cuda"
    size = 128 << 20
    if on_gpu:
        size = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 8)
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        dst.copy_(src)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size / min(seconds)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _axes(path: Path, **legend: Any) -> Iterator[Axes]:
    """Axes to draw on; the figure is saved afterwards. Text stays text in an SVG, which keeps it small.

    Args:
        legend: where it stands, as matplotlib's `legend` takes it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "nanopaged", "font.sans-serif": ["DejaVu Sans"]}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6, 3.6))
        yield axes
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, **legend)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def save_lines(
    path: Path,
    xs: list[int],
    lines: dict[str, list[float]],
    x_label: str,
    y_label: str,
    to_scale: bool = False,
    log_y: bool = False,
) -> None:
    """One line for each name. A line shorter than `xs` ends early.

    The points stand side by side at equal distances, which suits sizes that double; `to_scale` places them
    by their value. The y axis starts at 0 unless it is logarithmic.
    """
    from matplotlib.ticker import LogLocator

    places = xs if to_scale else list(range(len(xs)))
    with _axes(path) as axes:
        for name, ys in lines.items():
            axes.plot(places[: len(ys)], ys, marker="o", label=name)
        axes.set_xticks(places, [f"{x:,}" for x in xs])
        axes.set(xlabel=x_label, ylabel=y_label)
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))  # labels at 1, 3, 10, 30, …
            axes.yaxis.set_major_formatter("{x:,.10g}")  # 0.3 and 1,000,000, which {x:g} writes as 1e+06
            axes.minorticks_off()
        else:
            axes.set_ylim(bottom=0)


def save_bars(
    path: Path, groups: list[str], bars: dict[str, list[float]], y_label: str, x_label: str = ""
) -> None:
    """Groups of bars, with one bar for each name."""
    width = 0.8 / len(bars)
    with _axes(path) as axes:
        for i, (name, heights) in enumerate(bars.items()):
            axes.bar([x + i * width for x in range(len(groups))], heights, width, label=name)
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(groups))], groups)
        axes.set(xlabel=x_label, ylabel=y_label)


def save_stacks(
    path: Path,
    groups: dict[str, dict[str, dict[str, float]]],
    colors: dict[str, str],
    y_label: str,
    why_empty: str,
) -> None:
    """Groups of bars, each bar with its parts, in percent, on top of each other.

    Args:
        colors: part → its colour.
        why_empty: stands in the place of a bar without parts.
    """
    names, places = [], []
    with _axes(path, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(colors)) as axes:
        for group, bars in groups.items():
            first = places[-1] + 1.6 if places else 0.0
            places += [first + i for i in range(len(bars))]
            names += list(bars)
            middle = (first + places[-1]) / 2
            axes.text(middle, -0.18, group, ha="center", transform=axes.get_xaxis_transform())
        stacks = [bar for bars in groups.values() for bar in bars.values()]
        for place, bar in zip(places, stacks, strict=True):
            if not bar:
                axes.text(place, 2, why_empty, ha="center", rotation=90)
        bottoms = [0.0] * len(places)
        for part, color in colors.items():
            heights = [bar.get(part, 0.0) for bar in stacks]
            axes.bar(places, heights, 0.8, bottoms, label=part, color=color)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(places, names)
        axes.set(ylabel=y_label, ylim=(0, 105))
