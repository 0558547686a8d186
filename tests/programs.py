"""Python programs that the tests run, without the seconds in which each would import torch and transformers.

On Linux, a process that has imported the libraries waits for programs. It forks for each, and the child
becomes the program: with a folder, environment, arguments and output of its own. It has not imported
nanopaged, which a program takes from its own copy of the repository.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

# Neither Triton nor transformers' model classes, which import it: a program first chooses its interpreter.
LIBRARIES = ["torch", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]
LIBRARIES += ["pytest", "hypothesis", "psutil"]
SHELL = re.compile(r"[|&;<>()$`*~#\\\n]")

INHERITED = dict(os.environ)  # before tests and the libraries that they use change it

Done = subprocess.CompletedProcess[str]


def environment(**changes: str) -> dict[str, str]:
    """The environment of a reader, in which programs print the same on every machine."""
    # On a CI server (CI, BUILD_NUMBER) pytest does not shorten its summary to the width of the screen.
    left_out = {"TRITON_INTERPRET", "CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "PYTHONPATH"}
    inherited = {name: value for name, value in INHERITED.items() if name not in left_out}
    paths = [str(Path(sys.executable).parent), inherited.get("PATH", "")]
    return inherited | {
        "PATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that is broken and mended within a second would be stale
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take a second to import
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the pages show what a CPU prints
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "COLUMNS": "100",
        **changes,
    }


def run_line(command: str, folder: Path, env: dict[str, str]) -> Done:
    """Run a line of shell; a plain `python …` needs none."""
    if command.startswith("python ") and not SHELL.search(command):
        return run_program(shlex.split(command)[1:], folder, env)
    return run_process(command, folder, env)


def run_program(arguments: list[str], folder: Path, env: dict[str, str], timeout: float = 300) -> Done:
    """Run `python arguments…` in the folder.

    The environment comes too late for what the libraries read when they are imported.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds; the program is killed.
    """
    understood = arguments[0] in ("-m", "-c") or not arguments[0].startswith("-")
    if sys.platform != "linux" or not understood:
        return run_process([sys.executable, *arguments], folder, env, timeout)
    waiting = _waiting_process()
    with tempfile.TemporaryDirectory() as name:
        files = [os.devnull, str(Path(name, "stdout")), str(Path(name, "stderr"))]
        program = {"arguments": arguments, "folder": str(folder), "env": env, "files": files}
        line = json.dumps(program | {"timeout": timeout}, default=str)
        waiting.stdin.write(line.encode() + b"\n")
        status = int(waiting.stdout.readline())
        if status == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(arguments, timeout)
        stdout, stderr = (Path(file).read_text(encoding="utf-8") for file in files[1:])
    return subprocess.CompletedProcess(arguments, status, stdout, stderr)


def run_process(command: str | list[str], folder: Path, env: dict[str, str], timeout: float = 300) -> Done:
    """Run a line of shell, or a program, as a process that imports everything itself."""
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def load_file(file: Path, name: str | None = None) -> ModuleType:
    """A Python file that is not on the path, as a module of this process."""
    spec = importlib.util.spec_from_file_location(name or file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ── the process that waits: it is asked for one program at a time ─────────────────────────────────


@cache
def _waiting_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    atexit.register(os.killpg, process.pid, signal.SIGKILL)  # with a program that a Ctrl-C has left behind
    return process


def wait_for_programs() -> None:
    """Fork for each line of stdin; say the child's exit status on stdout."""
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy the pages of all objects
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(arguments: list[str], folder: str, env: dict[str, str], files: list[str], timeout: float) -> None:
    """Run the program in this process, and end it."""
    signal.setitimer(signal.ITIMER_REAL, timeout)  # SIGALRM kills it
    for descriptor, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (the old one has been read from)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    del sys.path[0]  # the folder of this file
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    status = 0
    try:
        _run_main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    # As the interpreter ends, except that it would also take every imported module apart, which takes 0.3 s.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_main(arguments: list[str]) -> None:
    """What `python arguments…` does with its arguments: `-m module …`, `-c code …` or `file …`."""
    sys.argv = arguments
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    wait_for_programs()
