"""Stage 5: forks and copy-on-write, by hand; then random workloads of requests with several sequences."""

from __future__ import annotations

from contextlib import suppress

import pytest
from beside import compare, engines_own
from pools import Pool, compare_pools
from random_workloads import forked, mixed

from nanopaged.beam_search import fork_samples
from nanopaged.block_manager import blocks_to_grow
from nanopaged.sequence import Sample, Sequence

SIX = "allocate A 1..6; compute A"  # two blocks of 4, the second with two free slots
TWO = f"{SIX}; fork A B"
THREE = f"{TWO}; fork A C"
ELEVEN = [f"B{i}" for i in range(11)]
TWELVE = "; ".join([SIX, *[f"fork A {name}" for name in ELEVEN]])
CASES = [
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
]  # fmt: skip


@pytest.mark.function("blocks_to_grow")
@pytest.mark.parametrize(
    ("rule", "tables", "num_tokens"),
    [
        ("The newest token has a slot", [[7, 2]], 8),
        ("The newest token needs a new block", [[7, 2]], 9),
        ("Tokens may need several blocks", [[7]], 13),
        ("An empty table needs all its blocks", [[]], 4),
        ("Of two writers of a block one needs a copy", [[7, 2], [7, 2]], 7),
        ("Both need a new block, and a full block is not copied", [[7, 2], [7, 2]], 9),
        ("Two blocks have two writers each", [[7, 2], [7, 2], [7, 3], [7, 3]], 7),
        ("A block that is shared, but not written, needs no copy", [[7, 2], [7, 3]], 6),
        ("Three sequences need two new blocks each", [[7], [7], [7]], 9),
        ("Eleven sequences write two blocks", [[7, 2]] * 5 + [[7, 3]] * 6, 6),
        ("Twelve sequences write one block", [[7, 2]] * 12, 7),
    ],
)
def test_blocks_to_grow(rule: str, tables: list[list[int]], num_tokens: int) -> None:
    """The sequences have no blocks of their own, as those of a request that is swapped out."""
    request = Pool("1 blocks of 4").request({"A": [1]})
    sequences = [Sequence(request, list(range(num_tokens))) for _ in tables]
    with engines_own():
        expected = blocks_to_grow(sequences, tables, 4)
    given = [list(table) for table in tables]
    found = blocks_to_grow(list(sequences), given, 4)
    case = f"{rule}. The tables {tables}, {num_tokens} tokens each, blocks of 4:"
    assert found == expected, f"{case} `blocks_to_grow` gives {found}, and not {expected}."
    assert given == tables, f"{case} `blocks_to_grow` changes the tables to {given}; it only counts."


@pytest.mark.parametrize(("function", "rule", "sizes", "commands"), CASES)
def test_a_case(function: str, rule: str, sizes: str, commands: str) -> None:
    compare_pools(rule, sizes, commands)


@pytest.mark.function("fork_samples")
def test_a_failure_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the step fails at the second sample, the request has the parent alone, without a token."""
    pool = Pool("6 blocks of 4")
    for command in SIX.split("; "):
        pool.do(command)
    parent = pool.sequences["A"]
    append = Sequence.append
    appended: list[Sample] = []

    def failing(seq: Sequence, sample: Sample) -> bool:
        appended.append(sample)
        if len(appended) == 2:
            raise KeyboardInterrupt
        return append(seq, sample)

    monkeypatch.setattr(Sequence, "append", failing)
    with suppress(KeyboardInterrupt):
        fork_samples(parent.request, [Sample(20, -1.0), Sample(21, -1.0), Sample(22, -1.0)], pool.manager)
    assert parent.request.sequences == parent.request.live == [parent], (
        "The step failed at the second of three samples, and the request no longer has the parent alone: "
        "`fork_samples` changes the request last."
    )
    assert parent.num_tokens == 6, (
        "The step failed, and the parent has another token: the forks get the samples."
    )


def test_random_workloads() -> None:
    """Requests with several sequences are served as the engine serves them."""
    for seed in range(30):
        compare(mixed(seed), f"Random workload {seed}")
        compare(forked(seed), f"Random workload {seed} with forked requests")
