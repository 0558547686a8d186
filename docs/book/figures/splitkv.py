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
    drawing = Drawing(820, 430, "Split-KV: partial results of three splits, combined by their log-sum-exp")
    keys = SPLIT * BLOCK_SIZE
    num_splits = len(TABLE) // SPLIT
    drawing.text(24, 30, "KV cache", anchor="start", bold=True)
    drawing.note(24, 48, "block id; scores of its keys")
    for block in range(8):
        x = 212 + 72 * block
        fill, line, text = PAPER, GREY, ""
        if block in TABLE:
            logical = TABLE.index(block)
            fill, line = COLORS[logical // SPLIT]
            text = ", ".join(map(str, SCORES[logical * BLOCK_SIZE :][:BLOCK_SIZE])).replace("-", "−")
        drawing.text(x + 32, 22, str(block), size=12, color=GREY, mono=True)
        drawing.box(x, 32, 64, 26, text, fill, line, dashed=block not in TABLE)

    drawing.text(24, 104, "Block table", anchor="start", bold=True)
    drawing.note(24, 122, "split by its entries")
    drawing.text(24, 180, "Programs", anchor="start", bold=True)
    drawing.note(24, 198, "run at the same time")
    drawing.text(24, 318, "Combine", anchor="start", bold=True)
    drawing.note(24, 336, "w = exp(lse − LSE)")
    lses, outs = [], []
    for split in range(num_splits):
        fill, line = COLORS[split]
        x = 212 + 200 * split
        for i in range(SPLIT):
            logical = split * SPLIT + i
            drawing.box(x + 48 + 40 * i, 98, 40, 26, str(TABLE[logical]), fill, line)
            drawing.line(x + 68 + 40 * i, 97, 244 + 72 * TABLE[logical], 60, line, arrow=True)
        lses.append(math.log(sum(math.exp(s) for s in SCORES[split * keys :][:keys])))
        outs.append(attend(TABLE[split * SPLIT :][:SPLIT], keys))
        drawing.line(x + 88, 125, x + 88, 160, line, arrow=True)
        drawing.box(x, 162, 176, 86, fill=fill, line=line)
        drawing.text(x + 88, 178, f"keys {split * keys} to {split * keys + keys - 1}", bold=True)
        drawing.text(x + 88, 200, "online softmax", size=12)
        drawing.text(x + 48, 228, f"out {outs[-1]:.3f}", mono=True)
        drawing.text(x + 130, 228, f"lse {lses[-1]:.3f}", mono=True)
    lse = math.log(sum(map(math.exp, lses)))
    weights = [math.exp(x - lse) for x in lses]
    for split, weight in enumerate(weights):
        x = 300 + 200 * split
        drawing.line(x, 249, 500 + 60 * (split - 1), 294, COLORS[split][1], arrow=True)
        middle = (x + 500 + 60 * (split - 1)) / 2
        drawing.text(
            middle + (-64, -44, 64)[split], 272, f"w = {weight:.3f}", color=COLORS[split][1], mono=True
        )
    drawing.box(300, 296, 400, 60)
    drawing.text(500, 314, f"LSE = ln Σ exp(lse) = {lse:.3f}", mono=True)
    total = " + ".join(f"{w:.3f}·{o:.3f}" for w, o in zip(weights, outs, strict=True))
    drawing.text(500, 338, f"out = {total}", size=12, mono=True)
    combined = sum(w * o for w, o in zip(weights, outs, strict=True))
    whole = attend(TABLE, len(SCORES))
    drawing.line(500, 357, 500, 380, INK, arrow=True)
    drawing.text(500, 396, f"{combined:.3f}", bold=True, mono=True)
    drawing.text(500, 414, f"one program over all {len(SCORES)} keys: {whole:.3f}", size=12, color=GREY)
    drawing.save()


if __name__ == "__main__":
    main()
