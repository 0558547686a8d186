"""Which versions work: for each pair a new environment, the tests that depend on versions, a row of a table.

    python tests/versions.py                  all pairs: the table of docs/reference/using.md
    python tests/versions.py 3.14 oldest      the pairs with one of these words
    python tests/versions.py --list           the pairs, and what is installed for each

The tests are `-m quick` and, of those that are not slow, the rest of the files below: all families against
transformers, attention, the runner, the cache, checkpoints, and the kernels by Triton's interpreter. The rows
are printed as they are done, the failed tests on stderr.

uv makes the environments. Without uv, `pythonX.Y -m venv` and pip do, but not that of "oldest", which takes
the lowest version that pyproject.toml allows of everything. The Pythons must be on the machine, or uv fetches
them. On Linux, PyPI's torch brings CUDA's libraries, 6 GB for each pair; an environment is removed after use.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ["tests/model", "tests/engine/test_oracle.py"] + [
    f"tests/kernels/test_{name}.py" for name in ("attention", "kernels")
]
SELECTIONS = [["-m", "quick"], ["-m", "not quick and not slow", *FILES]]
COLUMNS = ["python", "torch", "transformers", "triton", "numpy"]
COUNTS = ["passed", "failed", "skipped"]

OLDEST = ["--resolution", "lowest-direct", "-e", ".[test]"]
NEWEST = ["-e", ".[test]"]
# Python → what is installed: the ends of what pyproject.toml promises, and some between them. Triton 3.4 and
# 3.6, which torch 2.8 and 2.10 bring, have interpreters that need numpy below 2.4.
PAIRS = [
    ("3.10", OLDEST),
    ("3.10", ["torch==2.14.1", "transformers==5.20.2", *NEWEST]),  # the newest for this Python
    ("3.11", ["torch==2.8.0", "transformers==5.6.2", "numpy<2.4", *NEWEST]),
    ("3.11", NEWEST),
    ("3.12", ["torch==2.10.0", "transformers==5.12.1", "numpy<2.4", *NEWEST]),
    ("3.13", ["torch==2.13.0", "transformers==5.17.0", *NEWEST]),
    ("3.14", NEWEST),
]


def name_of(python: str, packages: list[str]) -> str:
    kind = "oldest " if packages == OLDEST else ""
    return f"{python} {kind}{' '.join(packages)}"


def run(command: list[str], **options: object) -> None:
    """Run a command at the root of the project; what it prints goes to stderr.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, **options)


def make_environment(folder: Path, python: str, packages: list[str]) -> str:
    """A new environment with the project and these packages. Returns the path of its Python.

    Raises:
        subprocess.CalledProcessError: if there is no such Python, or no such version for it.
    """
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if shutil.which("uv"):
        run(["uv", "venv", "-q", "--no-project", "--python", python, str(folder)])
        run(["uv", "pip", "install", "-q", "--python", str(interpreter), *packages])
    else:
        run([f"python{python}", "-m", "venv", str(folder)])
        run([str(interpreter), "-m", "pip", "install", "-q", *packages])
    return str(interpreter)


def versions_in(interpreter: str) -> list[str]:
    """What stands in the columns of the versions; "–" for a package that is not there."""
    code = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
row = [platform.python_version()]
for name in {COLUMNS[1:]}:
    try:
        row.append(version(name))
    except PackageNotFoundError:
        row.append("–")
print(json.dumps(row))"""
    done = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, encoding="utf-8")
    return json.loads(done.stdout)


def run_tests(interpreter: str) -> Counter[str]:
    """How many tests passed, failed and were skipped. A file that cannot be collected counts as failed.

    Raises:
        RuntimeError: if pytest could not run tests at all.
    """
    counts: Counter[str] = Counter()
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    for selection in SELECTIONS:
        command = [interpreter, "-m", "pytest", "-p", "no:cacheprovider", *selection]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment, encoding="utf-8")
        print(done.stdout, file=sys.stderr)
        found = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.strip().rpartition("\n")[2])
        if not found:
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode} and counted no tests")
        for num, kind in found:
            counts[kind.replace("error", "failed")] += int(num)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="only pairs with one of these words, such as 3.14 or oldest")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    pairs = [pair for pair in PAIRS if not args.words or set(args.words) & set(name_of(*pair).split())]
    if not pairs:
        parser.error(f"no pair has one of {' '.join(args.words)} (--list shows the pairs)")
    if args.list:
        print("\n".join(name_of(*pair) for pair in pairs))
        return
    print(f"| {' | '.join([*COLUMNS, *COUNTS, 'date'])} |", flush=True)
    print("|" + "---|" * len([*COLUMNS, *COUNTS, "date"]), flush=True)
    for python, packages in pairs:
        with tempfile.TemporaryDirectory() as folder:
            interpreter = make_environment(Path(folder) / "environment", python, packages)
            versions, counts = versions_in(interpreter), run_tests(interpreter)
        numbers = [str(counts[kind]) for kind in COUNTS]
        print(f"| {' | '.join([*versions, *numbers, datetime.date.today().isoformat()])} |", flush=True)


if __name__ == "__main__":
    main()
