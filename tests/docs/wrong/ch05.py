"""Wrong solutions of the exercises of chapter 5."""

TOTAL = "total.masked_fill(total == 0, 1)"
OUT = f"(w[..., None] * outs).sum(0) / {TOTAL}[..., None]"

WRONG_1 = [
    ("no maximum is subtracted", "(lses - top).exp()", "lses.exp()"),
    ("the maximum over the heads", "lses.amax(0)", "lses.amax(1, keepdim=True)"),
    ("the outputs are averaged", OUT, "outs.mean(0)"),
    ("the weights are not divided by their sum", f" / {TOTAL}[..., None]", ""),
    ("a weight without an exponential", "(lses - top).exp()", "lses - top"),
    ("NaN of an empty split", "outs.masked_fill((lses == -math.inf)[..., None], 0)", "outs"),
    ("the outputs are overwritten", "outs.masked_fill((", "outs.masked_fill_(("),
]
