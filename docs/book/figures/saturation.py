"""Chapter 11: requests served and good, and the wait for the first token, over the rate of arrivals.

python docs/book/figures/saturation.py
"""

from __future__ import annotations

import math
from itertools import pairwise

from runs import arrivals
from svg import COLORS, FAINT, GREY, Drawing

MOST = 5.0  # requests a second, the end of both axes
TOP, BOTTOM, WIDTH = 70, 290, 270
BLUE, ORANGE = COLORS[0][1], COLORS[1][1]


def main() -> None:
    args = arrivals.make_arguments([])
    lengths = arrivals.draw_lengths(args)
    rates = [0.25 * i for i in range(1, int(4 * MOST) + 1)]
    rows = [arrivals.summary(lengths, arrivals.simulate(rate, lengths, args), args) for rate in rates]
    drawing = Drawing(
        760, 360, "Requests served and good, and the wait for the first token, over the rate of arrivals"
    )

    x, ticks = 70, range(5)
    axes(drawing, x, "requests a second", [(str(tick), tick / 4) for tick in ticks])
    curve(drawing, x, rates, [row["served"] / 4 for row in rows], BLUE)
    curve(drawing, x, rates, [row["good"] / 4 for row in rows], ORANGE)
    drawing.text(x + 195, TOP + 22, "served", color=BLUE, bold=True)
    drawing.text(x + 250, TOP + 130, "good", color=ORANGE, bold=True)

    x = 450
    axes(drawing, x, "seconds to the first token", [(f"{t:g}", height(t)) for t in (0.1, 1, 10, 100)])
    curve(drawing, x, rates, [height(row["p50"]) for row in rows], BLUE)
    curve(drawing, x, rates, [height(row["p99"]) for row in rows], ORANGE)
    drawing.line(x, y_of(height(args.first)), x + WIDTH, y_of(height(args.first)), dashed=True)
    drawing.text(x + 6, y_of(height(args.first)) - 10, "limit for a good request", 11, "start", GREY)
    drawing.text(x + 240, TOP + 180, "median", color=BLUE, bold=True)
    drawing.text(x + 205, TOP + 40, "p99", color=ORANGE, bold=True)
    drawing.save()


def height(seconds: float) -> float:
    """A place on the axis from 0.1 to 100 s, which is logarithmic: 0 is its foot, 1 its top."""
    return (math.log10(seconds) + 1) / 3


def y_of(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


def axes(drawing: Drawing, x: float, title: str, ticks: list[tuple[str, float]]) -> None:
    """Two axes, lines at the ticks of the upright one, and titles."""
    drawing.text(x - 30, TOP - 32, title, 14, "start", bold=True)
    for name, share in ticks:
        drawing.line(x, y_of(share), x + WIDTH, y_of(share), FAINT, width=1)
        drawing.text(x - 8, y_of(share), name, 12, "end", GREY)
    drawing.line(x, BOTTOM, x + WIDTH, BOTTOM)
    for rate in range(int(MOST) + 1):
        drawing.text(x + WIDTH * rate / MOST, BOTTOM + 16, str(rate), 12, color=GREY)
    drawing.text(x + WIDTH / 2, BOTTOM + 40, "requests a second, arriving", 12, color=GREY)


def curve(drawing: Drawing, x: float, rates: list[float], shares: list[float], color: str) -> None:
    """A line through (rate, share of the height)."""
    points = [
        (round(x + WIDTH * rate / MOST, 1), round(y_of(share), 1))
        for rate, share in zip(rates, shares, strict=True)
    ]
    for (x1, y1), (x2, y2) in pairwise(points):
        drawing.line(x1, y1, x2, y2, color, width=2.2)


if __name__ == "__main__":
    main()
