"""A tour of paged attention: a run of some 60 steps in which everything happens, as a page for the browser.

    python docs/experiments/tour.py

writes docs/tour.html (see docs/trace.md). The pool and the host pool are so small, and the requests come at
such times, that the run has prefix hits, chunked prefill, four samples and their copies on write, a beam
search, preemption by swapping and, once the host pool is full, by recomputation, and evictions. The picture
in the README is one of its steps:

    chromium --headless --window-size=1200,860 --screenshot=docs/tour.png "file://$PWD/docs/tour.html#19"
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from common import make_parser

SPEECH = "HERALD:\nThe king comes here to-night; and all the court\nAttend upon his pleasure in the hall.\n\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/tour.html"), help="the file to write")
    args = parser.parse_args()
    write_tour(args.page, args.seed)
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


def count_events(page: Path) -> Counter[str]:
    """Kind of event → steps that have it."""
    _, data = page.read_text(encoding="utf-8").split('id="steps">\n')
    _, *lines = map(json.loads, data.splitlines())
    return Counter(
        kind
        for line in lines
        for kind in {kind for kinds, _ in line.get("said", []) for kind in kinds.split()}
    )


if __name__ == "__main__":
    main()
