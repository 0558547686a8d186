"""Stage 2: blocks without the prefix cache, by hand; then random workloads of requests with one sequence."""

from __future__ import annotations

from dataclasses import replace

from beside import compare
from pools import table
from random_workloads import mixed

test_a_case = table([
    ("take", "Each block is given once, and has one reference", "3 blocks of 4", "take x; take y; take z"),
    ("take", "`free_ids` is a stack: the block that was released last is taken first", "3 blocks of 4",
     "take x; take y; release x; take z; release y; release z; take u; take v"),
    ("share", "A block has another reference", "2 blocks of 4", "take x; share x; share x"),
    ("share", "A cached block is in use again and keeps its key; the others stay cached", "4 blocks of 4",
     "take x; take y; take z; key x y z; release y; release x; release z; share x; release x; share y"),
    ("release", "A block becomes free with its last reference", "2 blocks of 4",
     "take x; share x; release x; release x"),
    ("release", "Without references it raises RuntimeError, and nothing changes", "3 blocks of 4",
     "take x; take y; release x; release x; release y; release x"),
    ("release", "A block with a key becomes cached, behind those that are cached", "3 blocks of 4",
     "take x; take y; key x y; share x; release x; release x; release y; release x"),
    ("allocate", "1 and 4 tokens need a block of 4, and 5 need two", "6 blocks of 4",
     "allocate A 1; allocate B 1..4; allocate C 1..5"),
    ("allocate", "13 tokens need 4 blocks: it gives False, and nothing changes", "3 blocks of 4",
     "allocate A 1..13; allocate B 1..12"),
    ("allocate", "Cached blocks count in `num_free_blocks`", "4 blocks of 4",
     "take x; take y; key x y; release y; release x; allocate A 1..16"),
    ("append_slots", "The newest token has a slot or needs a new block; no copies", "4 blocks of 4",
     "allocate A 1..7; append A 8; append A 9"),
    ("append_slots", "A free slot needs no free block", "2 blocks of 4", "allocate A 1..7; append A 8"),
    ("append_slots", "Without a free block it gives None, and nothing changes", "2 blocks of 4",
     "allocate A 1..8; append A 9"),
    ("append_slots", "Tokens may need several blocks: all, or none", "4 blocks of 4",
     "allocate A 1..4; append A 5..13; append A 14..20"),
    ("append_slots", "Cached blocks count in `num_free_blocks`", "4 blocks of 4",
     "take x; take y; key x y; allocate A 1..4; release x; release y; append A 5..16"),
    ("trim", "The blocks beyond the tokens are given back", "5 blocks of 4",
     "allocate A 1..17; trim A 17; trim A 13; trim A 12; trim A 1; trim A 0"),
    ("trim", "A block that another table has stays in use", "2 blocks of 4",
     "allocate A 1..4; share A[0]; trim A 0"),
    ("trim", "The last block goes first, so that it is evicted first", "3 blocks of 4",
     "allocate A 1..12; key A[0] A[1] A[2]; trim A 0"),
    ("trim", "The table may be long", "200 blocks of 4", "allocate A 1..790; trim A 10"),
])  # fmt: skip


def test_random_workloads() -> None:
    """Requests with one sequence are served as the engine serves them."""
    for seed in range(60):
        work = mixed(seed)
        requests = [asked for asked in work.requests if asked.params.width == 1]
        if requests:
            options = work.options | {"enable_prefix_caching": False, "watermark": 0.0}
            work = replace(work, options=options, requests=requests)
            compare(work, f"Random workload {seed}")
