"""The same bits in any batch. Every comparison is exact, but for that with transformers."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import invariant
import pytest
import test_random_runs
import torch
from conftest import Oracle, make_checkpoint, memory_that_was_never_written, oracle, random_prompts, tokens
from invariant import LLM, InvariantAttention, InvariantConfig, InvariantEngine, in_tiles
from random_workloads import LONGEST, Workload, tiny
from serving import serve

import nanopaged
from nanopaged import BeamSearchParams, EngineConfig, RequestOutput, SamplingParams

FIXTURES = memory_that_was_never_written, oracle  # small KV caches begin full of NaN
Params = SamplingParams | BeamSearchParams
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.9, seed=5, top_p=0.95)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    # So wide that the sums of oneDNN in float32 depend on the rows.
    make_checkpoint(request.param, path, intermediate_size=2048, initializer_range=0.1)
    return path


def make_llm(folder: Path, dtype: str = "float32", kind: type[nanopaged.LLM] = LLM, **options: Any) -> Any:
    return kind(folder, dtype=dtype, **{"num_blocks": 64, "block_size": 8} | options)


def bits(outputs: list[RequestOutput]) -> list[object]:
    """All that requests got, to the last bit: tokens, and log-probabilities of prompts and outputs."""
    rows = [(each.token_ids, each.cumulative_logprob, each.logprobs) for o in outputs for each in o.outputs]
    return [rows, [output.prompt_logprobs for output in outputs]]


def draw(seed: int, num: int = 9) -> tuple[list[list[int]], list[Params]]:
    """Prompts that often begin alike, with params of every kind."""
    rng, stem = random.Random(seed), tokens(3, 90)
    prompts = [rng.choice([[], stem[: rng.randint(1, 90)]]) + p for p in random_prompts(num, seed, 50)]
    kinds: list[Params] = [
        GREEDY,
        SAMPLED,
        replace(GREEDY, prompt_logprobs=1),
        replace(SAMPLED, n=3, top_k=20, presence_penalty=0.5),
        replace(SAMPLED, min_p=0.02, top_p=1.0, frequency_penalty=0.3, prompt_logprobs=0),
        BeamSearchParams(beam_width=3, max_tokens=10),
    ]
    return prompts, [rng.choice(kinds) for _ in prompts]


@cache
def alone(folder: Path, dtype: str, block_size: int, seed: int) -> list[list[object]]:
    """What the requests get one after the other, each with an empty prefix cache."""
    llm, found = make_llm(folder, dtype, block_size=block_size), []
    for prompt, params in zip(*draw(seed), strict=True):
        llm.reset_prefix_cache()
        found.append(bits(serve(llm, [prompt], [params])))
    return found


def check(llm: nanopaged.LLM, folder: Path, dtype: str, seed: int) -> None:
    outputs = serve(llm, *draw(seed))
    assert [bits([output]) for output in outputs] == alone(folder, dtype, llm.engine.config.block_size, seed)


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
    for seed in range(2):
        check(llm, folder, dtype, seed)
    if "preemption" in options:
        assert getattr(llm.engine.stats(), f"num_preemptions_{options['preemption']}") > 0


def test_the_engine_itself_has_other_bits(folder: Path) -> None:
    """So the comparison can fail. In bfloat16 a difference is often rounded away."""
    plain = make_llm(folder, kind=nanopaged.LLM)
    together = make_llm(folder, kind=nanopaged.LLM, **OPTIONS["chunks of 7"])
    prompts, params = draw(0)
    one_by_one = [bits(serve(plain, [p], [its])) for p, its in zip(prompts, params, strict=True)]
    assert [bits([output]) for output in serve(together, prompts, params)] != one_by_one


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With aborts, faults and preemption, log-probabilities are equal to the last bit, too."""

    def make_engine(config: EngineConfig) -> InvariantEngine:
        if config.block_size == LONGEST:  # alone, in blocks of the same size
            config = replace(config, block_size=4, num_blocks=64 * LONGEST // 4)
        return InvariantEngine(InvariantConfig(**vars(config)))

    def in_blocks_of_4(seed: int) -> Workload:
        workload = tiny(seed)
        most = max(asked.most_blocks(4) for asked in workload.requests)
        return replace(workload, block_size=4, num_blocks=most + seed % 3)

    monkeypatch.setattr(test_random_runs, "LLMEngine", make_engine)
    monkeypatch.setitem(test_random_runs.TOLERANCE, "tiny", 0.0)
    test_random_runs.large_engine.cache_clear()
    events = ["swap", "recompute", "cache hit", "copy on write", "abort while running", "fault: update"]
    test_random_runs.serve_random(in_blocks_of_4, 5, events)
    test_random_runs.large_engine.cache_clear()


def test_it_says_what_transformers_says(oracle: Oracle) -> None:
    """The same greedy tokens, and log-probabilities to 1e-4."""
    llm = make_llm(oracle.folder, max_num_batched_tokens=40)
    prompts = random_prompts(6, seed=4, longest=100)
    params = replace(GREEDY, logprobs=0, prompt_logprobs=0)
    for prompt, output in zip(prompts, serve(llm, prompts, params), strict=True):
        (got,) = output.outputs
        assert got.token_ids == oracle.greedy(prompt, 20, ignore_eos=True)
        right = oracle.logprobs(prompt + got.token_ids)
        for i, row in enumerate([*output.prompt_logprobs[1:], *got.logprobs]):
            token_id = (prompt + got.token_ids)[i + 1]
            assert row[token_id].logprob == pytest.approx(right[i, token_id].item(), abs=1e-4)


def test_every_product_has_one_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers, the activation and attention: all that is computed, on any machine."""
    shapes: dict[str, set[tuple[int, ...]]] = {}

    def note(name: str, *arrays: torch.Tensor) -> None:
        shapes.setdefault(name, set()).update(tuple(array.shape) for array in arrays)

    gather = invariant.gather_context
    monkeypatch.setattr(invariant, "gather_context", lambda *a: note("keys", out := gather(*a)) or out)
    llm = make_llm(folder, max_num_batched_tokens=50)
    tiles = in_tiles
    model = llm.engine.runner.model
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Module) and name.endswith(("_proj", "lm_head")):
            product = part.forward.args[0]
            part.forward = lambda x, name=name, f=product: tiles(lambda y: note(name, y) or f(y), x)
        if name.endswith("mlp"):
            product = part.silu_mul.args[0]
            part.silu_mul = lambda x, f=product: tiles(lambda y: note("silu_mul", y) or f(y), x)
    check(llm, folder, "float32", 0)
    assert len(shapes) >= 11
    assert all(len(its) == 1 for its in shapes.values()), shapes
    assert {next(iter(its))[0] for its in shapes.values()} == {invariant.ROWS}


def test_equal_tokens_are_drawn_alike_whatever_is_drawn_beside_them(folder: Path) -> None:
    """Of tokens with equal logits the largest top-k, and the most log-probabilities, of a call choose."""
    llm = make_llm(folder)
    llm.engine.runner.model.lm_head.forward = lambda x: torch.ones(len(x), 97)
    for params in (replace(SAMPLED, top_k=3), GREEDY, replace(SAMPLED, top_p=0.3)):
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
    with pytest.raises(ValueError, match=r"at most 2 threads.* not cpu with 3"):
        LLM(num_blocks=9)


def test_what_is_refused() -> None:
    for name in ("cpp", "triton", "flash", "reference"):
        with pytest.raises(
            ValueError, match=f"attention_backend is '{name}', but must be one of auto, torch"
        ):
            LLM(attention_backend=name)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but ranks add up in another order"):
        LLM(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="need an InvariantConfig"):
        InvariantEngine(EngineConfig(num_blocks=9))
    llm = LLM(num_blocks=9, attention_backend="auto")
    assert isinstance(llm.engine.config, InvariantConfig)
    assert isinstance(llm.engine.runner.attention, InvariantAttention)
