"""The same bits in any batch. Every comparison is exact, but for that with transformers."""

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import GREEDY, Oracle, Run, Workload, check_refused, random_prompts, random_runs, serve, tokens
from invariant import LLM, InvariantEngine

TOP = replace(GREEDY, logprobs=2)
SAMPLED = replace(TOP, temperature=0.9, seed=5, top_p=0.95)


@pytest.fixture(scope="module", params=["Qwen3", "Llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # So wide that the sums of oneDNN in float32 depend on the rows.
    model = harness.make_model(request.param, intermediate_size=2048, initializer_range=0.1)
    return Oracle(model, tmp_path_factory.mktemp(request.param)).folder


class InvariantRun(Run):
    """Log-probabilities are those that it gets alone, in blocks of the same size, to the last bit."""

    engine_class = alone_class = InvariantEngine
    tolerance = 0.0
    alone_options = {"block_size": 4, "num_blocks": 640}

    def __init__(self, folder: Path, workload: Workload) -> None:
        for asked in workload.requests[::2]:
            asked.prompt = tokens(3, 60) + asked.prompt
        super().__init__(folder, workload.with_pool(4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_workloads(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InvariantRun, "options", {"dtype": dtype})
    monkeypatch.setitem(InvariantRun.alone_options, "dtype", dtype)
    events = ["swap", "recompute", "cache hit", "copy on write", "abort"]
    random_runs(InvariantRun, folder, 9, events)


def test_it_says_what_transformers_says(oracle: Oracle) -> None:
    """The same greedy tokens, and log-probabilities to 1e-4."""
    llm = LLM(oracle.folder, num_blocks=64, block_size=8, max_num_batched_tokens=40)
    oracle.check(serve(llm, random_prompts(6, seed=4, longest=100), replace(TOP, prompt_logprobs=0)))


def test_equal_tokens_are_drawn_alike_whatever_is_drawn_beside_them(folder: Path) -> None:
    """Of tokens with equal logits the largest top-k, and the most log-probabilities, of a call choose."""
    llm = LLM(folder, num_blocks=64, block_size=8)
    llm.engine.runner.model.lm_head.forward = lambda x: torch.ones(len(x), 97)
    for params in (replace(SAMPLED, top_k=3), TOP, replace(SAMPLED, top_p=0.3)):
        (by_itself,) = serve(llm, [[1, 2, 3]], params)
        beside = serve(llm, [[1, 2, 3], [4]], [params, replace(SAMPLED, top_k=50, logprobs=90)])[0]
        assert by_itself.outputs == beside.outputs


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(LLM, [({"attention_backend": "reference"}, "must be one of auto, torch")])
    check_refused(LLM, [({"tensor_parallel_size": 2}, "is 2, but ranks add up in another order")])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check_refused(LLM, [({"num_blocks": 9}, r"at most 2 threads.* not cpu with 3")])
