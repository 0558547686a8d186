"""What a GPU's memory holds while it serves: weights, K/V, and the rest, as in the paper's Figure 1.

    python docs/book/figures/gpu_memory.py

By arithmetic. The first row is the paper's case (its Table 1 has 12 GB and 15,700 slots for K/V); the other
has 90 % of 24 GB for weights, K/V, and 1 GB for a step.
"""

from __future__ import annotations

import torch
from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged.kv_cache import KVShape

OPT = KVShape(num_layers=40, num_kv_heads=40, head_dim=128, dtype=torch.float16)
LLAMA = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
# Name, GB of memory, GB of weights, GB of K/V, and the K/V of one token.
ROWS = [
    ("OPT-13B, 40 GB", 40, 26.0, 12.0, OPT),
    ("Llama-3-8B, 24 GB", 24, 16.1, 0.9 * 24 - 16.1 - 1.0, LLAMA),
]
LONGEST, MEAN = 2048, 338 + 161  # tokens of the longest request possible, and of ShareGPT's on average
LEFT, WIDTH = 166, 540


def main() -> None:
    drawing = Drawing(LEFT + WIDTH + 30, 262, "A GPU's memory: weights, K/V, and the rest")
    for i, (name, total, weights, kv, shape) in enumerate(ROWS):
        y, x = 26 + 112 * i, float(LEFT)
        drawing.text(LEFT - 12, y + 17, name, 13, "end", bold=True)
        for label, size, style in (
            (f"weights {weights:.0f} GB", weights, COLORS[0]),
            (f"K/V {kv:.1f} GB", kv, COLORS[1]),
            ("rest", total - weights - kv, (PAPER, GREY)),
        ):
            drawing.box(x, y, WIDTH * size / total, 34, label, *style, 12)
            x += WIDTH * size / total
        slots = int(kv * (2**30 if i == 0 else 1e9) // shape.block_bytes(1))  # the paper's GB are 2³⁰ bytes
        start = LEFT + WIDTH * weights / total
        drawing.line(start, y + 34, LEFT, y + 52, FAINT)
        drawing.line(start + WIDTH * kv / total, y + 34, LEFT + WIDTH, y + 52, FAINT)
        at_most, paged = slots // LONGEST, slots // MEAN
        for first in range(at_most):
            size = WIDTH * LONGEST / slots
            drawing.box(LEFT + first * size, y + 52, size, 16, "", PAPER, COLORS[1][1])
            drawing.box(LEFT + first * size, y + 52, size * MEAN / LONGEST, 16, "", *COLORS[1])
        text = (
            f"{slots:,} tokens: {at_most} requests that reserve {LONGEST:,}, or {paged} of {MEAN} in blocks"
        )
        drawing.text(LEFT, y + 82, text, 12, "start", GREY)
    drawing.text(
        LEFT,
        248,
        "Each box is a range for the longest request; the filled part is what a mean one uses.",
        12,
        "start",
        GREY,
    )
    drawing.save()


if __name__ == "__main__":
    main()
