"""The report of first_light.py: what became of each part, as Markdown. It needs no torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"

ADVICE = {  # part → (what to look at, what avoids the failure until it is mended)
    "machine": ("the versions: is torch a build for this driver and this GPU?", "`device='cpu'`"),
    "tokens": (
        "nanopaged/attention: torch_backend.py if all rows are wrong, else triton_backend.py; "
        "nanopaged/cuda_graphs.py if only graphs are",
        "the row that is right: `attention_backend='torch'`, `enforce_eager=True`",
    ),
    "kernels": (
        "nanopaged/kernels/paged_attention.py (decode, store), nanopaged/kv_cache.py (copy)",
        "`attention_backend='torch'`",
    ),
    "prefill": ("nanopaged/attention/flash_backend.py", "`attention_backend='triton'`: plain prefills"),
    "steps": (
        "nanopaged/cuda_graphs.py if only graphs fail",
        "`enforce_eager=True`",
    ),
    "memory": (
        "nanopaged/memory.py",
        "`memory_utilization=0.7` or `num_blocks=…`; a smaller `max_num_batched_tokens` or `max_num_seqs`",
    ),
    "swap": ("nanopaged/kv_cache.py, nanopaged/swap.py", "`preemption='recompute'`"),
    "workload": ("the parts above", "`enforce_eager=True`, then `attention_backend='torch'`"),
    "peers": ("docs/experiments/peers.py", "not needed, unless the row of nanopaged is missing"),
    "engine-tests": (
        "the test that is named, in tests/kernels/test_gpu.py",
        "`enforce_eager=True`, `attention_backend='torch'`, `preemption='recompute'`",
    ),
    "kernel-tests": (
        "the test that is named, in tests/kernels/test_kernels.py",
        "`attention_backend='torch'`",
    ),
}

HELP = """
Run a part again alone: `python docs/experiments/first_light.py --parts kernels`. After an illegal memory
access, put `CUDA_LAUNCH_BLOCKING=1` in front: then the stack names the kernel.

To report it, open an issue where you found nanopaged, and attach this file as it is. It names the machine,
the versions and the commit, and has the output of failed parts: read it before you send it.
"""


@dataclass
class Result:
    """What became of a part.

    Fields:
        sentence: what it found, or why it failed or was not run.
        lines: Markdown.
        log: its output, if it failed.
    """

    name: str
    state: str
    seconds: float
    sentence: str
    lines: list[str] = field(default_factory=list)
    log: str = ""


def render(results: list[Result], num_parts: int, machine: str, size: str, seconds: float) -> str:
    """The report. With fewer results than parts, it says that the run has not ended.

    Args:
        machine: the name of the GPU or CPU.
        size: as in `Light`.
        seconds: since the run began.
    """
    if size == "rehearsal":
        lines = ["# A rehearsal of first light: nothing here ran on a GPU", ""]
        lines.append(f"It ran on a CPU ({machine}), with small sizes, and Triton's kernels were interpreted.")
        lines += ["Times and rates say nothing about a GPU.", ""]
    else:
        lines = [f"# First light of nanopaged: {machine}", ""]
    failed = [result for result in results if result.state == FAILED]
    not_run = [result.name for result in results if result.state == NOT_RUN]
    if len(results) < num_parts:
        lines.append(f"**The run has not ended**: {len(results)} of {num_parts} parts are done.")
    if failed:
        names = ", ".join(result.name for result in failed)
        lines.append(f"**{len(failed)} of {num_parts} parts failed: {names}.** What to do stands at the end.")
    elif len(results) == num_parts:
        lines.append("**No part failed.**")
    lines += [f"Not run: {', '.join(not_run)}."] if not_run else []
    lines += [
        f"{seconds:.0f} seconds.",
        "",
        "| part | | seconds | in a sentence |",
        "| --- | --- | ---: | --- |",
    ]
    for result in results:
        sentence = result.sentence.replace("|", "\\|")
        lines.append(f"| {result.name} | {result.state} | {result.seconds:.1f} | {sentence} |")
    for result in results:
        lines += ["", f"## {result.name}: {result.state}", "", result.sentence, "", *result.lines]
        if result.log:
            lines += ["", "Its output:", "", "````text", result.log, "````"]
    if failed:
        lines += ["", "## What to do", "", "| part | look at | until then |", "| --- | --- | --- |"]
        lines += [f"| {result.name} | {' | '.join(ADVICE[result.name])} |" for result in failed]
        lines.append(HELP.rstrip())
    return without_paths("\n".join(lines) + "\n")


def without_paths(text: str) -> str:
    """The same text, without the folders of this machine."""
    names = {f"{Path.home()}{os.sep}": "~/", f"{ROOT}{os.sep}": "", f"{sys.prefix}{os.sep}": "PYTHON/"}
    for path in sorted(names, key=len, reverse=True):  # the longest first: .venv may lie in the repository
        if len(path) > 3:  # the home of some users is /
            text = text.replace(path, names[path])
    return text
