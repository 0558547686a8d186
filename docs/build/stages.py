"""The stages of docs/build/rebuild.py: which functions are to be written, and which tests judge them.

N.md is the page of stage N, judge_N.py its judge, and hints.md has its hints.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = "nanopaged/block_manager.py"
SCHEDULER = "nanopaged/scheduler.py"
SAMPLER = "nanopaged/sampler.py"
KERNELS = "nanopaged/kernels/paged_attention.py"
DECODER = "nanopaged/model/decoder.py"
TEST_BLOCKS = "tests/engine/test_block_manager.py"
TEST_SCHEDULER = "tests/engine/test_scheduler.py"
TEST_SWAP = "tests/engine/test_swap.py"
RANDOM_RUNS = ("tests/engine/test_random_runs.py", "--random-runs", "10")


@dataclass(frozen=True)
class Stage:
    """A part of the engine to write.

    Fields:
        functions: (file, dotted name) of each function that loses its body. One that the reader has written
            in an earlier stage is kept: this stage asks more of it.
        suite: arguments of pytest, from the root: the tests of the suite that judge it after judge_N.py.
            Empty where the suite asks for more than the stage (2), or takes long (7 to 9).
    """

    functions: tuple[tuple[str, str], ...]
    suite: tuple[str, ...] = ()


def methods(file: str, name: str, *names: str) -> tuple[tuple[str, str], ...]:
    """Methods of a class."""
    return tuple((file, f"{name}.{method}") for method in names)


STAGES = {
    1: Stage(
        functions=(
            ("nanopaged/attention/torch_backend.py", "gather_context"),
            ("nanopaged/attention/torch_backend.py", "attend"),
            ("nanopaged/attention/reference_backend.py", "reference_paged_attention"),
        ),
        suite=("tests/kernels/test_attention.py",),
    ),
    2: Stage(methods(BLOCKS, "BlockManager", "take", "share", "release", "allocate", "append_slots", "trim")),
    3: Stage(
        functions=methods(SCHEDULER, "Scheduler", "_schedule_tokens", "schedule"),
        suite=(TEST_SWAP, *RANDOM_RUNS),
    ),
    4: Stage(
        functions=methods(
            BLOCKS, "BlockManager", "keys_of", "find_prefix", "publish", "allocate", "take", "evict"
        ),
        suite=(TEST_BLOCKS, TEST_SCHEDULER, TEST_SWAP),
    ),
    5: Stage(
        functions=(
            *methods(BLOCKS, "BlockManager", "fork", "append_slots"),
            (BLOCKS, "blocks_to_grow"),
            ("nanopaged/beam_search.py", "fork_samples"),
        ),
        suite=(TEST_BLOCKS, "tests/engine/test_sharing.py", *RANDOM_RUNS),
    ),
    6: Stage(
        functions=(
            (SCHEDULER, "Scheduler._preempt"),
            *methods("nanopaged/swap.py", "Swapper", "swap_out", "swap_in", "release"),
            ("nanopaged/kv_cache.py", "KVCache.move_blocks"),
        ),
        suite=(TEST_SWAP, TEST_SCHEDULER, *RANDOM_RUNS),
    ),
    7: Stage(((SAMPLER, "filtered_probs"), (SAMPLER, "locate"), (SAMPLER, "draw_samples"))),
    8: Stage(((KERNELS, "decode_kernel"), (KERNELS, "reduce_kernel"))),
    9: Stage(
        (
            ("nanopaged/model/model_config.py", "ModelConfig.for_rank_of"),
            ("nanopaged/model/checkpoint.py", "_rank_slices"),
            *methods("nanopaged/parallel.py", "Ranks", "all_reduce", "gather"),
            (DECODER, "Linear.forward"),
            *methods(DECODER, "Model", "_embed_rows", "logits"),
        )
    ),
}
