"""A second tier. The oracles: transformers, and the engine without a tier."""

import random
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import GREEDY, Oracle, Run, Workload, check_refused, random_runs, serve, tokens
from tier import LLM, TierConfig, TierEngine

from nanopaged import SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult

CHATS = [tokens(first, 30) for first in (1, 2, 3)]


def make(oracle: Oracle, **options: Any) -> LLM:
    """An engine with a pool of 14 blocks of 4: room for one chat."""
    return LLM(oracle.folder, **{"block_size": 4, "num_blocks": 14} | options)


def say(oracle: Oracle, llm: LLM, chats: list[list[int]]) -> int:
    """Serve chats one by one; their tokens are those of transformers. Returns how many were cached."""
    num_cached = 0
    for chat in chats:
        (output,) = serve(llm, [chat], GREEDY)
        oracle.check([output])
        num_cached += output.metrics.num_cached_tokens
    return num_cached


def test_chats_come_back(qwen3: Oracle) -> None:
    """All full blocks of a chat are found, but for its last token, which is always computed."""
    llm = make(qwen3)
    assert [say(qwen3, llm, CHATS) for _ in range(3)] == [0, 3 * 28, 3 * 28]
    assert llm.engine.stats().prefix_cache_hits == 6 * 28
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert serve(llm, CHATS[2:], scored)[0].metrics.num_cached_tokens == 0
    llm.reset_prefix_cache()
    assert say(qwen3, llm, CHATS) == 0, "the tier was not emptied"


def test_the_least_recently_used_make_room(qwen3: Oracle) -> None:
    """Each chat has seven full blocks of a prompt, and a few of its answer."""
    llm = make(qwen3)
    tier = llm.engine.block_manager.tier
    tier.capacity = 40
    chats = [tokens(first, 30) for first in range(1, 12)]
    assert say(qwen3, llm, chats) == 0
    assert len(tier.kv) == 40
    for chat in (chats[-2], chats[0]):  # the newest one that the pool has not, and the oldest one
        assert (say(qwen3, llm, [chat]) > 0) == (chat != chats[0])


class TierRun(Run):
    """A run with a tier of three blocks or of many."""

    engine_class = TierEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        workload.options["enable_prefix_caching"] = True
        super().__init__(folder, workload)
        self.tier = self.engine.block_manager.tier
        self.tier.capacity = random.Random(workload.seed).choice([3, 1000, 1000])
        self.execute, self.engine.runner.execute = self.engine.runner.execute, self.count_and_execute

    def count_and_execute(self, batch: ScheduledBatch) -> StepResult:
        out, into = {block for block, _ in batch.moves.swap_out}, {block for block, _ in self.tier.loads}
        self.happened["loaded"] += len(into)
        self.happened["swapped out and loaded"] += len(out & into)
        return self.execute(batch)


@pytest.mark.parametrize(
    ("draw", "events"), [(harness.draw_workload, []), (harness.crowded, ["swapped out and loaded"])]
)
def test_random_workloads(qwen3: Oracle, draw: Any, events: list[str]) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    random_runs(TierRun, qwen3.folder, 15, ["loaded", "swap", "fault: schedule", *events], draw)


def test_what_is_refused(qwen3: Oracle) -> None:
    table = [
        ({"enable_prefix_caching": False}, "a tier needs"),
        ({"tensor_parallel_size": 2}, "a tier needs"),
    ]
    check_refused(TierConfig, table)
    small = {"model": qwen3.folder, "num_blocks": 14, "tier_bytes": 100}
    check_refused(LLM, [(small, "tier_bytes is 100, but a block has .*: raise it")])
