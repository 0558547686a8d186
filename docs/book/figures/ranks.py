"""Two ranks: the same block tables and block ids on both; in every block the K/V of the rank's heads."""

from __future__ import annotations

from svg import COLORS, FAINT, GREY, PAPER, Drawing

from nanopaged import LLM, SamplingParams
from nanopaged.snapshot import Snapshot

RANKS, WIDTH, LEFT, GAP = 2, 368, 16, 72
SHARED = COLORS[4]


def run() -> tuple[Snapshot, LLM]:
    """Two prompts with a common beginning, after the step in which both were computed."""
    llm = LLM(block_size=4, num_blocks=6)
    for name, prompt in (("A", [3, 5, 7, 9, 11, 13, 15]), ("B", [3, 5, 7, 9, 17, 19])):
        llm.engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=4))
    llm.engine.step()
    return llm.engine.snapshot(), llm


def main() -> None:
    snapshot, llm = run()
    config = llm.engine.runner.model.config
    share = config.share(RANKS)
    tables = {seq.name: seq.block_table for request in snapshot.requests for seq in request.sequences}
    picture = Drawing(2 * LEFT + RANKS * WIDTH + GAP, 352, "Two ranks with the same block tables")
    for rank in range(RANKS):
        draw_rank(picture, rank, share, snapshot, tables)
    middle = LEFT + WIDTH + GAP / 2
    left, right = middle - GAP / 2 + 6, middle + GAP / 2 - 6
    for y, words, begin, end in (
        (116, "message", left, right),
        (200, "all-reduce", left, right),
        (284, "logits", right, left),
    ):
        picture.line(begin, y, end, y, arrow=True)
        picture.text(middle, y - 12, words, 11, color=GREY)
    picture.line(right, 200, left, 200, arrow=True)
    picture.text(middle, 130, "each step", 10, color=GREY)
    picture.text(middle, 214, f"{2 * config.num_layers + 1} a step", 10, color=GREY)
    picture.save()


def draw_rank(picture: Drawing, rank: int, share: object, snapshot: Snapshot, tables: dict) -> None:
    x = LEFT + rank * (WIDTH + GAP)
    picture.box(x, 16, WIDTH, 320, fill="#f6f8fa", line=FAINT)
    titles = ("rank 0: the process of the engine", "rank 1: a worker")
    picture.text(x + 14, 38, titles[rank], 14, "start", bold=True)
    roles = ("scheduler, block manager, model runner, sampler", "model runner; it does what a message says")
    picture.note(x + 14, 58, roles[rank])

    for row, (name, table) in enumerate(tables.items()):
        y = 82 + 30 * row
        picture.text(x + 14, y + 12, f"table of {name}", 12, "start")
        for column, block_id in enumerate(table):
            fill, line = color_of(block_id, tables)
            picture.box(x + 92 + 34 * column, y, 32, 24, str(block_id), fill, line)
    picture.note(x + 200, 97, f"query heads {span(rank, share.num_heads)}")
    heads = span(rank, share.num_kv_heads)
    picture.note(x + 200, 115, f"KV head {heads}")
    columns = span(rank, share.intermediate_size)
    picture.note(x + 200, 133, f"MLP columns {columns}")

    picture.text(x + 14, 176, "blocks", 12, "start")
    for block in snapshot.blocks:
        column = x + 14 + 57 * block.block_id
        fill, line = color_of(block.block_id, tables)
        picture.text(column + 26, 196, str(block.block_id), 12)
        for slot in range(snapshot.block_size):
            is_filled = slot < block.num_filled
            words = f"K/V, h{heads}" if is_filled else ""
            cell = (fill, line) if is_filled else (PAPER, FAINT)
            picture.box(column, 208 + 22 * slot, 52, 20, words, *cell, size=10)
    picture.text(x + 14, 318, f"h{heads}: K and V of KV head {heads}, all layers", 11, "start", GREY)


def span(rank: int, num: int) -> str:
    """What of `num` heads a rank has: 4 → 0-3, 4-7; 1 → 0, 1."""
    first = rank * num
    return f"{first}–{first + num - 1}" if num > 1 else str(first)


def color_of(block_id: int, tables: dict) -> tuple[str, str]:
    users = [i for i, table in enumerate(tables.values()) if block_id in table]
    if not users:
        return PAPER, FAINT
    return SHARED if len(users) > 1 else COLORS[users[0]]


if __name__ == "__main__":
    main()
