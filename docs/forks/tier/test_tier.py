"""A second tier. The oracles: transformers, and the engine without a tier."""

import gc
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_random_runs
import torch
from conftest import Oracle, make_checkpoint, memory_that_was_never_written, qwen3, tokens  # noqa: F401
from fake_runner import GARBAGE, FakeRunner
from faults import STAGES
from random_workloads import LONGEST, Workload, forked, mixed, siblings, tiny
from serving import serve, tokens_of
from test_random_runs import fake_model, fake_tokenizer, serve_random
from tier import LLM, PAGE, Tier, TierBlockManager, TierConfig, TierEngine

from nanopaged import EngineConfig, LLMEngine, SamplingParams
from nanopaged.model_runner import ModelRunner
from nanopaged.sequence import Moves, ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CHATS = [tokens(first, 30) for first in (1, 2, 3)]
MIB = 1 << 20


def make(folder: Path, file: Path | None = None, **options: Any) -> LLM:
    """An engine with a pool of 14 blocks of 4: room for one chat."""
    gc.collect()  # the engine before it has the file open
    options = {"block_size": 4, "num_blocks": 14, "tier_bytes": 4 * MIB, "tier_file": file} | options
    return LLM(folder, **options)


def say(oracle: Oracle, llm: LLM, chats: list[list[int]]) -> int:
    """Serve chats one by one; their tokens are those of transformers. Returns how many were cached."""
    num_cached = 0
    for chat in chats:
        (output,) = serve(llm, [chat], GREEDY)
        assert tokens_of([output]) == [oracle.greedy(chat, 8, ignore_eos=True)]
        num_cached += output.metrics.num_cached_tokens
    return num_cached


@pytest.mark.parametrize("where", [None, "file"])
def test_chats_come_back_and_outlive_the_engine(qwen3: Oracle, where: str | None, tmp_path: Path) -> None:  # noqa: F811
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
    for budget, chunked in ((5, True), (200, False)) if file is not None else ():
        llm = make(folder, file, max_num_batched_tokens=budget, enable_chunked_prefill=chunked)
        assert say(qwen3, llm, CHATS) == 3 * 28
        llm.close_tier()
    llm = make(folder, file, preemption="recompute")
    say(qwen3, llm, CHATS)
    llm.reset_prefix_cache()
    llm.close_tier()
    assert say(qwen3, make(folder, file), CHATS) == 0, "the tier was not emptied"


def test_a_loaded_block_is_shared(qwen3: Oracle) -> None:  # noqa: F811
    """Two equal chats share what the first one loads: together they need 7 + 2 · 3 blocks, not 20."""
    llm, num_running = make(qwen3.folder, watermark=0), set[int]()
    say(qwen3, llm, CHATS)
    serve(llm, CHATS[:1] * 2, GREEDY, lambda llm: num_running.add(llm.engine.stats().num_running))
    assert max(num_running) == 2


class Slots(dict):
    """The slots of a fake runner are in a tensor, the pool of its tier: int64 [num_blocks, block_size]."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool.fill_(GARBAGE).numpy()

    def get(self, slot: tuple[int, int], default: int = GARBAGE) -> int:
        return int(self.pool[slot])

    def __setitem__(self, slot: tuple[int, int], number: int) -> None:
        self.pool[slot] = number


class TierFakeRunner(FakeRunner):
    """Numbers of prefixes move to the tier and back, so each is checked when it is read."""

    def __init__(self, config: TierConfig) -> None:
        super().__init__(config.num_blocks, config.block_size, config.num_host_blocks)
        self.slots = Slots(torch.empty(config.num_blocks, config.block_size, dtype=torch.int64))
        self.tier = Tier(config, fake_model(), torch.from_numpy(self.slots.pool))

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.swap(batch)
        for block_id, kv in self.tier.loads:
            self.slots.pool[block_id] = memoryview(kv).cast("q")
        self.tier.loads.clear()
        batch.moves.swap_out, batch.moves.swap_in = [], []
        return super().execute(batch)

    def forget(self) -> None:
        """The pool is lost. The tier is not, so the numbers of prefixes stay."""
        self.host_slots = {}
        self.slots.pool.fill(GARBAGE)


def crowded(seed: int) -> Workload:
    """Requests overtake each other and are swapped, so that blocks are loaded where others swap out."""
    workload = mixed(seed)
    size = min(workload.block_size, 3)
    most = max(asked.most_blocks(size) for asked in workload.requests)
    pool = {"block_size": size, "num_blocks": most, "num_host_blocks": 300, "budget": 40, "caching": True}
    return replace(workload, **pool, preemption="swap", watermark=0.0, order="random")


WORKLOADS = [(mixed, 20, "file"), (forked, 10, None), (siblings, 20, None), (crowded, 30, None)]
WORKLOADS.append((tiny, 3, "file"))


@pytest.mark.parametrize(("make_workload", "num", "where"), WORKLOADS)
def test_random_workloads(
    make_workload: Callable, num: int, where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    happened: Counter[str] = Counter()
    plain, number = test_random_runs.make_engine, count()

    def make_engine(model: str, config: EngineConfig) -> LLMEngine:
        gc.collect()
        if config.block_size == LONGEST or not config.enable_prefix_caching:
            return plain(model, config)
        file = where and tmp_path / str(next(number))
        options = vars(config) | {"tier_bytes": 4 * MIB, "tier_file": file}
        if model == "tiny":
            engine = TierEngine(TierConfig(**options | {"dtype": "float32"}))
        else:
            engine_config = TierConfig(**options | {"model": fake_model()})
            engine = TierEngine(engine_config, TierFakeRunner(engine_config))
            engine.prompts.tokenizer = fake_tokenizer()
        tier, execute = engine.block_manager.tier, engine.runner.execute
        tier.capacity = random.Random(config.num_blocks).choice([3, 1000, 1000])

        def count_and_execute(batch: ScheduledBatch) -> StepResult:
            out, into = {block for block, _ in batch.moves.swap_out}, {block for block, _ in tier.loads}
            happened["loaded"] += len(into)
            happened["swapped out and loaded"] += len(out & into)
            return execute(batch)

        engine.runner.execute = count_and_execute
        return engine

    mine = TierBlockManager.take, TierBlockManager.allocate, TierBlockManager.reset
    monkeypatch.setitem(STAGES, "schedule", STAGES["schedule"] + mine + (Tier.store, Tier.load))
    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    serve_random(make_workload, num, [] if make_workload is tiny else ["swap"])
    assert happened["loaded"] > 0 or make_workload is tiny
    assert happened["swapped out and loaded"] > 0 or make_workload is not crowded


def test_loads_come_after_the_moves(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Block 5 is swapped out to host block 0, then loaded; 6 is swapped in, then copied to 7."""
    runner: Any = make(qwen3.folder, num_host_blocks=2).engine.runner
    cache = runner.kv_cache
    _ = cache.data.fill_(1.0), cache.host.fill_(3.0)
    runner.tier.loads.append((5, torch.full_like(cache.data[5], 2.0).numpy().tobytes()))
    monkeypatch.setattr(ModelRunner, "forward", lambda self, inputs: inputs.moves)
    moves = Moves(swap_out=[(5, 0)], swap_in=[(1, 6)], copies=[(6, 7)])
    assert runner.forward(SimpleNamespace(moves=moves)) == Moves()
    assert [float(cache.data[i].mean()) for i in (4, 5, 6, 7)] == [1, 2, 3, 3]
    assert float(cache.host[0].mean()) == 1
    assert not runner.tier.loads


HOLDER = "import sys; from test_tier import *; serve(llm := make(*sys.argv[1:]), CHATS, GREEDY)"
HOLDER += "; print('ready', flush=True); sys.stdin.read()"


def test_one_engine_has_a_file(qwen3: Oracle, tmp_path: Path) -> None:  # noqa: F811
    """A second engine is refused, in this process and in another; when its owner is killed, it is free."""
    file, in_use = tmp_path / "tier", "an engine has it open: call `close_tier` there, or name another"
    llm = make(qwen3.folder, file)
    with pytest.raises(ValueError, match=in_use):
        LLM(qwen3.folder, tier_file=file, num_blocks=14, block_size=4)
    assert say(qwen3, llm, CHATS * 2) == 3 * 28
    llm.close_tier()
    command, pipes = [sys.executable, "-c", HOLDER, qwen3.folder, file], {"stdin": -1, "stdout": -1}
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    with subprocess.Popen(command, env=env, **pipes) as owner:
        assert owner.stdout.readline() == b"ready\n"
        with pytest.raises(ValueError, match=in_use):
            make(qwen3.folder, file)
        owner.kill()
    assert say(qwen3, make(qwen3.folder, file), CHATS) == 3 * 28


@pytest.mark.parametrize("where", [None, "file"])
def test_the_tier_keeps_its_size(qwen3: Oracle, where: str | None, tmp_path: Path, caplog: Any) -> None:  # noqa: F811
    """The oldest blocks make room. Then the disk is full: one warning, and tokens stay right."""
    file = tmp_path / "tier" if where else None
    llm = make(qwen3.folder, file, tier_bytes=(num_bytes := 70 * PAGE))
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
    with file.open("r+b") as opened:
        for _ in range(rng.choice([1, 9]) if seed % 3 else 0):
            opened.seek(rng.randrange(size))
            opened.write(bytes([7]) * rng.choice([1, 4096]))


@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_file_is_never_wrong(qwen3: Oracle, is_open: bool, tmp_path: Path, caplog: Any) -> None:  # noqa: F811
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


def test_what_is_refused(qwen3: Oracle, tmp_path: Path) -> None:  # noqa: F811
    """Options, and files of another model, dtype or block size, or of another program."""
    file = tmp_path / "tier"
    make(qwen3.folder, file).close_tier()
    model = make_checkpoint("qwen3", tmp_path)
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path)  # the same config
    for folder, options in (
        (tmp_path, {}),
        (qwen3.folder, {"dtype": "bfloat16"}),
        (qwen3.folder, {"block_size": 8}),
    ):
        with pytest.raises(ValueError, match="it is of .*, this engine of .*: delete it, or name another"):
            make(folder, file, **options)
    (tmp_path / "text").write_bytes(b"A text that is no database." * 99)
    with pytest.raises(ValueError, match="not a database: delete it, or name another"):
        make(qwen3.folder, tmp_path / "text")
    with pytest.raises(ValueError, match=r"tier_bytes is 4,096, .* raise it to"):
        make(qwen3.folder, tier_bytes=4096)
    for wrong in ({"enable_prefix_caching": False}, {"tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match="is .*, but a tier needs"):
            TierConfig(**wrong)
    for wrong, says in ((tmp_path, "is a folder"), (tmp_path / "none" / "tier", "folder is missing")):
        with pytest.raises((ValueError, FileNotFoundError), match=f"tier_file is .*, .*{says}"):
            TierConfig(tier_file=wrong)
