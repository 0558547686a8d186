"""Stage 1 of docs/build/rebuild.py."""

from stages import Stage

PLAIN, BLOCKS = "nanopaged/attention/torch_backend.py", "nanopaged/attention/reference_backend.py"
TESTS = "tests/kernels/test_attention.py::test"
# The backends against a dense softmax: some of the shapes, because all of them take ten seconds.
LENGTHS = "decodes", "prompts", "chunks after a cached context", "decodes and chunks"
CASES = [f"backends_equal_dense_attention[heads1-20-{size}-{case}]" for size in (1, 7) for case in LENGTHS]
CASES += ["backends_equal_dense_attention[heads0-8-16-more queries than a tile]"]
CASES += [f"a_score_mod_changes_the_scores_before_the_softmax[{size}-{LENGTHS[3]}]" for size in (7, 100)]
CASES += ["scores_far_apart_do_not_overflow", "half_precision_stays_close"]

STAGE = Stage(
    title="attention: gather, then attend; then block by block",
    chapter="05-attention.md",
    functions=(
        (PLAIN, "gather_context"),
        (PLAIN, "attend"),
        (BLOCKS, "reference_paged_attention"),
    ),
    suite=tuple(f"{TESTS}_{case}" for case in CASES),
    hints=(
        "Position p of a sequence lies in block `block_table[p // block_size]`, at offset p % `block_size`. "
        "`gather_context` is this rule for all positions at once: pick the blocks, then join them.",
        "The picked blocks are [..., blocks, num_kv_heads, block_size, head_dim]. Blocks and slots become "
        "one dimension when they lie side by side: `transpose`, `flatten`, and cut at `num_keys` last.",
        "`attend` is q kᵀ, `score_mod`, the mask, softmax, times v. The mask replaces scores by -inf "
        "(`masked_fill`) where `keys > queries`. Shapes broadcast over all dimensions before the last two.",
        "The loop over blocks keeps m, l and acc for each query head. For each block: its scores, the new "
        "maximum, exp(score - new maximum), and the factor exp(old maximum - new maximum) for l *and* acc.",
        "If a `score_mod` masks a whole block, the maximum stays -inf, and -inf - -inf is NaN. Begin with "
        "the lowest finite number (`torch.finfo`) instead of -inf. Sum in float32 also when q is float16.",
    ),
)
