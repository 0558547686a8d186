"""Drawings as SVG: boxes, text and arrows on a light card, so that they read well on light and dark pages.

The scripts beside this file draw the figures of the book with it. Each writes the file of its own name:

    python docs/book/figures/NAME.py

The same script writes the same bytes on every machine, and a test compares them with the file that is there.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape, unescape
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(
    str(HERE.parents[1] / "experiments")
)  # for the scripts that run the scheduler without a model
INK, GREY, FAINT, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
# Requests A, B, C, …: (fill, line).
COLORS = [
    ("#cfe2ff", "#0b5cad"),
    ("#ffe3b3", "#9a5b00"),
    ("#d3f0d0", "#1a7f37"),
    ("#f9d6e8", "#a01c61"),
    ("#e3d9fb", "#6639ba"),
    ("#d2f1f0", "#0a7070"),
]


class Drawing:
    """A picture of `width` × `height` units, which are pixels at 100 %. y grows downwards.

    Args:
        title: read aloud by screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        fill: str = PAPER,
        line: str = GREY,
        size: float = 13,
        dashed: bool = False,
    ) -> None:
        """A rectangle from its upper left corner, with text in its middle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{line}"{dash}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text, size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        anchor: str = "middle",
        color: str = INK,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """One line of text. x is its `anchor`: "start", "middle" or "end"; y is the middle of the line."""
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}{family}>{escape(text)}</text>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str = GREY,
        arrow: bool = False,
        width: float = 1.3,
        dashed: bool = False,
    ) -> None:
        """A line from (x1, y1) to (x2, y2), with a point at its end if it is an arrow."""
        head = ' marker-end="url(#head)"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="{width:g}"{head}{dash}/>'
        )

    def note(self, x: float, y: float, text: str) -> None:
        """A line of explanation, from x on."""
        self.text(x, y, text, 12, "start", GREY)

    def save(self) -> None:
        """Write the file with the name of the running script, beside it; in Chinese, to docs/zh/figures."""
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" '
            'font-family="system-ui, Segoe UI, Roboto, Noto Sans, Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            head,
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" '
            f'fill="{PAPER}" stroke="{FAINT}"/>',
            *self.parts,
            "</svg>",
        ]
        svg = "\n".join(lines) + "\n"
        name = Path(sys.argv[0]).stem + ".svg"
        (HERE / name).write_text(svg, encoding="utf-8")
        (HERE.parents[1] / "zh" / "figures" / name).write_text(in_chinese(svg), encoding="utf-8")


def in_chinese(svg: str) -> str:
    """A figure with the labels of chinese.json, in which {} is a number; both languages have the same order.

    Raises:
        KeyError: a label is not in the file.
    """
    groups = json.loads((HERE / "chinese.json").read_text(encoding="utf-8"))
    labels = {label: label for label in groups.pop("as in English")}
    for group in groups.values():
        labels |= group

    def translate(found: re.Match[str]) -> str:
        label = unescape(found[0])
        number = r"\d+(?:[.,]\d+)*"
        pattern = re.sub(number, "{}", label)
        if pattern not in labels and not re.search("[A-Za-z]{2}", label):  # a name, or a number
            return found[0]
        return escape(labels[pattern].format(*re.findall(number, label)))

    svg = svg.replace("<svg ", '<svg lang="zh" ', 1)  # the glyphs are those of Chinese, and not of Japanese
    return re.sub(r"(?<=>)[^<>\n]+(?=</(?:text|title)>)", translate, svg)
