"""The key of token 37 in layer 5 and KV head 3 of Llama-3-8B: each row is a part of the row above it."""

from __future__ import annotations

from math import prod

from svg import COLORS, FAINT, GREY, PAPER, Drawing

LEFT, WIDTH, HEIGHT, ROW = 16, 368, 26, 70
# Of each axis its name, its size, the index, and what its cells show.
AXES = [
    ("block", 10, 9, "0 1 2 3 4 5 6 7 8 9"),
    ("layer", 32, 5, "0 1 2 3 4 5 6 … 31"),
    ("K or V", 2, 0, "K V"),
    ("KV head", 8, 3, "0 1 2 3 4 5 6 7"),
    ("slot", 16, 5, "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
]
SIZES = [size for _, size, _, _ in AXES] + [128]

drawing = Drawing(400, len(AXES) * ROW + 106, "The address of a key in the KV cache")
y, address = 38, 0
for axis, (name, _, index, labels) in enumerate(AXES):
    stride = prod(SIZES[axis + 1 :])
    address += index * stride
    drawing.text(LEFT, y - 12, name, 14, "start", bold=True)
    drawing.text(LEFT + WIDTH, y - 12, f"{index} · {stride:,}", 14, "end", COLORS[0][1])
    cells = labels.split()
    width = WIDTH / len(cells)
    for i, label in enumerate(cells):
        style = COLORS[0] if i == index else (PAPER, FAINT)
        drawing.box(LEFT + i * width, y, width, HEIGHT, label, *style, 13)
    for x, end in ((LEFT + index * width, LEFT), (LEFT + (index + 1) * width, LEFT + WIDTH)):
        drawing.line(x, y + HEIGHT, end, y + ROW - 22, GREY, width=1)
    y += ROW
drawing.box(LEFT, y, WIDTH, HEIGHT, f"{SIZES[-1]} numbers: the key of token 37", *COLORS[0], 13)
drawing.text(LEFT + WIDTH, y + HEIGHT + 22, f"sum: element {address:,}", 14, "end", COLORS[0][1], bold=True)
drawing.save()
