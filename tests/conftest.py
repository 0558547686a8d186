"""Options of the test run, and the oracle: small random models of docs/forks/harness.py in transformers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a GPU the kernels are interpreted. This comes before transformers, which imports triton.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

pytest.register_assert_rewrite("harness")

import harness  # noqa: E402
import transformers  # noqa: E402
from harness import (  # noqa: E402, F401  for the tests, and a fixture
    EOS,
    LLAMA3_ROPE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Params,
    make_model,
    memory_that_was_never_written,
    random_prompts,
    serve,
    tokens,
    tokens_of,
)

from nanopaged import BeamSearchParams, SamplingParams  # noqa: E402

# Where the tests of the C++ kernels build them.
KERNELS = Path(tempfile.gettempdir()) / f"nanopaged-test-kernels-{getattr(os, 'getuid', int)()}"
RANDOM_RUNS = 100  # of each kind, or as many more as it takes until all that they should meet has happened
QUICK_RUNS = 50
# What `-m quick` runs: the bookkeeping, the sampler, and one family of models against transformers.
QUICK = ["block_manager", "scheduler", "swap", "beam_search", "sampler", "random_runs", "oracle"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the random workloads run: see tests/engine/test_random_runs.py."""
    runs = f"random workloads of each kind (default: {RANDOM_RUNS}, or {QUICK_RUNS} with -m quick)"
    parser.addoption("--random-runs", type=int, help=runs)
    parser.addoption("--first-seed", type=int, default=0, help="the seed of the first of them")
    backend = "attention_backend of those with the tiny model, such as cpp (default: torch)"
    parser.addoption("--random-backend", default="torch", help=backend)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.random_runs is None:
        config.option.random_runs = QUICK_RUNS if config.option.markexpr == "quick" else RANDOM_RUNS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n: a worker without tests takes some of another's. Slow tests stand side by side in a file."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and skip the GPU tests where there is no GPU."""
    for item in items:
        family = getattr(item, "callspec", None) and item.callspec.params.get("oracle")
        is_slow = item.get_closest_marker("slow") is not None
        if item.path.stem.removeprefix("test_") in QUICK and family in (None, "qwen3") and not is_slow:
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device (with one: pytest -m gpu)"))


def make_checkpoint(family: str, folder: Path, **changes: object) -> transformers.PreTrainedModel:
    """A random model of a family, such as "qwen3", saved to `folder`, with changes of its config."""
    model = make_model(family.capitalize(), **changes)
    model.save_pretrained(folder)
    return model


class Oracle(harness.Oracle):
    """With the outputs of transformers' own generation, for one prompt at a time."""

    @cached_property
    def _greedy(self) -> Callable[..., list[int]]:  # many tests ask for the same prompts
        return cache(self._generate)

    def greedy(self, prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
        return list(self._greedy(tuple(prompt), max_tokens, ignore_eos))

    @torch.inference_mode()
    def _generate(self, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None if ignore_eos else EOS,
        )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """One for each family."""
    return Oracle(make_model(request.param.capitalize()), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """For tests that do not depend on the family."""
    return Oracle(make_model("Qwen3"), tmp_path_factory.mktemp("qwen3-alone"))


# One of each kind, of what a device computes with operations of its own.
KINDS: dict[str, Params] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top_k": SamplingParams(top_k=5, seed=2),
    "top_p": SamplingParams(top_p=0.9, seed=3),
    "min_p": SamplingParams(min_p=0.1, seed=4),
    "all filters": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=5),
    "banned tokens": SamplingParams(min_tokens=3, stop_token_ids=[3, 4], seed=6),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=1, seed=7),
    "several": SamplingParams(n=3, seed=8),
    "log-probabilities": SamplingParams(temperature=0, logprobs=2),
    "beams": BeamSearchParams(beam_width=3),
    "banned beams": BeamSearchParams(beam_width=3, min_tokens=3),
}
