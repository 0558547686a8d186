"""Stage 4 of docs/build/rebuild.py."""

from stages import Stage

FILE = "nanopaged/block_manager.py"
NAMES = "keys_of", "find_prefix", "publish", "allocate", "take"

BLOCK_MANAGER = (
    "equal_blocks_after_different_beginnings_are_not_shared",
    "the_last_token_is_always_computed",
    "a_chain_is_evicted_from_its_end",
    "the_least_recently_used_chain_goes_first",
    "refused_admission_changes_nothing",
    "cached_blocks_that_are_hit_do_not_count_as_free_for_the_rest",
    "blocks_whose_fast_hashes_collide_are_told_apart",
    "blocks_are_shared_among_equal_salts_only",
    "a_block_after_a_private_one_is_found_by_its_contents",
    "an_emptied_prefix_cache_keeps_what_is_in_use",
    "siblings_that_come_back_share_their_common_past",
    "a_sibling_does_not_evict_what_another_has_found",
    "siblings_that_do_not_fit_together_change_nothing",
)
SCHEDULER = (
    "the_watermark_leaves_room_to_grow",
    "a_block_that_a_step_fills_exactly_is_found",
    "a_preempted_prompt_finds_its_blocks_again",
    "twins_arriving_in_the_same_step_share_their_prompt",
    "a_twin_arriving_while_the_first_is_half_prefilled",
    "a_fully_cached_prompt_computes_its_last_block_again",
    "a_prompt_with_logprobs_is_neither_looked_up_nor_counted",
    "aborted_requests_are_neither_served_nor_kept",
)

STAGE = Stage(
    title="the prefix cache: keys, hits, eviction",
    chapter="06-prefix-cache.md",
    functions=tuple((FILE, f"BlockManager.{name}") for name in NAMES),
    suite=(
        *(f"tests/engine/test_block_manager.py::test_{name}" for name in BLOCK_MANAGER),
        *(f"tests/engine/test_scheduler.py::test_{name}" for name in SCHEDULER),
        "tests/engine/test_swap.py::test_a_request_whose_prompt_another_one_uses_is_swapped_whole",
    ),
    hints=(
        'Begin with `keys_of`. `array("q", token_ids).tobytes()` are the tokens of a block as bytes, and '
        "`sha256(key).digest()` is the hash of a key. Append to `seq.block_keys` what it lacks, and return "
        "its beginning.",
        "`find_prefix` never looks at the block of the last token: of n tokens it asks for (n - 1) // "
        "`block_size` keys. `publish` asks for the keys up to the end of what this step computes, and sets "
        "those of the blocks that it fills.",
        "Eviction in `take` undoes a publication: the block leaves `cached` and `index`, and loses its key. "
        "`popitem(last=False)` of an `OrderedDict` gives the oldest entry.",
        "`allocate` in three parts: count, share all that is found, take the rest. Taking may evict, so "
        "nothing that was found may be without a reference by then.",
        "How many of `num_free_blocks` does `allocate` need? One for each sequence (its last), one for each "
        "different key that is not found, and one for each found block that is cached: it counts as free "
        "until it is shared.",
        "For several sequences keep a dictionary from a key to the block that an earlier one of them took. A "
        "key that is in it is shared, and its tokens count as computed.",
    ),
)
