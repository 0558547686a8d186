"""Stage 7 of docs/build/rebuild.py."""

from stages import Stage

FILE = "nanopaged/sampler.py"
TESTS = "tests/engine/test_sampler.py::test"
CASES = (
    "filters_equal_transformers_row_by_row",
    "filters_out_of_all_proportion",
    "equals_are_kept_or_dropped_together",
    "the_edge_of_top_p_is_that_of_transformers",
    "tiny_temperatures_are_greedy_and_not_nan",
    "a_draw_inverts_the_distribution",
    "banned_tokens_are_never_drawn_but_logprobs_stay_the_models_own",
    "a_row_in_which_no_token_is_allowed_is_marked",
    "a_beam_proposes_only_what_can_follow",
    "a_repetition_penalty_lowers_logits_of_either_sign",
)

STAGE = Stage(
    title="sampling: filters, a draw, the next token",
    chapter="02-one-request.md",
    functions=tuple((FILE, name) for name in ("filtered_probs", "draw_tokens", "sample")),
    suite=tuple(f"{TESTS}_{case}" for case in CASES),
    hints=(
        "Each filter finds a threshold for each row, and drops what lies below it. So ties are kept or "
        "dropped together, and the order of a sort does not matter.",
        "Top-k: the k-th largest logit of a row is its threshold, if k is less than the vocabulary. Logits "
        "below it become -inf *before* the softmax, so top-p and min-p see the probabilities of the rest.",
        "Top-p: sort a row's probabilities in rising order and take cumulative sums. Those whose sum is at "
        "most 1 - top_p are dropped; the next one is the threshold. Rows with top_p = 1 stay as they are.",
        "A draw: the first token whose cumulative sum is *greater* than u · total. A token of probability 0 "
        "does not raise the sum, so it is never the first. In float32 the last sum and the total may differ: "
        "add in float64, and take the last cumulative sum as the total.",
        "`sample` keeps two tensors: the logits as they came, whose log-probabilities are returned, and the "
        "allowed scores, after `penalize` and the bans, from which it chooses. `gather_logprobs` takes both.",
        "If `metadata.all_greedy` is true, the metadata has no filters: take the argmax. Otherwise draw for "
        "all rows, and put the argmax where `is_greedy` is set.",
    ),
)
