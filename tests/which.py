"""The tests that concern a file of the package, the ones that find most mistakes in the least time first.

    python tests/which.py nanopaged/scheduler.py          prints them
    python tests/which.py --run nanopaged/scheduler.py    runs them, and stops at the first that fails

mutate.py takes the tests of a changed file from here. test_which.py holds that no file is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {  # file of the package → NAMEs of its tests, tests/*/test_NAME.py
    "__init__.py": "names imports",
    "__main__.py": "chat terminal",
    "terminal.py": "terminal",
    "engine.py": "scheduler api names weights snapshot trace prompts model_runner",
    "llm.py": "names prompts api threads text",
    "config.py": "api names sampler trace sharing beam_search weights",
    "prompts.py": "prompts api text sharing names",
    "outputs.py": "names api text",
    "text.py": "text prompts api",
    "sequence.py": "scheduler text swap random_runs api sampler threads",
    "scheduler.py": "scheduler swap random_runs api",
    "block_manager.py": "block_manager scheduler swap random_runs",
    "swap.py": "swap scheduler random_runs",
    "beam_search.py": "beam_search random_runs sharing",
    "snapshot.py": "snapshot block_manager swap api trace random_runs",
    "sampler.py": "sampler penalties beam_search sharing oracle api mps",
    "model_runner.py": "model_runner api cuda_path sharing oracle",
    "parallel.py": "parallel",
    "memory.py": "model_runner api cuda_path weights mps",
    "cuda_graphs.py": "cuda_graphs cuda_path",
    "kv_cache.py": "kv_cache attention api cuda_path mps kernels",
    "trace.py": "trace trace_page",
    "attention/__init__.py": "attention cuda_path cpp api sharing",
    "attention/cpp_backend.py": "cpp",
    "attention/flash_backend.py": "attention cuda_path",
    "attention/metadata.py": "model_runner attention",
    "attention/reference_backend.py": "attention",
    "attention/torch_backend.py": "attention oracle sharing",
    "attention/triton_backend.py": "attention cuda_path cuda_graphs",
    "kernels/build.py": "cpp",
    "kernels/cpp.py": "cpp",
    "kernels/paged_attention.py": "kernels attention cuda_path",
    "model/checkpoint.py": "weights checkpoints parallel api",
    "model/decoder.py": "weights cpp oracle parallel",
    "model/model_config.py": "weights checkpoints parallel",
}


def tests_of(file: str) -> list[str]:
    """The tests of a file, such as nanopaged/scheduler.py, as paths from the project's folder."""
    names = TESTS[Path(file).absolute().relative_to(ROOT / "nanopaged").as_posix()]
    files = [next((ROOT / "tests").glob(f"*/test_{name}.py")) for name in names.split()]
    return [file.relative_to(ROOT).as_posix() for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", help="of the package")
    parser.add_argument("--run", action="store_true", help="run the tests, too")
    args = parser.parse_args()
    try:
        tests = list(dict.fromkeys(test for file in args.files for test in tests_of(file)))
    except (KeyError, ValueError):
        parser.error(f"no tests are known for one of {' '.join(args.files)}: name files of nanopaged/")
    print("\n".join(tests))
    if args.run:
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-x", *tests], cwd=ROOT))


if __name__ == "__main__":
    main()
