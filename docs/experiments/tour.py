"""A tour of paged attention: a run of some 60 steps in which everything happens, as a page for the browser.

    python docs/experiments/tour.py

writes docs/play/tour.html (see docs/reference/trace.md). The pool and the host pool are so small, and the
requests come at such times, that the run has prefix hits, chunked prefill, four samples and their copies on
write, a beam search, preemption by swapping and, once the host pool is full, by recomputation, and evictions.
Captions say why. The picture in the README is one of the steps:

    cd docs/play
    chromium --headless --window-size=1280,500 --screenshot=tour.png "file://$PWD/tour.html#2-copied"
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from lib.common import make_parser

from nanopaged.terminal import run_program

LINKS = [["Try the playground", "index.html"], ["Read chapter 3", "../book/03-blocks.md"]]  # at the end
SPEECH = "HERALD:\nThe king comes here to-night; and all the court\nAttend upon his pleasure in the hall.\n\n"
GLOSSARY = Path(__file__).parents[1] / "reference" / "glossary.md"


class Stop(NamedTuple):
    """A caption.

    Fields:
        step: in which it is shown, and the part of the step.
        event: which it explains. The step has it, in this part or before.
        terms: words of the text that the glossary explains.
        text: why it happens, in a few words.
    """

    step: int
    part: str
    event: str
    title: str
    terms: tuple[str, ...]
    text: str


STOPS = [
    Stop(1, "computed", "admit", "A block table", ("KV cache", "Slot", "Block", "Block table"),
         "A block of the KV cache has four slots, each for a token's key and value (K/V). A1's block table "
         "lists its blocks, which lie anywhere: 2, 6, 3, 4."),
    Stop(1, "updated", "fork", "Why share", ("Fork", "Reference count"),
         "All four samples begin with this prompt, so they share its K/V. A fork copies only the block "
         "table, and each block now has a reference count of four."),
    Stop(2, "copied", "copy", "Why copy on write", ("Copy-on-write",),
         "“have”, “will”, “am” and “pray” belong in the same slot of block 4. A1, A2 and A3 copy the block "
         "before they write (copy-on-write), and A4 keeps the original."),
    Stop(2, "updated", "decode", "The newest token has no K/V", ("Decode",),
         "A forward pass computes the K/V of its input. The token it samples, dotted here, becomes the "
         "input of the next step, a decode, and has no K/V until then."),
    Stop(9, "scheduled", "hit", "Why a prefix can be found", ("Block key", "Prefix cache"),
         "A token's K/V depends only on the tokens up to it. C's prompt begins like B's, so its block keys "
         "find blocks in the prefix cache."),
    Stop(13, "scheduled", "preempt", "Why preempt the last one", ("Preemption", "All-or-nothing"),
         "No block is free for the next tokens. A preemption takes all blocks of the request that came "
         "last (all-or-nothing), because a step reads all its K/V. Earlier requests finish."),
    Stop(17, "scheduled", "preempt", "No room to swap", ("Swap", "Recompute"),
         "A1–A4 need a block each. A1 takes 26, left by C; for the others B is preempted. The host has no "
         "room to swap all 12 of B's blocks: 9 stay cached; A2–A4 take 3, which B will recompute."),
    Stop(19, "scheduled", "evict", "Which block to evict", ("Cached block", "Eviction", "LRU"),
         "A cached block has no user, but a later prompt may find its contents. When no block is free, an "
         "eviction takes the one unused for longest (LRU)."),
    Stop(20, "updated", "beams", "Beams", ("Beam search", "Candidate"),
         "In a beam search the best candidates become the next beams. A beam may have several children, "
         "which share its blocks until they write, or none."),
    Stop(60, "updated", "finish", "What is left", ("Partial block", "Prefix cache"),
         "F, the last request, is finished, and its partial block is free. Full blocks stay in the prefix "
         "cache until their memory is needed. Prompts that begin alike find them."),
]  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/play/tour.html"), help="the file to write")
    args = parser.parse_args()
    write_tour(args.page)
    add_captions(args.page)
    print(f"{args.page}, {args.page.stat().st_size / 1024:.0f} KiB")


def write_tour(page: Path) -> None:
    """Serve the requests of the tour; each comes at its step.

    Three requests are served before the recording. They give blocks back in another order than they took
    them, so the first text of the tour gets blocks from all over the pool.
    """
    from nanopaged import LLM, BeamSearchParams, SamplingParams
    from nanopaged.trace import Recorder

    def sampled(max_tokens: int, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, temperature=0.8, max_tokens=max_tokens, ignore_eos=True, seed=21)

    arrivals = {
        0: [("four samples", "The king is come to speak with you, my lord.\nI", sampled(18, n=4))],
        3: [("a long prompt", f"{SPEECH}KING HENRY:\n", sampled(40))],
        8: [("the same beginning", f"{SPEECH}FALSTAFF:\n", sampled(34))],
        12: [
            ("beams", "To be, or not to be", BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True))
        ],
        16: [("a late one", f"{SPEECH}JULIET:\n", sampled(12)), ("the last one", "Once more", sampled(12))],
    }
    llm = LLM(
        block_size=4,
        num_blocks=32,
        num_host_blocks=14,
        max_num_batched_tokens=24,
        preemption="swap",
        watermark=0.0,
    )
    earlier = ["To be, or not to be", "Once more", "The king is come"]
    llm.generate(earlier, [sampled(4), sampled(9), sampled(6)])
    engine = llm.engine
    engine.reset_prefix_cache()
    tokenizer = engine.prompts.tokenizer
    engine.listeners.append(Recorder(page, engine.scheduler, tokenizer, engine.model_name))
    step = 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for name, prompt, params in arrivals.get(step, []):
            engine.add_request(name, prompt, params)
        engine.step()
        step += 1


def add_captions(page: Path) -> None:
    """Give the first line of the data a title and the captions, with the meanings of their terms."""
    words = read_glossary()
    captions = []
    for stop in STOPS:
        captions.append(stop._asdict() | {"terms": [[term, *words[term]] for term in stop.terms]})
    captions[-1]["links"] = LINKS
    viewer, data = page.read_text(encoding="utf-8").split('id="steps">\n')
    first, rest = data.split("\n", 1)
    header = json.loads(first) | {"title": "A tour of paged attention", "captions": captions}
    as_json = json.dumps(header, separators=(",", ":")).replace("<", "\\u003c")  # no "<" may end the script
    page.write_text(f'{viewer}id="steps">\n{as_json}\n{rest}', encoding="utf-8")


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


if __name__ == "__main__":
    run_program(main)
