"""Machines that lack something: what their user sees, with the lack simulated here.

Without Triton and flash-attn: test_attention.py and test_api.py. Without a compiler: test_cpp.py. Without
oneDNN: test_weights.py. Without a CUDA GPU, or with Apple's: test_api.py and test_mps.py.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from test_api import run_python

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it removes what Linux has")
def test_it_runs_with_what_windows_has() -> None:
    """No fork, no affinity, no sysconf, no /proc, and none of the modules that only Unix has.

    PyTorch and transformers are imported before, since on Windows they are built without these.
    """
    run_python(
        "import builtins, os, sys, torch, transformers\n"
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
        "from nanopaged.model.sizing import HOST_BYTES, available_memory\n"
        "assert available_memory() == HOST_BYTES\n"
        "params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "llm = LLM(trace=os.devnull)\n"
        "(out,) = llm.generate('A', params, use_tqdm=False)\n"
        "assert len(out.outputs[0].token_ids) == 2\n"
    )


def test_without_a_browser_its_tests_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are skipped, and the last lines of a run give the reason of each (-rs in pyproject.toml)."""
    pytest.importorskip("selenium")
    monkeypatch.setattr(browser, "which", lambda name: None)
    opened = browser.open_browser()
    with pytest.raises(pytest.skip.Exception, match="no Chromium here .*apt-get install chromium"):
        opened.__enter__()


def lacks(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """No such module is installed."""
    find_spec = importlib.util.find_spec
    for module in (importlib.util, sys.modules.get("common")):
        if module is not None:
            monkeypatch.setattr(
                module, "find_spec", lambda name: None if name == missing else find_spec(name)
            )


def load(path: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """A program as a module, under a name of its own."""
    file = ROOT / path
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"{file.stem}_as_a_module", file)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_without_rich_the_live_view_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("example.py", monkeypatch)
    lacks(monkeypatch, "rich")
    monkeypatch.setattr(sys, "argv", ["example.py", "--watch"])
    with pytest.raises(SystemExit):
        example.main()
    assert '--watch needs rich: pip install -e ".[watch]"' in capsys.readouterr().err


def test_without_matplotlib_a_figure_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lacks(monkeypatch, "matplotlib")  # before the program takes the function
    common = load("docs/experiments/common.py", monkeypatch)
    with pytest.raises(argparse.ArgumentTypeError, match="needs matplotlib: pip install"):
        common.figure_file(str(tmp_path / "figure.svg"))


# ── text files ────────────────────────────────────────────────────────────────────────────────────


def without_encoding(source: str) -> Iterator[int]:
    """The lines of calls that read or write text, and leave the encoding to the machine."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        constants = [
            a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)
        ]
        modes = [value for value in constants if value in ("r", "w", "a", "x", "rt", "wt", "at", "r+", "w+")]
        is_binary = any(isinstance(value, str) and len(value) < 4 and "b" in value for value in constants)
        if (
            (name == "read_text" and not call.args)  # ray's has one, the path, and takes it as UTF-8
            or (name == "write_text" and len(call.args) < 2)
            or (name == "open" and isinstance(call.func, ast.Name) and not is_binary)
            or (name == "open" and isinstance(call.func, ast.Attribute) and modes)
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
    files = [
        *ROOT.glob("*.py"),
        *(f for name in ("nanopaged", "tests", "docs") for f in (ROOT / name).rglob("*.py")),
    ]
    assert len(files) > 100
    found = []
    for file in files:
        source = file.read_text(encoding="utf-8")
        if "_text(" in source or "open(" in source:
            found += [f"{file.relative_to(ROOT)}:{line}" for line in without_encoding(source)]
    assert not found, "encoding='utf-8' is missing"
