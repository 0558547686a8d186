"""The stages of docs/build/rebuild.py: what is to be written, what judges it. The hints are in hints.md."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = "nanopaged/attention"
BLOCKS = "nanopaged/block_manager.py"
SCHEDULER = "nanopaged/scheduler.py"
SWAP = "nanopaged/swap.py"
SAMPLER = "nanopaged/sampler.py"
KERNELS = "nanopaged/kernels/paged_attention.py"
MODEL = "nanopaged/model"
PARALLEL = "nanopaged/parallel.py"
RANDOM_RUNS = ("tests/engine/test_random_runs.py", "--random-runs", "10")


@dataclass(frozen=True)
class Stage:
    """A part of the engine to write.

    Fields:
        chapter: of the book, which explains it: a file of docs/book.
        functions: (file, dotted name) of each function that loses its body. One that the reader has written
            in an earlier stage is kept: this stage asks more of it.
        suite: arguments of pytest, from the root: the tests of the suite that judge it after judge_N.py.
    """

    title: str
    chapter: str
    functions: tuple[tuple[str, str], ...]
    suite: tuple[str, ...]


def methods(file: str, name: str, *names: str) -> tuple[tuple[str, str], ...]:
    """Methods of a class."""
    return tuple((file, f"{name}.{method}") for method in names)


STAGES = {
    1: Stage(
        title="attention: gather, then attend; then block by block",
        chapter="05-attention.md",
        functions=(
            (f"{ATTENTION}/torch_backend.py", "gather_context"),
            (f"{ATTENTION}/torch_backend.py", "attend"),
            (f"{ATTENTION}/reference_backend.py", "reference_paged_attention"),
        ),
        suite=("tests/kernels/test_attention.py",),
    ),
    2: Stage(
        title="blocks: take, share, release, allocate, grow",
        chapter="03-blocks.md",
        functions=methods(
            BLOCKS, "BlockManager", "take", "share", "release", "allocate", "append_slots", "trim"
        ),
        suite=(),  # it asks for one sequence and no cache: the judge serves what the suite does not
    ),
    3: Stage(
        title="the scheduler's one rule",
        chapter="04-scheduling.md",
        functions=methods(SCHEDULER, "Scheduler", "_schedule_tokens", "schedule"),
        suite=("tests/engine/test_swap.py", *RANDOM_RUNS),
    ),
    4: Stage(
        title="the prefix cache: keys, hits, eviction",
        chapter="06-prefix-cache.md",
        functions=methods(BLOCKS, "BlockManager", "keys_of", "find_prefix", "publish", "allocate", "take"),
        suite=(
            "tests/engine/test_block_manager.py",
            "tests/engine/test_scheduler.py",
            "tests/engine/test_swap.py",
        ),
    ),
    5: Stage(
        title="forks and copy-on-write",
        chapter="07-sharing.md",
        functions=(
            *methods(BLOCKS, "BlockManager", "fork", "append_slots"),
            (BLOCKS, "blocks_to_grow"),
            ("nanopaged/beam_search.py", "fork_samples"),
        ),
        suite=("tests/engine/test_block_manager.py", "tests/engine/test_sharing.py", *RANDOM_RUNS),
    ),
    6: Stage(
        title="preemption and swapping",
        chapter="08-preemption.md",
        functions=(
            (SCHEDULER, "Scheduler._preempt"),
            *methods(SWAP, "Swapper", "swap_out", "swap_in", "release"),
            ("nanopaged/kv_cache.py", "KVCache.move_blocks"),
        ),
        suite=("tests/engine/test_swap.py", "tests/engine/test_scheduler.py", *RANDOM_RUNS),
    ),
    7: Stage(
        title="sampling: filters, a draw, the next token",
        chapter="02-one-request.md",
        functions=((SAMPLER, "filtered_probs"), (SAMPLER, "draw_tokens"), (SAMPLER, "sample")),
        suite=(),  # the judge compares with the source; a plain sort is too slow for the suite's vocabularies
    ),
    8: Stage(
        title="the Triton kernels of a decode, interpreted",
        chapter="09-gpu.md",
        functions=((KERNELS, "decode_kernel"), (KERNELS, "reduce_kernel")),
        suite=(),  # the interpreter is slow, and the judge has the suite's cases in small
    ),
    9: Stage(
        title="tensor parallelism: a share of each layer",
        chapter="10-parallel.md",
        functions=(
            (f"{MODEL}/model_config.py", "ModelConfig.share"),
            (f"{MODEL}/checkpoint.py", "_share"),
            *methods(PARALLEL, "Ranks", "all_reduce", "gather"),
            (f"{MODEL}/decoder.py", "Linear.forward"),
            *methods(f"{MODEL}/decoder.py", "Model", "_embed_share", "logits"),
        ),
        suite=(),  # the judge runs ranks as threads; the processes of test_parallel.py would take long
    ),
}
