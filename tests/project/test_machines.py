"""Machines that lack something: what their user sees, with the lack simulated here.

Without Triton and flash-attn: test_attention.py and test_api.py. Without a compiler: test_cpp.py. Without
oneDNN: test_weights.py. Without a CUDA GPU, or with Apple's: test_api.py and test_mps.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import environment, run_process

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it removes what Linux has")
def test_it_runs_with_what_windows_has() -> None:
    """No fork, no affinity, no sysconf, no /proc, and none of the modules that only Unix has.

    PyTorch and transformers are imported before, since on Windows they are built without these.
    """
    code = (
        "import builtins, os, psutil, sys, torch, transformers\n"
        "memory = psutil.virtual_memory()\n"
        "psutil.virtual_memory = lambda: memory  # Windows has another way to ask\n"
        "for name in ('fork', 'register_at_fork', 'sched_getaffinity', 'sched_setaffinity', 'sysconf',\n"
        "             'getuid', 'killpg', 'setsid', 'uname'):\n"
        "    delattr(os, name)  # each is here: else this would simulate nothing\n"
        "unix = ('fcntl', 'grp', 'pwd', 'pty', 'readline', 'resource', 'termios', 'tty')\n"
        "sys.modules.update(dict.fromkeys(unix))\n"
        "opened = builtins.open\n"
        "def open(file, *args, **options):\n"
        "    if str(file).startswith('/proc'):\n"
        "        raise FileNotFoundError(file)\n"
        "    return opened(file, *args, **options)\n"
        "builtins.open = open\n"
        "import nanopaged.__main__\n"
        "from nanopaged import LLM, SamplingParams\n"
        "sys.modules['nanopaged.memory'].CGROUP_LIMITS = ()  # Windows has no control groups\n"
        "params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "llm = LLM(trace=os.devnull)\n"
        "(out,) = llm.generate('A', params, use_tqdm=False)\n"
        "assert len(out.outputs[0].token_ids) == 2\n"
    )
    done = run_process([sys.executable, "-c", code], ROOT, environment())
    assert done.returncode == 0, done.stderr


# ── text files ────────────────────────────────────────────────────────────────────────────────────


def without_encoding(source: str) -> Iterator[int]:
    """The lines of calls that read or write text, and leave the encoding to the machine."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if is_method else getattr(call.func, "id", "")
        given = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
        mode = [value for value in given if isinstance(value, str) and re.fullmatch("[rwaxbt+]{1,3}", value)]
        if (
            (name == "read_text" and not call.args)  # ray's has one, the path, and takes it as UTF-8
            or (name == "write_text" and len(call.args) < 2)
            or (name == "open" and (mode or not is_method) and "b" not in "".join(mode))
        ):
            yield call.lineno


def test_every_text_file_names_its_encoding() -> None:
    """Windows' own is not UTF-8. (ruff's PLW1514 sees only the paths that it can tell to be paths.)"""
    wrong = 'Path(x).read_text(), x.write_text(""), open(x), x.open("w")'
    right = (
        'x.read_text(encoding="utf-8"), open(x, "rb"), browser.open(x), x.write_text("", encoding="utf-8")'
    )
    assert len([*without_encoding(wrong)]) == 4
    assert not [*without_encoding(right)]
    folders = (".", "nanopaged/**", "tests/**", "docs/**")
    texts = {file: file.read_text(encoding="utf-8") for name in folders for file in ROOT.glob(f"{name}/*.py")}
    assert len(texts) > 100
    found = [f"{file.relative_to(ROOT)}:{line}" for file in texts for line in without_encoding(texts[file])]
    assert not found, "encoding='utf-8' is missing"
