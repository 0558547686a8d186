"""Two ways to attend to scattered blocks: copy them to contiguous memory first, or read them in place.

    python docs/book/figures/gather.py

The bytes are those of one decode of Llama-3-8B with 4,096 tokens of context.
"""

from __future__ import annotations

import torch
from svg import COLORS, GREY, INK, PAPER, Drawing

from nanopaged.kv_cache import KVShape

TABLE, TOKENS = [5, 2, 7], ["0–3", "4–7", "8, 9"]  # a sequence of 10 tokens in blocks of 4
NUM_BLOCKS, STEP, PANEL = 8, 44, 420


def draw_cache(drawing: Drawing, left: float, title: str) -> list[float]:
    """The pool with the blocks of the sequence. Returns the middle of each of them, in order."""
    drawing.text(left, 28, title, 14, "start", bold=True)
    drawing.text(left, 52, "KV cache: block ids, and the tokens of one sequence", 12, "start", GREY)
    for block in range(NUM_BLOCKS):
        fill, line, text = PAPER, GREY, ""
        if block in TABLE:
            fill, line = COLORS[TABLE.index(block)]
            text = TOKENS[TABLE.index(block)]
        x = left + block * STEP
        drawing.text(x + 20, 72, str(block), 11, color=GREY, mono=True)
        drawing.box(x, 82, 40, 30, text, fill, line, 12, dashed=block not in TABLE)
    return [left + block * STEP + 20 for block in TABLE]


def main() -> None:
    drawing = Drawing(2 * PANEL, 330, "Attention over scattered blocks: gather first, or read in place")
    llama = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    gib = 4096 * llama.block_bytes(1) / 2**30
    for panel, title in enumerate(("Gather, then attend", "Read the blocks in place")):
        left = 34 + panel * PANEL
        middles = draw_cache(drawing, left, title)
        for i, x in enumerate(middles):
            fill, line = COLORS[i]
            if panel == 0:
                to = left + 110 + i * 44 + 20
                drawing.line(x, 113, to, 168, line, arrow=True)
                drawing.box(left + 110 + i * 44, 170, 44, 30, TOKENS[i], fill, line, 12)
            else:
                to = left + 20 + i * 116 + 46
                drawing.line(x, 113, to, 168, line, arrow=True)
                drawing.box(left + 20 + i * 116, 170, 92, 30, "m, l, acc", fill, line, 12)
                if i < 2:
                    drawing.line(to + 47, 185, to + 69, 185, INK, arrow=True)
        if panel == 0:
            drawing.text(left + 254, 185, "a contiguous copy", 12, "start", GREY)
            drawing.line(left + 176, 201, left + 176, 228, INK, arrow=True)
            drawing.box(left + 96, 230, 160, 30, "softmax over all scores", size=12)
            passes, moved = "three passes: read the blocks, write the copy, read the copy", 3 * gib
        else:
            drawing.line(left + 298, 201, left + 298, 228, INK, arrow=True)
            drawing.box(left + 252, 230, 92, 30, "acc / l", size=12)
            drawing.text(left + 240, 245, "three running numbers", 12, "end", GREY)
            passes, moved = "one pass: read the blocks", gib
        drawing.text(left, 286, passes, 12, "start")
        drawing.text(left, 308, f"Llama-3-8B, 4,096 tokens: {moved:g} GiB for each new token", 12, "start")
    drawing.line(PANEL, 20, PANEL, 310, GREY, dashed=True)
    drawing.save()


if __name__ == "__main__":
    main()
