"""Stage 3: the scheduler's one rule and its two loops, by hand; then random workloads."""

from __future__ import annotations

from typing import Any

import pytest
from beside import asked, compare, small_workload, test_random_workloads  # noqa: F401
from pools import table
from random_workloads import Asked

FAMILY = "allocate A 1..10 | B 11..22 | C 23..29; compute A 6; compute B 6; compute C 6"
TOKENS = [
    ("A sequence gets the tokens that it lacks", "allocate A 1..10; compute A 6; schedule A 20"),
    ("A sequence gets what the budget has", "allocate A 1..20; schedule A 8"),
    ("One token is a decode", "allocate A 1..21; compute A 20; schedule A 8"),
    ("A chunk of one token counts as a decode", "allocate A 1..13; compute A 6; schedule A 1"),
    ("Without chunks a prompt waits until there is budget", "allocate A 1..10; schedule A 9 chunks=0"),
    ("Without chunks a prompt fits in a budget of its size", "allocate A 1..10; schedule A 10 chunks=0"),
    ("Two blocks of 4 become full", "allocate A 1..13; compute A 6; schedule A 100"),
    ("A block becomes full with its last slot", "allocate A 1..4; compute A 3; schedule A 9"),
    ("No block becomes full", "allocate A 1..7; compute A 4; schedule A 9"),
    ("After a sequence that is cut short its siblings get nothing", f"{FAMILY}; schedule A 8"),
    ("They wait as well without chunks", f"{FAMILY}; schedule A 8 chunks=0"),
    ("With enough budget all get theirs, and decodes come first", f"{FAMILY}; schedule A 100"),
    ("A beam that waits for its sibling is not in the batch",
     "allocate A 1..10 | B 11..20; compute A; compute B 9; schedule A 8"),
]  # fmt: skip
test_tokens = table([("_schedule_tokens", rule, "20 blocks of 4", commands) for rule, commands in TOKENS])

CASES = [
    ("Without requests the batch is empty", {}, [asked(1, arrival=1)]),
    ("The table of the page", {"budget": 8}, [asked(4, 6), asked(20, 2, arrival=1), asked(3, 2, arrival=1)]),
    ("Running requests come first, and a prompt gets what they leave: nothing", {"budget": 3},
     [asked(1), asked(1), asked(1), asked(2, arrival=1)]),
    ("A request that comes later may have a smaller rank", {"budget": 6},
     [asked(5, arrival=1), asked(9), asked(9)]),
    ("A request for 2 outputs counts 2 of max_num_seqs", {"max_num_seqs": 4},
     [asked(3), asked(3), asked(3, n=2), asked(3)]),
    ("It counts 2 while its prompt is computed", {"max_num_seqs": 2, "budget": 3}, [asked(6, n=2), asked(3)]),
    ("No request overtakes one that does not fit in max_num_seqs", {"max_num_seqs": 3},
     [asked(3), asked(3, n=3), asked(3)]),
    ("No request overtakes one that needs more blocks", {"num_blocks": 8},
     [asked(15), asked(24, arrival=1), asked(2, arrival=1)]),
    ("The last request is preempted", {"num_blocks": 6}, [asked(8), asked(7), asked(7)]),
    ("The request that needs a block may be the last one", {"num_blocks": 3}, [asked(2), asked(8)]),
    ("Three are preempted for one", {"num_blocks": 5}, [asked(5, n=4), asked(3), asked(3), asked(3)]),
    ("Five are preempted for one", {"num_blocks": 7}, [asked(5, n=6), *[asked(3)] * 5]),
    ("A request without budget needs no slots, so none is preempted for it", {"num_blocks": 4, "budget": 4},
     [asked(3, 9), asked(4, 9), asked(4, 5, arrival=1)]),
    ("A preempted request does not count for max_num_seqs",
     {"num_blocks": 4, "max_num_seqs": 2, "block_size": 2}, [asked(2), asked(2, arrival=1), asked(6, 2)]),
    ("A block that a running request may need stays free", {"num_blocks": 4, "watermark": 0.5},
     [asked(4), asked(8, arrival=1)]),
    ("Without chunks a prompt waits for a step that has room", {"chunked": False, "budget": 12},
     [asked(5), asked(9), asked(2)]),
    ("All 150 that max_num_seqs allows run", {"num_blocks": 400, "budget": 400, "max_num_seqs": 150},
     [asked(1, 2)] * 151),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "options", "requests"), CASES)
def test_schedule(rule: str, options: dict[str, Any], requests: list[Asked]) -> None:
    compare(small_workload(requests, **options), rule)
