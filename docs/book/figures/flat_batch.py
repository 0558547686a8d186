"""The flat batch of one step: the id, the position and the slot of each token, and where the slots are.

python docs/book/figures/flat_batch.py
"""

from __future__ import annotations

from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

from nanopaged import LLM, SamplingParams
from nanopaged.model_runner import prepare

SIZE, BUDGET = 4, 8  # slots in a block, tokens in a step
LEFT, RIGHT, COLUMN, FIRST = 12, 378, 38, 73  # pixels: the margins, a column's width, the first column
PROMPTS = {"A": "Now is the king of the", "B": "I am the", "C": "Where is my lord of Kent now?"}


def main() -> None:
    engine = LLM(block_size=SIZE, num_blocks=8, max_num_batched_tokens=BUDGET, dtype="float32").engine
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for name in "AB":
        engine.add_request(name, PROMPTS[name], params)
    for _ in range(3):
        engine.step()
    engine.add_request("C", PROMPTS["C"], params)
    batch = engine.scheduler.schedule()
    inputs = prepare(batch, SIZE)

    drawing = Drawing(390, 470, "The flat batch of a step")
    owners: list[int] = []  # of the tokens in the batch
    owner_of_slot: dict[int, int] = {}
    drawing.text(LEFT, 20, "The positions of all known tokens", anchor="start", bold=True)
    drawing.text(RIGHT, 20, "block table", 12, "end", GREY)
    for i, seq in enumerate(batch.sequences):
        y, (fill, line) = 34 + 28 * i, COLORS[i]
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        drawing.text(LEFT, y + 10, seq.request.request_id, 13, "start", line, bold=True)
        for position in range(seq.num_tokens):
            is_new = seq.num_computed_tokens <= position < end
            color = fill if position < end else PAPER
            cell(drawing, LEFT + 20 + 23 * position, y, 21, position, color, INK if is_new else line, is_new)
        drawing.text(RIGHT, y + 10, ", ".join(map(str, seq.block_table)), 13, "end", line)
        owners += [i] * seq.num_scheduled_tokens
        for position in range(end):
            slot = seq.block_table[position // SIZE] * SIZE + position % SIZE
            owner_of_slot[slot] = i
        text = f"{seq.num_scheduled_tokens} new, reads {end}, samples the next token"
        if not seq.needs_sample:
            text = f"{seq.num_scheduled_tokens} new, reads {end}, samples nothing yet"
        drawing.text(LEFT, 264 + 18 * i, seq.request.request_id, 12, "start", line, bold=True)
        drawing.text(LEFT + 20, 264 + 18 * i, text, 12, "start")

    drawing.text(LEFT, 134, "The flat batch: all that is new, in one row", anchor="start", bold=True)
    slots = inputs.metadata.slot_mapping.tolist()
    tokens = [engine.tokenizer.decode([token_id]).strip() or "␣" for token_id in inputs.input_ids]
    rows = {"token": tokens, "id": inputs.input_ids, "position": inputs.positions, "slot": slots}
    for row, (label, values) in enumerate(rows.items()):
        y = 148 + 25 * row
        drawing.text(LEFT, y + 10, label, 12, "start", GREY)
        for i, value in enumerate(values):
            color, line = (PAPER, FAINT) if label == "token" else COLORS[owners[i]]
            cell(drawing, FIRST + COLUMN * i, y, COLUMN - 2, value, color, line)

    drawing.text(LEFT, 334, "The KV cache, slot by slot", anchor="start", bold=True)
    for block_id in range(8):
        column, row = divmod(block_id, 4)
        x, y = LEFT + 196 * column, 348 + 28 * row
        drawing.text(x + 4, y + 10, str(block_id), 12, color=GREY)
        for slot in range(block_id * SIZE, (block_id + 1) * SIZE):
            color, line = (COLORS[owner_of_slot[slot]]) if slot in owner_of_slot else (PAPER, FAINT)
            edge = INK if slot in slots else line
            cell(drawing, x + 16 + 38 * (slot % SIZE), y, 36, slot, color, edge, slot in slots)
    drawing.save()


def cell(
    drawing: Drawing, x: float, y: float, width: float, text: object, fill: str, line: str, new: bool = False
) -> None:
    """A box with a number or a word; what is new in this step is underlined."""
    drawing.box(x, y, width, 21, str(text), fill, line, 11)
    if new:
        drawing.line(x, y + 22, x + width, y + 22, INK, width=3)


if __name__ == "__main__":
    main()
