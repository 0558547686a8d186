"""Sparse pages. The oracle is transformers with an attention in which the pages are chosen by plain loops."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import GREEDY, SMALL, Oracle, Run, Workload, check_refused, serve, tokens
from quest import LLM, QuestBlockManager, QuestEngine
from transformers import AttentionInterface

from nanopaged.sequence import Sequence

rule = SimpleNamespace(block_size=4, num_pages=2, prompt_len=0)  # of `sparse_attention`


def sparse_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    """q [1, num_heads, length, head_dim] → [1, length, num_heads, head_dim]: token by token."""
    size, group, out = rule.block_size, q.shape[1] // k.shape[1], torch.empty_like(q)
    for head in range(k.shape[1]):
        keys, heads = k[0, head], slice(head * group, (head + 1) * group)
        for t in range(q.shape[2]):
            seen, queries = list(range(t + 1)), q[0, heads, t]
            if t >= rule.prompt_len:
                bounds = []
                for page in range(t // size):
                    page_keys = keys[page * size : (page + 1) * size]
                    products = torch.maximum(queries * page_keys.amin(0), queries * page_keys.amax(0))
                    bounds.append((-float(products.sum(-1).max()), page))
                pages = {t // size, *(page for _, page in sorted(bounds)[: rule.num_pages - 1])}
                seen = [i for i in seen if i // size in pages]
            weights = (queries @ keys[seen].T * scaling).softmax(-1)
            out[0, heads, t] = weights @ v[0, head, seen]
    return out.transpose(1, 2), None


AttentionInterface.register("sparse", sparse_attention)


class SparseOracle(Oracle):
    def logprobs(self, token_ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
        rule.prompt_len = num_prompt_tokens
        return super().logprobs(token_ids, num_prompt_tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = SparseOracle(harness.make_model("Llama"), tmp_path_factory.mktemp("llama"))
    oracle.model.set_attn_implementation("sparse")
    return oracle


@pytest.mark.parametrize(("num", "size", "budget"), [(1, 4, 200), (2, 4, 2), (3, 1, 40), (4, 5, 2000)])
def test_the_tokens_of_transformers(llama: Oracle, num: int, size: int, budget: int) -> None:
    """Mixed batches, chunks (also of one token, beside decodes). With all pages it is dense."""
    options = {"block_size": size, "num_blocks": 600, "max_num_batched_tokens": budget}
    prompts = harness.random_prompts(9, seed=num)
    vars(rule).update(block_size=size, num_pages=num)
    llama.check(serve(LLM(llama.folder, num_pages_read=num, **options), prompts, GREEDY))
    rule.num_pages = 1000
    llama.check(serve(LLM(llama.folder, num_pages_read=1 << 30, **options), prompts, GREEDY))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_and_the_prefix_cache(llama: Oracle, preemption: str) -> None:
    """Prompts go on where texts ended, so they find blocks of prompts; generated blocks have other K/V."""
    llm = LLM(llama.folder, num_pages_read=2, preemption=preemption, **SMALL | {"num_blocks": 30})
    prompts = [tokens(first, 17 + first) for first in range(8)]
    vars(rule).update(block_size=4, num_pages=2)
    for _ in range(3):
        outputs = serve(llm, prompts, GREEDY)
        llama.check(outputs)
        texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
        prompts = [*prompts[4:], *(text[:-1] for text in texts[:4])]
    assert harness.num_preempted(llm) > 3
    assert llm.engine.stats().prefix_cache_hits > 0


class QuestRun(Run):
    """Each request says what it says alone, with pages of that size."""

    engine_class = alone_class = QuestEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        size = min(workload.options["block_size"], 4)
        self.options = {"num_pages_read": random.Random(workload.seed).randint(1, 3)}
        self.alone_options = self.options | {"block_size": size, "num_blocks": 400}
        super().__init__(folder, workload.with_pool(size))


def test_random_workloads(llama: Oracle) -> None:
    events = ["swap", "recompute", "copy on write", "cache hit", "finished"]
    harness.random_runs(QuestRun, llama.folder, 20, events)


def test_keys_tell_where_the_prompt_ends() -> None:
    """Blocks of equal tokens share a key if all are the prompt's, or if the prompts end at one token."""
    manager, rows = QuestBlockManager(num_blocks=8, block_size=2), list[list[bytes]]()
    for prompt_len in range(1, 9):
        seq = Sequence(SimpleNamespace(cache_salt=b"", num_prompt_tokens=prompt_len), [1] * 8)
        manager.keys_of(seq, prompt_len % 4)
        rows.append(manager.keys_of(seq, 4))
    assert [len(set(keys)) for keys in zip(*rows, strict=True)] == [2, 4, 6, 8]


def test_what_is_refused() -> None:
    wrong = [("num_pages_read", 0), ("attention_backend", "triton"), ("tensor_parallel_size", 2)]
    check_refused(LLM, [({name: value}, f"{name}.*{value}") for name, value in wrong])
