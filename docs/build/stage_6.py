"""Stage 6 of docs/build/rebuild.py."""

from stages import Stage

SWAP = "nanopaged/swap.py"
SUITE = (
    "test_swap.py::test_a_victim_is_moved_and_comes_back",
    "test_swap.py::test_no_new_request_is_admitted_while_a_swapped_one_waits",
    "test_swap.py::test_a_full_host_pool_falls_back_to_recompute",
    "test_swap.py::test_a_victim_that_needs_every_block_comes_back",
    "test_swap.py::test_shared_blocks_move_once_and_stay_shared",
    "test_swap.py::test_a_request_whose_prompt_another_one_uses_is_swapped_whole",
    "test_swap.py::test_a_half_prefilled_victim",
    "test_scheduler.py::test_preempted_beams_propose_anew",
    "test_scheduler.py::test_a_preempted_prompt_finds_its_blocks_again",
    "test_random_runs.py::test_every_request_reads_its_own_kv_and_says_what_it_would_say_alone[forked]",
)

STAGE = Stage(
    title="preemption and swapping",
    chapter="08-preemption.md",
    functions=(
        ("nanopaged/scheduler.py", "Scheduler._preempt"),
        (SWAP, "Swapper.swap_out"),
        (SWAP, "Swapper.swap_in"),
        (SWAP, "Swapper.release"),
        ("nanopaged/kv_cache.py", "KVCache.move_blocks"),
    ),
    suite=(*(f"tests/engine/{test}" for test in SUITE), "--random-runs", "12"),
    hints=(
        "`move_blocks` is three loops of `copy_`, over `moves.swap_out`, `moves.swap_in` and `moves.copies`: "
        "`self.host[i]` and `self.data[i]` are whole blocks. (The source makes all copies on write together, "
        "by index.)",
        "`swap_out`: collect the device blocks of all sequences that have computed tokens, each once, and "
        "compare their number with `free_ids` before you change anything.",
        "A `host_table` has the host block of each block of the `block_table` that moved, also if only a "
        "sibling has computed tokens in it. Then `trim(seq, 0)` gives all blocks back: `free` would also "
        "forget that tokens are computed.",
        "`swap_in` needs a device block for each distinct host block, and those of `blocks_to_grow` for the "
        "newest tokens. `num_reserved` more must be free.",
        "`take` gives a block its first reference. Each further table that names it needs a `share`. The "
        "last line of `swap_in` is `self.release(request)`: the host blocks are free, each once.",
        'In `_preempt`, `swap_out` may return None even if the mode is "swap". Only a request that is '
        "computed again loses the `candidates` of its beams. `insort_left` inserts before equal ranks.",
    ),
)
