"""A prompt of 40 tokens next to three decodes: whole in one step, and in chunks.

    python docs/book/figures/chunks.py

Both runs are the real scheduler's, without a model. A step takes as long as its tokens: the width of a bar.
"""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, GREY, Drawing

from nanopaged import SamplingParams

BUDGET, PROMPT, STEPS = 13, 40, 14
LEFT, WIDTH, HEIGHT = 14, 4.6, 30  # WIDTH: of a token


def run(budget: int) -> list[dict[str, int]]:
    """Of each step, the tokens of each request. The prompt arrives before the fourth step."""
    scheduler, runner, steps = make_scheduler(64, 4, max_num_batched_tokens=budget), NoModel(), []
    for name in "ABC":
        scheduler.add(make_request(name, [0], SamplingParams(max_tokens=99)))
    for step in range(STEPS):
        if step == 3:
            scheduler.add(make_request("P", [1] * PROMPT, SamplingParams(max_tokens=99)))
        batch = scheduler.schedule()
        steps.append({seq.request.request_id: seq.num_scheduled_tokens for seq in batch.sequences})
        scheduler.update(batch, runner.execute(batch))
    return steps


def style_of(name: str) -> tuple[str, str]:
    """Fill and line. A decode is full of colour, because its box is only one token wide."""
    return COLORS[4] if name == "P" else (COLORS["ABC".index(name)][1],) * 2


def draw(drawing: Drawing, y: float, title: str, steps: list[dict[str, int]]) -> None:
    """One run over time. Each decode gets its token at the end of a bar."""
    drawing.text(LEFT, y, title, 14, "start", bold=True)
    waits, x = [], float(LEFT)
    for step in steps:
        if x + WIDTH * sum(step.values()) > LEFT + 80 * WIDTH:
            break
        begin = x
        for name, num_tokens in sorted(step.items()):
            style = style_of(name)
            label = str(num_tokens) if num_tokens > 2 else ""
            drawing.box(x, y + 18, WIDTH * num_tokens, HEIGHT, label, *style, 13)
            x += WIDTH * num_tokens
        drawing.line(x, y + 12, x, y + 18 + HEIGHT + 6, GREY)
        waits.append(round((x - begin) / WIDTH))
        x += 3
    longest = max(waits)
    at = LEFT + sum(WIDTH * wait + 3 for wait in waits[: waits.index(longest)])
    drawing.line(at, y + 18 + HEIGHT + 14, at + WIDTH * longest, y + 18 + HEIGHT + 14, COLORS[0][1], width=2)
    text = f"A, B and C wait for a step of {longest} tokens"
    drawing.text(at, y + 18 + HEIGHT + 28, text, 13, "start", COLORS[0][1])


def main() -> None:
    drawing = Drawing(400, 266, "A long prompt next to three decodes, whole and in chunks")
    draw(drawing, 22, "whole", run(1000))
    draw(drawing, 128, f"in chunks: at most {BUDGET} tokens per step", run(BUDGET))
    for i, name in enumerate("ABCP"):
        style = style_of(name)
        x = LEFT + 96 * i
        drawing.box(x, 232, 16, 16, "", *style)
        text = "prompt" if name == "P" else f"decode {name}"
        drawing.text(x + 22, 240, text, 13, "start", GREY)
    drawing.save()


if __name__ == "__main__":
    main()
