"""Inputs and padding of CUDA graphs. Without a GPU, a replay computes again from the same buffers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import MAX_MODEL_LEN, Oracle, random_prompts, tokens
from torch import Tensor

pytest.importorskip("triton", reason="decodes in graphs read their pages by Triton kernels")

from nanopaged import LLM, SamplingParams
from nanopaged.attention.triton_backend import BlockTables
from nanopaged.cuda_graphs import DecodeGraphs, graph_sizes


def compute_again(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Like a real capture: a replay writes its result to the memory of the first one."""
    out = work().clone()
    return out, lambda: out.copy_(work())


def with_graphs(folder: str, max_num_seqs: int, **options: object) -> LLM:
    options |= {"dtype": "float32", "attention_backend": "triton", "preemption": "recompute"}
    llm = LLM(folder, max_num_seqs=max_num_seqs, **options)
    runner = llm.engine.runner
    runner.graphs = DecodeGraphs(runner.model, runner.attention, max_num_seqs, MAX_MODEL_LEN, compute_again)
    return llm


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 100, 256, 257])
def test_every_batch_finds_a_size(most: int) -> None:
    """Up to the largest batch, and padded to less than twice its size or by less than 8."""
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    for n in range(1, most + 1):
        size = next(size for size in sizes if size >= n)
        assert size < 2 * n or size - n < 8


def test_graphs_give_the_same_tokens(oracle: Oracle) -> None:
    """Prompts and decodes mixed, batches of all sizes, blocks shared, freed and used again."""
    llm = with_graphs(oracle.folder, 6, block_size=4, num_blocks=60)
    graphs, sizes = llm.engine.runner.graphs, set()
    replay = graphs.run

    def counted(input_ids: np.ndarray, *rest: object) -> Tensor:
        sizes.add(len(input_ids))
        return replay(input_ids, *rest)

    graphs.run = counted
    prompts = random_prompts(8, seed=3, longest=20)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 3, 12, 6, 1, 7, 5, 10)]
    for prompt, p, output in zip(prompts, params, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, p.max_tokens)
    assert sizes & set(graphs.sizes), "no batch filled a graph"
    assert sizes - set(graphs.sizes), "no batch needed padding"


def test_graphs_up_to_the_longest_context(qwen3: Oracle) -> None:
    """160 tokens in blocks of 7: the 23rd block has six slots. No decode outgrows the captured tables."""
    llm = with_graphs(qwen3.folder, 1, block_size=7, num_blocks=23)
    prompt = tokens(3, MAX_MODEL_LEN - 2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == qwen3.greedy(prompt, 2, ignore_eos=True)
    assert llm.engine.num_steps == 2


def test_forks_in_graphs(qwen3: Oracle) -> None:
    """Samples that share blocks and copy them on write: as without graphs."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10]
    plain = LLM(qwen3.folder, dtype="float32", block_size=4, num_blocks=40)
    graphed = with_graphs(qwen3.folder, 6, block_size=4, num_blocks=40)
    actual, expected = (llm.generate([prompt], params, use_tqdm=False)[0] for llm in (graphed, plain))
    assert [out.token_ids for out in actual.outputs] == [out.token_ids for out in expected.outputs]


def test_padding_touches_no_block(qwen3: Oracle) -> None:
    """Three decodes in a graph of four: of all slots only their three are written."""
    llm = with_graphs(qwen3.folder, 4, block_size=4, num_blocks=12)
    data = llm.engine.runner.kv_cache.data.zero_()
    for i in range(3):
        llm.engine.add_request(str(i), [3 + i] * (2 + i), SamplingParams(temperature=0, max_tokens=4))
    llm.engine.step()
    before = data.clone()
    llm.engine.step()
    written = (data != before).any(-1).any(1).any(1).any(1)  # [num_blocks, block_size]
    assert int(written.sum()) == 3
    expected = {
        (seq.block_table[n // 4], n % 4)
        for seq in llm.engine.scheduler.running_sequences
        if (n := seq.num_tokens - 2)
    }
    assert {tuple(slot) for slot in written.nonzero().tolist()} == expected


# ── block tables on the device ────────────────────────────────────────────────────────────────────


def test_block_tables_follow_all_changes() -> None:
    """Growth, copies on write, forks, new sequences in old rows, more sequences than rows."""
    rng = random.Random(0)
    tables = BlockTables(torch.device("cpu"))
    tables.reserve(6, 8)
    address = tables.data.data_ptr()
    running: dict[int, list[int]] = {}
    for step in range(400):
        if len(running) < 6 and rng.random() < 0.5:
            running[step] = [rng.randrange(100) for _ in range(rng.randint(1, 5))]
        for seq_id in list(running):
            event, table = rng.random(), running[seq_id]
            if event < 0.3 and len(table) < 8:
                table.append(rng.randrange(100))
            elif event < 0.4:
                table[-1] = rng.randrange(100)
            elif event < 0.5:
                running[seq_id] = list(rng.choice(list(running.values())))
            elif event < 0.55:
                running[seq_id] = table[: rng.randint(1, len(table))]
            elif event < 0.65:
                del running[seq_id]
        batch = rng.sample(list(running), rng.randint(0, len(running)))
        if batch:
            rows = tables.update(batch, [running[seq_id] for seq_id in batch])
            assert len(set(rows)) == len(rows)
            for seq_id, row in zip(batch, rows, strict=True):
                table = running[seq_id]
                assert tables.data[row, : len(table)].tolist() == table
    assert tables.data.data_ptr() == address, "a graph has captured it"


def test_block_tables_send_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[list[int]]] = []
    import nanopaged.attention.triton_backend as module

    to_device = module.to_device
    monkeypatch.setattr(
        module, "to_device", lambda a, device: sent.append(a.T.tolist()) or to_device(a, device)
    )
    tables = BlockTables(torch.device("cpu"))
    tables.reserve(2, 4)
    one, two = tables.update([7, 8], [[5, 2], [0]])
    tables.update([8, 7], [[0], [5, 2]])
    tables.update([7, 8], [[5, 2, 9], [0]])
    assert sent == [[[one, 0, 5], [one, 1, 2], [two, 0, 0]], [[one, 2, 9]]]
