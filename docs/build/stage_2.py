"""Stage 2 of docs/build/rebuild.py."""

from stages import Stage

FILE = "nanopaged/block_manager.py"
NAMES = "take", "share", "release", "allocate", "append_slots", "trim"

SCHEDULER = (
    "the_latest_is_preempted_and_says_the_same_in_the_end",
    "several_victims_resume_in_order_of_arrival",
)
SWAP = (
    "a_victim_is_moved_and_comes_back",
    "a_victim_that_needs_every_block_comes_back",
    "a_half_prefilled_victim",
)

STAGE = Stage(
    title="blocks: take, share, release, allocate, grow",
    chapter="03-blocks.md",
    functions=tuple((FILE, f"BlockManager.{name}") for name in NAMES),
    suite=(
        "tests/engine/test_block_manager.py::test_a_block_is_taken_only_when_a_token_needs_it",
        *(f"tests/engine/test_scheduler.py::test_{name}" for name in SCHEDULER),
        *(f"tests/engine/test_swap.py::test_{name}" for name in SWAP),
    ),
    hints=(
        "`free_ids` is a stack: `pop` and `append` work at its end. `blocks[block_id]` is the block itself.",
        "`release` has three cases: no reference (an error), one (the block becomes free or cached), more.",
        "A block without references goes to `free_ids` if its key is None, and into `cached` if it has one. "
        "`share` takes a cached block out of `cached` again.",
        "Count before you take. `allocate` and `append_slots` compare the blocks that they need with "
        "`num_free_blocks` first, so when they refuse, there is nothing to undo.",
        "`append_slots` needs as many new blocks as the tokens need and the table lacks: often none, mostly "
        "one, several if a request was swapped out in the middle of its prompt.",
        "In `trim` 0 tokens and None differ: `is None` tells them apart. Release from the end of the table.",
    ),
)
