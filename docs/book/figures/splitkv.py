"""Split-KV: three programs read parts of one context at the same time, and their results are combined.

    python docs/book/figures/splitkv.py

The partial outputs are those of `reference_paged_attention` over a part of the block table.
"""

from __future__ import annotations

import math

import torch
from svg import COLORS, GREY, INK, PAPER, Drawing

from nanopaged.attention.reference_backend import reference_paged_attention

BLOCK_SIZE, SPLIT = 2, 2  # slots in a block, blocks in a split
TABLE = [5, 2, 7, 0, 4, 1]
SCORES = [-1, 1, 0, 2, 1, 3, 0, 1, 2, 2, 0, -1]
VALUES = [4, 3, 2, 1, 2, 5, 1, 3, 4, 2, 1, 3]
LEFT = 16
QUERY = torch.tensor([[2.0, 0, 0, 0]])  # with a scale of 1/√4 the score of a key is its first number


def attend(block_table: list[int], num_keys: int) -> float:
    """The first number of the output of the query over these blocks."""
    caches = torch.full((2, 8, 1, BLOCK_SIZE, 4), math.nan)
    for token, (score, value) in enumerate(zip(SCORES, VALUES, strict=True)):
        block, offset = TABLE[token // BLOCK_SIZE], token % BLOCK_SIZE
        caches[0, block, 0, offset] = torch.tensor([score, 0, 0, 0])
        caches[1, block, 0, offset] = value
    return reference_paged_attention(QUERY, *caches, block_table, num_keys, 0.5)[0, 0].item()


def main() -> None:
    drawing = Drawing(420, 466, "Split-KV: partial results of three splits, combined by their log-sum-exp")
    keys = SPLIT * BLOCK_SIZE
    num_splits = len(TABLE) // SPLIT
    drawing.note(LEFT, 18, "KV cache: block ids, and the scores of the keys. Below:")
    drawing.note(LEFT, 36, "the block table, and three programs that run at the same time")
    for block in range(8):
        fill, line, text = PAPER, GREY, ""
        if block in TABLE:
            logical = TABLE.index(block)
            fill, line = COLORS[logical // SPLIT]
            text = ", ".join(map(str, SCORES[logical * BLOCK_SIZE :][:BLOCK_SIZE])).replace("-", "−")
        drawing.text(block_x(block), 58, str(block), 11, color=GREY, mono=True)
        drawing.box(block_x(block) - 22, 66, 45, 26, text, fill, line, 12, dashed=block not in TABLE)

    lses, outs = [], []
    for split in range(num_splits):
        fill, line = COLORS[split]
        middle = LEFT + 60 + 134 * split
        for i in range(SPLIT):
            logical = split * SPLIT + i
            drawing.box(middle - 36 + 36 * i, 150, 36, 26, str(TABLE[logical]), fill, line)
            drawing.line(middle - 18 + 36 * i, 149, block_x(TABLE[logical]), 94, line, arrow=True)
        lses.append(math.log(sum(math.exp(s) for s in SCORES[split * keys :][:keys])))
        outs.append(attend(TABLE[split * SPLIT :][:SPLIT], keys))
        drawing.line(middle, 177, middle, 200, line, arrow=True)
        drawing.box(middle - 60, 202, 120, 80, fill=fill, line=line)
        drawing.text(middle, 218, f"keys {split * keys} to {split * keys + keys - 1}", bold=True)
        drawing.text(middle, 242, f"out {outs[-1]:.3f}", mono=True)
        drawing.text(middle, 264, f"lse {lses[-1]:.3f}", mono=True)
    lse = math.log(sum(map(math.exp, lses)))
    for split, one in enumerate(lses):
        middle = LEFT + 60 + 134 * split
        drawing.line(middle, 283, middle, 330, COLORS[split][1], arrow=True)
        drawing.text(middle + 8, 304, f"w = {math.exp(one - lse):.3f}", 12, "start", COLORS[split][1])
    drawing.box(LEFT, 332, 388, 56)
    drawing.text(210, 348, f"LSE = ln Σ exp(lse) = {lse:.3f},  w = exp(lse − LSE)", 12)
    weights = [math.exp(x - lse) for x in lses]
    total = " + ".join(f"{w:.3f}·{o:.3f}" for w, o in zip(weights, outs, strict=True))
    drawing.text(210, 370, f"out = {total}", 12)
    combined = sum(w * o for w, o in zip(weights, outs, strict=True))
    whole = attend(TABLE, len(SCORES))
    drawing.line(210, 389, 210, 410, INK, arrow=True)
    drawing.text(210, 426, f"{combined:.3f}", 14, bold=True, mono=True)
    drawing.text(210, 448, f"one program over all {len(SCORES)} keys: {whole:.3f}", 12, color=GREY)
    drawing.save()


def block_x(block: int) -> float:
    """The middle of a block of the KV cache."""
    return LEFT + 22 + 49 * block


if __name__ == "__main__":
    main()
