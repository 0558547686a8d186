"""The snapshot between two steps, and its drawing."""

from __future__ import annotations

from functools import partial

from conftest import tokens
from fake_runner import fake_engine

from nanopaged import SamplingParams

make_engine = partial(fake_engine, num_blocks=6, block_size=4, num_host_blocks=8, watermark=0.0)


def test_the_drawing() -> None:
    """Two samples of seven tokens (the paper's Fig. 8): after a step each has a partial block of its own."""
    engine = make_engine()
    engine.add_request("A", tokens(5, 7), SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True))
    engine.add_request("B", tokens(1, 5), SamplingParams(max_tokens=1))
    engine.step()
    shared = engine.snapshot()
    engine.step()
    assert (
        str(engine.snapshot())
        == """\
after step 2: of 6 blocks with 4 slots, 3 in use, 1 cached, 2 free

A.1, running: 9 tokens, 8 of them computed
  logical block    0  1
  physical block   0  3
  # filled         4  4

A.2, running: 9 tokens, 8 of them computed
  logical block    0  1
  physical block   0  1
  # filled         4  4

physical blocks
    0  ████  A.1 A.2
    1  ████  A.2
    2  ████  cached, number 1 to be evicted
    3  ████  A.1
  4-5  free"""
    )
    assert "    1  ███·  A.1 A.2\n" in str(shared), "a snapshot does not change with the engine"


def test_states() -> None:
    """Each state of a request and of a block, counted as `stats` counts them."""
    engine = make_engine(preemption="swap")
    for name, first, num in (("A", 5, 9), ("B", 20, 7), ("C", 40, 8)):
        engine.add_request(name, tokens(first, num), SamplingParams(max_tokens=12, ignore_eos=True))
    seen_requests, seen_blocks = set(), set()
    while engine.has_unfinished_requests():
        engine.step()
        snapshot, stats = engine.snapshot(), engine.stats()
        states = [request.state for request in snapshot.requests]
        counted = [states.count(state) for state in ("running", "waiting", "swapped")]
        assert counted == [stats.num_running, stats.num_waiting, stats.num_swapped]
        blocks = [block.state for block in snapshot.blocks]
        cached = blocks.count("cached")
        assert blocks.count("free") + cached == snapshot.num_free_blocks == stats.num_free_blocks
        assert cached == len(snapshot.cached) == stats.num_cached_blocks
        used = [block for block in snapshot.blocks if block.ref_count > 0]
        filled = sum(block.num_filled for block in used)
        assert not used or filled / (4 * len(used)) == stats.slot_utilization
        for request in snapshot.requests:
            for seq in request.sequences:
                assert bool(seq.host_table) == (request.state == "swapped")
                assert bool(seq.block_table) == (request.state == "running")
                assert ("host block" in str(snapshot)) == ("swapped" in states)
        seen_requests |= set(states)
        seen_blocks |= set(blocks)
    assert seen_requests == {"running", "waiting", "swapped"}
    assert seen_blocks == {"free", "partial", "full", "cached"}
