"""Copy-on-write, write by write, as the block manager does it: an animation, and the site's live figure.

    python docs/book/figures/write_a_token.py

Each group of the picture has the first and the last frame in which it is shown. As an image, it shows one
frame after another by itself. In the site, docs/site/live.js shows them when the button is pressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from svg import COLORS, FAINT, GREY, INK, PAPER, Drawing

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Request, Sequence
from nanopaged.text import StopRules

PROMPT = ["Four", "score", "and", "seven", "years", "ago", "our"]
OUTPUTS = [["fathers", "brought", "forth"], ["friends", "met", "here"]]
WORDS = [*PROMPT, *OUTPUTS[0], *OUTPUTS[1]]  # by token id
NUM_BLOCKS, SIZE = 5, 4
SECONDS, LOOPS, STILL = 3, 4, 2  # of a frame; of the animation; the frame before and after it
WIDTH, HEIGHT, TOP, ROW, HIGH = 680, 316, 68, 40, 30
TABLES, ENTRY, POOL, SLOT = (22, 606), 52, 128, 74  # left edges of the tables, of the pool; widths
ENDS = (POOL, POOL + 30 + SIZE * SLOT + 98)  # edges of the blocks, where the arrows from the tables end
MARK, SHARED, BLOCK = "#c2185b", FAINT, "#f6f8fa"

Frame = dict[str, Drawing]
"""What is drawn of each thing: "block 2", "table 1", "copy", "caption"."""


@dataclass
class State:
    """What a frame shows of the manager and its sequences."""

    tables: list[list[int]]
    references: list[int]  # by block
    tokens: list[list[int]]  # by block: those whose K/V it has


def main() -> None:
    manager, sequences = fork()
    a, b = map(name_of, sequences)
    words = f"{a} and {b} continue one prompt. Both tables point to its blocks."
    frames, ends = [draw(look(manager, sequences), words)], [0]
    for place in range(len(OUTPUTS[0])):
        for seq in sequences:
            before = look(manager, sequences)
            seq.token_ids.append(len(PROMPT) + seq.index * len(OUTPUTS[0]) + place)
            copies = manager.append_slots(sequences)
            assert copies is not None
            name, other = name_of(seq), name_of(sequences[1 - seq.index])
            for src, dst in copies:
                words = f"{name} is to write into block {src}. But {other} reads that block, too."
                frames.append(draw(before, words, marked=(src, len(PROMPT) % SIZE)))
                words = f"So block {src} is copied to block {dst}, and {name}'s table points to the copy."
                frames.append(draw(look(manager, sequences), words, copy=(src, dst)))
            seq.num_computed_tokens = seq.num_tokens
            block_id, is_new = seq.block_table[-1], len(seq.block_table) > len(before.tables[seq.index])
            words = f"{name} writes into block {block_id}, to which no other table points."
            if is_new:
                words = f"The last block of {name} is full, so its table gets a free one: block {block_id}."
            marked = block_id, (seq.num_tokens - 1) % SIZE
            frames.append(draw(look(manager, sequences), words, marked=marked))
            ends.append(len(frames) - 1)
    film(frames, ends).save()


def fork() -> tuple[BlockManager, list[Sequence]]:
    """Two samples of the prompt, whose K/V is computed. They share its blocks."""
    manager = BlockManager(num_blocks=NUM_BLOCKS, block_size=SIZE, enable_prefix_caching=False)
    manager.free_ids = [4, 0, 2, 1, 3]  # in which order earlier texts gave them back; the last is taken first
    params = SamplingParams(n=2)
    token_ids = list(range(len(PROMPT)))
    request = Request(
        request_id="A",
        prompt=None,
        prompt_token_ids=token_ids,
        params=params,
        stop_rules=StopRules.of(params, len(token_ids), frozenset(), max_model_len=NUM_BLOCKS * SIZE),
        seed=0,
    )
    (first,) = request.live
    manager.allocate([first])
    first.num_computed_tokens = first.num_tokens
    return manager, [first, manager.fork(first, 1)]


def name_of(seq: Sequence) -> str:
    return f"A{seq.index + 1}"


def look(manager: BlockManager, sequences: list[Sequence]) -> State:
    tokens: list[list[int]] = [[] for _ in manager.blocks]
    for seq in sequences:
        for i, block_id in enumerate(seq.block_table):
            tokens[block_id] = seq.token_ids[: seq.num_computed_tokens][i * SIZE : (i + 1) * SIZE]
    return State([list(seq.block_table) for seq in sequences], [b.ref_count for b in manager.blocks], tokens)


def draw(
    state: State, caption: str, marked: tuple[int, int] | None = None, copy: tuple[int, int] | None = None
) -> Frame:
    """`marked` is the block and the slot of a write, `copy` the source and the destination of one."""
    names = [f"block {i}" for i in range(NUM_BLOCKS)] + ["table 0", "table 1", "copy", "caption"]
    frame = {name: Drawing(WIDTH, HEIGHT, "") for name in names}
    frame["caption"].text(WIDTH / 2, HEIGHT - 27, caption, 16)
    for block_id, token_ids in enumerate(state.tokens):
        drawing, y, count = frame[f"block {block_id}"], TOP + block_id * ROW, state.references[block_id]
        edge = GREY if count else FAINT
        drawing.box(ENDS[0], y - 2, ENDS[1] - ENDS[0], HIGH + 4, "", BLOCK if count else PAPER, edge)
        drawing.text(POOL + 15, y + HIGH / 2, str(block_id), 17, color=INK if count else GREY, bold=True)
        for slot in range(SIZE):
            fill, line, word = PAPER, edge, ""
            if slot < len(token_ids):
                owner = (token_ids[slot] - len(PROMPT)) // len(OUTPUTS[0])  # -3 to -1: both, the prompt
                fill, line = COLORS[owner] if owner >= 0 else (SHARED, GREY)
                word = WORDS[token_ids[slot]]
            x = POOL + 30 + slot * SLOT
            drawing.box(x, y, SLOT, HIGH, word, fill, line, 15)
        references = f"{count} reference{'s' * (count > 1)}" if count else "free"
        drawing.text(ENDS[1] - 6, y + HIGH / 2, references, 14, "end", INK if count else GREY)
    for i, table in enumerate(state.tables):
        drawing, x = frame[f"table {i}"], TABLES[i]
        for place, block_id in enumerate(table):
            y = TOP + ROW / 2 + place * HIGH
            start, end = (x + ENTRY, ENDS[0]) if i == 0 else (x, ENDS[1])
            drawing.box(x, y, ENTRY, HIGH, str(block_id), *COLORS[i], size=17)
            target = TOP + block_id * ROW + HIGH / 2
            drawing.line(start, y + HIGH / 2, end, target, COLORS[i][1], arrow=True, width=2)
    if marked:
        x, y = POOL + 30 + marked[1] * SLOT, TOP + marked[0] * ROW
        frame["copy"].box(x + 1, y + 1, SLOT - 2, HIGH - 2, "", "none", MARK)
        frame["copy"].box(x, y, SLOT, HIGH, "", "none", MARK)
    if copy:
        src, dst = copy
        for slot in range(len(state.tokens[src])):
            x = POOL + 30 + (slot + 0.5) * SLOT
            start, end = TOP + src * ROW + HIGH, TOP + dst * ROW
            frame["copy"].line(x, start - 6, x, end + 5, MARK, arrow=True, width=2)
    return frame


def film(frames: list[Frame], ends: list[int]) -> Drawing:
    """All frames in one picture; `ends` are those after the writes."""
    title = "Two samples write their tokens: a shared block is copied before a write"
    picture = Drawing(WIDTH, HEIGHT, title)
    for i, (x, anchor) in enumerate([(TABLES[0], "start"), (TABLES[1] + ENTRY, "end")]):
        picture.text(x, 26, "block table", 14, anchor, COLORS[i][1], bold=True)
        picture.text(x, 46, f"of A{i + 1}", 14, anchor, COLORS[i][1], bold=True)
    picture.text(POOL + 30, 46, "physical blocks", 14, "start", GREY)
    spans: dict[tuple[int, int], str] = {}
    for name in frames[0]:
        drawn = ["".join(frame[name].parts) for frame in frames]
        for parts, its in groupby(range(len(frames)), drawn.__getitem__):
            first, last = (shown := list(its))[0], shown[-1]
            if parts:
                hidden = "" if first <= STILL <= last else ' visibility="hidden"'
                group = f'<g class="f{first}-{last}" data-of="{name}" data-frames="{first} {last}"{hidden}>'
                picture.parts.append(f"{group}{parts}</g>")
                spans[first, last] = keyframes(first, last, len(frames))
    picture.parts.insert(0, f"<style>{''.join(spans.values())}</style>")
    picture.parts.append(f"<metadata>{' '.join(map(str, ends))}</metadata>")
    return picture


def keyframes(first: int, last: int, num_frames: int) -> str:
    """Shows the groups of these frames, and hides them in the others."""
    at = {0: "visible" if first == 0 else "hidden", first: "visible", last + 1: "hidden"}
    places = [(f"{100 * i / num_frames:.4g}", how) for i, how in at.items() if i < num_frames]
    stops, name = "".join(f"{i}%{{visibility:{how}}}" for i, how in places), f"f{first}-{last}"
    return f".{name}{{animation:{name} {SECONDS * num_frames}s step-end {LOOPS}}}@keyframes {name}{{{stops}}}"


if __name__ == "__main__":
    main()
