"""Static and continuous batching of the same eight requests, four at once, step by step.

The lower half is a run of the real scheduler without a model. The upper half is computed from the same
lengths.
"""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, FAINT, GREY, Drawing

from nanopaged import SamplingParams

OUTPUTS = {"A": 3, "B": 12, "C": 5, "D": 7, "E": 9, "F": 4, "G": 10, "H": 6}  # tokens that each generates
AT_ONCE = 4
WIDTH, HEIGHT, LEFT, GAP = 15, 17, 52, 3

Rows = dict[str, list[str]]  # request → in each step "prefill", "decode", "idle", or "" while it is not there


def static_batching() -> Rows:
    """Batches of four. A batch begins when the one before it is done, and runs until its longest text is."""
    rows: Rows = {name: [] for name in OUTPUTS}
    names = list(OUTPUTS)
    for first in range(0, len(names), AT_ONCE):
        batch = names[first : first + AT_ONCE]
        longest = max(OUTPUTS[name] for name in batch)
        for name in names:
            own = ["prefill"] + ["decode"] * (OUTPUTS[name] - 1)
            rows[name] += own + ["idle"] * (longest - len(own)) if name in batch else [""] * longest
    return rows


def continuous_batching() -> Rows:
    """What the scheduler does with the same requests."""
    scheduler = make_scheduler(
        num_blocks=100, block_size=4, max_num_seqs=AT_ONCE, enable_prefix_caching=False
    )
    for name, length in OUTPUTS.items():
        scheduler.add(make_request(name, list(range(6)), SamplingParams(max_tokens=length)))
    runner, rows = NoModel(), {name: [] for name in OUTPUTS}
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        tokens = {seq.request.request_id: seq.num_scheduled_tokens for seq in batch.sequences}
        for name, row in rows.items():
            row.append({6: "prefill", 1: "decode"}[tokens[name]] if name in tokens else "")
        scheduler.update(batch, runner.execute(batch))
    return rows


def draw(drawing: Drawing, top: float, title: str, rows: Rows) -> None:
    """One half of the picture."""
    num_steps = len(rows["A"])
    used = sum(cell in ("prefill", "decode") for row in rows.values() for cell in row)
    idle = AT_ONCE * num_steps - used
    share = idle / (AT_ONCE * num_steps)
    drawing.text(14, top, title, 14, "start", bold=True)
    summary = f"{num_steps} steps · {idle} of {AT_ONCE * num_steps} places idle ({share:.0%})"
    drawing.text(LEFT + 22 * WIDTH, top, summary, 13, "end", GREY)
    styles = {"prefill": COLORS[1], "decode": COLORS[0], "idle": (FAINT, GREY)}
    for i, (name, row) in enumerate(rows.items()):
        y = top + 16 + i * (HEIGHT + GAP)
        drawing.text(LEFT - 10, y + HEIGHT / 2, name, 13, "end", mono=True)
        drawing.line(LEFT, y + HEIGHT / 2, LEFT + num_steps * WIDTH, y + HEIGHT / 2, FAINT, width=1)
        for step, cell in enumerate(row):
            if cell:
                fill, line = styles[cell]
                drawing.box(LEFT + step * WIDTH + 1, y, WIDTH - 2, HEIGHT, "", fill, line)
    y = top + 16 + len(rows) * (HEIGHT + GAP) + HEIGHT / 2 - 2
    drawing.text(LEFT - 10, y, "idle", 13, "end", GREY)
    for step in range(num_steps):
        at_work = sum(row[step] in ("prefill", "decode") for row in rows.values())
        number = str(AT_ONCE - at_work) if at_work < AT_ONCE else "·"
        drawing.text(LEFT + (step + 0.5) * WIDTH, y, number, 13, color=GREY, mono=True)


def main() -> None:
    half = 16 + 9 * (HEIGHT + GAP) + 26
    drawing = Drawing(400, 2 * half + 46, "Static and continuous batching, step by step")
    draw(drawing, 26, "Static", static_batching())
    draw(drawing, 26 + half, "Continuous", continuous_batching())
    y = 2 * half + 18
    legend = [("prefill", COLORS[1]), ("decode", COLORS[0]), ("finished, place kept", (FAINT, GREY))]
    x = LEFT
    for text, (fill, line) in legend:
        drawing.box(x, y, WIDTH - 2, 14, "", fill, line)
        drawing.text(x + WIDTH + 4, y + 7, text, 13, "start", GREY)
        x += WIDTH + 70
    drawing.save()


if __name__ == "__main__":
    main()
