"""Copy-on-write of two samples, before and after, drawn from two snapshots of an engine (paper, Fig. 8).

    python docs/book/figures/copy_on_write.py

Texts and tables are those of a run of the tiny model, the same as in docs/book/07-sharing.md.
"""

from __future__ import annotations

from svg import COLORS, GREY, INK, PAPER, Drawing

from nanopaged import LLM, SamplingParams
from nanopaged.snapshot import Snapshot

PROMPT = "Four score and seven"
SLOT, ROW, TOP, PANEL = 50, 40, 146, 430


def main() -> None:
    engine = LLM(block_size=4, num_blocks=8).engine
    pieces = [engine.tokenizer.decode(token_id).strip() for token_id in engine.prompts.encode(PROMPT)]
    engine.add_request("A", PROMPT, SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True))
    snapshots = []
    for _ in range(2):
        engine.step()
        snapshots.append(engine.snapshot())
    drawing = Drawing(2 * PANEL, 310, "Two samples before and after one of them copies the block they share")
    titles = ["after step 1: forked", "after step 2: A.1 copied block 1, A.2 did not"]
    for i, (snapshot, title) in enumerate(zip(snapshots, titles, strict=True)):
        draw(drawing, i * PANEL, snapshot, title, pieces)
    before, after = ([seq.block_table for seq in each.requests[0].sequences] for each in snapshots)
    for old_table, new_table in zip(before, after, strict=True):
        for src, dst in zip(old_table, new_table, strict=True):
            if src != dst:  # its computed slots, all that the prompt has in its last block
                for slot in range(len(pieces) % 4):
                    x = PANEL + 60 + (slot + 0.5) * SLOT
                    drawing.line(x, TOP + src * ROW + 26, x, TOP + dst * ROW, INK, arrow=True)
    drawing.line(PANEL, 20, PANEL, 290, GREY, dashed=True)
    drawing.save()


def draw(drawing: Drawing, left: float, snapshot: Snapshot, title: str, pieces: list[str]) -> None:
    """The block tables of both samples, and the pool below them."""
    (request,) = snapshot.requests
    owners = {seq.name: COLORS[i] for i, seq in enumerate(request.sequences)}
    drawing.text(left + PANEL / 2, 24, title, 14, bold=True)
    for i, seq in enumerate(request.sequences):
        x = left + 24 + i * 200
        drawing.text(x, 62, f"block table of {seq.name}", 12, "start", owners[seq.name][1], bold=True)
        for place, block_id in enumerate(seq.block_table):
            drawing.box(x + place * 44, 76, 44, 26, str(block_id), *owners[seq.name])
    drawing.note(left + 24, 132, "physical blocks")
    drawing.text(left + PANEL - 24, 132, "references", 12, "end", GREY)
    for block in snapshot.blocks[:4]:
        y = TOP + block.block_id * ROW
        drawing.text(left + 34, y + 13, str(block.block_id), 13, "start", mono=True)
        holders = [seq for seq in request.sequences if block.block_id in seq.block_table]
        for slot in range(snapshot.block_size):
            fill, line, text = PAPER, GREY, ""
            if holders and slot < block.num_filled:
                position = holders[0].block_table.index(block.block_id) * snapshot.block_size + slot
                fill, line = "#eef0f2", GREY
                text = pieces[position] if position < len(pieces) else f"{holders[0].name}'s"
                if position >= len(pieces):  # a generated token, which one sample alone has
                    fill, line = owners[holders[0].name]
            drawing.box(left + 60 + slot * SLOT, y, SLOT, 26, text, fill, line, 12)
        text = f"{block.ref_count}: " + " ".join(seq.name for seq in holders) if holders else "free"
        drawing.text(left + PANEL - 24, y + 13, text, 12, "end", INK if holders else GREY)


if __name__ == "__main__":
    main()
