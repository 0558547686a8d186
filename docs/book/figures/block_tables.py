"""Two requests that grew in turns: their block tables and the physical blocks, from a snapshot."""

from __future__ import annotations

from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import LLM, SamplingParams

BLOCK_SIZE, SLOT, ROW = 4, 30, 34  # slots in a block; width of a slot and distance of two blocks, in pixels
TABLE_X, POOL_X = 44, 264

engine = LLM(block_size=BLOCK_SIZE, num_blocks=8, load_format="dummy").engine
for name, prompt in (("A", [11, 12, 13, 14, 15, 16]), ("B", [21, 22, 23])):
    engine.add_request(name, prompt, SamplingParams(max_tokens=6, ignore_eos=True))
for _ in range(5):
    engine.step()
snapshot = engine.snapshot()

drawing = Drawing(400, 348, "Two requests: block tables and physical blocks")
drawing.text(TABLE_X - 30, 24, "block tables", 14, "start", bold=True)
drawing.text(POOL_X, 24, "KV cache", 14, "start", bold=True)
pool_y = {block.block_id: 44 + block.block_id * ROW for block in snapshot.blocks}
for block in snapshot.blocks:
    y = pool_y[block.block_id]
    drawing.text(POOL_X - 14, y + 13, str(block.block_id), 13, color=GREY)
    if block.state == "free":
        drawing.box(POOL_X, y, BLOCK_SIZE * SLOT, 26, "free", PAPER, FAINT, 13, dashed=True)
top = 70
for request, (fill, line) in zip(snapshot.requests, COLORS, strict=False):
    (seq,) = request.sequences
    drawing.text(TABLE_X - 30, top - 16, f"request {seq.name}", 13, "start", line, bold=True)
    for i, block_id in enumerate(seq.block_table):
        y = top + i * ROW
        drawing.text(TABLE_X - 14, y + 13, str(i), 13, color=GREY)
        drawing.box(TABLE_X, y, 76, 26, str(block_id), PAPER, line)
        drawing.line(TABLE_X + 82, y + 13, POOL_X - 28, pool_y[block_id] + 13, line, arrow=True)
        for offset in range(BLOCK_SIZE):
            position = i * BLOCK_SIZE + offset
            text, color = (str(position), fill) if position < seq.num_computed_tokens else ("", PAPER)
            drawing.box(POOL_X + offset * SLOT, pool_y[block_id], SLOT, 26, text, color, line)
    top += len(seq.block_table) * ROW + 46
drawing.note(14, 330, "The number in a slot is the position of its token.")
drawing.save()
