"""One prefix in the tables of three requests: what each finds, and what it computes.

    python docs/book/figures/shared_prefix.py

The requests are those of docs/book/06-prefix-cache.md, in the real scheduler; they stay in the pool.
"""

from __future__ import annotations

from runs import NoModel, make_request, make_scheduler
from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

from nanopaged import SamplingParams
from nanopaged.sequence import Sequence

SIZE, SLOT, LEFT, TOP, POOL = 4, 15, 14, 30, 186
PROMPTS = {
    "A": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    "B": [1, 2, 3, 4, 5, 6, 20, 21, 22],
    "C": [1, 2, 3, 4, 5, 6, 7, 8],
}


def main() -> None:
    scheduler, runner = make_scheduler(num_blocks=6, block_size=SIZE), NoModel()
    drawing = Drawing(420, POOL + 112, "One prefix in the block tables of three requests")
    seqs = []
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        request = make_request(name, prompt, SamplingParams(max_tokens=9))
        scheduler.add(request)
        scheduler.update(batch := scheduler.schedule(), runner.execute(batch))
        seqs.append(request.live[0])
        draw_table(drawing, i, name, request.live[0], request.num_cached_tokens or 0)
    for block in scheduler.block_manager.blocks:
        x = pool_x(block.block_id)
        holder = next(seq for seq in seqs if block.block_id in seq.block_table)
        first = holder.block_table.index(block.block_id) * SIZE
        shared = block.ref_count > 1
        color = COLORS[4] if shared else COLORS[seqs.index(holder)]
        drawing.text(x + 2 * SLOT, POOL + 8, str(block.block_id), 14, bold=True)
        for slot in range(SIZE):
            filled = first + slot < holder.request.num_prompt_tokens
            token = str(holder.token_ids[first + slot]) if filled else ""
            style = color if filled else (PAPER, FAINT)
            drawing.box(x + slot * SLOT, POOL + 18, SLOT, 26, token, *style, 11)
        ink = INK if shared else GREY
        drawing.text(x + 2 * SLOT, POOL + 58, str(block.ref_count), 13, color=ink, bold=shared)
    drawing.note(LEFT, POOL + 80, "Numbers in a block are tokens; below it, its references.")
    drawing.note(LEFT, POOL + 98, "C computes block 5 for its last token.")
    drawing.save()


def pool_x(block_id: int) -> float:
    return LEFT + block_id * (SIZE * SLOT + 6.4)


def draw_table(drawing: Drawing, i: int, name: str, seq: Sequence, num_found: int) -> None:
    """A request: its table, what it found, and arrows from the entries to the blocks."""
    y, color = TOP + 44 * i, COLORS[i]
    drawing.text(LEFT, y, f"table of {name}", 13, "start", color[1], bold=True)
    for place, block_id in enumerate(seq.block_table):
        style = COLORS[4] if place * SIZE < num_found or (i == 0 and place == 0) else color
        x = LEFT + 84 + 36 * place
        drawing.box(x, y - 13, 36, 26, str(block_id), *style, 14)
        drawing.line(x + 18, y + 13, pool_x(block_id) + 2 * SLOT, POOL - 2, style[1], arrow=True, width=1.2)
    drawing.note(LEFT + 218, y, f"{num_found} tokens found, {len(PROMPTS[name]) - num_found} computed")


if __name__ == "__main__":
    main()
