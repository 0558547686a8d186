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
BOOKKEEPING = ("scheduler", "swap", "random_runs")
TESTS = {  # file of the package → NAME of its tests, tests/test_NAME.py
    "__init__.py": ["names", "imports"],
    "__main__.py": ["chat"],
    "engine.py": ["scheduler", "api", "names", "weights", "snapshot", "trace"],
    "sequence.py": ["scheduler", "text", "swap", "random_runs", "api"],
    "block_manager.py": ["block_manager", *BOOKKEEPING],
    "scheduler.py": [*BOOKKEEPING, "api"],
    "swap.py": ["swap", *BOOKKEEPING],
    "beam_search.py": ["beam_search", "random_runs", "sharing"],
    "kv_cache.py": ["kv_cache", "attention", "api", "cuda_path", "mps"],
    "model_runner.py": ["api", "cuda_path", "sharing", "oracle"],
    "sampler.py": ["sampler", "penalties", "beam_search", "api"],
    "llm.py": ["names", "prompts", "api", "threads", "text"],
    "prompts.py": ["prompts", "api", "text", "sharing"],
    "config.py": ["api", "names", "sampler", "trace", "sharing"],
    "attention/__init__.py": ["attention", "cuda_path", "api"],
    "attention/cpp_backend.py": ["cpp"],
    "attention/flash_backend.py": ["attention", "cuda_path"],
    "attention/key_rows.py": ["attention", "sharing"],
    "attention/metadata.py": ["model_runner", "attention"],
    "attention/reference_backend.py": ["attention"],
    "attention/torch_backend.py": ["attention", "oracle"],
    "attention/triton_backend.py": ["attention", "cuda_path", "cuda_graphs"],
    "checks/__init__.py": [],
    "checks/engine_options.py": ["names"],
    "checks/failures.py": ["sampler", "api"],
    "checks/foreign_names.py": ["names", "api"],
    "checks/lengths.py": ["api", "weights"],
    "checks/requests.py": ["api", "prompts", "names"],
    "checks/rules.py": ["api", "names", "trace", "beam_search"],
    "kernels/__init__.py": [],
    "kernels/build.py": ["cpp"],
    "kernels/copy_blocks.py": ["kernels", "cuda_path"],
    "kernels/cpp.py": ["cpp"],
    "kernels/devices.py": ["cuda_path", "api", "model_runner", "attention", "weights", "kv_cache", "mps"],
    "kernels/fused.py": ["fused"],
    "kernels/paged_attention.py": ["kernels", "attention"],
    "model/__init__.py": [],
    "model/checkpoint.py": ["weights", "parallel", "api"],
    "model/cuda_graphs.py": ["cuda_graphs", "cuda_path"],
    "model/decoder.py": ["weights", "oracle", "parallel"],
    "model/layers.py": ["weights", "fused", "cpp", "oracle"],
    "model/model_config.py": ["weights", "parallel"],
    "model/onednn.py": ["weights"],
    "model/parallel.py": ["parallel"],
    "model/prompt_scores.py": ["sharing", "oracle", "api", "cuda_path"],
    "model/sizing.py": ["model_runner", "api", "cuda_path", "weights", "mps"],
    "queues/__init__.py": [],
    "queues/waiting.py": ["scheduler", "random_runs"],
    "sampling/__init__.py": [],
    "sampling/logprobs.py": ["sharing", "beam_search", "api"],
    "sampling/penalties.py": ["penalties", "sampler"],
    "terminal/__init__.py": [],
    "terminal/chat.py": ["chat"],
    "text/__init__.py": [],
    "text/chat.py": ["prompts", "api"],
    "text/detokenizer.py": ["text"],
    "text/outputs.py": ["names", "api", "text"],
    "text/stopping.py": ["text", "prompts", "api"],
    "threads/__init__.py": [],
    "threads/turns.py": ["threads", "api", "text"],
    "tiny/train.py": ["scripts"],
    "trace/__init__.py": [],
    "trace/recorded_pool.py": ["trace"],
    "trace/recorder.py": ["trace", "trace_page"],
    "trace/sentences.py": ["trace"],
    "trace/watch.py": ["watch"],
    "views/__init__.py": [],
    "views/invariants.py": ["block_manager", "swap", "random_runs"],
    "views/progress.py": ["api", "names"],
    "views/outputs.py": ["text", "api", "threads"],
    "views/snapshot.py": ["snapshot", "trace"],
    "views/statistics.py": ["api", "block_manager", "swap", "snapshot"],
}


def tests_of(file: str) -> list[str]:
    """The tests of a file, such as nanopaged/scheduler.py, as paths from the project's folder."""
    names = TESTS[Path(file).absolute().relative_to(ROOT / "nanopaged").as_posix()]
    return [f"tests/test_{name}.py" for name in names]


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
