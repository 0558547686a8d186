"""The online softmax, block after block: the running maximum, sum and output after each.

    python docs/book/figures/online_softmax.py

The first two blocks are the example of docs/book/05-attention.md, and the outputs those of the reference
backend.
"""

from __future__ import annotations

import math

import torch
from svg import COLORS, INK, Drawing

from nanopaged.attention.reference_backend import reference_paged_attention

TABLE = [2, 0, 1]
SCORES, VALUES = [-1, 1, 0, 2, 1, 0], [4, 3, 2, 1, 5, 2]
QUERY = torch.tensor([[2.0, 0, 0, 0]])  # with a scale of 1/√4 the score of a key is its first number
LEFT, STEP, WIDTH = 190, 226, 148


def output(num_keys: int) -> float:
    """The first number of the reference backend's output over the first keys."""
    caches = torch.full((2, 3, 1, 2, 4), math.nan)
    for token, (score, value) in enumerate(zip(SCORES, VALUES, strict=True)):
        block, offset = TABLE[token // 2], token % 2
        caches[0, block, 0, offset] = torch.tensor([score, 0, 0, 0])
        caches[1, block, 0, offset] = value
    return reference_paged_attention(QUERY, *caches, TABLE, num_keys, 0.5)[0, 0].item()


def numbers(x: list[int]) -> str:
    return ",  ".join(map(str, x)).replace("-", "−")


def main() -> None:
    drawing = Drawing(820, 330, "The online softmax: maximum, sum and weighted sum after each block")
    rows = {
        42: "block",
        74: "scores s",
        100: "values v",
        182: "m",
        208: "l",
        234: "acc",
        280: "output, acc / l",
    }
    for y, text in rows.items():
        drawing.text(24, y, text, 13, "start", bold=text in ("block", "output, acc / l"))
    notes = {182: "largest score", 208: "Σ exp(s − m)", 234: "Σ exp(s − m) · v"}
    for y, text in notes.items():
        drawing.note(58, y, text)
    m, l, acc = -math.inf, 0.0, 0.0
    for i, block in enumerate(TABLE):
        fill, line = COLORS[i]
        x = LEFT + i * STEP
        scores, values = SCORES[2 * i : 2 * i + 2], VALUES[2 * i : 2 * i + 2]
        drawing.box(x, 24, WIDTH, 96, fill=fill, line=line)
        drawing.text(x + WIDTH / 2, 42, str(block), bold=True)
        drawing.text(x + WIDTH / 2, 74, numbers(scores), mono=True)
        drawing.text(x + WIDTH / 2, 100, numbers(values), mono=True)
        m_new = max(m, *scores)
        p = [math.exp(s - m_new) for s in scores]
        rescale = math.exp(m - m_new)
        l = l * rescale + sum(p)
        acc = acc * rescale + sum(w * v for w, v in zip(p, values, strict=True))
        m = m_new
        drawing.line(x + WIDTH / 2, 121, x + WIDTH / 2, 162, line, arrow=True)
        drawing.box(x, 164, WIDTH, 86, line=line)
        for y, text in ((182, f"{m:g}"), (208, f"{l:.4f}"), (234, f"{acc:.4f}")):
            drawing.text(x + WIDTH / 2, y, text, mono=True)
        if i:
            drawing.line(x - STEP + WIDTH + 1, 221, x - 2, 221, INK, arrow=True)
            drawing.text(x - (STEP - WIDTH) / 2, 208, f"× {rescale:.4g}", 12)
        out = output(2 * i + 2)
        assert math.isclose(out, acc / l, rel_tol=1e-6)
        drawing.text(x + WIDTH / 2, 280, f"{out:.4f}", bold=True, mono=True)
    drawing.note(24, 310, "× is the rescale factor exp(m − m'): 1 if the block does not raise the maximum.")
    drawing.save()


if __name__ == "__main__":
    main()
