"""One step of a beam search: block tables and blocks before and after, as in the paper's Figure 9.

    python docs/book/figures/beams.py

The block manager forks the parents and frees the old beams.
"""

from __future__ import annotations

from runs import make_request
from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Sample, Sequence

TABLES = ([0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8])
PARENTS = (1, 1, 2, 2)  # of the next beams
SIDE, LEFT, RIGHT, TOP, POOL, WIDTH = 25, 58, 276, 44, 204, 416


def main() -> None:
    manager, before = BlockManager(num_blocks=13, block_size=1), []
    manager.free_ids = [12, 11, 10, 9]
    for table in TABLES:
        beam = make_request("", list(table), SamplingParams(max_tokens=9)).live[0]
        beam.block_table, beam.num_computed_tokens = list(table), len(table)
        for block_id in table:
            manager.blocks[block_id].ref_count += 1
        before.append(beam)
    drawing = Drawing(WIDTH, 306, "Block tables of four beams before and after a step of a beam search")
    draw(drawing, LEFT, "four beams", before, PARENTS)
    counts = [block.ref_count for block in manager.blocks]

    after = [manager.fork(before[parent], i) for i, parent in enumerate(PARENTS)]
    for beam in before:
        manager.free(beam)
    freed = set(manager.free_ids) - {9, 10, 11, 12}
    manager.free_ids = [*sorted(freed), 12, 11, 10, 9]
    for beam in after:
        beam.append(Sample(token_id=50, logprob=-1.0))
    copies = manager.append_slots(after)
    assert copies == [], "the last blocks were full"
    draw(drawing, RIGHT, "the next four", after, (0, 1, 2, 3))
    for i, parent in enumerate(PARENTS):
        color = COLORS[parent][1]
        drawing.line(LEFT + 4 * SIDE + 6, row(parent), RIGHT - 54, row(i), color, arrow=True, width=2)
    drawing.note(LEFT, POOL, "the blocks, and how many tables point to each")
    pool(drawing, "before", POOL + 14, counts, set())
    pool(drawing, "after", POOL + 52, [block.ref_count for block in manager.blocks], freed)
    drawing.save()


def row(i: int) -> float:
    return TOP + 35 * i + SIDE / 2


def draw(drawing: Drawing, left: float, title: str, beams: list[Sequence], parents: tuple[int, ...]) -> None:
    """The tables of the beams; a colour is a beam that has children, or their parent."""
    drawing.text(left, 24, title, 14, "start", bold=True)
    for i, beam in enumerate(beams):
        color = (
            COLORS[PARENTS[i]] if len(beam.block_table) > 4 else COLORS[i] if i in parents else (PAPER, GREY)
        )
        drawing.text(left - 6, row(i), f"beam {i}", 11, "end", color[1], bold=True)
        for place, block_id in enumerate(beam.block_table):
            drawing.box(left + SIDE * place, row(i) - SIDE / 2, SIDE, SIDE, str(block_id), *color, 12)


def pool(drawing: Drawing, name: str, y: float, counts: list[int], freed: set[int]) -> None:
    """The blocks 0 to 12: the number, and below it how many tables have it."""
    drawing.text(LEFT - 6, y + 16, name, 11, "end", GREY)
    for block_id, count in enumerate(counts):
        x = LEFT + SIDE * block_id
        fill = "#eef0f2" if count else PAPER
        drawing.box(x, y, SIDE - 2, 32, "", fill, GREY if count else FAINT, dashed=block_id in freed)
        drawing.text(x + SIDE / 2 - 1, y + 10, str(block_id), 12, color=INK if count else GREY, bold=True)
        drawing.text(x + SIDE / 2 - 1, y + 23, str(count) if count else "free", 10, color=GREY)


if __name__ == "__main__":
    main()
