"""How long a decode step takes with more sequences, and the least time for reading and for computing.

The numbers are those of docs/records/benchmarks.md, Steps against the roofline. Both axes are logarithmic.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2

from svg import COLORS, FAINT, GREY, Drawing

STEPS = {1: 11.3, 2: 12.3, 4: 13.3, 8: 17.0, 16: 28.1, 32: 58.3, 64: 128, 128: 242}  # milliseconds
READ, COMPUTE = 8.9, 0.94  # milliseconds: of the weights, and of each sequence
BLUE, ORANGE = COLORS[0][1], COLORS[1][1]


def place(sequences: float, milliseconds: float) -> tuple[float, float]:
    return 52 + 46 * log2(sequences), 298 - 42 * log2(milliseconds / 5)


drawing = Drawing(400, 346, "Milliseconds of a decode step against the number of sequences in the batch")
drawing.text(14, 24, "milliseconds of a decode step", 13, "start", GREY)
for tick in (5, 10, 20, 40, 80, 160):
    x, y = place(1, tick)
    drawing.line(x, y, 384, y, FAINT, width=1)
    drawing.text(x - 12, y, str(tick), 13, "end", GREY)
for sequences in STEPS:
    drawing.text(place(sequences, 5)[0], 314, str(sequences), 13, color=GREY)
drawing.text(218, 335, "sequences in the batch", 13, color=GREY)
drawing.line(*place(1, READ), *place(128, READ), ORANGE, dashed=True)
drawing.line(*place(5 / COMPUTE, 5), *place(128, 128 * COMPUTE), BLUE, dashed=True)
drawing.text(384, place(1, READ)[1] + 14, "reading the weights", 13, "end", ORANGE)
drawing.text(384, place(1, 30)[1], "computing", 13, "end", BLUE)
for one, other in pairwise(STEPS.items()):
    drawing.line(*place(*one), *place(*other), width=2.2)
for sequences, milliseconds in STEPS.items():
    x, y = place(sequences, milliseconds)
    drawing.box(x - 4, y - 4, 8, 8, "", *COLORS[2])
for sequences, anchor, shift in ((1, "start", -50), (128, "end", -18)):
    x, y = place(sequences, STEPS[sequences])
    drawing.text(x + 4, y + shift, f"{STEPS[sequences] / sequences:.1f} ms per token", 13, anchor, bold=True)
drawing.save()
