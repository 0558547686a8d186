"""A tour of paged attention: a run of some 60 steps in which everything happens, as a page for the browser.

    python docs/experiments/tour.py

writes docs/play/tour.html (see docs/reference/trace.md). The pool and the host pool are so small, and the
requests come at such times, that the run has prefix hits, chunked prefill, four samples and their copies on
write, a beam search, preemption by swapping and, once the host pool is full, by recomputation, and evictions.
Captions say why, at the steps in which the events of `STOPS` are found. The picture in the README is one of
its steps:

    cd docs/play
    chromium --headless --window-size=1200,730 --screenshot=tour.png "file://$PWD/tour.html#2-copied"
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from nanopaged.terminal import run_program

SPEECH = "HERALD:\nThe king comes here to-night; and all the court\nAttend upon his pleasure in the hall.\n\n"
GLOSSARY = Path(__file__).parents[1] / "reference" / "glossary.md"


class Stop(NamedTuple):
    """A caption, and the event that it explains.

    Fields:
        kind: of the event, see `events_of`.
        part: of the step, in which the caption is shown.
        text: why it happens, in at most 30 words.
        terms: words of the text that the glossary explains.
        lacks: a kind of event that the step must not have.
        last: the last such event of the run, not the first.
    """

    title: str
    kind: str
    part: str
    text: str
    terms: tuple[str, ...]
    lacks: str = ""
    last: bool = False

    def find(self, events: list[dict[str, str]]) -> int:
        """The number of the step. Raises ValueError if no step has the event."""
        steps = [step for step, its in enumerate(events, 1) if self.kind in its and self.lacks not in its]
        if not steps:
            raise ValueError(f"no step of the run has the event {self.kind!r} of the caption {self.title!r}")
        return steps[-1 if self.last else 0]


STOPS = [
    Stop(
        "A block table",
        "admit",
        "computed",
        "A slot holds the K/V of one token. A block is four slots, anywhere in memory; the block table names "
        "the blocks in order. Only the last has empty slots.",
        ("Slot", "Block", "Block table"),
    ),
    Stop(
        "Why share",
        "fork",
        "updated",
        "Four samples begin with this prompt, so its K/V is the same. A fork copies the block table, no K/V: "
        "each block now has a reference count of four.",
        ("Fork", "Reference count"),
    ),
    Stop(
        "Why copy on write",
        "copy",
        "copied",
        "Each sample is about to write its own token into the same slot of a shared block. So three copy the "
        "block first: copy-on-write. The last keeps the original.",
        ("Copy-on-write",),
    ),
    Stop(
        "The newest token has no K/V",
        "decode",
        "updated",
        "The forward pass computes the K/V of its input. The token that it samples, framed, is input of the "
        "next step, a decode, and has no K/V until then.",
        ("Decode",),
    ),
    Stop(
        "Why a prefix can be found",
        "hit",
        "scheduled",
        "A token's K/V depends on the token, its position and the tokens before it. This prompt begins like "
        "an earlier one: block keys find those blocks in the prefix cache.",
        ("Block key", "Prefix cache"),
    ),
    Stop(
        "Why preempt, and why the last",
        "preempt",
        "scheduled",
        "No block is free for the next tokens. A preemption takes every block of the request that came last: "
        "all-or-nothing, as a step reads all its K/V. Earlier requests finish.",
        ("Preemption", "All-or-nothing"),
    ),
    Stop(
        "Swap or recompute",
        "preempt",
        "scheduled",
        "A swap moves the K/V of a preempted request to host memory. Here the host pool is too full, so this "
        "request will recompute: one prefill for all its tokens.",
        ("Swap", "Recompute", "Prefill"),
        lacks="swap",
    ),
    Stop(
        "Why evict the least recently used",
        "evict",
        "scheduled",
        "A cached block has no user, only contents that a later prompt may find. When no block is free, an "
        "eviction takes the one unused for longest (LRU).",
        ("Cached block", "Eviction", "LRU"),
        lacks="preempt",
    ),
    Stop(
        "Beams",
        "beams",
        "updated",
        "In a beam search the best candidates become the next beams. One beam may have several children, "
        "which share its blocks until they write; another has none.",
        ("Beam search", "Candidate"),
    ),
    Stop(
        "What is left",
        "finish",
        "updated",
        "All requests are finished: every reference is given back, no block is in use. Partial blocks are "
        "free; full ones stay in the prefix cache until their memory is needed.",
        ("Partial block", "Prefix cache"),
        last=True,
    ),
]


def main() -> None:
    from common import make_parser

    parser = make_parser(__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/play/tour.html"), help="the file to write")
    args = parser.parse_args()
    write_tour(args.page, args.seed)
    add_captions(args.page)
    print(f"{args.page}, {args.page.stat().st_size / 1024:.0f} KiB. Steps with each kind of event:")
    for kind, num in count_events(args.page).most_common():
        print(f"{num:4}  {kind}")


def write_tour(page: Path, seed: int) -> None:
    """Serve the requests of the tour; each comes at its step."""
    from nanopaged import LLM, BeamSearchParams, SamplingParams

    def sampled(max_tokens: int, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, temperature=0.8, max_tokens=max_tokens, ignore_eos=True, seed=seed)

    arrivals = {
        0: [("four samples", "Four score and seven years ago our", sampled(18, n=4))],
        3: [("a long prompt", f"{SPEECH}KING HENRY:\n", sampled(40))],
        8: [("the same beginning", f"{SPEECH}FALSTAFF:\n", sampled(34))],
        12: [
            ("beams", "To be, or not to be", BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True))
        ],
        16: [("a late one", f"{SPEECH}JULIET:\n", sampled(14)), ("the last one", "Once more", sampled(12))],
    }
    engine = LLM(
        block_size=4,
        num_blocks=32,
        num_host_blocks=14,
        max_num_batched_tokens=24,
        preemption="swap",
        watermark=0.0,
        trace=page,
    ).engine
    step = 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for name, prompt, params in arrivals.get(step, []):
            engine.add_request(name, prompt, params)
        engine.step()
        step += 1


Line = dict[str, Any]
"""A step; `Recorder` in nanopaged/trace.py describes its fields. The states are whole, see `read_lines`."""


def read_lines(text: str) -> list[Line]:
    """The lines of a page: the header, then the steps, with whole states instead of the changes.

    `seqs` of a state is a list of (request, index, number of computed tokens, block table, host table, finish
    reason, tokens).
    """
    header, *lines = map(json.loads, text.split('id="steps">\n')[1].splitlines())
    state: dict[str, Any] = {}
    for line in lines:
        if "failed" in line:
            state = {}
        for part in ("scheduled", "updated")["failed" in line :]:
            state = change(state, line.get(part, {}))
            line[part] = whole(state)
    return [header, *lines]


def change(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The state, name → lists, after these changes of a line."""
    state = dict(old)
    for name, lists in changes.items():
        before = state.pop(name, [[]] * len(lists))
        if lists:
            state[name] = [change_list(*pair) for pair in zip(before, lists, strict=True)]
    return state


def change_list(old: list[Any], changes: list[list[Any]]) -> list[Any]:
    removed, added = changes
    gone = set(removed)
    return [item for place, item in enumerate(old) if place not in gone] + added


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state as the functions below read it."""
    names = ("queue", "running", "cached", "keys")
    queue, (num_running,), cached, keys = (state.get(name, [[]])[0] for name in names)
    sequences = []
    for name in (name for name in state if "." in name):
        number, index = map(int, name.split("."))
        (reason, computed), tokens, table, host = state[name]
        sequences.append((number, index, computed, table, host, reason, tokens))
    queues = {"running": queue[:num_running], "waiting": queue[num_running:], "cached": cached}
    return queues | {"seqs": sequences, "keys": dict(keys)}


def find_events(lines: list[Line]) -> list[dict[str, str]]:
    """For each step, kind of event → the part of the step in which it happens."""
    requests = {fields[0]: fields for line in lines for fields in line.get("requests", [])}
    events, before = [], {"running": [], "waiting": [], "cached": [], "keys": {}}
    for line in lines:
        events.append(events_of(line, before, requests))
        before = line["updated"]
    return events


def events_of(line: Line, before: dict[str, Any], requests: dict[int, list[Any]]) -> dict[str, str]:
    """As the page finds them, where it says what has happened.

    Args:
        before: the state after the step before.
        requests: number → what the trace says of it.
    """
    if "failed" in line:
        return {"fail": "failed"}
    now, after = line["scheduled"], line["updated"]
    came_in = {block_id for _, block_id in line.get("in", [])}
    in_use = {block_id for row in now["seqs"] for block_id in row[3]}
    lengths = {(row[0], row[1]): len(row[6]) for row in now["seqs"]}
    num_seqs = Counter(row[0] for row in now["seqs"])
    hits = decodes = chunks = forks = beams = False
    for number, index, computed, table, *_ in now["seqs"]:
        admitted = index == 0 and number in line.get("admitted", ())
        hits |= admitted and computed > 0 and not came_in.intersection(table)
        for _, _, num in (its for its in line.get("batch", ()) if its[:2] == [number, index]):
            is_decode = num == 1 and lengths[number, index] > requests[number][2]
            decodes |= is_decode
            chunks |= not is_decode and computed + num < lengths[number, index]
    for number, index, _, _, _, reason, tokens in after["seqs"]:
        forks |= num_seqs[number] == 1 and index > 0 and reason is None
        longer = len(tokens) > lengths.get((number, index), 0)
        beams |= requests[number][4] and num_seqs[number] > 1 and reason is None and longer
    ended = [{(row[0], row[1]) for row in state["seqs"] if row[5]} for state in (now, after)]
    left = {*before["running"], *before["waiting"]} - {*now["running"], *now["waiting"]}
    keys = after["keys"]
    lost = {block_id for block_id, key in before["keys"].items() if keys.get(block_id) != key} & in_use
    was_reset = {*before["cached"]} - in_use - {*now["cached"]}  # by reset_prefix_cache
    happened = {
        "scheduled": {
            "finish": bool(left),  # aborted
            "arrive": "requests" in line,
            "preempt": "preempted" in line,
            "admit": "admitted" in line,
            "hit": hits,
            "evict": bool(lost) and not was_reset,
        },
        "copied": {"copy": "copies" in line, "swap": "out" in line or "in" in line},
        "computed": {"decode": decodes, "chunk": chunks},
        "updated": {"fork": forks, "beams": beams, "finish": bool(ended[1] - ended[0])},
    }
    return {kind: part for part, kinds in happened.items() for kind, happens in kinds.items() if happens}


def add_captions(page: Path) -> None:
    """Give the header of the page a title and the captions, each with its step and its terms."""
    header, *lines = read_lines(page.read_text(encoding="utf-8"))
    header["title"] = "A tour of paged attention"
    words, events = read_glossary(), find_events(lines)
    header["captions"] = [
        {
            "step": stop.find(events),
            "part": stop.part,
            "event": stop.kind,
            "title": stop.title,
            "text": stop.text,
            "terms": [[term, *words[term]] for term in stop.terms],
        }
        for stop in STOPS
    ]
    begin, data = page.read_text(encoding="utf-8").split('id="steps">\n')
    _, rest = data.split("\n", 1)
    as_json = json.dumps(header, separators=(",", ":")).replace("<", "\\u003c")  # no "<" may end the script
    page.write_text(f'{begin}id="steps">\n{as_json}\n{rest}', encoding="utf-8")


def read_glossary() -> dict[str, tuple[str, str]]:
    """Word → its address in a checkout, from the tour, and its meaning. The site has .html for .md."""
    rows = re.findall(
        r"^\| \*\*(.+?)\*\*[^|]*\| (.+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE
    )
    words = {}
    for word, meaning in rows:
        meaning = meaning.replace("`", "")
        begin = quote(" ".join(meaning.split()[:5]).rstrip(".,;:"), safe="")
        words[word] = f"../reference/glossary.md#:~:text={begin}", meaning  # the browser scrolls to this text
    return words


def count_events(page: Path) -> Counter[str]:
    """Kind of event → steps that have it."""
    _, *lines = read_lines(page.read_text(encoding="utf-8"))
    return Counter(kind for events in find_events(lines) for kind in events)


if __name__ == "__main__":
    run_program(main)
