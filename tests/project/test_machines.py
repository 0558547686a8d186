"""Machines that lack something: what their user sees, with the lack simulated here.

Without Triton and flash-attn: test_attention.py and test_api.py. Without a compiler: test_cpp.py. Without
oneDNN: test_weights.py. Without a CUDA GPU, or with Apple's: test_api.py and test_mps.py.
"""

from __future__ import annotations

import sys
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
