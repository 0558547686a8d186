"""One step of the engine: what is scheduled, where its K/V goes, and who gets a token."""

from __future__ import annotations

from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

from nanopaged import LLM, SamplingParams

BLOCK_SIZE, SQUARE, ROW = 4, 19, 72  # slots in a block; pixels of a token, and from a request to the next
LEFT, MIDDLE, RIGHT = 24, 316, 596

engine = LLM(block_size=BLOCK_SIZE, num_blocks=8, max_num_batched_tokens=8, load_format="dummy").engine
prompts = {"A": [11, 12, 13, 14, 15, 16], "B": [21, 22, 23], "C": [31, 32, 33, 34, 35, 36, 37, 38, 39]}
for name in "AB":
    engine.add_request(name, prompts[name], SamplingParams(max_tokens=9, ignore_eos=True))
for _ in range(3):
    engine.step()
engine.add_request("C", prompts["C"], SamplingParams(max_tokens=9, ignore_eos=True))
before = {request.request_id: request.sequences[0] for request in engine.snapshot().requests}
engine.step()
after = engine.snapshot()
colors = dict(zip(prompts, COLORS, strict=False))

drawing = Drawing(740, 372, "One step: schedule, execute, update")
for x, title, text in (
    (LEFT, "1  schedule", "all that was not computed, up to 8 tokens"),
    (MIDDLE, "2  execute", "one batch through the model"),
    (RIGHT, "KV cache", "after the step"),
):
    drawing.text(x, 24, title, anchor="start", bold=True)
    drawing.text(x, 43, text, 11, "start", GREY)

new_tokens = []  # (request, position) in the order of the batch
for i, request in enumerate(after.requests):
    (seq,) = request.sequences
    fill, line = colors[seq.name]
    first, end = before[seq.name].num_computed_tokens, seq.num_computed_tokens
    y = 70 + i * ROW
    drawing.text(LEFT, y, f"request {seq.name}", 12, "start", line, bold=True)
    text = f"{first} computed, {end - first} scheduled"
    drawing.text(LEFT + 76, y, text, 11, "start", GREY)
    for position in range(len(before[seq.name].token_ids)):
        here = first <= position < end
        x = LEFT + position * (SQUARE + 2)
        style = (PAPER, FAINT) if position >= end else (fill, INK if here else line)
        drawing.box(x, y + 14, SQUARE, SQUARE, str(position), *style, 10)
        if here:
            new_tokens.append((seq.name, position))
            drawing.line(x, y + 38, x + SQUARE, y + 38, INK, width=3)
    got = "3  update: it gets a token" if len(seq.token_ids) > len(before[seq.name].token_ids) else ""
    drawing.text(LEFT, y + 50, got or "3  update: no token yet, its prompt goes on", 11, "start", line)

top = 112
for i, (name, position) in enumerate(new_tokens):
    fill, _ = colors[name]
    drawing.box(MIDDLE + i * (SQUARE + 2), top, SQUARE, SQUARE, str(position), fill, INK, 10)
drawing.line(LEFT + 248, top + 10, MIDDLE - 8, top + 10, arrow=True)
center = MIDDLE + len(new_tokens) * (SQUARE + 2) / 2
drawing.line(center, top + 24, center, top + 46, arrow=True)
drawing.box(MIDDLE, top + 48, len(new_tokens) * (SQUARE + 2) - 2, 40, "every layer", PAPER, GREY)
drawing.line(MIDDLE + 176, top + 60, RIGHT - 34, top + 60, arrow=True)
drawing.text(MIDDLE + 184, top + 48, "new K, V", 11, "start", GREY)
drawing.line(RIGHT - 34, top + 78, MIDDLE + 176, top + 78, arrow=True)
drawing.text(MIDDLE + 184, top + 92, "all K, V", 11, "start", GREY)
drawing.line(center, top + 90, center, top + 112, arrow=True)
drawing.text(center, top + 124, "the next token of A and of B", 11, color=GREY)

owners = {
    block_id: (seq.name, i)
    for request in after.requests
    for seq in request.sequences
    for i, block_id in enumerate(seq.block_table)
}
for block in after.blocks:
    y = 66 + block.block_id * 30
    drawing.text(RIGHT - 12, y + 10, str(block.block_id), 11, color=GREY)
    name, i = owners.get(block.block_id, ("", 0))
    for slot in range(BLOCK_SIZE):
        position = i * BLOCK_SIZE + slot
        fill, line = colors.get(name, (PAPER, FAINT))
        if (name, position) in new_tokens:
            line = INK
        text = str(position)
        if slot >= block.num_filled:
            fill, text = PAPER, ""
        x = RIGHT + slot * (SQUARE + 2)
        drawing.box(x, y, SQUARE, SQUARE, text, fill, line, 10, dashed=not name)
for i, (name, (fill, line)) in enumerate(colors.items()):
    (table,) = (r.sequences[0].block_table for r in after.requests if r.request_id == name)
    drawing.box(LEFT + i * 226, 332, 20, 20, name, fill, line, 12)
    drawing.text(LEFT + 28 + i * 226, 342, f"block table {', '.join(map(str, table))}", 12, "start", line)
drawing.note(LEFT, 306, "The number in a square is the position of its token; dark edges are new.")
drawing.save()
