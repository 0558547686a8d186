"""Chapter 11: requests served and good, and the wait for the first token, over the rate of arrivals.

python docs/book/figures/saturation.py
"""

from __future__ import annotations

import math
from itertools import pairwise

from runs import arrivals
from svg import COLORS, FAINT, GREY, Drawing

MOST = 5.0  # requests per second, the end of both axes
LEFT, WIDTH, HEIGHT = 56, 320, 200
BLUE, ORANGE = COLORS[0][1], COLORS[1][1]


def main() -> None:
    args = arrivals.make_arguments([])
    lengths = arrivals.draw_lengths(args)
    rates = [0.25 * i for i in range(1, int(4 * MOST) + 1)]
    rows = [arrivals.summary(lengths, arrivals.simulate(rate, lengths, args), args) for rate in rates]
    drawing = Drawing(
        400, 620, "Requests served and good, and the wait for the first token, over the rate of arrivals"
    )

    bottom = 260
    axes(drawing, bottom, "requests per second", [(str(tick), tick / 4) for tick in range(5)])
    curve(drawing, bottom, rates, [row["served"] / 4 for row in rows], BLUE)
    curve(drawing, bottom, rates, [row["good"] / 4 for row in rows], ORANGE)
    drawing.text(LEFT + 240, bottom - 182, "served", color=BLUE, bold=True)
    drawing.text(LEFT + 296, bottom - 80, "good", color=ORANGE, bold=True)

    bottom = 562
    axes(drawing, bottom, "seconds to the first token", [(f"{t:g}", height(t)) for t in (0.1, 1, 10, 100)])
    curve(drawing, bottom, rates, [height(row["p50"]) for row in rows], BLUE)
    curve(drawing, bottom, rates, [height(row["p99"]) for row in rows], ORANGE)
    limit = bottom - HEIGHT * height(args.first)
    drawing.line(LEFT, limit, LEFT + WIDTH, limit, dashed=True)
    drawing.text(LEFT + 6, limit - 10, "limit for a good request", 12, "start", GREY)
    drawing.text(LEFT + 284, bottom - 36, "median", color=BLUE, bold=True)
    drawing.text(LEFT + 240, bottom - 160, "p99", color=ORANGE, bold=True)
    drawing.save()


def height(seconds: float) -> float:
    """A place on the axis from 0.1 to 100 s, which is logarithmic: 0 is its foot, 1 its top."""
    return (math.log10(seconds) + 1) / 3


def axes(drawing: Drawing, bottom: float, title: str, ticks: list[tuple[str, float]]) -> None:
    """Two axes, lines at the ticks of the upright one, and titles."""
    drawing.text(16, bottom - HEIGHT - 32, title, 14, "start", bold=True)
    for name, share in ticks:
        y = bottom - HEIGHT * share
        drawing.line(LEFT, y, LEFT + WIDTH, y, FAINT, width=1)
        drawing.text(LEFT - 8, y, name, 12, "end", GREY)
    drawing.line(LEFT, bottom, LEFT + WIDTH, bottom)
    for rate in range(int(MOST) + 1):
        drawing.text(LEFT + WIDTH * rate / MOST, bottom + 16, str(rate), 12, color=GREY)
    drawing.text(LEFT + WIDTH / 2, bottom + 38, "requests arriving per second", 12, color=GREY)


def curve(drawing: Drawing, bottom: float, rates: list[float], shares: list[float], color: str) -> None:
    """A line through (rate, share of the height)."""
    points = [
        (round(LEFT + WIDTH * rate / MOST, 1), round(bottom - HEIGHT * share, 1))
        for rate, share in zip(rates, shares, strict=True)
    ]
    for (x1, y1), (x2, y2) in pairwise(points):
        drawing.line(x1, y1, x2, y2, color, width=2.2)


if __name__ == "__main__":
    main()
