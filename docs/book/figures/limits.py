"""The roofline of an H200: what limits a step, the bytes that it reads or the FLOP that it computes.

    python docs/book/figures/limits.py

Limits and steps of Llama-3-8B, with contexts of 1,000 tokens, are those of docs/book/09-gpu.md: arithmetic.
"""

from __future__ import annotations

from math import log10

from svg import COLORS, FAINT, GREY, INK, Drawing

FLOPS, BYTES = 989e12, 4.8e12  # a second
LINEAR, PROJECTION = 6_979_321_856, 128_256 * 4096  # weights: layers, output projection
KEY, PAIR = 131_072, 32 * 32 * 4 * 128  # bytes of a key with its value; FLOP of a query with both
LEFT, TOP, WIDTH, HEIGHT = 84, 44, 560, 250
STEPS = [  # name, tokens computed, sequences, keys read, pairs of a query and a key
    ("decode of 1 sequence", 1, 1, 1000, 1000),
    ("decode of 32", 32, 32, 32_000, 32_000),
    ("decode of 256", 256, 256, 256_000, 256_000),
    ("prefill of 4,096 tokens", 4096, 1, 4096, 4096**2 / 2),
]


def main() -> None:
    drawing = Drawing(
        LEFT + WIDTH + 40, TOP + HEIGHT + 62, "The roofline of an H200, and steps of Llama-3-8B"
    )
    for power in range(5):
        x = place(10**power, 1e12)[0]
        drawing.line(x, TOP, x, TOP + HEIGHT, FAINT, width=1)
        drawing.text(x, TOP + HEIGHT + 16, f"{10**power:,}", 12, color=GREY)
    for tera in (1, 10, 100, 1000):
        y = place(1, tera * 1e12)[1]
        drawing.line(LEFT, y, LEFT + WIDTH, y, FAINT, width=1)
        drawing.text(LEFT - 8, y, f"{tera:,}", 12, "end", GREY)
    drawing.text(
        LEFT + WIDTH / 2,
        TOP + HEIGHT + 38,
        "arithmetic intensity: FLOP for each byte that is read",
        12,
        color=GREY,
    )
    drawing.text(LEFT - 60, TOP - 14, "TFLOP a second", 12, "start", GREY)
    ridge = FLOPS / BYTES
    drawing.line(*place(1 / 5, BYTES / 5), *place(ridge, FLOPS), INK, width=2.2)
    drawing.line(*place(ridge, FLOPS), *place(1e4, FLOPS), INK, width=2.2)
    x, y = place(ridge, FLOPS)
    drawing.line(x, y, x, TOP + HEIGHT, INK, dashed=True)
    drawing.text(x + 6, TOP + HEIGHT - 12, f"{ridge:.0f}", 12, "start", bold=True)
    drawing.text(LEFT + 120, TOP + 44, "memory-bound: 4.8 TB a second", 12, color=COLORS[0][1], bold=True)
    drawing.text(x + 110, TOP + 44, "compute-bound", 12, color=COLORS[1][1], bold=True)
    for name, tokens, samples, keys, pairs in STEPS:
        flop = 2 * (tokens * LINEAR + samples * PROJECTION) + pairs * PAIR
        read = 2 * (LINEAR + PROJECTION) + keys * KEY
        rate = min(FLOPS, flop / read * BYTES)
        x, y = place(flop / read, rate)
        color = COLORS[1] if rate == FLOPS else COLORS[0]
        drawing.box(x - 5, y - 5, 10, 10, "", *color)
        dx, dy, anchor = (5, -14, "end") if rate == FLOPS else (12, 6, "start")
        text = f"{name}: {rate / FLOPS:.1%} of the FLOP"
        drawing.text(x + dx, y + dy, text, 12, anchor)
    drawing.save()


def place(intensity: float, rate: float) -> tuple[float, float]:
    """Where a point stands on logarithmic axes: 0.2 to 10,000 FLOP a byte, 1 to 2,000 TFLOP a second."""
    x = (log10(intensity) - log10(0.2)) / (4 - log10(0.2))
    y = (log10(rate) - 12) / log10(2000)
    return round(LEFT + WIDTH * x, 1), round(TOP + HEIGHT * (1 - y), 1)


if __name__ == "__main__":
    main()
