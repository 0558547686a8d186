"""Sparse pages. The oracle is transformers with an attention in which the pages are chosen by plain loops."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import test_random_runs
import torch
from conftest import Oracle, memory_that_was_never_written, random_prompts, tokens  # noqa: F401
from quest import LLM, QuestBlockManager, QuestConfig, QuestEngine
from random_workloads import LONGEST, Workload, tiny
from serving import serve, tokens_of
from test_random_runs import Run, large_engine, serve_random
from transformers import AttentionInterface

import nanopaged
from nanopaged import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.attention import metadata
from nanopaged.sequence import Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=0)
rule = SimpleNamespace(block_size=4, num_pages=2, prompt_len=0)  # of `sparse_attention`


def sparse_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    """q [1, num_heads, length, head_dim] → [1, length, num_heads, head_dim]: token by token."""
    size, group, out = rule.block_size, q.shape[1] // k.shape[1], torch.empty_like(q)
    for head in range(k.shape[1]):
        keys, its = k[0, head], slice(head * group, (head + 1) * group)
        for t in range(q.shape[2]):
            seen, queries = list(range(t + 1)), q[0, its, t]
            if t >= rule.prompt_len:
                bounds = []
                for page in range(t // size):
                    its_keys = keys[page * size : (page + 1) * size]
                    products = torch.maximum(queries * its_keys.amin(0), queries * its_keys.amax(0))
                    bounds.append((-float(products.sum(-1).max()), page))
                pages = {t // size, *(page for _, page in sorted(bounds)[: rule.num_pages - 1])}
                seen = [i for i in seen if i // size in pages]
            weights = (queries @ keys[seen].T * scaling).softmax(-1)
            out[0, its, t] = weights @ v[0, head, seen]
    return out.transpose(1, 2), None


AttentionInterface.register("sparse", sparse_attention)


def check(
    oracle: Oracle, prompts: list[list[int]], outputs: list[RequestOutput], num: int, size: int = 4
) -> None:
    """Greedy tokens and their log-probabilities are those of transformers, which computes a text at once."""
    oracle.model.set_attn_implementation("sparse")
    for prompt, output in zip(prompts, outputs, strict=True):
        vars(rule).update(block_size=size, num_pages=num, prompt_len=len(prompt))
        (completion,) = output.outputs
        right = oracle.logprobs(prompt + completion.token_ids)[len(prompt) - 1 : -1]
        assert completion.token_ids == right.argmax(-1).tolist()
        ours = [
            row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert ours == pytest.approx(right.amax(-1).tolist(), abs=1e-4)
    oracle.model.set_attn_implementation("eager")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("num", "size", "budget"), [(1, 4, 200), (2, 4, 2), (3, 1, 40), (4, 5, 2000)])
def test_the_tokens_of_transformers(
    llama: Oracle, num: int, size: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches, chunks (also of one token, beside decodes), many groups; dense, other tokens come."""
    monkeypatch.setattr(metadata, "GATHER_KEYS", 100)
    options = {"block_size": size, "num_blocks": 600, "max_num_batched_tokens": budget}
    prompts = random_prompts(9, seed=num)
    outputs = serve(LLM(llama.folder, num_pages_read=num, **options), prompts, GREEDY)
    check(llama, prompts, outputs, num, size)
    plain = nanopaged.LLM(llama.folder, attention_backend="torch", **options)
    assert tokens_of(outputs) != tokens_of(serve(plain, prompts, GREEDY))
    every = LLM(llama.folder, num_pages_read=1 << 30, **options)
    assert tokens_of(serve(every, prompts, GREEDY)) == tokens_of(serve(plain, prompts, GREEDY))


@pytest.mark.parametrize("gather", [1 << 16, 1200])
def test_many_rows_at_once(llama: Oracle, gather: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 decodes in a step, in one group or in several."""
    monkeypatch.setattr(metadata, "GATHER_KEYS", gather)
    prompts = random_prompts(80, seed=5, longest=24)
    params = replace(GREEDY, max_tokens=6)
    check(
        llama,
        prompts,
        serve(LLM(llama.folder, num_pages_read=2, block_size=4, num_blocks=900), prompts, params),
        2,
    )


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_and_the_prefix_cache(llama: Oracle, preemption: str) -> None:
    """Prompts go on where texts ended, so they find blocks of prompts; generated blocks have other K/V."""
    options = {"num_blocks": 30, "block_size": 4, "preemption": preemption, "max_num_batched_tokens": 50}
    llm = LLM(llama.folder, num_pages_read=2, watermark=0, **options)
    prompts = [tokens(first, 17 + first) for first in range(8)]
    for _ in range(3):
        outputs = serve(llm, prompts, GREEDY)
        check(llama, prompts, outputs, 2)
        texts = [
            prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)
        ]
        prompts = [*prompts[4:], *(text[:-1] for text in texts[:4])]
    stats = llm.engine.stats()
    assert getattr(stats, f"num_preemptions_{preemption}") > 3
    assert stats.prefix_cache_hits > 0


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, beams, aborts, faults: each request says what it says alone, with pages of that size."""

    def make_workload(seed: int) -> Workload:
        workload = tiny(seed)
        size = min(workload.block_size, 4)
        most = max(asked.most_blocks(size) for asked in workload.requests)
        pool = {"block_size": size, "num_blocks": most + 2, "num_host_blocks": most * (seed % 2)}
        return replace(workload, **pool)

    def make_run(workload: Workload) -> Run:
        size, num_pages = workload.block_size, random.Random(workload.seed).randint(1, 3)

        def make_engine(config: EngineConfig) -> LLMEngine:
            if config.block_size == LONGEST:  # alone
                config = replace(config, block_size=size, num_blocks=64 * LONGEST // size)
            return QuestEngine(QuestConfig(**vars(config) | {"num_pages_read": num_pages}))

        monkeypatch.setattr(test_random_runs, "LLMEngine", make_engine)
        large_engine.cache_clear()
        run = Run(workload)
        assert isinstance(large_engine("tiny"), QuestEngine)
        return run

    serve_random(make_workload, 10, ["swap", "recompute", "copy on write", "cache hit", "finished"], make_run)
    large_engine.cache_clear()


def test_keys_tell_where_the_prompt_ends() -> None:
    """Two texts share a key exactly if their tokens are equal, and prompts end at one token or behind it."""
    rng, manager = random.Random(1), QuestBlockManager(num_blocks=8, block_size=2)
    keys: dict[tuple, bytes] = {}
    for _ in range(400):
        text, prompt_len = rng.choices((1, 2), k=8), rng.randint(1, 8)
        seq = Sequence(SimpleNamespace(cache_salt=b"", num_prompt_tokens=prompt_len), text)
        for step in sorted(rng.sample(range(5), k=3)):
            its = manager.keys_of(seq, step)
        for i, key in enumerate(its):
            means = (*text[: 2 * i + 2], min(prompt_len, 2 * i + 2), "prompt")
            assert keys.setdefault(means, key) == key
    assert len(set(keys.values())) == len(keys)


def test_bounds_are_in_the_measured_memory(llama: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 layers, 2 KV heads of 20, blocks of 16: K, V and the bounds of both layers in one plane."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 << 20))
    llm = LLM(llama.folder, memory_utilization=1.0, dtype="float32")
    cache = llm.engine.runner.kv_cache
    assert cache.data[0].nbytes == (2 + 1) * 2 * 2 * 16 * 20 * 4
    assert 0 <= (5 << 20) - cache.data.nbytes < cache.data[0].nbytes


REFUSED = [("num_pages_read", value) for value in (0, -1, 10**30, 2.5, True)]
REFUSED += [("attention_backend", "triton"), ("tensor_parallel_size", 2)]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_is_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name}.*{value}"):
        LLM(**{name: value})
    with pytest.raises(ValueError, match="make a QuestConfig"):
        QuestEngine(EngineConfig(num_blocks=8))
