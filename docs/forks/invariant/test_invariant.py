"""The same bits in any batch. Every comparison is exact, but for that with transformers."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import GREEDY, Oracle, Params, Run, Workload, check_refused, random_prompts, serve, tokens
from invariant import LLM, InvariantAttention, InvariantEngine

import nanopaged
from nanopaged import BeamSearchParams, EngineConfig, RequestOutput

TOP = replace(GREEDY, logprobs=2)
SAMPLED = replace(TOP, temperature=0.9, seed=5, top_p=0.95)


@pytest.fixture(scope="module", params=["Qwen3", "Llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # So wide that the sums of oneDNN in float32 depend on the rows.
    model = harness.make_model(request.param, intermediate_size=2048, initializer_range=0.1)
    return Oracle(model, tmp_path_factory.mktemp(request.param)).folder


def make_llm(folder: Path, dtype: str = "float32", kind: type[nanopaged.LLM] = LLM, **options: Any) -> Any:
    return kind(folder, dtype=dtype, **{"num_blocks": 64, "block_size": 8} | options)


def bits(outputs: list[RequestOutput]) -> list[object]:
    """All that requests got, to the last bit: tokens, and log-probabilities of prompts and outputs."""
    found: list[object] = [output.prompt_logprobs for output in outputs]
    for output in outputs:
        found += [(got.token_ids, got.cumulative_logprob, got.logprobs) for got in output.outputs]
    return found


def draw(seed: int, num: int = 9) -> tuple[list[list[int]], list[Params]]:
    """Prompts that often begin alike, with params of every kind."""
    rng, stem = random.Random(seed), tokens(3, 90)
    prompts = [rng.choice([[], stem[: rng.randint(1, 90)]]) + p for p in random_prompts(num, seed, 50)]
    kinds: list[Params] = [
        TOP,
        SAMPLED,
        replace(TOP, prompt_logprobs=1),
        replace(SAMPLED, n=3, top_k=20, presence_penalty=0.5),
        replace(SAMPLED, min_p=0.02, top_p=1.0, frequency_penalty=0.3, prompt_logprobs=0),
        BeamSearchParams(beam_width=3, max_tokens=10),
    ]
    return prompts, [rng.choice(kinds) for _ in prompts]


@cache
def alone(folder: Path, dtype: str, kind: type[nanopaged.LLM], block_size: int) -> list[list[object]]:
    """What the requests get one after the other, each with an empty prefix cache."""
    llm, found = make_llm(folder, dtype, kind, block_size=block_size), []
    for prompt, params in zip(*draw(0), strict=True):
        llm.reset_prefix_cache()
        found.append(bits(serve(llm, [prompt], [params])))
    return found


def is_as_alone(folder: Path, llm: nanopaged.LLM) -> bool:
    config = llm.engine.config
    found = [bits([output]) for output in serve(llm, *draw(0))]
    return found == alone(folder, config.dtype, type(llm), config.block_size)


OPTIONS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "without prefix cache": {"max_num_batched_tokens": 33, "enable_prefix_caching": False},
    "swapped": {"num_blocks": 30, "preemption": "swap", "watermark": 0.0},
    "recomputed": {"num_blocks": 30, "preemption": "recompute", "max_num_batched_tokens": 19},
    "blocks of 5": {"block_size": 5, "max_num_seqs": 4},
    "blocks of 80": {"block_size": 80, "num_blocks": 20},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_request_has_the_bits_that_it_has_alone(folder: Path, dtype: str, options: dict[str, Any]) -> None:
    llm = make_llm(folder, dtype, **options)
    assert is_as_alone(folder, llm)
    assert "preemption" not in options or harness.num_preempted(llm) > 0


def test_the_engine_itself_has_other_bits(folder: Path) -> None:
    """So the comparison can fail. In bfloat16 a difference is often rounded away."""
    assert not is_as_alone(folder, make_llm(folder, kind=nanopaged.LLM, **OPTIONS["chunks of 7"]))


class InvariantRun(Run):
    """Log-probabilities are those that it gets alone, in blocks of the same size, to the last bit."""

    engine_class = alone_class = InvariantEngine
    tolerance = 0.0
    alone_options = {"block_size": 4, "num_blocks": 640}

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload.with_pool(4))


def test_random_workloads(qwen3: Oracle) -> None:
    events = ["swap", "recompute", "cache hit", "copy on write", "abort", "fault: update"]
    harness.random_runs(InvariantRun, qwen3.folder, 12, events)


def test_it_says_what_transformers_says(oracle: Oracle) -> None:
    """The same greedy tokens, and log-probabilities to 1e-4."""
    llm = make_llm(oracle.folder, max_num_batched_tokens=40)
    oracle.check(serve(llm, random_prompts(6, seed=4, longest=100), replace(TOP, prompt_logprobs=0)))


def test_equal_tokens_are_drawn_alike_whatever_is_drawn_beside_them(folder: Path) -> None:
    """Of tokens with equal logits the largest top-k, and the most log-probabilities, of a call choose."""
    llm = make_llm(folder)
    llm.engine.runner.model.lm_head.forward = lambda x: torch.ones(len(x), 97)
    for params in (replace(SAMPLED, top_k=3), TOP, replace(SAMPLED, top_p=0.3)):
        (by_itself,) = serve(llm, [[1, 2, 3]], params)
        beside = serve(llm, [[1, 2, 3], [4]], [params, replace(SAMPLED, top_k=50, logprobs=90)])[0]
        assert bits([by_itself]) == bits([beside])


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_three_threads_are_refused(three_threads: None) -> None:
    """A thread could begin in the middle of a row, where other instructions compute exp."""
    check_refused(LLM, [({"num_blocks": 9}, r"at most 2 threads.* not cpu with 3")])


def test_what_is_refused() -> None:
    message = "attention_backend is '{}', but must be one of auto, torch"
    backends = ("cpp", "triton", "flash", "reference")
    check_refused(LLM, [({"attention_backend": name}, message.format(name)) for name in backends])
    check_refused(LLM, [({"tensor_parallel_size": 2}, "is 2, but ranks add up in another order")])
    check_refused(InvariantEngine, [({"config": EngineConfig(num_blocks=9)}, "need an InvariantConfig")])
    llm = LLM(num_blocks=9, attention_backend="auto")
    assert isinstance(llm.engine.runner.attention, InvariantAttention)
