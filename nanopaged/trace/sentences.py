"""The trace in words: one plain sentence for everything that happens in a step.

These functions know names and numbers only. `recorder.py` finds out what has happened.
"""

from __future__ import annotations

from collections.abc import Iterable

PARTS = ("scheduled", "copied", "computed", "updated")
"""The parts of a step, each named for what is done at its end. The page shows the state at each of them."""

SCHEDULED, COPIED, COMPUTED, UPDATED = range(4)

Sentence = tuple[str, str, int]
"""What kind of event it is, for the page's jumps (several kinds with spaces between); the sentence; the part
of the step in which it happens. The sentence has the names and the blocks of that part."""


# ── scheduled ─────────────────────────────────────────────────────────────────────────────────────


def aborted(name: str, cached: list[int], freed: list[int]) -> Sentence:
    """cached, freed: blocks that are in no table any more."""
    return "finish", f"{name} is aborted{_left(cached, freed)}.", SCHEDULED


def arrived(name: str, num_tokens: int, several: str) -> Sentence:
    """several: "4 samples", "beam search of width 4", or empty."""
    purpose = f", for {several}" if several else ""
    return "arrive", f"{name} arrives with a prompt of {count(num_tokens, 'token')}{purpose}.", SCHEDULED


def grown(names: list[str], taken: list[int]) -> Sentence:
    """names: of sequences whose blocks are full; taken: their new ones."""
    needs = (
        "needs a slot for its newest token" if len(names) == 1 else "need a slot each for the newest token"
    )
    return "grow", f"{shortened(names)} {needs}: {blocks(taken)} {are(taken)} taken.", SCHEDULED


def parted(names: list[str], taken: list[int]) -> Sentence:
    """names: of sequences that are about to write into a shared block; taken: those of their copies."""
    about = f"{shortened(names)} {are(names)} about to write into a shared block"
    return "part", f"{about}: {blocks(taken)} {are(taken)} taken for copies.", SCHEDULED


def preempted(name: str, is_swapped: bool) -> Sentence:
    """is_swapped: its K/V is moved to host memory."""
    then = "It gives its blocks back, and its K/V is computed again later"
    if is_swapped:
        then = "Its K/V moves to the host"
    why = f"Too few blocks are free: {name}, the last in the order of service, is preempted"
    return "preempt", f"{why}. {then}.", SCHEDULED


def admitted(name: str, taken: list[int], num_tokens: int) -> Sentence:
    """taken: blocks for all its tokens."""
    return (
        "admit",
        f"{name} is admitted: {blocks(taken)} {are(taken)} taken for its {count(num_tokens, 'token')}.",
        SCHEDULED,
    )


def found(name: str, hits: list[int], taken: list[int], num_found: int, num_tokens: int) -> Sentence:
    """hits: the blocks of the prefix cache with the first `num_found` tokens; taken: those for the others."""
    them = f"{num_found} of its {count(num_tokens, 'token')} need not be computed"
    begins = f"{name} begins like an earlier text: it finds {blocks(hits)} in the prefix cache, {them}"
    rest = f". {blocks(taken).capitalize()} {are(taken)} taken for the others" if taken else ""
    return "admit hit", f"{begins}{rest}.", SCHEDULED


def resumed(name: str, taken: list[int]) -> Sentence:
    """taken: device blocks for the K/V of a request that is swapped out."""
    return (
        "admit",
        f"{name} comes back from the host: {blocks(taken)} {are(taken)} taken for its K/V.",
        SCHEDULED,
    )


def evicted(block_ids: list[int]) -> Sentence:
    """block_ids: cached blocks that were handed out again, in this order."""
    which = f"cached {blocks(block_ids)}, unused for longest, {are(block_ids)} evicted"
    return "evict", f"No block is free: {which}.", SCHEDULED


# ── copied ────────────────────────────────────────────────────────────────────────────────────────


def swapped_out(name: str, moved: dict[int, int]) -> Sentence:
    """moved: device block → host block."""
    return "swap", f"{name} leaves: {blocks(moved)} → host {blocks(moved.values())}.", COPIED


def swapped_in(name: str, moved: dict[int, int]) -> Sentence:
    """moved: host block → device block."""
    return "swap", f"{name} comes back: host {blocks(moved)} → {blocks(moved.values())}.", COPIED


def copied(writer: str, others: list[str], src: int, dst: int) -> Sentence:
    """others: the sequences that still use the source block."""
    use = "uses" if len(others) == 1 else "use"
    why = f"{writer} writes into block {src}, which {join(others)} also {use}"
    return "copy", f"{why}: copied to block {dst}.", COPIED


# ── computed ──────────────────────────────────────────────────────────────────────────────────────


def prefilled(name: str, first: int, num_scheduled: int, num_tokens: int) -> Sentence:
    """first: the tokens that are computed before this step."""
    if first + num_scheduled == num_tokens:
        rest = "" if first == 0 else f", the last of its {num_tokens}"
        return "prefill", f"{name} computes {count(num_scheduled, 'token')}{rest}.", COMPUTED
    left = num_tokens - first - num_scheduled
    return (
        "chunk prefill",
        f"{name} computes a chunk of {count(num_scheduled, 'token')}: the token budget is used up. "
        f"{left} of its {num_tokens} tokens are left for later steps.",
        COMPUTED,
    )


def decoded(names: list[str]) -> Sentence:
    """names: of all sequences that decode in the step."""
    computes = "computes one token" if len(names) == 1 else "compute one token each"
    return "decode", f"{shortened(names)} {computes}.", COMPUTED


# ── updated ───────────────────────────────────────────────────────────────────────────────────────


def forked(name: str, children: list[str], shared: int) -> Sentence:
    """shared: the number of the prompt's blocks."""
    shares = f"which share its {count(shared, 'block')}"
    return "fork", f"The prompt is computed: {name} is forked into {join(children)}, {shares}.", UPDATED


def next_beams(parents: dict[str, list[str]], childless: list[str]) -> Sentence:
    """parents: beam → the beams forked from it."""
    forks = join([f"{parent} → {' '.join(children)}" for parent, children in parents.items()])
    dropped = f"; {join(childless)} had no child" if childless else ""
    return "beams", f"The next beams: {forks}{dropped}.", UPDATED


def finished(name: str, reason: str | None, cached: list[int], freed: list[int]) -> Sentence:
    """cached, freed: blocks that are in no table any more."""
    return "finish", f"{name} is finished ({reason}){_left(cached, freed)}.", UPDATED


def _left(cached: list[int], freed: list[int]) -> str:
    left = []
    if cached:
        left.append(f"{blocks(cached)} {'stays' if len(cached) == 1 else 'stay'} in the prefix cache")
    if freed:
        left.append(f"{blocks(freed)} {are(freed)} free")
    return f": {join(left)}" if left else ""


def failed(error: str) -> Sentence:
    """error: the name of its type."""
    what = "all requests start over. All K/V and the prefix cache are forgotten"
    return "fail", f"The step failed ({error}): {what}.", UPDATED


# ── words ─────────────────────────────────────────────────────────────────────────────────────────


def count(number: int, noun: str) -> str:
    """3 blocks, 1 block"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def are(things: list[int] | list[str]) -> str:
    """block 3 is, blocks 3 and 4 are"""
    return "is" if len(things) == 1 else "are"


def join(parts: list[str]) -> str:
    """A, B and C"""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def shortened(names: list[str]) -> str:
    """A, B and C; of many, the first ones"""
    return join(names if len(names) <= 12 else [*names[:10], f"{len(names) - 10} more"])


def blocks(block_ids: Iterable[int]) -> str:
    """block 3; blocks 1, 3 to 6 and 9; of many, the first ones"""
    runs: list[list[int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][-1] + 1:
            runs[-1].append(block_id)
        else:
            runs.append([block_id])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(parts) > 12:
        parts = [*parts[:10], "others"]
    return f"block{'' if sum(map(len, runs)) == 1 else 's'} {join(parts)}"
