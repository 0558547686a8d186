"""A program that forks, and checks that no child of its engine's process harms the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import gc, importlib, json, os, signal, sys
from nanopaged import SamplingParams

def main():
    llm = importlib.import_module(sys.argv[1]).LLM(**json.loads(sys.argv[2]))
    for ending in ("exit", "drop", "raise"):
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends it if it hangs
            if ending == "drop":
                del llm
                gc.collect()
            if ending == "raise":
                raise ValueError("the child's own")
            sys.exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        print(json.dumps([ending, status, output.outputs[0].token_ids]), flush=True)

if __name__ == "__main__":
    main()
"""


def check_children(module: str, options: dict[str, Any], expected: list[int], folder: Path) -> None:
    """Children end by `sys.exit`, after they have dropped the LLM, and by an exception.

    None of them hangs or says more than its own traceback. After each one, the engine still generates the
    tokens `expected` after the prompt 1 2 3. At the end no temporary file is left in the `folder`.
    """
    (folder / "temporary").mkdir()
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder / "temporary")}
    command = [sys.executable, folder / "program.py", module, json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [["exit", 3, expected], ["drop", 3, expected], ["raise", 1, expected]], done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("ValueError: the child's own\n"), done.stderr
    assert not [path for path in (folder / "temporary").iterdir() if path.name.startswith("nanopaged")]
