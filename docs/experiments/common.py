"""What experiments share beside the parts of bench.py: models of known shapes, timing, figures.

torch, transformers and matplotlib take seconds to load. They are imported in the functions that need them, so
that `--help` and a mistake in the arguments answer at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

    from nanopaged import LLM

ROOT = Path(__file__).parents[2]  # of the checkout
sys.path.append(str(ROOT))
from bench import (  # noqa: E402, F401 (the experiments take them from here)
    DTYPES,
    SHAPES,
    at_least,
    commit_of,
    copy_bandwidth,
    decode_bytes,
    device_name,
    layer_weights,
    machine,
    make_parser,
    pick_device,
)

# ── the command line ──────────────────────────────────────────────────────────────────────────────


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
