"""The slots of one small pool in the same step of a run, under each kind of allocation.

python docs/book/figures/waste.py
"""

from __future__ import annotations

from string import ascii_uppercase

from runs import NoModel, make_request, make_scheduler, no_model
from svg import INK, PAPER, Drawing

from nanopaged import SamplingParams

NUM_SLOTS, BLOCK_SIZE, STEP = 320, 8, 24
RULES = no_model.reserve_rules(64)
NAMES = [*ascii_uppercase, *map(str, range(1, 27))]  # of the requests
LENGTHS = no_model.draw_lengths((10, 22), len(NAMES), seed=53, longest=64)

Piece = tuple[int, int, str]  # (first slot, number of slots, kind)
Range = tuple[int, int, str, int]  # (first slot, number of slots, its request, slots with a token)
ROW = NUM_SLOTS // 2
WIDTH, LEFT, TOP, HEIGHT = 2.3, 11, 50, 30  # pixels: of a slot, the margins, and of a row


def contiguous(policy: str) -> tuple[list[Piece], list[Range], int]:
    """The pool after `STEP` steps, and the number of requests served."""
    holes, running, waiting = [(0, NUM_SLOTS)], [], list(zip(NAMES, LENGTHS, strict=True))
    for _ in range(STEP):
        for ended in [each for each in running if each["tokens"] == each["final"]]:
            no_model.give_back(holes, ended["start"], ended["size"])
            running.remove(ended)
        while True:
            name, (num_input, num_output) = waiting[0]
            size = RULES[policy](num_input, num_output)
            start = no_model.take(holes, size)
            if start is None:
                break
            final = num_input + num_output
            running.append({"name": name, "start": start, "size": size, "tokens": num_input, "final": final})
            del waiting[0]
        for each in running:
            each["tokens"] += 1
    kind = "external" if sum(length for _, length in holes) >= size else "too few"
    pieces, ranges = [(start, length, kind) for start, length in holes], []
    for each in running:
        start, tokens, final = each["start"], each["tokens"], each["final"]
        pieces += [
            (start, tokens, "real"),
            (start + tokens, final - tokens, "reserved"),
            (start + final, each["size"] - final, "internal"),
        ]
        ranges.append((start, each["size"], each["name"], tokens))
    return pieces, ranges, len(LENGTHS) - len(waiting) - len(running)


def paging() -> tuple[list[Piece], list[Range], int]:
    """The same with the real scheduler and block manager."""
    scheduler = make_scheduler(NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
    for name, (num_input, num_output) in zip(NAMES, LENGTHS, strict=True):
        scheduler.add(make_request(name, [0] * num_input, SamplingParams(max_tokens=num_output)))
    runner, served = NoModel(), 0
    for step in range(STEP):
        batch = scheduler.schedule()
        if step < STEP - 1:
            served += sum(each.finished for each in scheduler.update(batch, runner.execute(batch)))
    pieces, ranges = [], []
    for seq in scheduler.running_sequences:
        tokens = seq.num_computed_tokens + seq.num_scheduled_tokens
        final = seq.request.num_prompt_tokens + seq.request.params.max_tokens - 1
        for i, block_id in enumerate(seq.block_table):
            start, first = block_id * BLOCK_SIZE, i * BLOCK_SIZE
            filled = min(BLOCK_SIZE, tokens - first)
            in_the_end = min(BLOCK_SIZE, final - first)
            pieces += [
                (start, filled, "real"),
                (start + filled, in_the_end - filled, "reserved"),
                (start + in_the_end, BLOCK_SIZE - in_the_end, "internal"),
            ]
            ranges.append((start, BLOCK_SIZE, seq.request.request_id, filled))
    assert scheduler.waiting, "all requests fit"
    free = set(scheduler.block_manager.free_ids)
    return (
        pieces + [(block_id * BLOCK_SIZE, BLOCK_SIZE, "too few") for block_id in sorted(free)],
        ranges,
        served,
    )


def main() -> None:
    drawing = Drawing(2 * LEFT + round(ROW * WIDTH), 560, "A pool under four ways to allocate it")
    shown: set[str] = set()
    for i, policy in enumerate([*RULES, "paging"]):
        pieces, ranges, served = paging() if policy == "paging" else contiguous(policy)
        totals = dict.fromkeys(no_model.KINDS, 0)
        top = TOP + 126 * i
        for start, length, kind in sorted(pieces, key=lambda piece: piece[2] == "real"):
            totals[kind] += length
            color = no_model.KINDS[kind]
            for x, y, width in rows_of(start, length, top + 36):
                # One token of eight would be hidden by the border that is drawn over it.
                width = max(width, 5.0) if kind == "real" else width
                drawing.box(x, y, width, HEIGHT, fill=color, line=color)
        assert sum(totals.values()) == NUM_SLOTS
        shown |= {kind for kind, num_slots in totals.items() if num_slots > 0}
        for start, length, name, filled in ranges:
            for x, y, width in rows_of(start, length, top + 36):
                drawing.box(x, y, width, HEIGHT, fill="none", line=INK)
            # The name stands in the larger part of the first block: what is filled, or what is not.
            first, end, color = filled, BLOCK_SIZE, INK
            if filled > 3:
                first, end, color = 0, min(filled, BLOCK_SIZE), PAPER
            x, y, _ = rows_of(start, BLOCK_SIZE, top + 36)[0]
            drawing.text(x + WIDTH * (first + end) / 2, y + HEIGHT / 2, name, size=11, color=color, bold=True)
        drawing.text(LEFT, top + 6, policy, anchor="start", bold=True)
        running = len({name for _, _, name, _ in ranges})
        text = f"{running} requests run, {served} served before"
        drawing.text(LEFT + 60, top + 6, text, anchor="start")
        shares = ", ".join(f"{kind} {100 * n / NUM_SLOTS:.0f} %" for kind, n in totals.items() if n > 0)
        drawing.note(LEFT, top + 24, shares)
    for i, (kind, color) in enumerate(each for each in no_model.KINDS.items() if each[0] in shown):
        drawing.box(LEFT + 90 * i, 16, 14, 14, fill=color, line=color)
        drawing.text(LEFT + 90 * i + 20, 23, kind, anchor="start")
    drawing.save()


def rows_of(start: int, length: int, top: float) -> list[tuple[float, float, float]]:
    """(x, y, width) of a range of slots: the pool is drawn in two rows."""
    parts = []
    for row in range(NUM_SLOTS // ROW):
        first, end = max(start, ROW * row), min(start + length, ROW * (row + 1))
        if first < end:
            parts.append((LEFT + WIDTH * (first - ROW * row), top + 36 * row, WIDTH * (end - first)))
    return parts


if __name__ == "__main__":
    main()
