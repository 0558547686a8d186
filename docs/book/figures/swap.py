"""Swapping, out and in again: which blocks hold what, in a run of the real scheduler without a model."""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import SamplingParams
from nanopaged.scheduler import Scheduler

NUM_BLOCKS, SIZE, STEP, PANEL = 4, 30, 36, 96
DEVICE, HOST = 16, 224
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
        drawing.text(x + block_id * STEP + SIZE / 2, y + SIZE + 8, str(block_id), 10, color=GREY, mono=True)


def main() -> None:
    scheduler = make_scheduler(NUM_BLOCKS, block_size=4, enable_prefix_caching=False, preemption="swap")
    for name in "AB":
        scheduler.add(make_request(name, list(range(6)), SamplingParams(max_tokens=6)))
    drawing = Drawing(
        384, 352, "The blocks of the device and of the host before, during and after a preemption"
    )
    drawing.text(DEVICE, 22, "device", 12, "start", GREY)
    drawing.text(HOST, 22, "host", 12, "start", GREY)
    titles = {3: "no block is left", 4: "B is swapped out", 7: "B is back in other blocks"}
    runner, y = NoModel(), 66.0
    for step in range(1, 8):
        batch = scheduler.schedule()
        moves = batch.moves
        scheduler.update(batch, runner.execute(batch))
        if step not in titles:
            continue
        device, host = places(scheduler, block_size=4)
        x = 150 if moves.swap_in else DEVICE  # beside the arrows
        drawing.text(x, y - 18, f"step {step}: {titles[step]}", 12, "start", bold=True)
        draw_row(drawing, DEVICE, y, device)
        draw_row(drawing, HOST, y, host)
        # An arrow begins in the row above, where the block still holds what is copied.
        for pairs, from_x, to_x in ((moves.swap_out, DEVICE, HOST), (moves.swap_in, HOST, DEVICE)):
            for source, destination in pairs:
                x1, x2 = from_x + (source + 0.5) * STEP, to_x + (destination + 0.5) * STEP
                drawing.line(x1, y - PANEL + SIZE + 2, x2, y - 2, COLORS[1][1], arrow=True)
        y += PANEL
    drawing.note(DEVICE, 320, "B:4 is a block with the K/V of four tokens of B.")
    drawing.note(DEVICE, 338, "An arrow is a copy between device and host.")
    drawing.save()


if __name__ == "__main__":
    main()
