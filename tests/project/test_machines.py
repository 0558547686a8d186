"""Machines that lack something: what their user sees, with the lack simulated here.

Without Triton and flash-attn: test_attention.py and test_api.py. Without a compiler: test_cpp.py. Without
oneDNN: test_weights.py. Without a CUDA GPU, or with Apple's: test_api.py and test_mps.py.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import environment, run_process

ROOT = Path(__file__).parents[2]

WINDOWS = """
import builtins, os, psutil, sys, torch, transformers
memory = psutil.virtual_memory()
psutil.virtual_memory = lambda: memory  # Windows has another way to ask
unix = ("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sysconf", "getuid", "killpg")
for name in (*unix, "setsid", "uname"):
    delattr(os, name)  # all of them are on Linux: else this would simulate nothing
modules = ("fcntl", "grp", "pwd", "pty", "readline", "resource", "termios", "tty")
sys.modules.update(dict.fromkeys(modules))
opened = builtins.open
def open(file, *args, **options):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(file)
    return opened(file, *args, **options)
builtins.open = open
import nanopaged.__main__
from nanopaged import LLM, SamplingParams
sys.modules["nanopaged.memory"].CGROUP_LIMITS = ()  # Windows has no control groups
(out,) = LLM(trace=os.devnull).generate("A", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
assert len(out.outputs[0].token_ids) == 2
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it removes what Linux has")
def test_it_runs_with_what_windows_has() -> None:
    """No fork, no affinity, no sysconf, no /proc, and none of the modules that only Unix has.

    PyTorch and transformers are imported before, since on Windows they are built without these.
    """
    done = run_process([sys.executable, "-c", WINDOWS], ROOT, environment())
    assert done.returncode == 0, done.stderr


def without_encoding(file: Path) -> Iterator[str]:
    """The calls of `open`, `read_text` and `write_text` that leave the encoding to the machine."""
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        modes = [node.value for node in call.args if isinstance(node, ast.Constant)]
        is_text = not any("b" in str(mode) for mode in modes)
        # ray's read_text has an argument, the path, and takes it as UTF-8
        if name == "write_text" or (name == "read_text" and not call.args):
            yield f"{file}:{call.lineno}"
        if isinstance(call.func, ast.Name) and name == "open" and is_text:
            yield f"{file}:{call.lineno}"


def test_every_text_file_names_its_encoding() -> None:
    """Windows' own is not UTF-8. (ruff's PLW1514 sees only the paths that it can tell to be paths.)"""
    folders = (".", "nanopaged/**", "tests/**", "docs/**")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/*.py")]
    assert [line for file in files for line in without_encoding(file)] == []
