"""The decode kernel: its grid of programs, and one tile of keys whose blocks lie anywhere in the KV cache.

    python docs/book/figures/grid.py

The sequences and splits are those of docs/experiments/interpreted.py (4 cuts); the block tables are random.
"""

from __future__ import annotations

import random

from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

KEYS = {"A": 5, "B": 37, "C": 300}
KV_HEADS, CUTS, MIN_SPLIT, TILE, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 128, 64, 16, 28
SPLIT_KEYS = -(-sum(KEYS.values()) // (CUTS * MIN_SPLIT)) * MIN_SPLIT  # as in `split_contexts`
SEQ, HEAD, FIRST_KEY, TILE_NUMBER = "C", 1, 128, 3  # the program, and the tile, that the lower half shows
LEFT, CELL, ROW, BLOCK = 24, 132, 28, 40


def main() -> None:
    drawing = Drawing(
        820, 500, "The grid of the decode kernel, and a tile of keys that spans four scattered blocks"
    )
    chosen = draw_grid(drawing)
    free = random.Random(176).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = {name: [free.pop() for _ in range(-(-n // BLOCK_SIZE))] for name, n in KEYS.items()}
    draw_tile(drawing, tables, chosen)
    drawing.save()


def draw_grid(drawing: Drawing) -> tuple[float, float]:
    """A cell for each program, with its keys. Returns the middle of the lower edge of the chosen one."""
    splits = [
        (name, first, min(first + SPLIT_KEYS, n))
        for name, n in KEYS.items()
        for first in range(0, n, SPLIT_KEYS)
    ]
    drawing.text(LEFT, 24, "Grid", anchor="start", bold=True)
    sizes = f"{len(splits)} splits × {KV_HEADS} KV heads = {len(splits) * KV_HEADS} programs"
    drawing.text(LEFT + 46, 24, f"{sizes}; a cell shows its keys", 12, "start", GREY)
    for head in range(KV_HEADS):
        drawing.text(LEFT, 74 + (head + 0.5) * ROW, f"KV head {head}", 12, "start", GREY)
    chosen = (0.0, 0.0)
    for number, (name, first, end) in enumerate(splits):
        i = list(KEYS).index(name)
        fill, line = COLORS[i]
        x = LEFT + 66 + number * CELL + i * 22
        if first == 0:
            width = CELL * sum(each == name for each, _, _ in splits)
            drawing.text(x + width / 2, 46, f"sequence {name}: {KEYS[name]} keys", 12, bold=True)
        drawing.text(x + CELL / 2, 64, f"split {number}", 11, color=GREY)
        for head in range(KV_HEADS):
            y, here = 74 + head * ROW, (name, head, first) == (SEQ, HEAD, FIRST_KEY)
            drawing.box(x, y, CELL, ROW, f"{first}–{end - 1}", fill, INK if here else line, size=11)
            if here:
                drawing.box(x + 1.5, y + 1.5, CELL - 3, ROW - 3, "", "none", INK)
                chosen = (x + CELL / 2, y + ROW)
    return chosen


def draw_tile(drawing: Drawing, tables: dict[str, list[int]], chosen: tuple[float, float]) -> None:
    table, per_tile = tables[SEQ], TILE // BLOCK_SIZE
    entries = range(TILE_NUMBER * per_tile, (TILE_NUMBER + 1) * per_tile)
    fill, line = COLORS[list(KEYS).index(SEQ)]

    drawing.text(LEFT, 166, f"Block table of {SEQ}", anchor="start", bold=True)
    drawing.text(LEFT + 128, 166, f"blocks of {BLOCK_SIZE} keys; tiles of {TILE}", 12, "start", GREY)
    for i, block in enumerate(table):
        inside = i in entries
        drawing.box(
            LEFT + i * BLOCK, 200, BLOCK, 26, str(block), fill if inside else PAPER, line if inside else FAINT
        )
    for tile in range(FIRST_KEY // TILE, (FIRST_KEY + SPLIT_KEYS) // TILE):
        x = LEFT + tile * per_tile * BLOCK
        drawing.box(x, 198, per_tile * BLOCK, 30, "", "none", INK)
        drawing.text(
            x + per_tile * BLOCK / 2, 188, f"tile {tile}: keys {tile * TILE}–{tile * TILE + TILE - 1}", 11
        )
    drawing.line(*chosen, LEFT + (FIRST_KEY + SPLIT_KEYS / 2) / BLOCK_SIZE * BLOCK, 178, INK, arrow=True)

    drawing.text(LEFT, 274, "KV cache", anchor="start", bold=True)
    drawing.text(LEFT + 78, 274, "blocks of all sequences, in any order", 12, "start", GREY)
    width = 772 / NUM_BLOCKS
    owners = {block: name for name, blocks in tables.items() for block in blocks}
    for block in range(NUM_BLOCKS):
        x = LEFT + block * width
        color = COLORS[list(KEYS).index(owners[block])] if block in owners else (PAPER, FAINT)
        inside = block in [table[i] for i in entries]
        drawing.box(
            x, 306, width, 30, "", color[0] if inside else PAPER, color[1], dashed=block not in owners
        )
        drawing.text(x + width / 2, 321, str(block), 11, color=INK if inside else GREY)
    left = LEFT + 772 / 2 - 2 * 110
    drawing.text(LEFT, 424, "Tile", anchor="start", bold=True)
    for number, i in enumerate(entries):
        x = LEFT + (table[i] + 0.5) * width
        drawing.line(LEFT + (i + 0.5) * BLOCK, 229, x, 303, line, arrow=True)
        drawing.line(x, 337, left + (number + 0.5) * 110, 405, line, arrow=True)
        first = i * BLOCK_SIZE
        drawing.box(left + number * 110, 408, 110, 32, f"{first}–{first + BLOCK_SIZE - 1}", fill, line, 12)
    words = (
        f"{TILE} keys of KV head {HEAD}, loaded at once and multiplied with all query heads that share it;"
    )
    drawing.text(410, 460, words, 12)
    words = "the program keeps m, l and acc from tile to tile, and writes out and LSE after its last tile"
    drawing.text(410, 478, words, 12)


if __name__ == "__main__":
    main()
