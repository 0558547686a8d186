"""Stage 3: the scheduler's one rule and its two loops, by hand; then random workloads."""

from __future__ import annotations

from typing import Any

import pytest
from beside import asked, compare, engines_own, make_request, small_workload
from random_workloads import Asked, mixed

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import ScheduledBatch, Sequence


class NotingBlocks(BlockManager):
    """Its `publish` only notes which logical blocks would get keys."""

    published: list[int]

    def publish(self, seq: Sequence) -> None:
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        self.published += range(seq.num_computed_tokens // self.block_size, end // self.block_size)


def schedule_tokens(siblings: list[tuple[int, int]], budget: int, chunked: bool) -> dict[str, Any]:
    """Call `_schedule_tokens` for a request with these sequences: (tokens, computed tokens)."""
    blocks = NotingBlocks(99, 4)
    blocks.published = []
    scheduler = Scheduler(blocks, max_num_seqs=99, max_num_batched_tokens=99, enable_chunked_prefill=chunked)
    request = make_request("0", [0], SamplingParams())
    request.live = [Sequence(request, [0] * num, num_computed_tokens=computed) for num, computed in siblings]
    batch = ScheduledBatch()
    rest = scheduler._schedule_tokens(request, budget, batch)
    scheduled = [seq.num_scheduled_tokens if seq in batch.sequences else 0 for seq in request.live]
    return {
        "the tokens of the sequences in the batch are": scheduled,
        "the rest of the budget is": rest,
        "num_decodes is": batch.num_decodes,
        "which sequences of the batch have one token is": [
            s.num_scheduled_tokens == 1 for s in batch.sequences
        ],
        "the logical blocks that `publish` gives keys, if num_scheduled_tokens is set, are": sorted(
            blocks.published
        ),
    }


@pytest.mark.function("_schedule_tokens")
@pytest.mark.parametrize(
    ("rule", "siblings", "budget", "chunked"),
    [
        ("A sequence gets the tokens that it lacks", [(10, 6)], 20, True),
        ("A sequence gets what the budget has", [(20, 0)], 8, True),
        ("One token is a decode", [(21, 20)], 8, True),
        ("A chunk of one token counts as a decode", [(13, 6)], 1, True),
        ("Without chunks a prompt waits until the budget is enough", [(10, 0)], 9, False),
        ("Without chunks a prompt fits in a budget of its size", [(10, 0)], 10, False),
        ("Two blocks of 4 become full", [(13, 6)], 100, True),
        ("A block becomes full with its last slot", [(4, 3)], 9, True),
        ("No block becomes full", [(7, 4)], 9, True),
        ("After a sequence that is cut short its siblings get nothing", [(10, 6), (12, 6), (7, 6)], 8, True),
        ("They wait as well without chunks", [(10, 6), (12, 6), (7, 6)], 8, False),
        ("With enough budget all get theirs, and decodes come first", [(10, 6), (12, 6), (7, 6)], 100, True),
        ("A beam that waits for its sibling is not in the batch", [(10, 10), (10, 9)], 8, True),
    ],
)
def test_schedule_tokens(rule: str, siblings: list[tuple[int, int]], budget: int, chunked: bool) -> None:
    with engines_own():
        expected = schedule_tokens(siblings, budget, chunked)
    found = schedule_tokens(siblings, budget, chunked)
    mode = "chunks" if chunked else "no chunks"
    case = f"{rule}. Sequences with (tokens, computed) {siblings}, budget {budget}, {mode}:"
    for fact, value in expected.items():
        assert found[fact] == value, f"{case} {fact} {found[fact]}, and not {value}."


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


@pytest.mark.function("schedule")
@pytest.mark.parametrize(("rule", "options", "requests"), CASES)
def test_schedule(rule: str, options: dict[str, Any], requests: list[Asked]) -> None:
    compare(small_workload(requests, **options), rule)


def test_random_workloads() -> None:
    """Requests of every kind are served as the engine serves them."""
    num_preemptions = sum(compare(mixed(seed), f"Random workload {seed}") for seed in range(100))
    assert num_preemptions > 50, f"{num_preemptions} preemptions are too few to judge them."
