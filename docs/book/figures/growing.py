"""One request grows token by token, as the scheduler and the block manager serve it next to another one.

python docs/book/figures/growing.py
"""

from __future__ import annotations

from collections.abc import Iterable

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import SamplingParams

WORDS = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought"]
SIZE, NUM_BLOCKS = 4, 6
SLOT, PITCH, LEFT, TOP, FRAME = 14, 62, 12, 12, 132  # pixels: of a slot, from a block to the next, …
CAPTIONS = [
    "The six tokens of the prompt take two free blocks.",
    "Token 6 goes into the next slot. The table stays.",
    "Token 7 fills the second block.",
    "Token 8 has no slot, so the table gets block 5.",
    "The request has ended, and its blocks are free.",
]


def main() -> None:
    scheduler, runner = make_scheduler(NUM_BLOCKS, SIZE, enable_prefix_caching=False), NoModel()
    drawing = Drawing(390, TOP + FRAME * len(CAPTIONS), "One request grows token by token")
    # The first two end after one step, and leave free blocks on both sides of B's.
    for name, num_prompt, num_output in (("1", 7, 1), ("2", 3, 1), ("B", 5, 9), ("A", 6, 4)):
        if name == "A":
            batch = scheduler.schedule()
            scheduler.update(batch, runner.execute(batch))
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        scheduler.add(make_request(name, [0] * num_prompt, params))
    for frame, caption in enumerate(CAPTIONS):
        batch = scheduler.schedule()
        y = TOP + FRAME * frame
        drawing.text(LEFT, y + 8, f"{frame + 1}", anchor="start", bold=True)
        drawing.text(LEFT + 16, y + 8, caption, anchor="start")
        if len(batch.sequences) == 1:
            drawing.text(LEFT, y + 54, "block table: empty", 11, "start", GREY)
        for block_id in scheduler.block_manager.free_ids:
            draw_block(drawing, block_id, y, [], PAPER, FAINT)
        for seq in batch.sequences:
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            for i, block_id in enumerate(seq.block_table):
                positions = range(i * SIZE, min(end, (i + 1) * SIZE))
                if seq.request.request_id == "B":
                    draw_block(drawing, block_id, y, [""] * len(positions), FAINT, GREY)
                else:
                    draw_block(drawing, block_id, y, positions, *COLORS[0])
                    draw_entry(drawing, i, block_id, y, positions)
        scheduler.update(batch, runner.execute(batch))
    drawing.save()


def draw_block(
    drawing: Drawing, block_id: int, y: float, positions: Iterable[object], fill: str, line: str
) -> None:
    """A physical block, with the positions of its tokens."""
    x = LEFT + PITCH * block_id
    labels = list(map(str, positions))
    for slot in range(SIZE):
        text, color = (labels[slot], fill) if slot < len(labels) else ("", PAPER)
        drawing.box(x + SLOT * slot, y + 88, SLOT, 18, text, color, line, 10)
    drawing.text(x + SLOT * SIZE / 2, y + 114, f"block {block_id}", 10, color=GREY)


def draw_entry(drawing: Drawing, i: int, block_id: int, y: float, positions: range) -> None:
    """A logical block with its words, its entry of the block table, and an arrow to the physical block."""
    x, (fill, line) = LEFT + 122 * i, COLORS[0]
    drawing.box(x, y + 20, 120, 20, " ".join(WORDS[position] for position in positions), fill, line, 10)
    if i == 0:
        drawing.text(x, y + 54, "block table", 11, "start", GREY)
    drawing.box(x + 66, y + 44, 26, 20, str(block_id), PAPER, line, 12)
    drawing.line(x + 79, y + 64, LEFT + PITCH * block_id + SLOT * SIZE / 2, y + 86, line, arrow=True)


if __name__ == "__main__":
    main()
