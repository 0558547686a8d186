"""The parts of first_light.py. Each runs in a process of its own: `python -m light PART FILE SIZE SECONDS`.

A part is a function that takes a `Light` and returns a sentence. It writes each finding to FILE immediately,
so a crash loses nothing that was found before.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


class NotRun(Exception):
    """Why a part cannot run on this machine. The part has not failed."""


def note(file: Path, kind: str, value: object) -> None:
    """Hand something to first_light.py: a line of JSON, written immediately."""
    with file.open("a", encoding="utf-8") as notes:
        notes.write(json.dumps({"kind": kind, "value": value}) + "\n")


class Light:
    """What a part knows of the machine, and how it says what it finds.

    Args:
        wanted: the size of the run: "full", "quick" or "rehearsal".
        seconds: the part's time limit.

    Attributes:
        size: `wanted`, but "rehearsal" if torch can use no GPU: small sizes on a CPU, interpreted kernels.
        device: a GPU, or the CPU in a rehearsal; `on_gpu` says which.
        no_kernels: why Triton's kernels cannot run on the device; None if they can.
        no_graphs: the same of CUDA graphs.
        args: what `common.make_llm` and other experiments read: Qwen3-0.6B's shape on a GPU.
        deadline: when the part has to end, by `time.monotonic`.
    """

    def __init__(self, file: Path, wanted: str, seconds: float) -> None:
        if wanted == "rehearsal":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs
        import torch
        from common import device_name

        self.file, self.wanted, self.deadline = file, wanted, time.monotonic() + seconds
        self.size = wanted if torch.cuda.is_available() else "rehearsal"
        if self.size == "rehearsal":
            os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
            torch.set_num_threads(1)  # the models are so small that a second thread only waits
        self.note("size", self.size)
        self.note("machine", device_name())
        self.device = torch.empty(0, device="cpu" if self.size == "rehearsal" else "cuda").device
        self.on_gpu = self.device.type == "cuda"
        self.no_kernels = why_no_kernels(self.device)
        self.no_graphs = self.no_kernels if self.on_gpu else "there are none on a CPU"
        self.dtype = torch.float32
        if self.on_gpu:
            from nanopaged import EngineConfig
            from nanopaged.memory import pick_dtype

            self.dtype = pick_dtype(EngineConfig(), "bfloat16", self.device)
        shape, dtype = "qwen3-0.6b" if self.on_gpu else "test", str(self.dtype).removeprefix("torch.")
        steps = self.pick(16, 12, 4)
        self.args = argparse.Namespace(model=None, shape=shape, dtype=dtype, seed=0, repeat=1, steps=steps)

    def pick(self, full: Value, quick: Value, rehearsal: Value) -> Value:
        """What belongs to the size of this run."""
        return {"full": full, "quick": quick, "rehearsal": rehearsal}[self.size]

    def note(self, kind: str, value: object) -> None:
        note(self.file, kind, value)

    def say(self, *lines: str) -> None:
        """Lines of Markdown in the report."""
        for line in lines:
            self.note("line", line)

    def table(self, *columns: str) -> None:
        """The head of a table; `row` adds a row."""
        self.say("", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}")

    def row(self, *cells: object) -> None:
        self.say(f"| {' | '.join(map(str, cells))} |")

    def now(self, what: str) -> None:
        """What is being done, in case the process crashes or hangs."""
        self.note("now", what)

    def wrong(self, what: str) -> None:
        """The part has failed, and goes on."""
        self.note("wrong", what)

    def cannot(self, what: str) -> None:
        """What this part does on other machines."""
        self.note("cannot", what)

    def say_what_is_missing(self) -> None:
        """For a part that runs the engine in several ways."""
        for what, reason in {"Triton's kernels": self.no_kernels, "CUDA graphs": self.no_graphs}.items():
            if reason is not None:
                self.cannot(f"run {what}: {reason}")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """An exception in the block is wrong, and the part goes on after the block."""
        self.now(what)
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.wrong(f"{what}: {in_a_line(error)}")


def why_no_kernels(device: torch.device) -> str | None:
    """Why the backend "triton" cannot run on the device."""
    import torch

    from nanopaged.attention import why_unavailable
    from nanopaged.kv_cache import KVShape

    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    return why_unavailable("triton", device, shape)


def release() -> None:
    """Give the memory of engines that are no longer used back to the GPU, for the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def worst(errors: list[float]) -> float:
    """The largest; NaN, if one is among them."""
    return max(errors, key=lambda error: (math.isnan(error), error), default=math.nan)


def in_a_line(error: BaseException) -> str:
    """The type of an exception, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def main(part: str, file: str, size: str, seconds: str) -> None:
    """Run a part, module.function, in a process that exists for it."""
    faulthandler.enable()  # prints the stack if a signal ends the process, …
    faulthandler.dump_traceback_later(
        max(0.8 * float(seconds), float(seconds) - 2)
    )  # … or the time is nearly over
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanopaged").setLevel(logging.INFO)
    module, function = part.split(".")
    try:
        light = Light(Path(file), size, float(seconds))
        light.note("sentence", getattr(import_module(f"light.{module}"), function)(light))
    except NotRun as reason:
        note(Path(file), "not run", str(reason))
    except BaseException as error:
        note(Path(file), "error", in_a_line(error))
        traceback.print_exc()
        sys.exit(1)
