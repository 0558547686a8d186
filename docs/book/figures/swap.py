"""Swapping, out and in again: which blocks hold what, in a run of the real scheduler without a model."""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import SamplingParams
from nanopaged.scheduler import Scheduler

NUM_BLOCKS, SIZE, STEP, PANEL = 4, 36, 42, 206
Places = dict[int, tuple[str, int]]  # block → the request whose K/V it holds, and how many slots of it


def places(scheduler: Scheduler, block_size: int) -> tuple[Places, Places]:
    """What the blocks of the device and of the host hold."""
    device: Places = {}
    host: Places = {}
    for request in [*scheduler.running, *scheduler.waiting]:
        for seq in request.live:
            for table, found in ((seq.block_table, device), (seq.host_table, host)):
                for i, block_id in enumerate(table):
                    filled = min(block_size, seq.num_computed_tokens - i * block_size)
                    found[block_id] = (request.request_id, filled)
    return device, host


def draw_row(drawing: Drawing, x: float, y: float, held: Places) -> None:
    """The blocks, side by side."""
    for block_id in range(NUM_BLOCKS):
        name, filled = held.get(block_id, ("", 0))
        fill, line = COLORS["AB".index(name)] if name else (PAPER, FAINT)
        text = f"{name}:{filled}" if name else ""
        drawing.box(x + block_id * STEP, y, SIZE, SIZE, text, fill, line, 12)
        drawing.text(x + block_id * STEP + SIZE / 2, y - 8, str(block_id), 10, color=GREY, mono=True)


def main() -> None:
    scheduler = make_scheduler(NUM_BLOCKS, block_size=4, enable_prefix_caching=False, preemption="swap")
    for name in "AB":
        scheduler.add(make_request(name, list(range(6)), SamplingParams(max_tokens=6)))
    drawing = Drawing(
        676, 268, "The blocks of the device and of the host before, during and after a preemption"
    )
    for y, text in ((84, "device"), (192, "host")):
        drawing.text(58, y + SIZE / 2, text, 12, "end", GREY)
    titles = {3: "no block is left", 4: "B is out, A has its block 2", 7: "B is back, in other blocks"}
    runner, x = NoModel(), 70.0
    for step in range(1, 8):
        batch = scheduler.schedule()
        moves = batch.moves
        scheduler.update(batch, runner.execute(batch))
        if step not in titles:
            continue
        device, host = places(scheduler, block_size=4)
        drawing.text(x, 24, f"after step {step}", 13, "start", bold=True)
        drawing.note(x, 44, titles[step])
        draw_row(drawing, x, 84, device)
        draw_row(drawing, x, 192, host)
        # An arrow begins in the panel before, where the block still holds what is copied.
        for pairs, begin, end, side in ((moves.swap_out, 122, 174, -8), (moves.swap_in, 174, 122, 8)):
            for source, destination in pairs:
                at, to = (block_id * STEP + SIZE / 2 for block_id in (source, destination))
                shift_at, shift_to = (0, side) if side < 0 else (side, 0)  # beside each other at the host
                drawing.line(
                    x - PANEL + at + shift_at, begin, x + to + shift_to, end, COLORS[1][1], arrow=True
                )
        if step > 3:
            drawing.text(x - PANEL / 2 + (-12 if moves.swap_out else 96), 158, f"step {step}", 12, color=GREY)
        x += PANEL
    note = "B:4 is a block with the K/V of four tokens of B. An arrow is a copy, to where it is afterwards."
    drawing.note(70, 248, note)
    drawing.save()


if __name__ == "__main__":
    main()
