"""Stage 5 of docs/build/rebuild.py."""

from stages import Stage

BLOCKS, BEAMS = "nanopaged/block_manager.py", "nanopaged/beam_search.py"

BLOCK_MANAGER = (
    "parallel_sampling_as_in_figure_8_of_the_paper",
    "beam_search_as_in_figure_9_of_the_paper",
    "a_beam_that_waits_for_its_siblings_writes_nothing",
    "out_of_blocks_for_a_copy_changes_nothing",
    "a_block_is_taken_only_when_a_token_needs_it",
)
SCHEDULER = (
    "a_sibling_waits_for_the_one_whose_blocks_it_shares",
    "preempted_beams_propose_anew",
    "an_interrupted_fork_still_fits",
)
SWAP = "shared_blocks_move_once_and_stay_shared", "a_victim_that_needs_every_block_comes_back"
RANDOM_RUNS = (
    "tests/engine/test_random_runs.py::test_every_request_reads_its_own_kv_and_says_what_it_would_say_alone"
)

STAGE = Stage(
    title="forks and copy-on-write",
    chapter="07-sharing.md",
    functions=(
        (BLOCKS, "BlockManager.fork"),
        (BLOCKS, "BlockManager.append_slots"),
        (BLOCKS, "blocks_to_grow"),
        (BEAMS, "fork_samples"),
    ),
    suite=(
        *(f"tests/engine/test_block_manager.py::test_{name}" for name in BLOCK_MANAGER),
        *(f"tests/engine/test_scheduler.py::test_{name}" for name in SCHEDULER),
        *(f"tests/engine/test_swap.py::test_{name}" for name in SWAP),
        f"{RANDOM_RUNS}[mixed]",
        f"{RANDOM_RUNS}[forked]",
        "--random-runs",
        "10",
    ),
    hints=(
        "`parent.copy_tokens(index)` makes a sequence with the same tokens and no blocks. The fork needs "
        "three things more: a reference to each block, a table of its own, and `num_computed_tokens`.",
        "The newest token is written into the logical block `(num_tokens - 1) // block_size`. If the table "
        "has it, the question is whether a sibling's table has the same block; if not, new ones are needed.",
        "In `blocks_to_grow` list the block of each sequence's newest token. Where a block stands n times in "
        "the list, n - 1 copies are made: the length of the list minus the number of different blocks.",
        "In `append_slots` go through the sequences in order. To copy is: take a block, put it into the "
        "table in the place of the shared one, release that one. The last writer then finds one reference.",
        "Two sequences of `append_slots` need nothing: one with a free slot in a block of its own, and a "
        "beam with all its tokens computed (`num_computed_tokens == num_tokens`): it waits for its siblings.",
        "`fork_samples` makes all forks and gives them their samples with `append`, then frees the parent. "
        "It changes the request last: `sequences` has all siblings, `live` those that have not finished.",
    ),
)
