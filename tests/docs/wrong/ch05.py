"""Wrong solutions of the exercises of chapter 5."""

NAIVE = """from nanopaged.attention.reference_backend import reference_paged_attention


def shared_decode(q, k_cache, v_cache, prefix, suffixes, context_lens, scale):
    return torch.stack([
        reference_paged_attention(q[i], k_cache, v_cache, prefix + blocks, n, scale)
        for i, (blocks, n) in enumerate(zip(suffixes, context_lens))
    ])


def unused(q, k_cache, v_cache, prefix, suffixes, context_lens, scale):
"""
SHARED = "def shared_decode(q, k_cache, v_cache, prefix, suffixes, context_lens, scale):\n"

PREFIX_EACH = """    args = k_cache, v_cache, prefix, num_shared, scale
    each = [partial_attention(x[None], *args) for x in q]
    parts = [tuple(map(torch.cat, zip(*each)))]
"""
PREFIX = "    parts = [partial_attention(q, k_cache, v_cache, prefix, num_shared, scale)]\n"

BLOCKS = "max(-(-n // 16) for n in context_lens)"
ROW = "-(-n // 64) * 64"

WRONG_1 = [
    ("the rectangle without blocks", "longest * 16", "max(context_lens)"),
    ("one block too many", BLOCKS, "max(n // 16 + 1 for n in context_lens)"),
    ("a row too many", ROW, "(n // 64 + 1) * 64"),
]
WRONG_2 = [
    ("the maximum over the heads", "lses.amax(0)", "lses.amax(1, keepdim=True)"),
    ("NaN of an empty split", "outs.masked_fill((lses == -math.inf)[..., None], 0)", "outs"),
    ("the outputs are overwritten", "outs.masked_fill((", "outs.masked_fill_(("),
]
WRONG_3 = [
    ("the reference backend for each sequence", SHARED, NAIVE),
    ("the prefix is read for each sequence", PREFIX, PREFIX_EACH),
    ("copies the cache", PREFIX, "    k_cache, v_cache = k_cache.clone(), v_cache.clone()\n" + PREFIX),
]
