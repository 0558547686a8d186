"""Two ranks: the same block tables and block ids on both; in every block the K/V of the rank's heads."""

from __future__ import annotations

from svg import COLORS, FAINT, PAPER, Drawing

from nanopaged import LLM, SamplingParams
from nanopaged.snapshot import Snapshot

RANKS, WIDTH, HEIGHT, LEFT, GAP = 2, 356, 232, 12, 52
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
    rank_config = config.for_rank_of(RANKS)
    tables = {seq.name: seq.block_table for request in snapshot.requests for seq in request.sequences}
    picture = Drawing(
        2 * LEFT + WIDTH, 2 * LEFT + RANKS * HEIGHT + GAP, "Two ranks with the same block tables"
    )
    for rank in range(RANKS):
        draw_rank(picture, rank, rank_config, snapshot, tables)
    top = LEFT + HEIGHT + 5
    bottom = top + GAP - 10
    for x, words, begin, end in ((30, "message", top, bottom), (300, "logits", bottom, top)):
        picture.line(x, begin, x, end, arrow=True)
        picture.note(x + 8, (top + bottom) / 2, words)
    picture.line(128, top, 128, bottom, arrow=True)
    picture.line(128, bottom, 128, top, arrow=True)
    picture.note(136, (top + bottom) / 2, f"all-reduce, {2 * config.num_layers + 1} per step")
    picture.save()


def draw_rank(picture: Drawing, rank: int, rank_config: object, snapshot: Snapshot, tables: dict) -> None:
    x, y = LEFT, LEFT + rank * (HEIGHT + GAP)
    picture.box(x, y, WIDTH, HEIGHT, fill="#f6f8fa", line=FAINT)
    titles = ("rank 0: the process of the engine", "rank 1: a worker")
    picture.text(x + 12, y + 20, titles[rank], 14, "start", bold=True)
    roles = ("it schedules, computes its heads, and samples", "it computes its heads")
    picture.note(x + 12, y + 40, roles[rank])

    for row, (name, table) in enumerate(tables.items()):
        row_y = y + 58 + 28 * row
        picture.text(x + 12, row_y + 12, f"table of {name}", 12, "start")
        for column, block_id in enumerate(table):
            fill, line = color_of(block_id, tables)
            picture.box(x + 84 + 34 * column, row_y, 32, 24, str(block_id), fill, line)
    picture.note(x + 190, y + 68, f"query heads {span(rank, rank_config.num_heads)}")
    heads = span(rank, rank_config.num_kv_heads)
    picture.note(x + 190, y + 85, f"KV head {heads}")
    columns = span(rank, rank_config.intermediate_size)
    picture.note(x + 190, y + 102, f"MLP columns {columns}")

    for block in snapshot.blocks:
        column = x + 12 + 56 * block.block_id
        fill, line = color_of(block.block_id, tables)
        picture.text(column + 26, y + 128, str(block.block_id), 12)
        for slot in range(snapshot.block_size):
            is_filled = slot < block.num_filled
            words = f"head {heads}" if is_filled else ""
            cell = (fill, line) if is_filled else (PAPER, FAINT)
            picture.box(column, y + 138 + 22 * slot, 52, 20, words, *cell, size=11)


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
