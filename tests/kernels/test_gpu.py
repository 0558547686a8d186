"""The whole engine on a GPU: against transformers, graphs against eager, forks and swaps on CUDA's streams.

With `python -m pytest -m gpu`; skipped, with the reason, where there is none. The kernels' own tests are in
`test_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch
from conftest import Oracle, random_prompts, serve, tokens_of

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.attention import why_unavailable
from nanopaged.kv_cache import KVShape
from nanopaged.sequence import ScheduledBatch, StepResult

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def engine(oracle: Oracle, **options: object) -> LLM:
    """An engine that does not swap unless it is asked to: "auto" would pin memory to measure it."""
    defaults = {"dtype": "float32", "device": DEVICE, "block_size": 4, "num_blocks": 200, "max_num_seqs": 12}
    defaults["preemption"] = "recompute"
    return LLM(oracle.folder, **defaults | options)


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_same_tokens_as_transformers(oracle: Oracle, backend: str, enforce_eager: bool) -> None:
    """And log-probabilities: Llama, Qwen2 and Qwen3; prompts and decodes mixed, prompts in chunks."""
    prompts = random_prompts(20, seed=1)
    llm = engine(oracle, attention_backend=backend, enforce_eager=enforce_eager, max_num_batched_tokens=64)
    oracle.check(serve(llm, prompts, SamplingParams(temperature=0, max_tokens=20, logprobs=1)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_graphs_equal_eager(oracle: Oracle, size: int) -> None:
    """Token for token, with samples drawn and log-probabilities alike; batches that need padding, too."""
    prompts = random_prompts(size, seed=size)
    params = [SamplingParams(temperature=0.8, top_k=20, seed=i, max_tokens=30) for i in range(size)]
    eager = serve(engine(oracle, enforce_eager=True), prompts, params)
    graphs = serve(engine(oracle), prompts, params)
    assert tokens_of(graphs) == tokens_of(eager)
    for one, other in zip(graphs, eager, strict=True):
        assert abs(one.outputs[0].cumulative_logprob - other.outputs[0].cumulative_logprob) < 1e-3


def test_padding_touches_no_block(qwen3: Oracle) -> None:
    """Blocks that no sequence has keep their values."""
    llm = engine(qwen3, max_num_seqs=7, enable_prefix_caching=False)
    cache = llm.engine.runner.kv_cache.data.fill_(3.0)
    for i in range(5):
        llm.engine.add_request(str(i), [i + 1] * (3 * i + 1), SamplingParams(max_tokens=12, ignore_eos=True))
    used: set[int] = set()
    execute = llm.engine.runner.execute

    def watched(batch: ScheduledBatch) -> StepResult:
        used.update(block for seq in batch.sequences for block in seq.block_table)
        return execute(batch)

    llm.engine.runner.execute = watched
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    untouched = [block for block in range(len(cache)) if block not in used]
    assert len(untouched) > 100
    assert (cache[untouched] == 3.0).all()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_forks_and_preemption_on_streams(oracle: Oracle, preemption: str) -> None:
    """Copies on write, swaps and kernels run in the right order: the same tokens as without preemption."""
    prompts = random_prompts(8, seed=4, longest=20)
    params = [BeamSearchParams(beam_width=3, max_tokens=24)] * 4
    params += [SamplingParams(n=3, seed=i, max_tokens=24, ignore_eos=True) for i in range(4)]
    expected = serve(engine(oracle), prompts, params)
    llm = engine(oracle, num_blocks=40, num_host_blocks=200, preemption=preemption)
    actual = serve(llm, prompts, params)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert stats.num_blocks_copied > 0
    assert tokens_of(actual) == tokens_of(expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_half_precision(qwen3: Oracle, dtype: str, backend: str) -> None:
    """Prompt log-probabilities near those of float32, by flash attention and by plain PyTorch, in chunks."""
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=getattr(torch, dtype))
    reason = why_unavailable(backend, torch.device(DEVICE), shape)
    if reason is not None:
        pytest.skip(reason)
    prompts = random_prompts(6, seed=6)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    exact = serve(engine(qwen3, attention_backend="torch"), prompts, params)
    llm = engine(qwen3, dtype=dtype, attention_backend=backend, max_num_batched_tokens=24)
    tolerance = 0.05 if dtype == "float16" else 0.4
    for one, other, prompt in zip(exact, serve(llm, prompts, params), prompts, strict=True):
        pairs = zip(prompt, one.prompt_logprobs, other.prompt_logprobs, strict=True)
        for token_id, a, b in [*pairs][1:]:
            assert abs(float(a[token_id]) - float(b[token_id])) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pool_is_measured(qwen3: Oracle, dtype: str) -> None:
    """If num_blocks is left open, it follows from the memory of the card, and the engine runs."""
    llm = engine(qwen3, dtype=dtype, num_blocks=None, memory_utilization=0.5)
    assert llm.engine.stats().num_blocks == 12 * 160 // 4, "all that 12 sequences could use fit easily"
    (output,) = serve(llm, [[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 5
