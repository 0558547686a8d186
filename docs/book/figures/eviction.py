"""A small pool at six times: blocks in use, cached blocks in the order of their eviction, and free ones.

    python docs/book/figures/eviction.py

The requests are those of docs/book/06-prefix-cache.md, in the real scheduler.
"""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from shared_prefix import PROMPTS, SIZE
from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import SamplingParams
from nanopaged.snapshot import Snapshot, take_snapshot

NUM_BLOCKS, LEFT, TOP, ROW, BOX = 8, 20, 42, 74, 44
CACHED = ("#e7ebef", GREY)
EVENTS = [  # requests that arrive (none: those that run go on to their ends), and what happens
    (PROMPTS, "A, B and C run; B and C find block 0"),
    ({}, "All have ended: their full blocks are cached"),
    ({"D": list(range(31, 52))}, "D takes four free blocks, then evicts two"),
    ({}, "D has ended"),
    ({"A": PROMPTS["A"]}, "A again: finds block 0, takes block 1, evicts block 3"),
    ({}, "A has ended: block 0 is now the last to be evicted"),
]


def main() -> None:
    scheduler, runner = make_scheduler(num_blocks=NUM_BLOCKS, block_size=SIZE), NoModel()
    drawing = Drawing(420, TOP + ROW * len(EVENTS) + 42, "A pool with a prefix cache at six times")
    for block_id in range(NUM_BLOCKS):
        name = str(block_id) if block_id else "block 0"
        drawing.text(box_x(block_id) + BOX / 2, 20, name, 12, color=GREY)
    before = take_snapshot(0, scheduler, [])
    for row, (prompts, text) in enumerate(EVENTS):
        requests = [make_request(name, ids, SamplingParams(max_tokens=3)) for name, ids in prompts.items()]
        for request in requests:
            scheduler.add(request)
        while True:
            scheduler.update(batch := scheduler.schedule(), runner.execute(batch))
            if prompts or not scheduler.running:
                break
        now = take_snapshot(row, scheduler, scheduler.running)
        y = TOP + ROW * row
        drawing.text(LEFT, y + 8, f"{row + 1}", 14, "start", bold=True)
        drawing.text(LEFT + 18, y + 8, text, 13, "start")
        draw_pool(drawing, y + 22, before, now)
        before = now
    y = TOP + ROW * len(EVENTS) + 6
    drawing.note(LEFT, y, "Letters: in use by these requests. Empty: free.")
    drawing.note(LEFT, y + 18, "Numbers: cached; number 1 is the next to be evicted.")
    drawing.save()


def box_x(block_id: int) -> float:
    return LEFT + block_id * (BOX + 4)


def draw_pool(drawing: Drawing, y: float, before: Snapshot, now: Snapshot) -> None:
    """A box for each block, and below it what has just happened to a cached or a shared one."""
    users: dict[int, list[str]] = {block.block_id: [] for block in now.blocks}
    for request in now.requests:
        for block_id in request.sequences[0].block_table:
            users[block_id].append(request.request_id)
    for block in now.blocks:
        names = users[block.block_id]
        text, style = " ".join(names), (PAPER, FAINT)
        if len(names) > 1:
            style = COLORS[4]
        elif names:
            style = COLORS["ABCD".index(names[0])]
        elif block.state == "cached":
            text, style = str(now.cached.index(block.block_id) + 1), CACHED
        x = box_x(block.block_id)
        drawing.box(x, y, BOX, 26, text, *style)
        was = before.blocks[block.block_id]
        if names and (len(names) > 1 or was.state == "cached"):
            kept = was.key in (None, block.key)
            mark, color = ("hit", COLORS[2][1]) if kept else ("evicted", COLORS[3][1])
            drawing.text(x + BOX / 2, y + 35, mark, 11, color=color, bold=True)


if __name__ == "__main__":
    main()
