"""Stage 5: forks and copy-on-write, by hand; then random workloads of requests with several sequences."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

from beside import test_random_workloads  # noqa: F401
from pools import Pool, table

from nanopaged.beam_search import fork_samples
from nanopaged.sequence import Sample, Sequence

SIX = "allocate A 1..6; compute A"  # two blocks of 4, the second with two free slots
TWO = f"{SIX}; fork A B"
THREE = f"{TWO}; fork A C"
ELEVEN = [f"B{i}" for i in range(11)]
TWELVE = "; ".join([SIX, *[f"fork A {name}" for name in ELEVEN]])
GROW = "1 blocks of 4"
test_a_case = table([
    ("blocks_to_grow", "The newest token has a slot", GROW, "grow 8 7 2"),
    ("blocks_to_grow", "The newest token needs a new block", GROW, "grow 9 7 2"),
    ("blocks_to_grow", "Tokens may need several blocks", GROW, "grow 13 7"),
    ("blocks_to_grow", "An empty table needs all its blocks", GROW, "grow 4"),
    ("blocks_to_grow", "Of two writers of a block one needs a copy", GROW, "grow 7 7 2 | 7 2"),
    ("blocks_to_grow", "Both need a new block, and a full block is not copied", GROW, "grow 9 7 2 | 7 2"),
    ("blocks_to_grow", "Two blocks have two writers each", GROW, "grow 7 7 2 | 7 2 | 7 3 | 7 3"),
    ("blocks_to_grow", "A block that is shared, but not written, needs no copy", GROW, "grow 6 7 2 | 7 3"),
    ("blocks_to_grow", "Three sequences need two new blocks each", GROW, "grow 9 7 | 7 | 7"),
    ("blocks_to_grow", "Eleven sequences write two blocks", GROW, "grow 6 7 2" + " | 7 2" * 4 + " | 7 3" * 6),
    ("blocks_to_grow", "Twelve sequences write one block", GROW, "grow 7 7 2" + " | 7 2" * 11),
    ("fork", "A fork shares all blocks, and its tokens are computed", "6 blocks of 4", TWO),
    ("fork", "A fork and its parent have tables and tokens of their own", "6 blocks of 4",
     f"{TWO}; append B 7..9"),
    ("append_slots", "A block that both write is copied for the first, and the last writes in place",
     "3 blocks of 4", f"{TWO}; append A 7 | B 8"),
    ("append_slots", "Afterwards each sequence has its own block", "4 blocks of 4",
     f"{TWO}; append A 7 | B 8; append A 9 | B 9"),
    ("append_slots", "Three writers need two copies", "4 blocks of 4", f"{THREE}; append A 7 | B 8 | C 9"),
    ("append_slots", "Twelve writers need eleven copies", "13 blocks of 4",
     f"{TWELVE}; append A 7 | {' 7 | '.join(ELEVEN)} 7"),
    ("append_slots", "A full block is not copied: each sequence needs a new one", "4 blocks of 4",
     "allocate A 1..4; compute A; fork A B; append A 5 | B 6"),
    ("append_slots", "Too few blocks for all copies: None, and nothing changes", "3 blocks of 4",
     f"{THREE}; append A 7 | B 8 | C 9"),
    ("append_slots", "Too few new blocks for all: None, and nothing changes", "3 blocks of 4",
     "allocate A 1..8; compute A; fork A B; append A 9 | B 9"),
    ("append_slots", "One sequence grows as in stage 2", "3 blocks of 4",
     "allocate A 1..7; compute A; append A 8; append A 9; append A 10..13"),
    ("append_slots", "A beam that waits for its sibling writes nothing: no copy",
     "3 blocks of 4", "allocate A 1..4; compute A; share A[0]; fork A B; append B 5"),
    ("fork_samples", "Each sample has a fork, in order, and the parent is freed",
     "6 blocks of 4", f"{SIX}; fork_samples A 20 21 22"),
    ("fork_samples", "A sample that ends with its first token is freed, and not in `live`", "6 blocks of 4",
     "allocate A 1..6 max_tokens=1; compute A; fork_samples A 20 21"),
    ("fork_samples", "A single sample is a fork as well", "6 blocks of 4",
     f"{SIX}; fork_samples A 20; append A0 21"),
])  # fmt: skip


def test_fork_samples() -> None:
    """If the step fails at the second sample, the request has the parent alone, without a token."""
    pool = Pool("6 blocks of 4")
    pool.do("allocate A 1..6")
    pool.do("compute A")
    parent = pool.sequences["A"]
    failing = patch.object(Sequence, "append", autospec=True, side_effect=[False, KeyboardInterrupt])
    with suppress(KeyboardInterrupt), failing as append:
        fork_samples(parent.request, [Sample(20, -1.0), Sample(21, -1.0), Sample(22, -1.0)], pool.manager)
    assert parent.request.sequences == parent.request.live == [parent], (
        "The step failed at the second of three samples, and the request no longer has the parent alone: "
        "`fork_samples` changes the request last."
    )
    receivers = [call.args[0] for call in append.call_args_list]
    assert parent not in receivers, "The parent gets a token, and the step fails: the forks get the samples."
