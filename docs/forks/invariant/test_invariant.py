"""The same bits in any batch. Every comparison is exact, but for that with transformers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import Oracle, make_checkpoint, random_prompts, tokens
from serving import serve

from nanopaged import LLM, BeamSearchParams, EngineConfig, RequestOutput, SamplingParams
from nanopaged.attention import invariant_backend
from nanopaged.model.layers import in_tiles

sys.path.append(str(Path(__file__).parents[1] / "docs" / "forks" / "invariant"))
import measure  # noqa: E402

Params = SamplingParams | BeamSearchParams
Bits = list[object]

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.9, seed=5, top_p=0.95)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    # so wide that the sums of oneDNN in float32 depend on the rows
    make_checkpoint(request.param, path, intermediate_size=2048, initializer_range=0.1)
    return path


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def make_llm(folder: Path, dtype: str, **options: object) -> LLM:
    return LLM(folder, dtype=dtype, **{"batch_invariant": True, "num_blocks": 64, "block_size": 8} | options)


def bits(output: RequestOutput) -> Bits:
    """All that a request got, to the last bit: tokens, and log-probabilities of prompt and outputs."""
    scores = [output.prompt_logprobs] + [each.logprobs for each in output.outputs]
    return [[each.token_ids, each.cumulative_logprob] for each in output.outputs] + scores


def bits_of(llm: LLM, prompts: list[list[int]], params: list[Params]) -> list[Bits]:
    """What the requests say together."""
    return [bits(output) for output in serve(llm, prompts, params)]


def draw(seed: int, num: int = 9) -> tuple[list[list[int]], list[Params]]:
    """Prompts that often begin alike, with params of every kind."""
    rng = random.Random(seed)
    stem = tokens(3, 40)
    prompts = [rng.choice([[], stem[: rng.randint(1, 40)]]) + p for p in random_prompts(num, seed, 50)]
    kinds: list[Params] = [
        GREEDY,
        SAMPLED,
        replace(GREEDY, prompt_logprobs=1),
        replace(SAMPLED, n=3, top_k=20, presence_penalty=0.5),
        replace(SAMPLED, min_p=0.02, top_p=1.0, frequency_penalty=0.3, prompt_logprobs=0),
        BeamSearchParams(beam_width=3, max_tokens=10),
    ]
    return prompts, [rng.choice(kinds) for _ in prompts]


OPTIONS: dict[str, dict[str, object]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "without prefix cache": {"max_num_batched_tokens": 33, "enable_prefix_caching": False},
    "swapped": {"num_blocks": 30, "preemption": "swap", "watermark": 0.0},
    "recomputed": {
        "num_blocks": 30,
        "preemption": "recompute",
        "watermark": 0.0,
        "max_num_batched_tokens": 19,
    },
    "blocks of 5": {"block_size": 5, "max_num_seqs": 4},
}


@cache
def expected(folder: Path, dtype: str, block_size: int, seed: int) -> list[Bits]:
    """What the requests get one after the other, each with an empty prefix cache."""
    llm, found = make_llm(folder, dtype, block_size=block_size), []
    for prompt, params in zip(*draw(seed), strict=True):
        llm.reset_prefix_cache()
        found += bits_of(llm, [prompt], [params])
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_request_has_the_bits_that_it_has_alone(
    folder: Path, dtype: str, options: dict[str, object]
) -> None:
    llm = make_llm(folder, dtype, **options)
    for seed in range(2):
        assert bits_of(llm, *draw(seed)) == expected(folder, dtype, options.get("block_size", 8), seed)
    if "preemption" in options:
        assert getattr(llm.engine.stats(), f"num_preemptions_{options['preemption']}") > 0


@pytest.mark.parametrize("name", ["batched", "chunks of 7"])
def test_without_the_switch_the_bits_differ(folder: Path, name: str) -> None:
    """So the comparison can fail. In bfloat16 a difference is often rounded away."""
    llm = make_llm(folder, "float32", batch_invariant=False, **OPTIONS[name])
    plain = make_llm(folder, "float32", batch_invariant=False)
    prompts, params = draw(0)
    alone = [bits_of(plain, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    assert bits_of(llm, prompts, params) != alone


def test_groups_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of keys in memory at once."""
    monkeypatch.setattr(invariant_backend, "GROUP_ROWS", 3)
    assert bits_of(make_llm(folder, "float32"), *draw(0)) == expected(folder, "float32", 8, 0)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("float_type", [torch.float32, torch.bfloat16])
def test_no_operation_depends_on_the_batch(
    set_threads: Callable[[int], None], float_type: torch.dtype
) -> None:
    """The table of the README: without the fork some do, and attention always."""
    set_threads(1)
    found = measure.differences(float_type)
    assert {name: ours for name, (_, (ours, _)) in found.items() if ours} == {}
    dependent = {name for name, ((plain, _), _) in found.items() if plain}
    sampler = "sampler: other params beside it"
    assert {"decode: blocks shared", "prefill: as decodes", sampler} <= dependent


def test_a_tile_has_the_rows_that_it_is_given() -> None:
    """The function sees 16 rows each time, and the rows of zeros are cut off again."""
    seen = []
    x = torch.arange(20.0)[:, None]
    y = in_tiles(lambda a, b: seen.append(len(a)) or a + b, x, 2 * x)
    assert torch.equal(y, 3 * x)
    assert seen == [16, 16]


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": name} for name in ("cpp", "triton", "flash", "reference")]
    + [{"tensor_parallel_size": 2}],
    ids=str,
)
def test_what_is_refused(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"batch_invariant=True does not go with {name}={options[name]!r}"):
        EngineConfig(batch_invariant=True, **options)


def test_three_threads_are_refused(qwen3: Oracle, set_threads: Callable[[int], None]) -> None:
    """A thread could begin in the middle of a row, where other instructions compute exp."""
    set_threads(3)
    with pytest.raises(ValueError, match=r"at most two threads.* not cpu with 3"):
        make_llm(qwen3.folder, "float32")


def test_it_says_what_transformers_says(oracle: Oracle) -> None:
    """The same greedy tokens, and log-probabilities to 1e-4."""
    llm = make_llm(oracle.folder, "float32", max_num_batched_tokens=40)
    prompts = random_prompts(6, seed=4, longest=100)
    params = replace(GREEDY, logprobs=0, prompt_logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        (got,) = output.outputs
        assert got.token_ids == oracle.greedy(prompt, 20, ignore_eos=True)
        expected = oracle.logprobs(prompt + got.token_ids)
        scored = [*output.prompt_logprobs[1:], *got.logprobs]
        for i, token_id in enumerate((prompt + got.token_ids)[1:]):
            assert scored[i][token_id].logprob == pytest.approx(expected[i, token_id].item(), abs=1e-4)
