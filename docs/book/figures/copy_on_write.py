"""Copy-on-write of two samples, before and after, drawn from two snapshots of an engine (paper, Fig. 8).

    python docs/book/figures/copy_on_write.py

Texts and tables are those of a run of the tiny model.
"""

from __future__ import annotations

from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

from nanopaged import LLM, SamplingParams
from nanopaged.snapshot import Snapshot

PROMPT = "Four score and seven"
SLOT, ROW, LEFT, POOL, PANEL, WIDTH = 48, 36, 42, 90, 208, 384


def main() -> None:
    engine = LLM(block_size=4, num_blocks=8).engine
    pieces = [engine.tokenizer.decode(token_id).strip() for token_id in engine.prompts.encode(PROMPT)]
    engine.add_request("A", PROMPT, SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True))
    snapshots = []
    for _ in range(2):
        engine.step()
        snapshots.append(engine.snapshot())
    drawing = Drawing(
        WIDTH, 2 * PANEL + 12, "Two samples before and after one of them copies the block they share"
    )
    titles = ["after step 1: forked", "after step 2: A.1 copied block 1, A.2 did not"]
    for i, (snapshot, title) in enumerate(zip(snapshots, titles, strict=True)):
        draw(drawing, i * PANEL, snapshot, title, pieces)
    before, after = ([seq.block_table for seq in each.requests[0].sequences] for each in snapshots)
    for old_table, new_table in zip(before, after, strict=True):
        for src, dst in zip(old_table, new_table, strict=True):
            if src != dst:  # its computed slots, all that the prompt has in its last block
                for slot in range(len(pieces) % 4):
                    x = LEFT + (slot + 0.5) * SLOT
                    top = PANEL + POOL
                    drawing.line(x, top + src * ROW + 24, x, top + dst * ROW, INK, arrow=True)
    drawing.line(16, PANEL, WIDTH - 16, PANEL, FAINT)
    drawing.save()


def draw(drawing: Drawing, top: float, snapshot: Snapshot, title: str, pieces: list[str]) -> None:
    """The block tables of both samples, and the pool below them."""
    (request,) = snapshot.requests
    owners = {seq.name: COLORS[i] for i, seq in enumerate(request.sequences)}
    drawing.text(16, top + 22, title, 14, "start", bold=True)
    for i, seq in enumerate(request.sequences):
        x = 16 + i * 186
        drawing.text(x, top + 54, f"table of {seq.name}", 12, "start", owners[seq.name][1], bold=True)
        for place, block_id in enumerate(seq.block_table):
            drawing.box(x + 90 + place * 36, top + 42, 36, 24, str(block_id), *owners[seq.name])
    for block in snapshot.blocks[:3]:
        y = top + POOL + block.block_id * ROW
        drawing.text(24, y + 12, str(block.block_id), 13, "start", mono=True)
        holders = [seq for seq in request.sequences if block.block_id in seq.block_table]
        for slot in range(snapshot.block_size):
            fill, line, text = PAPER, GREY, ""
            if holders and slot < block.num_filled:
                position = holders[0].block_table.index(block.block_id) * snapshot.block_size + slot
                fill, line = "#eef0f2", GREY
                text = pieces[position] if position < len(pieces) else f"{holders[0].name}'s"
                if position >= len(pieces):  # a generated token, which one sample alone has
                    fill, line = owners[holders[0].name]
            drawing.box(LEFT + slot * SLOT, y, SLOT, 24, text, fill, line, 12)
        text = "{} references" if block.ref_count > 1 else "{} reference"
        drawing.text(
            LEFT + 4 * SLOT + 14,
            y + 12,
            text.format(block.ref_count) if holders else "free",
            12,
            "start",
            INK if holders else GREY,
        )


if __name__ == "__main__":
    main()
