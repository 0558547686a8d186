"""The online softmax, block after block: the running maximum, sum and output after each.

    python docs/book/figures/online_softmax.py

The first two blocks are the example of docs/book/05-attention.md, and the outputs those of the reference
backend.
"""

from __future__ import annotations

import math

import torch
from svg import COLORS, GREY, INK, Drawing

from nanopaged.attention.reference_backend import reference_paged_attention

TABLE = [2, 0, 1]
SCORES, VALUES = [-1, 1, 0, 2, 1, 0], [4, 3, 2, 1, 5, 2]
QUERY = torch.tensor([[2.0, 0, 0, 0]])  # with a scale of 1/√4 the score of a key is its first number
TOP, STEP = 18, 118


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
    drawing = Drawing(420, 392, "The online softmax: maximum, sum and weighted sum after each block")
    m, l, acc = -math.inf, 0.0, 0.0
    for i in range(len(TABLE)):
        fill, line = COLORS[i]
        y = TOP + i * STEP
        scores, values = SCORES[2 * i : 2 * i + 2], VALUES[2 * i : 2 * i + 2]
        drawing.box(16, y, 138, 74, fill=fill, line=line)
        drawing.text(85, y + 14, f"block {i}", bold=True)
        drawing.text(24, y + 37, "scores", anchor="start")
        drawing.text(24, y + 58, "values", anchor="start")
        drawing.text(146, y + 37, numbers(scores), anchor="end", mono=True)
        drawing.text(146, y + 58, numbers(values), anchor="end", mono=True)
        m_new = max(m, *scores)
        p = [math.exp(s - m_new) for s in scores]
        rescale = math.exp(m - m_new)
        l = l * rescale + sum(p)
        acc = acc * rescale + sum(w * v for w, v in zip(p, values, strict=True))
        m = m_new
        drawing.line(155, y + 37, 182, y + 37, line, arrow=True)
        drawing.box(184, y, 122, 74, line=line)
        for below, (name, number) in enumerate([("m", f"{m:g}"), ("l", f"{l:.4f}"), ("acc", f"{acc:.4f}")]):
            drawing.text(194, y + 15 + 22 * below, name, anchor="start")
            drawing.text(296, y + 15 + 22 * below, number, anchor="end", mono=True)
        if i:
            drawing.line(245, y - STEP + 75, 245, y - 2, INK, arrow=True)
            drawing.text(254, y - 22, f"l, acc × {rescale:.4g}", 12, "start")
        out = output(2 * i + 2)
        assert math.isclose(out, acc / l, rel_tol=1e-6)
        drawing.line(307, y + 37, 332, y + 37, line, arrow=True)
        drawing.text(372, y + 25, "acc / l", 12, color=GREY)
        drawing.text(372, y + 44, f"{out:.4f}", bold=True, mono=True)
    drawing.note(16, 358, "× is the rescale factor exp(m − m').")
    drawing.note(16, 376, "It is 1 if the block does not raise the maximum.")
    drawing.save()


if __name__ == "__main__":
    main()
