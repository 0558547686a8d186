"""A second tier. The oracles: transformers, and the engine without a tier."""

import gc
import os
import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import GREEDY, Oracle, Run, Workload, check_refused, random_runs, serve, tokens
from tier import LLM, PAGE, TierConfig, TierEngine

from nanopaged import SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult

CHATS = [tokens(first, 30) for first in (1, 2, 3)]
MIB = 1 << 20


def make(folder: Path | str, file: Path | str | None = None, **options: Any) -> LLM:
    """An engine with a pool of 14 blocks of 4: room for one chat."""
    gc.collect()  # the engine before it has the file open
    options = {"block_size": 4, "num_blocks": 14, "tier_bytes": 4 * MIB, "tier_file": file} | options
    return LLM(folder, **options)


def say(oracle: Oracle, llm: LLM, chats: list[list[int]]) -> int:
    """Serve chats one by one; their tokens are those of transformers. Returns how many were cached."""
    num_cached = 0
    for chat in chats:
        (output,) = serve(llm, [chat], GREEDY)
        oracle.check([output])
        num_cached += output.metrics.num_cached_tokens
    return num_cached


@pytest.mark.parametrize("where", [None, "file"])
def test_chats_come_back_and_outlive_the_engine(qwen3: Oracle, where: str | None, tmp_path: Path) -> None:
    """All full blocks of a chat are found, but for its last token, which is always computed."""
    folder, file = qwen3.folder, tmp_path / "tier" if where else None
    if file is not None:
        file.touch()  # an empty file is a new one
        say(qwen3, first := make(folder, file), CHATS[:1])
        first.close_tier()  # which stores what the pool has
    llm = make(folder, file)
    before = 28 if where else 0
    assert [say(qwen3, llm, CHATS) for _ in range(3)] == [before, 3 * 28, 3 * 28]
    assert llm.engine.stats().prefix_cache_hits == before + 6 * 28
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert serve(llm, CHATS[2:], scored)[0].metrics.num_cached_tokens == 0
    llm.close_tier()
    assert say(qwen3, llm, CHATS) == 0, "the tier is closed"
    llm = make(folder, file, preemption="recompute")
    say(qwen3, llm, CHATS)
    llm.reset_prefix_cache()
    llm.close_tier()
    assert say(qwen3, make(folder, file), CHATS) == 0, "the tier was not emptied"


numbers = count()


class TierRun(Run):
    """A run with a tier of three blocks or of many, in host memory or in a file of its own."""

    engine_class = TierEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        file = folder / f"tier-{next(numbers)}" if workload.seed % 2 else None
        workload.options["enable_prefix_caching"] = True
        self.options = {"tier_bytes": 4 * MIB, "tier_file": file}
        super().__init__(folder, workload)
        self.tier = self.engine.block_manager.tier
        self.tier.capacity = random.Random(workload.seed).choice([3, 1000, 1000])
        self.execute, self.engine.runner.execute = self.engine.runner.execute, self.count_and_execute

    def count_and_execute(self, batch: ScheduledBatch) -> StepResult:
        out, into = {block for block, _ in batch.moves.swap_out}, {block for block, _ in self.tier.loads}
        self.happened["loaded"] += len(into)
        self.happened["swapped out and loaded"] += len(out & into)
        return self.execute(batch)

    def check(self) -> None:
        super().check()
        assert self.tier.db is not None, "it was switched off"


def crowded(seed: int) -> Workload:
    """Requests overtake each other and are swapped, so that blocks are loaded where others swap out."""
    workload = harness.draw_workload(3 * seed)
    workload.is_shuffled = True
    options = {"num_host_blocks": 300, "max_num_batched_tokens": 160, "preemption": "swap", "watermark": 0.0}
    return workload.with_pool(min(workload.options["block_size"], 3), **options)


@pytest.mark.parametrize(
    ("draw", "events"), [(harness.draw_workload, []), (crowded, ["swapped out and loaded"])]
)
def test_random_workloads(qwen3: Oracle, draw: Any, events: list[str]) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    random_runs(TierRun, qwen3.folder, 15, ["loaded", "swap", "fault: schedule", *events], draw)


def test_one_engine_has_a_file(qwen3: Oracle, tmp_path: Path) -> None:
    """A second engine is refused until the first one has closed the file."""
    file, in_use = tmp_path / "tier", "an engine has it open: call `close_tier` there, or name another"
    llm = make(qwen3.folder, file)
    second = {"model": qwen3.folder, "tier_file": file, "num_blocks": 14, "block_size": 4}
    check_refused(LLM, [(second, in_use)])
    assert say(qwen3, llm, CHATS * 2) == 3 * 28
    llm.close_tier()
    assert say(qwen3, make(qwen3.folder, file), CHATS) == 3 * 28


@pytest.mark.parametrize("where", [None, "file"])
def test_the_tier_keeps_its_size(qwen3: Oracle, where: str | None, tmp_path: Path, caplog: Any) -> None:
    """The oldest blocks make room. Then the disk is full: one warning, and tokens stay right."""
    file = tmp_path / "tier" if where else None
    llm = make(qwen3.folder, file, tier_bytes=(num_bytes := 90 * PAGE))
    tier = llm.engine.block_manager.tier
    chats = [tokens(first, 30) for first in range(1, 12)]
    assert say(qwen3, llm, chats) == 0
    for chat in (chats[-2], chats[0]):  # the newest one that the pool has not, and the oldest one
        assert (say(qwen3, llm, [chat]) > 0) == (chat != chats[0])
        assert len(tier.order) <= tier.capacity
        (pages,), *_ = tier.run("PRAGMA page_count")
        assert pages * PAGE <= num_bytes
        assert file is None or file.stat().st_size <= num_bytes
    tier.capacity = 1000
    tier.run("PRAGMA max_page_count = 60")
    say(qwen3, llm, chats)
    assert caplog.text.count("the second tier") == caplog.text.count("is full. Tokens stay right") == 1


def damage(file: Path, seed: int) -> None:
    """Cut the file, or overwrite bytes or pages."""
    rng, size = random.Random(seed), file.stat().st_size
    if seed % 3 == 0:
        os.truncate(file, rng.choice([0, rng.randrange(size)]))
        return
    with file.open("r+b") as opened:
        for _ in range(rng.choice([1, 9])):
            opened.seek(rng.randrange(size // 2 if seed % 3 == 1 else 0, size))
            opened.write(bytes([7]) * rng.choice([1, 4096]))


@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_file_is_never_wrong(qwen3: Oracle, is_open: bool, tmp_path: Path, caplog: Any) -> None:
    """Tokens stay those of transformers, with at most one warning, or the file is refused."""
    happened: Counter[str] = Counter()
    for seed in range(12):
        llm, file = make(qwen3.folder, tmp_path / str(seed)), tmp_path / str(seed)
        llm.engine.block_manager.tier.db.execute("PRAGMA cache_size=2")  # pages: else it reads no damage
        say(qwen3, llm, CHATS)
        if not is_open:
            llm.close_tier()
        damage(file, seed)
        caplog.clear()
        try:
            llm = llm if is_open else make(qwen3.folder, file)
            happened["found"] += say(qwen3, llm, CHATS * 2) > 3 * 28
        except ValueError as error:
            assert "delete it, or name another" in str(error)  # noqa: PT017
            happened["refused"] += 1
        assert caplog.text.count("the second tier") <= 1
        happened["switched off"] += "Tokens stay right" in caplog.text
    assert all(happened[event] for event in ("found", "switched off", *["refused"] * (not is_open))), happened


def test_what_is_refused(qwen3: Oracle, tmp_path: Path) -> None:
    """Options, and files of another model, dtype or block size, or of another program."""
    file, folder = tmp_path / "tier", qwen3.folder
    make(folder, file).close_tier()
    model = harness.make_model("Qwen3")
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "other")  # the same config
    (tmp_path / "text").write_bytes(b"A text that is no database." * 99)
    is_of = "it is of .*, this engine of .*: delete it, or name another"
    table = [
        ({"folder": tmp_path / "other", "file": file}, is_of),
        ({"folder": folder, "file": file, "dtype": "bfloat16"}, is_of),
        ({"folder": folder, "file": file, "block_size": 8}, is_of),
        ({"folder": folder, "file": tmp_path / "text"}, "not a database: delete it, or name another"),
        ({"folder": folder, "tier_bytes": 4096}, r"tier_bytes is 4,096, .* raise it to"),
    ]
    check_refused(make, table)
    table = [
        ({"enable_prefix_caching": False}, "is .*, but a tier needs"),
        ({"tensor_parallel_size": 2}, "is .*, but a tier needs"),
        ({"tier_file": tmp_path}, "tier_file is .*, .*is a folder"),
        ({"tier_file": tmp_path / "none" / "tier"}, "tier_file is .*, .*folder is missing"),
    ]
    check_refused(TierConfig, table)
