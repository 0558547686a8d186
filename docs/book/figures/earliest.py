"""Why every request finishes: a run of the real scheduler without a model, step by step."""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import SamplingParams

NUM_BLOCKS, NUM_STEPS, PROMPT = 7, 18, 7
OUTPUTS = {"A": 10, "B": 12, "C": 8}  # tokens of each request
CELL, LEFT, TOP, ROW = 18, 44, 62, 46


def main() -> None:
    scheduler, runner = make_scheduler(NUM_BLOCKS, block_size=4, enable_prefix_caching=False), NoModel()
    requests = []
    for name, num_output in OUTPUTS.items():
        request = make_request(name, list(range(PROMPT)), SamplingParams(max_tokens=num_output))
        scheduler.add(request)
        requests.append(request)
    drawing = Drawing(LEFT + NUM_STEPS * CELL + 16, 280, "Three requests in 7 blocks, step by step")
    drawing.text(16, 22, "three requests in 7 blocks", 14, "start", bold=True)
    drawing.text(16, TOP - 14, "step", 11, "start", GREY)
    for step in range(1, NUM_STEPS + 1):
        x = LEFT + (step - 1) * CELL
        drawing.text(x + CELL / 2, TOP - 14, str(step), 10, color=GREY)
        batch = scheduler.schedule()
        earliest = next(request for request in requests if not request.finished)
        for i, request in enumerate(requests):
            y, (fill, line) = TOP + i * ROW, COLORS[i]
            num_blocks = sum(len(seq.block_table) for seq in request.live)
            if request is earliest:
                drawing.box(x, y, CELL, 24, fill=line, line=line)
                drawing.text(x + CELL / 2, y + 12, str(num_blocks), 12, color=PAPER, bold=True)
            elif num_blocks:
                drawing.box(x, y, CELL, 24, str(num_blocks), fill, line, 12)
            elif not request.finished:
                drawing.box(x, y, CELL, 24, line=FAINT, dashed=True)
        for request, _ in batch.preempted:
            drawing.text(x + CELL / 2, TOP + requests.index(request) * ROW + 12, "×", 16, color="#cf222e")
        scheduler.update(batch, runner.execute(batch))
        if earliest.finished and not all(request.finished for request in requests):
            i = requests.index(earliest)
            drawing.line(x + CELL - 4, TOP + i * ROW + 26, x + CELL + 6, TOP + (i + 1) * ROW - 2, arrow=True)
            words = f"{earliest.request_id} has finished"
            drawing.text(x - 2, TOP + i * ROW + 34, words, 12, "end", GREY)
    for i, request in enumerate(requests):
        drawing.text(30, TOP + i * ROW + 12, request.request_id, 14, color=COLORS[i][1], bold=True)
    bottom = TOP + len(requests) * ROW + 2
    drawing.box(16, bottom, CELL, 18, fill=COLORS[0][1], line=COLORS[0][1])
    drawing.note(40, bottom + 9, "the earliest request")
    drawing.box(182, bottom, CELL, 18, fill=COLORS[1][0], line=COLORS[1][1])
    drawing.note(206, bottom + 9, "a later one")
    drawing.text(25, bottom + 35, "×", 16, color="#cf222e")
    drawing.note(40, bottom + 35, "preempted")
    drawing.box(182, bottom + 26, CELL, 18, line=FAINT, dashed=True)
    drawing.note(206, bottom + 35, "waiting")
    drawing.note(16, bottom + 61, "A number: the blocks that the request holds in this step.")
    drawing.save()


if __name__ == "__main__":
    main()
