"""The trace in words: one plain sentence for everything that happens in a step.

These functions know names and numbers only. `recorder.py` finds out what has happened.
"""

from __future__ import annotations

from collections.abc import Iterable

Sentence = tuple[str, str]
"""What kind of event it is, for the page's jumps (several kinds with spaces between), and the sentence."""


def arrived(name: str, num_tokens: int, several: str) -> Sentence:
    """several: "4 samples", "beam search of width 4", or empty."""
    purpose = f", for {several}" if several else ""
    return "arrive", f"{name} arrives with a prompt of {count(num_tokens, 'token')}{purpose}."


def preempted(name: str, moved: dict[int, int]) -> Sentence:
    """moved: device block → host block; empty if the request is preempted by recomputation."""
    why = f"Too few blocks are free: {name}, the last in the order of service, is preempted"
    if not moved:
        return "preempt", f"{why}. It gives its blocks back, and its K/V is computed again later."
    return "preempt swap", f"{why}. Its {blocks(moved)} → host {blocks(moved.values())}."


def swapped_in(name: str, moved: dict[int, int]) -> Sentence:
    """moved: host block → device block."""
    return "swap", f"{name} comes back: host {blocks(moved)} → {blocks(moved.values())}."


def found(name: str, hits: list[int], num_found: int, num_tokens: int) -> Sentence:
    """hits: the blocks of the prefix cache with the first `num_found` tokens."""
    them = f"{num_found} of its {count(num_tokens, 'token')} need not be computed"
    return "hit", f"{name} begins like an earlier text: it finds {blocks(hits)} in the prefix cache, {them}."


def evicted(block_ids: list[int]) -> Sentence:
    """block_ids: cached blocks that were handed out again, in this order."""
    are = "is" if len(block_ids) == 1 else "are"
    return "evict", f"No block is free: cached {blocks(block_ids)}, unused for longest, {are} evicted."


def copied(writer: str, others: list[str], src: int, dst: int) -> Sentence:
    """others: the sequences that still use the source block."""
    use = "uses" if len(others) == 1 else "use"
    return (
        "copy",
        f"{writer} writes into block {src}, which {join(others)} also {use}: copied to block {dst}.",
    )


def prefilled(name: str, first: int, num_scheduled: int, num_tokens: int) -> Sentence:
    """first: the tokens that are computed before this step."""
    if first + num_scheduled == num_tokens:
        rest = "" if first == 0 else f", the last of its {num_tokens}"
        return "prefill", f"{name} computes {count(num_scheduled, 'token')}{rest}."
    left = num_tokens - first - num_scheduled
    return (
        "chunk prefill",
        f"{name} computes a chunk of {count(num_scheduled, 'token')}: the token budget is used up. "
        f"{left} of its {num_tokens} tokens are left for later steps.",
    )


def decoded(names: list[str]) -> Sentence:
    """names: of all sequences that decode in the step."""
    computes = "computes one token" if len(names) == 1 else "compute one token each"
    shown = names if len(names) <= 12 else [*names[:10], f"{len(names) - 10} more"]
    return "decode", f"{join(shown)} {computes}."


def forked(name: str, children: list[str], shared: int) -> Sentence:
    """shared: the number of the prompt's blocks."""
    shares = f"which share its {count(shared, 'block')}"
    return "fork", f"The prompt is computed: {name} is forked into {join(children)}, {shares}."


def next_beams(parents: dict[str, list[str]], childless: list[str]) -> Sentence:
    """parents: beam → the beams forked from it."""
    forks = join([f"{parent} → {' '.join(children)}" for parent, children in parents.items()])
    dropped = f"; {join(childless)} had no child" if childless else ""
    return "beams", f"The next beams: {forks}{dropped}."


def finished(name: str, reason: str, cached: list[int], freed: list[int]) -> Sentence:
    """cached, freed: blocks that are in no table any more."""
    text = f"{name} is {'aborted' if reason == 'abort' else f'finished ({reason})'}"
    left = []
    if cached:
        left.append(f"{blocks(cached)} {'stays' if len(cached) == 1 else 'stay'} in the prefix cache")
    if freed:
        left.append(f"{blocks(freed)} {'is' if len(freed) == 1 else 'are'} free")
    return "finish", f"{text}: {join(left)}." if left else f"{text}."


def failed(error: str) -> Sentence:
    """error: the name of its type."""
    return (
        "fail",
        f"The step failed ({error}): all requests start over. All K/V and the prefix cache are forgotten.",
    )


# ── words ─────────────────────────────────────────────────────────────────────────────────────────


def count(number: int, noun: str) -> str:
    """3 blocks, 1 block"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join(parts: list[str]) -> str:
    """A, B and C"""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


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
