"""Inputs and padding of CUDA graphs. Without a GPU, a replay computes again from the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle, random_prompts, tokens, tokens_of
from torch import Tensor

pytest.importorskip("triton", reason="decodes in graphs read their pages by Triton kernels")

from nanopaged import LLM, SamplingParams
from nanopaged.attention import triton_backend
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.cuda_graphs import DecodeGraphs, graph_sizes
from nanopaged.kernels.paged_attention import split_contexts
from nanopaged.kv_cache import KVCache, KVShape


def compute_again(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Like a real capture: a replay writes its result to the memory of the first one."""
    out = work().clone()
    return out, lambda: out.copy_(work())


def with_graphs(folder: Path, max_num_seqs: int, **options: object) -> LLM:
    options |= {"dtype": "float32", "attention_backend": "triton", "preemption": "recompute"}
    llm = LLM(folder, max_num_seqs=max_num_seqs, **options)
    runner = llm.engine.runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(DecodeGraphs, "capture", lambda _, work: compute_again(work))
        runner.graphs = DecodeGraphs(runner.model, runner.attention, max_num_seqs, MAX_MODEL_LEN)
    return llm


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 9, 100, 256, 257])
def test_every_batch_finds_a_size(max_num_seqs: int) -> None:
    """Up to the largest batch, and padded to less than twice its size or by less than 8."""
    sizes = graph_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    for n in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= n)
        assert size < 2 * n or size - n < 8


@pytest.mark.parametrize("num_sms", [1, 46, 132])
def test_a_graph_has_room_for_all_splits(num_sms: int) -> None:
    """Contexts of any lengths, in batches smaller than the graph and as large, few and many."""
    shape = KVShape(num_layers=1, num_kv_heads=8, head_dim=16, dtype=torch.float32)
    attention = TritonAttention(KVCache(shape, 1, 16, torch.device("cpu")), 1.0)
    attention.num_sms = num_sms
    rng = np.random.default_rng(0)
    smaller = 1
    for size in graph_sizes(300):
        for n in (smaller, size):
            lens = rng.integers(1, 5000, n) * rng.integers(1, 9, n)
            splits, _ = split_contexts(lens, attention.max_splits(size))
            assert len(splits) <= size + attention.max_splits(size)
        smaller = size + 1


def test_graphs_give_the_same_tokens(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decodes mixed, batches of all sizes, blocks shared, copied on write, freed and used again.

    Padding writes nothing: as many slots change as sequences decode.
    """
    options = {"block_size": 4, "num_blocks": 60}
    llm = with_graphs(qwen3.folder, 6, **options)
    graphs, cache, sizes = llm.engine.runner.graphs, llm.engine.runner.kv_cache, set()
    cache.data.zero_()
    replay = graphs.run

    def watched(input_ids: np.ndarray, *rest: object) -> Tensor:
        sizes.add(len(input_ids))
        before = cache.data.clone()
        out = replay(input_ids, *rest)
        written = (cache.data != before).any(-1).any(1).any(1).any(1)  # [num_blocks, block_size]
        assert int(written.sum()) == len(input_ids)
        return out

    monkeypatch.setattr(graphs, "run", watched)
    prompts = random_prompts(5, seed=3, longest=6)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (4, 2, 1, 3)]
    params += [SamplingParams(n=3, seed=5, max_tokens=3, ignore_eos=True)]
    eager = LLM(qwen3.folder, dtype="float32", **options)
    actual = llm.generate(prompts, params, use_tqdm=False)
    expected = eager.generate(prompts, params, use_tqdm=False)
    assert tokens_of(actual) == tokens_of(expected)
    assert sizes & set(graphs.graphs), "no batch filled a graph"
    assert sizes - set(graphs.graphs), "no batch needed padding"


def test_graphs_up_to_the_longest_context(qwen3: Oracle) -> None:
    """160 tokens in blocks of 7: the 23rd block has six slots. No decode outgrows the captured tables."""
    llm = with_graphs(qwen3.folder, 1, block_size=7, num_blocks=23)
    assert llm.engine.runner.attention.tables.data.shape == (1, 23)
    prompt = tokens(3, MAX_MODEL_LEN - 2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == qwen3.greedy(prompt, 2, ignore_eos=True)
    assert llm.engine.num_steps == 2


def test_block_tables_send_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """For old rows what changed; more sequences than rows take those of others. A graph has the address."""
    sent: list[list[list[int]]] = []
    to_device = triton_backend.to_device
    monkeypatch.setattr(
        triton_backend,
        "to_device",
        lambda a, device: sent.append(np.array(a).tolist()) or to_device(a, device),
    )
    tables = triton_backend.BlockTables(torch.device("cpu"))
    tables.reserve(2, 4)
    address = tables.data.data_ptr()
    one, two = tables.update([7, 8], [[5, 2], [0]])
    tables.update([8, 7], [[0], [5, 2]])
    tables.update([7, 8], [[5, 2, 9], [0]])
    assert sent == [[[one, 0, 5], [one, 1, 2], [two, 0, 0]], [[one, 2, 9]]]
    assert tables.update([8, 9], [[4], [5, 3, 9]]) == [two, one]
    assert (tables.data[two, 0], tables.data[one, :3].tolist()) == (4, [5, 3, 9])
    assert tables.data.data_ptr() == address
