"""First light on a GPU: checks and measures all that needs one, in ten minutes or so, and writes a report.

    python docs/experiments/first_light.py                    all parts
    python docs/experiments/first_light.py --quick            the most important ones, in two minutes
    python docs/experiments/first_light.py --parts kernels    some parts alone
    python docs/experiments/first_light.py --device cpu       a rehearsal, as on a machine without a GPU

It needs no network: the weights are random, or those of the tiny model. Each part (docs/experiments/light)
runs in a process of its own with a time limit, so a crash or a hang is a line of the report, and the other
parts still run. The limits are for a GPU that copies 1 TB/s (an A100); a slower one, such as a T4, has up to
four times as long. The report is written anew after each part. The exit status is 1 if a part failed.

A rehearsal runs all parts with small sizes on a CPU. The kernels are interpreted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, make_parser
from light.report import FAILED, NOT_RUN, OK, Result, render, without_paths

from nanopaged.terminal import run_program

EXPERIMENTS = Path(__file__).parent
LOG_LINES = 80  # of a failed part's output
MOST_WRONG = 30  # things that are wrong, of one part


@dataclass(frozen=True)
class Part:
    """A part and its time, start and imports included. What earlier parts leave over is added.

    Fields:
        function: in docs/experiments/light, as module.function.
        seconds: its share of ten minutes.
        quick: its share of two minutes; 0 leaves it out.
    """

    name: str
    function: str
    seconds: int
    quick: int


PARTS = [
    Part("machine", "machine.machine", 30, 20),
    Part("tokens", "tokens.tokens", 45, 25),
    Part("kernels", "kernels.kernels", 120, 30),
    Part("prefill", "prefill.prefill", 35, 0),
    Part("steps", "steps.steps", 80, 30),
    Part("memory", "memory.memory", 50, 0),
    Part("swap", "memory.swap", 35, 0),
    Part("workload", "throughput.workload", 50, 15),
    Part("peers", "throughput.peers", 180, 0),  # beyond the ten minutes, if there is one
    Part("engine-tests", "checks.engine_tests", 65, 0),
    Part("kernel-tests", "checks.kernel_tests", 60, 0),
]


def main() -> None:
    parser = make_parser(__doc__)
    add, names = parser.add_argument, [part.name for part in PARTS]
    add("--quick", action="store_true", help="in two minutes or so: fewer parts, smaller grids")
    add("--device", choices=["auto", "cpu"], default="auto", help="auto is the GPU if torch can use one")
    add("--parts", nargs="+", choices=names, metavar="PART", help=f"only these, of: {', '.join(names)}")
    add("--patience", type=float, default=1.0, metavar="FACTOR", help="of all time limits")
    add("--report", type=Path, default=Path("first-light.md"), metavar="FILE", help="where it is written")
    args = parser.parse_args()
    if not args.report.absolute().parent.is_dir():
        parser.error(f"there is no folder {args.report.absolute().parent}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the part's process as well
    sys.exit(0 if run_all(args) else 1)


def run_all(args: argparse.Namespace) -> bool:
    """Run the parts one after another. Returns whether none failed."""
    began = end = time.monotonic()
    size = "rehearsal" if args.device == "cpu" else "quick" if args.quick else "full"
    machine, results, slowness = "unknown", [], 1.0
    args.report.write_text(render([], len(chosen(args.parts, size)), machine, size, 0.0), encoding="utf-8")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in PARTS:
                if part not in chosen(args.parts, size):
                    continue
                print(f"{part.name:13}", end="", flush=True)
                limit = part.quick if size == "quick" and part.quick else part.seconds
                end += args.patience * slowness * limit
                seconds = max(1.0, end - time.monotonic())
                result, notes = run_part(part, size, seconds, Path(folder, part.name))
                size, machine = notes.get("size", size), notes.get("machine", machine)
                slowness = min(4.0, max(1.0, 1e12 / notes["bandwidth"])) if "bandwidth" in notes else slowness
                results.append(result)
                print(f"{result.state:8}{result.seconds:6.1f} s   {result.sentence}", flush=True)
                num_parts = len(chosen(args.parts, size))
                text = render(results, num_parts, machine, size, time.monotonic() - began)
                args.report.write_text(text, encoding="utf-8")
    except KeyboardInterrupt:
        print(f"interrupted; {args.report} has what was found until then")
        return False
    failed = [result.name for result in results if result.state == FAILED]
    verdict = f"failed: {', '.join(failed)}" if failed else "no part failed"
    where = "a rehearsal without a GPU, " if size == "rehearsal" else ""
    print(f"{verdict}; {where}{time.monotonic() - began:.0f} s; the report is {args.report}")
    return not failed


def chosen(names: list[str] | None, size: str) -> list[Part]:
    """The parts to run: those that are named, or all that belong to the size."""
    if names is not None:
        return [part for part in PARTS if part.name in names]
    return [part for part in PARTS if part.quick or size != "quick"]


# ── one part ──────────────────────────────────────────────────────────────────────────────────────


def run_part(part: Part, size: str, seconds: float, notes: Path) -> tuple[Result, dict[str, Any]]:
    """Run a part, for at most so many seconds. Returns also its last note of each kind.

    Args:
        notes: the file for its notes, see `light.note`.
    """
    notes.touch()
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "light", part.function, str(notes), size, f"{seconds:.1f}"]
        status = run_process(command, output, seconds)
        output.seek(0)
        log = output.read().decode("utf-8", "replace").splitlines()
    if len(log) > LOG_LINES:
        log = [*log[: LOG_LINES // 2], "…", *log[-LOG_LINES // 2 :]]
    found: dict[str, list[Any]] = {}  # kind → notes
    for line in notes.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # the last line of a process that was killed
            note = json.loads(line)
            found.setdefault(note["kind"], []).append(note["value"])
    last = {kind: values[-1] for kind, values in found.items()}
    wrong = found.get("wrong", [])
    if status is None:
        wrong.append(f"it was ended after {seconds:.0f} s, its time limit")
    elif status < 0:
        wrong.append(f"it was ended by the signal {signal.Signals(-status).name}")
    elif status > 0:
        wrong.append(last.get("error", f"its process ended with status {status}"))
    if status != 0 and "now" in last:
        wrong[-1] += f" (at: {last['now']})"

    lines = [f"It could not {what}." for what in found.get("cannot", [])]
    if wrong:
        lines += ["", "Wrong:", "", *(f"- {what}" for what in wrong[:MOST_WRONG]), ""]
        more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        state, sentence = FAILED, without_paths(wrong[0]) + more
    else:
        state = NOT_RUN if "not run" in last else OK
        sentence = last.get("not run") or last.get("sentence", "")
    lines += found.get("line", [])
    log = log if wrong else []
    return Result(part.name, state, time.monotonic() - began, sentence, lines, "\n".join(log)), last


def run_process(command: list[str], output: Any, seconds: float) -> int | None:
    """The exit status of a process, negative for a signal; None if it was killed when its time was over."""
    paths = [str(EXPERIMENTS), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # with the processes that it starts it is a group, which is killed together
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it cannot end before a kernel that it has launched
            process.wait(5)


if __name__ == "__main__":
    run_program(main)
