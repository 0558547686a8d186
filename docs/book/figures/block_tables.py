"""Two requests that grew in turns: logical blocks, block tables and physical blocks of a snapshot."""

from __future__ import annotations

from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import LLM, SamplingParams

BLOCK_SIZE, SLOT, ROW = 4, 28, 34  # slots in a block; width of a slot and height of a block, in pixels
LOGICAL_X, TABLE_X, POOL_X = 24, 268, 560

engine = LLM(block_size=BLOCK_SIZE, num_blocks=8, load_format="dummy").engine
for name, prompt in (("A", [11, 12, 13, 14, 15, 16]), ("B", [21, 22, 23])):
    engine.add_request(name, prompt, SamplingParams(max_tokens=6, ignore_eos=True))
for _ in range(5):
    engine.step()
snapshot = engine.snapshot()

drawing = Drawing(720, 372, "Two requests: logical blocks, block tables and physical blocks")
for x, text in (
    (LOGICAL_X + 84, "logical blocks"),
    (TABLE_X + 90, "block tables"),
    (POOL_X + 56, "KV cache"),
):
    drawing.text(x, 24, text, bold=True)


def draw_slots(x: float, y: float, positions: list[int], fill: str, line: str) -> None:
    """A block, with the positions of its tokens in its slots."""
    for i in range(BLOCK_SIZE):
        text, color = (str(positions[i]), fill) if i < len(positions) else ("", PAPER)
        drawing.box(x + i * SLOT, y, SLOT, 24, text, color, line, 12)


pool_y = {block.block_id: 62 + block.block_id * ROW for block in snapshot.blocks}
top = 62
for request, (fill, line) in zip(snapshot.requests, COLORS, strict=False):
    (seq,) = request.sequences
    drawing.text(LOGICAL_X, top - 14, f"request {seq.name}", 12, "start", line, bold=True)
    for x, text in ((TABLE_X + 45, "physical block"), (TABLE_X + 135, "# filled")):
        drawing.text(x, top - 14, text, 11, color=GREY)
    for i, block_id in enumerate(seq.block_table):
        y = top + i * ROW
        first = i * BLOCK_SIZE
        positions = list(range(first, min(first + BLOCK_SIZE, seq.num_computed_tokens)))
        drawing.text(LOGICAL_X + 10, y + 12, str(i), 12, color=GREY)
        draw_slots(LOGICAL_X + 28, y, positions, fill, line)
        drawing.line(LOGICAL_X + 28 + BLOCK_SIZE * SLOT + 6, y + 12, TABLE_X - 6, y + 12, line, arrow=True)
        drawing.box(TABLE_X, y, 90, 24, str(block_id), PAPER, line)
        drawing.box(TABLE_X + 90, y, 90, 24, str(len(positions)), PAPER, line)
        drawing.line(TABLE_X + 186, y + 12, POOL_X - 24, pool_y[block_id] + 12, line, arrow=True)
        draw_slots(POOL_X, pool_y[block_id], positions, fill, line)
    top += len(seq.block_table) * ROW + 46
drawing.text(POOL_X + 56, 48, "physical blocks", 11, color=GREY)
for block in snapshot.blocks:
    drawing.text(POOL_X - 12, pool_y[block.block_id] + 12, str(block.block_id), 12, color=GREY)
    if block.state == "free":
        drawing.box(
            POOL_X, pool_y[block.block_id], BLOCK_SIZE * SLOT, 24, "free", PAPER, FAINT, 11, dashed=True
        )
drawing.note(LOGICAL_X, 350, "The number in a slot is the position of its token.")
drawing.save()
