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

EACH_WHOLE = """    return torch.cat([
        partial_attention(q[i : i + 1], k_cache, v_cache, prefix + blocks, n, scale)[0]
        for i, (blocks, n) in enumerate(zip(suffixes, context_lens))
    ])
"""
PREFIX_EACH = """    args = k_cache, v_cache, prefix, num_shared, scale
    each = [partial_attention(x[None], *args) for x in q]
    parts = [tuple(map(torch.cat, zip(*each)))]
"""
NUM_SHARED = "    num_shared = len(prefix) * k_cache.shape[2]\n"
PREFIX = "    parts = [partial_attention(q, k_cache, v_cache, prefix, num_shared, scale)]\n"
COMBINED = "combine(*map(torch.stack, zip(*parts)))"

BLOCKS = "max(-(-n // 16) for n in context_lens)"
ROW = "-(-n // 64) * 64"
ROWS = f"sum({ROW} for n in context_lens)"
TOTAL = "total.masked_fill(total == 0, 1)"
OUT = f"(w[..., None] * outs).sum(0) / {TOTAL}[..., None]"

WRONG_1 = [
    ("the rectangle without blocks", "longest * 16", "max(context_lens)"),
    ("one block too many", BLOCKS, "max(n // 16 + 1 for n in context_lens)"),
    ("a rectangle of rows of 64", BLOCKS, "max(-(-n // 64) * 4 for n in context_lens)"),
    ("rows of 16", ROW, "-(-n // 16) * 16"),
    ("a row too many", ROW, "(n // 64 + 1) * 64"),
    ("as many rows for each", ROWS, "len(context_lens) * -(-max(context_lens) // 64) * 64"),
]
WRONG_2 = [
    ("no maximum is subtracted", "(lses - top).exp()", "lses.exp()"),
    ("the maximum over the heads", "lses.amax(0)", "lses.amax(1, keepdim=True)"),
    ("the outputs are averaged", OUT, "outs.mean(0)"),
    ("the weights are not divided by their sum", f" / {TOTAL}[..., None]", ""),
    ("a weight without an exponential", "(lses - top).exp()", "lses - top"),
    ("NaN of an empty split", "outs.masked_fill((lses == -math.inf)[..., None], 0)", "outs"),
    ("the outputs are overwritten", "outs.masked_fill((", "outs.masked_fill_(("),
]
WRONG_3 = [
    ("the reference backend for each sequence", SHARED, NAIVE),
    ("gathers each whole table", NUM_SHARED, NUM_SHARED + EACH_WHOLE),
    ("the prefix is read for each sequence", PREFIX, PREFIX_EACH),
    ("copies the cache", PREFIX, "    k_cache, v_cache = k_cache.clone(), v_cache.clone()\n" + PREFIX),
    ("no scale", "scale * torch", "torch"),
    ("the prefix alone", COMBINED, "parts[0][0]"),
]
