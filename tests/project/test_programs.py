"""A program that is forked behaves as one with a process of its own: see programs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from programs import environment, run_line, run_process, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")

LOOK_AROUND = """
import atexit, os, sys, threading, time
import of_the_copy
print(__name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals())
print(sys.argv, os.getcwd(), [path for path in sys.path if path], sys.path[0], sys.executable)
print(sorted(os.environ.items()), os.environb.get(b"OMP_NUM_THREADS"))
print(sys.stdin.read() == "", sys.stdout.isatty(), sys.stdout.encoding, sys.stderr.errors, "Höre")
print(sorted(name for name in sys.modules if name.startswith(("nanopaged", "test", "conftest", "programs"))))
print(sys.flags, threading.active_count(), threading.current_thread().name)
atexit.register(print, "the last line")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread is waited for"))).start()
print("to stderr", file=sys.stderr)
"""
LIBRARY = "library/of_the_copy.py"
ENDS = {"": 0, "sys.exit(7)": 7, "sys.exit(-1)": 255, "sys.exit('a complaint')": 1, "sys.exit(None)": 0}
ENDS |= {"raise ValueError('Höre')": 1, "os._exit(3)": 3, "os.kill(os.getpid(), 9)": -9, "print(undefined": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a program, a package that can be run, and a module that PYTHONPATH leads to."""
    for file, code in (("scripts/look.py", LOOK_AROUND), ("look_here.py", LOOK_AROUND), (LIBRARY, "")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [["scripts/look.py", "--option", "two words"], ["-m", "look_here", "-x"], ["-c", LOOK_AROUND, "x"]],
    ids=["file", "module", "code"],
)
def test_a_program_finds_what_it_would_find(folder: Path, arguments: list[str]) -> None:
    env = environment(PYTHONPATH=str(folder / "library"))
    forked, process = (run(arguments, folder, env) for run in (run_program, run_itself))
    assert process.returncode == 0, process.stderr
    assert "the last line" in process.stdout
    assert (forked.returncode, forked.stdout, forked.stderr) == (0, process.stdout, process.stderr)


def run_itself(arguments: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_process([sys.executable, *arguments], folder, env)


@pytest.mark.parametrize(("end", "status"), ENDS.items())
def test_each_way_to_end(tmp_path: Path, end: str, status: int) -> None:
    code = f"import os, sys\nprint('begun', flush=True)\n{end}"
    forked, process = (run(["-c", code], tmp_path, environment()) for run in (run_program, run_itself))
    assert forked.returncode == process.returncode == status
    assert forked.stdout == process.stdout
    assert forked.stderr.splitlines()[-1:] == process.stderr.splitlines()[-1:]


def test_it_is_a_fork() -> None:
    """Or the tests above compare a process with itself. Nothing of one program is left to the next."""
    code = """import os, sys
libraries = [name in sys.modules for name in ("torch", "transformers", "triton", "nanopaged", "programs")]
import torch
print(os.getppid(), torch.get_num_threads(), *libraries, os.environ.get("LEFT"), "left" in sys.path)
os.environ["LEFT"] = "behind"
sys.path.append("left")
"""
    for _ in range(2):
        done = run_program(["-c", code], Path(__file__).parents[2], environment())
        parent, *seen = done.stdout.split()
        assert seen == ["1", "True", "True", "False", "False", "False", "None", "False"], done.stderr
        assert psutil.Process(int(parent)).ppid() == os.getpid()


def test_what_is_no_plain_program_has_a_process(tmp_path: Path) -> None:
    """A line of shell, an option of the interpreter, an environment that the libraries would have read."""
    for command, changes in (
        ('cd . && python -c "print(1 != 1)" | cat', {}),
        ('python -I -c "print(1 != 1)"', {}),
        ("python -c \"print('torch' in __import__('sys').modules)\"", {"TRITON_INTERPRET": "1"}),
    ):
        done = run_line(command, tmp_path, environment(**changes))
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """With the processes that it has started; and the next one runs."""
    code = """import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(60)"""
    with pytest.raises(subprocess.TimeoutExpired, match=re.escape(sys.executable)):
        run_program(["-c", code], tmp_path, environment(), timeout=2)
    pids = map(int, (tmp_path / "pids").read_text(encoding="utf-8").split())
    left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not left
    assert run_program(["-c", "print(1)"], tmp_path, environment()).stdout == "1\n"
