"""Stage 6: preemption and swapping, by hand; then random workloads that are swapped and recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside import asked, check_facts, compare, engines_own, small_workload, test_random_workloads  # noqa: F401
from pools import table
from random_workloads import Asked

from nanopaged import BeamSearchParams
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.sequence import Moves

POOL = "8 blocks of 4, uncached, 8 on the host"
SMALL = "3 blocks of 4, uncached, 4 on the host"
BEAMS = Asked([0] * 6, BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True), arrival=0)
FAMILY = "allocate A 1..11 | B 1..8 20 21 22 | C 1..9; compute A 10; compute B 2; compute C 1"
test_a_case = table([
    ("swap_out", "The blocks with computed tokens move, and all blocks are given back", POOL,
     "allocate A 1..10; compute A 6; swap_out A"),
    ("swap_out", "8 computed tokens are in 2 blocks, and the ninth is in a third one", POOL,
     "allocate A 1..10; compute A 8; allocate B 1..10; compute B 9; swap_out A; swap_out B"),
    ("swap_out", "Without a computed token it gives None, and nothing changes", POOL,
     "allocate A 1..10; swap_out A"),
    ("swap_out", "Too few host blocks: None, and nothing changes", "8 blocks of 4, uncached, 1 on the host",
     "allocate A 1..10; compute A 6; swap_out A"),
    ("swap_out", "Two host blocks are enough for two blocks", "8 blocks of 4, uncached, 2 on the host",
     "allocate A 1..10; compute A 6; swap_out A"),
    ("swap_out", "A block that several sequences share moves once", POOL, f"{FAMILY}; swap_out A"),
    ("swap_out", "A block that only a sibling has computed is in both host tables", POOL,
     "allocate A 1..9 | B 1..8 20; compute A 2; swap_out A"),
    ("swap_in", "All blocks come back, and the host blocks are free", POOL,
     "allocate A 1..10; compute A 6; swap_out A; take x; swap_in A"),
    ("swap_in", "A block that several sequences share comes back once, and is shared", POOL,
     f"{FAMILY}; swap_out A; take x; swap_in A"),
    ("swap_in", "The newest token needs a block: None until one is free", SMALL,
     "allocate A 1..8; compute A; token A 9; swap_out A; take x; swap_in A; release x; swap_in A"),
    ("swap_in", "Tokens that are not computed need blocks", "5 blocks of 4, uncached, 4 on the host",
     "allocate A 1..20; compute A 6; swap_out A; take x; swap_in A; release x; swap_in A"),
    ("swap_in", "Of two writers of a block one needs a copy", SMALL,
     "allocate A 1..7; compute A; fork A B; token A 8; token B 8; swap_out A; take x; swap_in A; release x; "
     "swap_in A"),
    ("swap_in", "num_reserved blocks stay free", "4 blocks of 4, uncached, 4 on the host",
     "allocate A 1..8; compute A 7; swap_out A; swap_in A num_reserved=3; swap_in A num_reserved=2"),
    ("release", "Each host block is free once, and a second call does nothing", POOL,
     f"{FAMILY}; swap_out A; release_host A; release_host A"),
])  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "swap_out", "swap_in", "copies"),
    [
        ("Blocks go out", [(3, 1)], [], []),
        ("Blocks come in", [], [(2, 0)], []),
        ("Blocks are copied", [], [], [(1, 3), (1, 0)]),
        ("A block goes out before another comes to its place", [(1, 2)], [(0, 1)], []),
        ("A block comes in before it is copied", [], [(0, 1)], [(1, 2)]),
        ("A block goes out before a copy takes its place", [(2, 1)], [], [(0, 2)]),
        ("Out, in, copies", [(3, 1), (0, 2)], [(0, 3)], [(3, 0)]),
    ],
)
def test_move_blocks(rule: str, swap_out: list, swap_in: list, copies: list) -> None:
    """Device blocks hold the numbers 0 to 3, host blocks 100 to 102."""

    def contents() -> dict[str, Any]:
        """What attention sees through its views."""
        shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32)
        cache = KVCache(shape, 4, 4, torch.device("cpu"), num_host_blocks=3)
        data, host = cache.data, cache.host
        for i in range(4):
            data[i] = i
        for i in range(3):
            host[i] = 100 + i
        moves = Moves(list(swap_out), list(swap_in), list(copies))
        cache.move_blocks(moves)
        return {
            "the numbers in the blocks of `data` are": [block.unique().tolist() for block in data],
            "the numbers in the blocks of `host` are": [block.unique().tolist() for block in host],
            "`data` and `host` are still the tensors that attention views:": (
                cache.data is data and cache.host is host
            ),
            "the lists of moves, which belong to the batch, are": moves,
        }

    with engines_own():
        expected = contents()
    check_facts(f"{rule}. swap_out {swap_out}, swap_in {swap_in}, copies {copies}:", contents(), expected)


@pytest.mark.parametrize(
    ("rule", "options", "requests"),
    [
        ("A request is swapped", {"num_host_blocks": 8}, [asked(8), asked(7), asked(7)]),
        ("Too few host blocks: it is recomputed, and the next one is swapped",
         {"num_host_blocks": 1}, [asked(8, 9), asked(7), asked(3), asked(4)]),
        ("The mode is recompute", {"num_host_blocks": 8, "preemption": "recompute"},
         [asked(8), asked(7), asked(7)]),
        ("Several are preempted in a step, and their moves are put together",
         {"num_blocks": 5, "num_host_blocks": 8}, [asked(5, n=4), asked(3), asked(3), asked(3)]),
        ("A beam search is swapped", {"num_host_blocks": 8}, [asked(8, 9), BEAMS]),
        ("A beam search is recomputed", {}, [asked(8, 9), BEAMS]),
    ],
)  # fmt: skip
def test__preempt(rule: str, options: dict[str, Any], requests: list[Asked]) -> None:
    compare(small_workload(requests, **{"num_blocks": 6, "preemption": "swap"} | options), rule)
