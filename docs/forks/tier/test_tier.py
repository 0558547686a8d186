"""A second tier of the prefix cache. The oracles: transformers, and the engine without the tier."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import faults
import lmdb
import pytest
import test_random_runs
import torch
from conftest import Oracle, make_checkpoint, tokens
from fake_runner import FakeRunner
from lmdb.verify import verify
from random_workloads import LONGEST, Workload, forked, mixed, tiny
from serving import serve
from test_random_runs import Run, fake_model, fake_tokenizer

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model.tier import Tier
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult
from nanopaged.text.stopping import StopRules

MIB = 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
WHERE = ["memory", "file"]


def make_llm(oracle: Oracle, where: str, folder: Path, **options: object) -> LLM:
    """An engine with a pool of 14 blocks of 4 and a second tier, "memory", "file" or "none"."""
    gc.collect()  # the engine before it has the file open
    if where != "none":
        options = {"tier_bytes": 4 * MIB} | options
    if where == "file":
        options["tier_file"] = folder / "tier.mdb"
    llm = LLM(oracle.folder, **{"block_size": 4, "num_blocks": 14, "dtype": "float32"} | options)
    llm.loaded = []
    llm.engine.listeners.append(CountLoaded(llm.loaded))
    return llm


class CountLoaded:
    """Notes the blocks that each step takes from the second tier."""

    def __init__(self, loaded: list[int]) -> None:
        self.loaded = loaded

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        self.loaded += [device_block for _, device_block in batch.loaded]

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Nothing."""

    def step_failed(self, error: BaseException) -> None:
        """Nothing."""


def check_right(oracle: Oracle, prompt: list[int], output: RequestOutput) -> None:
    """The tokens of transformers, and its log-probabilities to 1e-4."""
    (completion,) = output.outputs
    assert completion.token_ids == oracle.greedy(prompt, GREEDY.max_tokens, ignore_eos=True)
    right = oracle.logprobs(prompt + completion.token_ids)[len(prompt) - 1 :]
    for position, token_id in enumerate(completion.token_ids):
        logprob = completion.logprobs[position][token_id].logprob
        assert logprob == pytest.approx(right[position, token_id].item(), abs=1e-4)


def texts_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


# ── against transformers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", WHERE)
def test_chats_that_come_back_say_what_transformers_says(oracle: Oracle, where: str, tmp_path: Path) -> None:
    """Three chats of three turns, one after the other, in a pool that has room for one of them."""
    llm = make_llm(oracle, where, tmp_path)
    chats = [tokens(first, 20) for first in (1, 2, 3)]
    for turn in range(3):
        for chat in chats:
            (output,) = serve(llm, [chat], GREEDY)
            check_right(oracle, chat, output)
            if turn > 0:  # all full blocks of the last turn, but for the last token, which was not computed
                assert output.metrics.num_cached_tokens == (len(chat) - 3 - 1) // 4 * 4
            chat += [*output.outputs[0].token_ids, 5, 6, 7]
    assert len(llm.loaded) > 20
    assert llm.engine.stats().prefix_cache_hits >= 4 * len(llm.loaded)


@pytest.mark.parametrize("budget", [2048, 5])
def test_after_a_restart_the_file_still_has_them(oracle: Oracle, budget: int, tmp_path: Path) -> None:
    chats = [tokens(first, 30) for first in (1, 2, 3)]
    llm = make_llm(oracle, "file", tmp_path)
    for chat in chats:
        serve(llm, [chat], GREEDY)
    llm.engine.save_prefix_cache()
    del llm
    llm = make_llm(oracle, "file", tmp_path, max_num_batched_tokens=budget)
    for chat in chats:
        (output,) = serve(llm, [chat], GREEDY)
        check_right(oracle, chat, output)
        assert output.metrics.num_cached_tokens == 28
    assert len(llm.loaded) == 3 * 7


# ── as without it: samples, beams, preemption, chunks, aborts ─────────────────────────────────────

ASKED = {
    "one": replace(GREEDY, max_tokens=14),
    "several": SamplingParams(n=3, seed=1, max_tokens=14, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("asked", ASKED)
def test_the_engine_with_a_tier_says_what_the_engine_without_says(
    qwen3: Oracle, asked: str, way: str, where: str, tmp_path: Path
) -> None:
    """Prompts that begin alike and come back, in a pool too small for two of them, cut into chunks."""
    params = ASKED[asked]
    stem = tokens(4, 13)
    prompts = [stem + tokens(first, 6) for first in (1, 2, 3, 1, 2, 3)]
    options = {"preemption": way, "num_host_blocks": 40, "max_num_batched_tokens": 9, "watermark": 0}
    options["num_blocks"] = 20 if params.num_sequences > 1 else 11
    plain = make_llm(qwen3, "none", tmp_path, **options | {"num_blocks": 200})
    expected = texts_of(serve(plain, prompts, params))
    llm = make_llm(qwen3, where, tmp_path, **options)
    for aborted in (None, 4):  # the second time, with a request that is aborted on the way
        if aborted is not None:
            llm.engine.add_request("aborted", tokens(7, 20), params)
            for _ in range(aborted):
                llm.engine.step()
            llm.engine.abort_request("aborted")
        assert texts_of(serve(llm, prompts, params)) == expected
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert llm.loaded


@pytest.mark.parametrize("where", WHERE)
def test_whole_prompts_only(qwen3: Oracle, where: str, tmp_path: Path) -> None:
    llm = make_llm(qwen3, where, tmp_path, enable_chunked_prefill=False)
    prompts = [tokens(first, 25) for first in (1, 2, 3, 1, 2, 3)]
    for prompt, output in zip(prompts, serve(llm, prompts, GREEDY), strict=True):
        check_right(qwen3, prompt, output)
    for prompt in prompts[:3]:
        check_right(qwen3, prompt, serve(llm, [prompt], GREEDY)[0])
    assert llm.loaded


def test_a_prompt_that_is_scored_is_not_looked_up(qwen3: Oracle, tmp_path: Path) -> None:
    llm = make_llm(qwen3, "memory", tmp_path)
    prompts = [tokens(first, 30) for first in (1, 2, 3)]
    serve(llm, prompts, GREEDY)
    outputs = [serve(llm, [prompt], replace(GREEDY, prompt_logprobs=0))[0] for prompt in prompts]
    assert not llm.loaded
    for prompt, output in zip(prompts, outputs, strict=True):
        right = qwen3.logprobs(prompt)
        for position in range(1, len(prompt)):
            logprob = output.prompt_logprobs[position][prompt[position]].logprob
            assert logprob == pytest.approx(right[position - 1, prompt[position]].item(), abs=1e-4)


@pytest.mark.parametrize("where", WHERE)
def test_salts_keep_requests_apart(qwen3: Oracle, where: str, tmp_path: Path) -> None:
    llm = make_llm(qwen3, where, tmp_path)
    for salt, num_cached in (("x", 0), ("y", 0), ("x", 28)):
        prompt = {"prompt_token_ids": tokens(1, 30), "cache_salt": salt}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.metrics.num_cached_tokens == num_cached
        serve(llm, [tokens(2, 40)], GREEDY)  # evicts it


def test_a_failed_step_leaves_nothing_wrong(
    qwen3: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 29th step fails after its blocks have moved, with the pool full of garbage."""
    llm = make_llm(qwen3, "memory", tmp_path, max_num_batched_tokens=16)
    runner, num_calls = llm.engine.runner, 0
    model = runner.model

    def fail_sometimes(*inputs: object) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 29 == 0:
            runner.kv_cache.data.fill_(1e4)
            raise RuntimeError("the device is on fire")
        return model(*inputs)

    monkeypatch.setattr(runner, "model", fail_sometimes)
    fail_sometimes.logits = model.logits
    prompts = [tokens(first, 30) for first in (1, 2, 3)]
    for prompt in prompts * 4:
        llm.engine.add_request("a", prompt, GREEDY)
        while llm.engine.has_unfinished_requests():
            try:
                outputs = llm.engine.step()
            except RuntimeError as error:
                assert "on fire" in str(error)  # noqa: PT017
            llm.engine.check_invariants()
        check_right(qwen3, prompt, outputs[0])
    assert llm.loaded


# ── a file that is damaged, or another model's ────────────────────────────────────────────────────


def fill(oracle: Oracle, folder: Path) -> list[list[int]]:
    """Leave a file with the K/V of three prompts behind."""
    prompts = [tokens(first, 30) for first in (1, 2, 3)]
    llm = make_llm(oracle, "file", folder)
    serve(llm, prompts, GREEDY)
    llm.engine.save_prefix_cache()
    assert len(llm.engine.tier.places) >= 21
    return prompts


@contextmanager
def records(file: Path) -> Iterator[lmdb.Transaction]:
    """A transaction on the records of a file that no engine has open."""
    gc.collect()
    with lmdb.open(str(file), 4 * MIB, subdir=False, max_dbs=1) as env:
        (name,) = env.dbs()
        with env.begin(env.open_db(name), write=True) as txn:
            yield txn


PARTS = {
    "checksum": 3,
    "fingerprint": 20,
    "parent": 40,
    "tokens": 70,
    "first of K/V": -2048,
    "last of K/V": -1,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_record_is_a_miss(qwen3: Oracle, part: str, tmp_path: Path) -> None:
    """One bit of each record is wrong. It is forgotten, computed, and stored again when it is evicted."""
    prompts = fill(qwen3, tmp_path)
    with records(tmp_path / "tier.mdb") as txn:
        for place, record in list(txn.cursor()):
            damaged = bytearray(record)
            damaged[PARTS[part]] ^= 16
            txn.put(place, bytes(damaged))
    llm = make_llm(qwen3, "file", tmp_path)
    for turn in range(2):
        for prompt in prompts:
            (output,) = serve(llm, [prompt], GREEDY)
            check_right(qwen3, prompt, output)
            if turn == 0:
                assert output.metrics.num_cached_tokens == 0
    assert llm.loaded


def test_a_record_under_another_name_is_a_miss(qwen3: Oracle, tmp_path: Path) -> None:
    """Whole and right, but the K/V of other tokens: every record has moved to the name of the next one."""
    prompts = fill(qwen3, tmp_path)
    with records(tmp_path / "tier.mdb") as txn:
        stored = list(txn.cursor())
        for (place, _), (_, other) in zip(stored, stored[1:] + stored[:1], strict=True):
            txn.put(place, other)
    llm = make_llm(qwen3, "file", tmp_path)
    for prompt in prompts:
        (output,) = serve(llm, [prompt], GREEDY)
        check_right(qwen3, prompt, output)
        assert output.metrics.num_cached_tokens == 0


def test_a_file_with_random_damage_is_never_wrong(qwen3: Oracle, tmp_path: Path) -> None:
    """Bits flipped, pages overwritten, the end cut off: some blocks are found, and those are right."""
    prompts, file = fill(qwen3, tmp_path), tmp_path / "tier.mdb"
    gc.collect()
    whole, happened = file.read_bytes(), Counter()
    for seed in range(24):
        rng, damaged = random.Random(seed), bytearray(whole)
        if seed % 3 == 0:
            for _ in range(rng.choice([1, 30])):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        elif seed % 3 == 1:
            page = rng.randrange(len(damaged) // 4096) * 4096
            damaged[page : page + 4096] = rng.randbytes(4096)
        else:
            del damaged[rng.randrange(len(damaged)) :]
        (tmp_path / "tier.mdb-lock").unlink(missing_ok=True)
        file.write_bytes(damaged)
        llm = make_llm(qwen3, "file", tmp_path)
        for prompt in prompts:
            check_right(qwen3, prompt, serve(llm, [prompt], GREEDY)[0])
        happened["used" if llm.engine.tier.file_errors and llm.engine.tier.capacity else "given up"] += 1
        happened["loaded"] += len(llm.loaded)
        del llm
    assert all(happened[event] for event in ("used", "given up", "loaded")), happened


@pytest.mark.parametrize("contents", [b"", b"a letter\n" * 999])
def test_a_file_that_is_no_tier_is_left_as_it_is(
    qwen3: Oracle, contents: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tier.mdb").write_bytes(contents)
    llm = make_llm(qwen3, "file", tmp_path)
    for prompt in [tokens(first, 30) for first in (1, 2, 1)]:
        check_right(qwen3, prompt, serve(llm, [prompt], GREEDY)[0])
    assert not llm.loaded
    assert "tier_file failed, delete it or name another" in caplog.text
    assert (tmp_path / "tier.mdb").read_bytes() == contents


@pytest.mark.parametrize("change", ["weights", "rope", "dtype", "block_size"])
def test_another_models_file_is_a_miss(
    qwen3: Oracle, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same sizes and the same tokens; it is left to the other model."""
    prompts = fill(qwen3, tmp_path)
    gc.collect()
    before, options, other = (tmp_path / "tier.mdb").read_bytes(), {}, qwen3
    if change == "weights":  # one number of them
        other = Oracle("qwen3", tmp_path / "model")
        with torch.no_grad():
            other.model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1
        other.model.save_pretrained(other.folder)
    elif change == "rope":
        config = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
        other = Oracle("qwen3", tmp_path / "model")
        other.model = make_checkpoint("qwen3", tmp_path / "model", **config)
    else:
        options = {"dtype": {"dtype": "bfloat16"}, "block_size": {"block_size": 2, "num_blocks": 28}}[change]
    llm = make_llm(other, "file", tmp_path, **options)
    outputs = [serve(llm, [prompt], GREEDY)[0] for prompt in prompts]
    if change != "dtype":
        for prompt, output in zip(prompts, outputs, strict=True):
            check_right(other, prompt, output)
    assert not llm.loaded
    assert "it is of another model, dtype or block size" in caplog.text
    assert (tmp_path / "tier.mdb").read_bytes() == before


def test_a_file_that_fails_later_is_given_up(
    qwen3: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk: one warning, and the engine goes on without."""
    llm, prompts = make_llm(qwen3, "file", tmp_path), [tokens(first, 30) for first in (1, 2, 3)]
    serve(llm, prompts, GREEDY)

    def fail() -> None:
        raise lmdb.DiskError("no space left on device")

    monkeypatch.setattr(llm.engine.tier, "begin", fail)
    for prompt in prompts:
        check_right(qwen3, prompt, serve(llm, [prompt], GREEDY)[0])
    assert not llm.loaded
    assert caplog.text.count("no space left on device") == 1


# ── the tier alone: its size, its order, the end of the process ───────────────────────────────────


def make_tier(where: str, folder: Path, num_bytes: int = 4 * MIB, num_values: int = 2048) -> Tier:
    """A tier for blocks of `num_values` int64, without a model."""
    gc.collect()
    file = folder / "tier.mdb" if where == "file" else None
    config = EngineConfig(block_size=4, tier_bytes=num_bytes, tier_file=file)
    return Tier(config, fake_model(), torch.zeros(num_values, dtype=torch.int64))


def block_of(i: int, num_values: int = 2048) -> torch.Tensor:
    return torch.arange(num_values) * 7 + i


def key_of(i: int) -> bytes:
    return bytes(32) + i.to_bytes(32, "big")


def stored_of(tier: Tier, num: int) -> list[int]:
    """Which of the blocks 0, 1, … are stored, without using them. Those that are, are right."""
    order, stored = tier.places.copy(), []
    for i in range(num):
        for found in tier.load([key_of(i)]):
            assert found == block_of(i, len(found) // 8).numpy().tobytes()
            stored.append(i)
    tier.places = order
    return stored


@pytest.mark.parametrize("where", WHERE)
def test_the_least_recently_used_goes_first(where: str, tmp_path: Path) -> None:
    tier = make_tier(where, tmp_path)
    tier.capacity = 3
    for i in (0, 1, 2):
        tier.store(key_of(i), block_of(i))
    assert len(tier.load([key_of(0), key_of(2), key_of(9), key_of(1)])) == 2  # used: 0 and 2, not 1
    tier.store(key_of(3), block_of(3))
    assert stored_of(tier, 9) == [0, 2, 3]
    tier.store(key_of(4), block_of(4))  # of a prefix that was found, the end goes first
    assert stored_of(tier, 9) == [0, 3, 4]
    tier.store(key_of(0), block_of(0))  # evicted again: used
    tier.store(key_of(5), block_of(5))
    assert stored_of(tier, 9) == [0, 4, 5]
    tier.clear()
    assert stored_of(tier, 9) == []


@pytest.mark.parametrize("num_values", [16, 300, 2048, 60_000])
@pytest.mark.parametrize("where", WHERE)
def test_it_never_exceeds_its_bytes(where: str, num_values: int, tmp_path: Path) -> None:
    """Ten times as many blocks as fit, of 128 bytes to 480 KB; most of the bytes are used."""
    num_bytes = 6 * MIB if num_values > 9999 else MIB
    tier = make_tier(where, tmp_path, num_bytes, num_values)
    size = num_values * 8
    num = max(40, 10 * min(num_bytes // size, 400))
    for i in range(num):
        tier.store(key_of(i), block_of(i, num_values))
        if where == "file":
            assert (tmp_path / "tier.mdb").stat().st_size <= num_bytes
    if where == "memory":
        (held,) = tier.begin.args
        assert sum(map(len, held.values())) <= num_bytes
    assert tier.capacity > 0, "the file was full"
    stored = stored_of(tier, num)
    assert stored == list(range(num))[-tier.capacity :]
    assert len(stored) * size > num_bytes / 3 or num_values < 2048


def test_a_file_that_is_larger_than_its_bytes_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier("file", tmp_path)
    for i in range(100):
        tier.store(key_of(i), block_of(i))
    del tier
    before = (tmp_path / "tier.mdb").read_bytes()
    tier = make_tier("file", tmp_path, MIB)
    assert "or larger than tier_bytes" in caplog.text
    tier.store(key_of(100), block_of(100))
    assert stored_of(tier, 101) == []
    assert (tmp_path / "tier.mdb").read_bytes() == before


def test_a_file_that_fails_while_storing_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier("file", tmp_path, MIB)
    tier.capacity = 10**6  # more than fit
    for i in range(200):
        tier.store(key_of(i), block_of(i))
    assert caplog.text.count("MDB_MAP_FULL") == 1
    tier = make_tier("memory", tmp_path)
    tier.file_errors = OSError
    monkeypatch.setattr(tier, "begin", lambda: (tmp_path / "missing").open())
    for i in range(9):
        tier.store(key_of(i), block_of(i))
    assert stored_of(tier, 200) == []
    assert caplog.text.count("No such file") == 1


@pytest.mark.parametrize("where", WHERE)
def test_too_few_bytes_are_refused(where: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tier_bytes is 10000, too few for blocks of 16384 bytes"):
        make_tier(where, tmp_path, 10_000)


WRITER = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from test_tier import *
tier = make_tier("file", Path({folder!r}), MIB)
print("open", flush=True)
for i in range(10**9):
    tier.store(key_of(i), block_of(i))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_process_that_is_killed_leaves_the_file_whole(tmp_path: Path) -> None:
    """It was storing all the time, and had forgotten many blocks before."""
    writer = WRITER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"open\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert verify(str(tmp_path / "tier.mdb"), subdir=False) == []
    tier = make_tier("file", tmp_path, MIB)
    last = max(int.from_bytes(place[:8], "big") for place in tier.places.values())
    assert abs(time.time_ns() - last) < 60e9
    with tier.begin() as txn:
        keys = [record[32:96] for _, record in txn.cursor()]
    assert len(keys) > 20
    for key in keys:
        (found,) = tier.load([key])
        assert found == block_of(int.from_bytes(key[32:], "big")).numpy().tobytes()


# ── the block manager and the moves ───────────────────────────────────────────────────────────────


def sequence_of(token_ids: list[int], salt: bytes = b"") -> Sequence:
    """The sequence of a request with this prompt."""
    params = SamplingParams()
    rules = StopRules.of(params, len(token_ids), frozenset(), max_model_len=1000)
    (seq,) = Request("r", None, token_ids, params, rules, seed=0).sequences
    seq.request.cache_salt = salt
    return seq


def test_a_refused_admission_changes_nothing() -> None:
    """The tier is not even asked, so that nothing in it counts as used."""
    manager, asked = BlockManager(3, 2), []
    manager.load = lambda keys: asked.append(keys) or [b"kv"] * len(keys)
    running = sequence_of([7, 7])
    assert manager.allocate([running])
    before = [list(manager.free_ids), dict(manager.index), [block.ref_count for block in manager.blocks]]
    asked.clear()
    seq = sequence_of(list(range(5)))
    assert not manager.allocate([seq])
    after = [list(manager.free_ids), dict(manager.index), [block.ref_count for block in manager.blocks]]
    assert before == after
    assert (asked, manager.loaded, manager.evicted, seq.block_table) == ([], [], [], [])
    manager.free(running)
    assert manager.allocate([seq])
    assert (len(asked), len(manager.loaded), seq.num_computed_tokens) == (1, 2, 4)


def test_a_block_between_two_stored_ones_that_was_not_evicted_is_shared() -> None:
    """Keys A B C: the pool has B, the tier A and C. No second block is published as B."""
    manager = BlockManager(6, 2)
    seq = sequence_of(list(range(8)))
    a, b, c = manager.keys_of(seq, 3)
    block = manager.take()
    manager.blocks[block].key, manager.index[b] = b, manager.blocks[block]
    manager.release(block)
    manager.load = lambda keys: [b"A", b"B", b"C"]
    assert manager.allocate([seq])
    assert seq.block_table[1] == block
    assert seq.num_computed_tokens == 6
    assert [stored for stored, _ in manager.loaded] == [b"A", b"C"]
    assert [manager.blocks[i].key for i in seq.block_table] == [a, b, c, None]


def test_everything_goes_out_before_anything_comes_in() -> None:
    """Block 1 is swapped out and loaded, in one step; then it is not the source of a copy, but block 2 is."""
    cache = KVCache(KVShape(1, 1, 2, torch.float32), 4, 2, torch.device("cpu"), 2)
    cache.data.copy_(torch.arange(4.0).view(4, 1, 1, 1, 1, 1).expand_as(cache.data))
    loaded = torch.full(cache.data.shape[1:], 9.0)
    cache.move_blocks([(1, 0)], [(0, 3)], [(2, 0)], [(loaded.numpy().tobytes(), 1)])
    assert cache.host[0].unique().tolist() == [1]
    assert [block.unique().tolist() for block in cache.data] == [[2], [9], [2], [1]]


def test_reset_prefix_cache_forgets_the_tier_too(qwen3: Oracle, tmp_path: Path) -> None:
    for where in WHERE:
        llm = make_llm(qwen3, where, tmp_path)
        prompts = [tokens(first, 30) for first in (1, 2, 3)]
        serve(llm, prompts, GREEDY)
        assert llm.engine.tier.places
        llm.reset_prefix_cache()
        assert [output.metrics.num_cached_tokens for output in serve(llm, prompts, GREEDY)] == [0, 0, 0]
    with pytest.raises(ValueError, match="no second tier to save the prefix cache in: set tier_bytes"):
        make_llm(qwen3, "none", tmp_path).engine.save_prefix_cache()


# ── random workloads, over slots that remember their tokens ───────────────────────────────────────


class TierRunner(FakeRunner):
    """A block in the tier is the numbers in its slots, see `FakeRunner`; it moves as in `ModelRunner`."""

    tier: Tier | None = None
    num_loaded = 0

    def execute(self, batch: ScheduledBatch) -> StepResult:
        for device_block, key in batch.evicted:
            slots = [self.slots[device_block, i] for i in range(self.block_size)]
            self.tier.store(key, torch.tensor(slots))
        if batch.loaded and not (batch.swap_out or batch.swap_in):
            self.swap(batch)
        return super().execute(batch)

    def swap(self, batch: ScheduledBatch) -> None:
        super().swap(batch)
        for stored, device_block in batch.loaded:
            for i, number in enumerate(memoryview(stored).cast("q")):
                self.slots[device_block, i] = number
        self.num_loaded += len(batch.loaded)

    def forget(self) -> None:
        """The pool is lost. The tier is not, so the numbers of prefixes stay what they are."""
        self.slots, self.host_slots = {}, {}

    def check_findable_blocks(self, manager: BlockManager) -> None:
        """In the tier, too: each record holds the K/V of exactly the tokens of its key."""
        super().check_findable_blocks(manager)
        if self.tier is not None:
            with self.tier.begin() as txn:
                held = [txn.get(place) for place in self.tier.places.values()]
            for record in filter(None, held):
                head = 16 + len(self.tier.fingerprint)
                key, numbers = record[head : -8 * self.block_size], record[-8 * self.block_size :]
                self.check_record(manager, key, list(memoryview(numbers).cast("q")))

    def check_record(self, manager: BlockManager, key: bytes, numbers: list[int]) -> None:
        salt, token_ids, right = self.prefixes.path(numbers[-1])
        assert right[-self.block_size :] == numbers, "a record of mixed contents"
        assert (
            manager.keys_of(sequence_of(list(token_ids), salt), len(token_ids) // self.block_size)[-1] == key
        )


def make_tier_engine(file: Path | None, happened: Counter[str]) -> Callable[[str, EngineConfig], LLMEngine]:
    """The `make_engine` of the random runs, with a tier of one to a thousand blocks."""
    make_engine = test_random_runs.make_engine

    def make(model: str, config: EngineConfig) -> LLMEngine:
        if config.block_size == LONGEST:  # it serves each request alone
            return make_engine(model, config)
        gc.collect()
        config = (
            replace(config, tier_bytes=4 * MIB, tier_file=file) if config.enable_prefix_caching else config
        )
        if model == "tiny":
            engine = make_engine(model, config)
        else:
            runner = TierRunner(config.num_blocks, config.block_size, config.num_host_blocks)
            if config.tier_bytes:
                runner.tier = Tier(config, fake_model(), torch.zeros(config.block_size, dtype=torch.int64))
            config = replace(config, tier_bytes=0, tier_file=None, model=fake_model())
            engine = LLMEngine(config, runner)
            engine.prompts.tokenizer = fake_tokenizer()
        if engine.tier is not None:
            engine.tier.capacity = random.Random(config.num_blocks).choice([1, 3, 8, 1000])
            happened[f"capacity {engine.tier.capacity}"] += 1
        loaded: list[int] = []
        engine.listeners.append(CountLoaded(loaded))
        engines.append((engine, loaded))
        return engine

    engines: list[tuple[LLMEngine, list[int]]] = []
    make.engines = engines
    return make


EVENTS = ["swap", "recompute", "copy on write", "finished", "cache hit", "loaded", "capacity 1", "capacity 3"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("make_workload", [mixed, forked, tiny])
def test_random_workloads(
    make_workload: Callable[[int], Workload], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults strike in the tier, too: in `load` while scheduling, and in `store`."""
    happened: Counter[str] = Counter()
    monkeypatch.setitem(faults.STAGES, "swap", (*faults.STAGES["swap"], Tier.store))
    for seed in range({mixed: 20, forked: 12, tiny: 6}[make_workload] if where == "memory" else 8):
        file = tmp_path / f"{seed}.mdb" if where == "file" else None
        make = make_tier_engine(file, happened)
        with monkeypatch.context() as patch:
            patch.setattr(test_random_runs, "make_engine", make)
            workload = replace(make_workload(seed), caching=True)
            if make_workload is tiny:  # its prompts seldom begin alike: preempted requests come back
                workload = replace(workload, preemption="recompute")
            run = Run(workload)
            run.serve()
        happened += run.happened
        happened["loaded"] += sum(len(loaded) for _, loaded in make.engines)
    print(dict(sorted(happened.items())))
    events = ["loaded", "finished"] if make_workload is tiny or where == "file" else EVENTS
    assert all(happened[event] for event in events), happened


# ── options ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier_bytes": -1}, "tier_bytes is -1, but must be at least 0"),
        ({"tier_bytes": 0}, "tier_file needs a size: set tier_bytes"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching is False, but tier_bytes needs .*=True"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but tier_bytes needs .*=1"),
        ({"trace": "run.html"}, "trace is 'run.html', but tier_bytes needs trace=None"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    good = {"tier_bytes": MIB, "tier_file": "tier.mdb"}
    EngineConfig(**good)
    with pytest.raises(ValueError, match=message):
        EngineConfig(**good | options)


def test_without_lmdb_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    EngineConfig(tier_bytes=MIB)
    with pytest.raises(ValueError, match="tier_file needs: pip install lmdb"):
        EngineConfig(tier_bytes=MIB, tier_file="tier.mdb")
