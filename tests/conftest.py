"""Small random checkpoints in transformers' format, and the outputs of transformers for them (the oracle)."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a GPU the kernels are interpreted. This comes before transformers, which imports triton.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

# "auto" takes the C++ kernels where they have been built: here it finds none.
os.environ["NANOPAGED_CACHE"] = os.path.join(os.path.dirname(__file__), "no kernels here")
os.environ["NANOPAGED_BUILD"] = "0"

import transformers  # the model classes are imported when they are used, which takes seconds

from nanopaged.kv_cache import KVCache

# Where the tests of the C++ kernels build them.
KERNELS = Path(tempfile.gettempdir()) / f"nanopaged-test-kernels-{getattr(os, 'getuid', int)()}"
VOCAB_SIZE = 97
MAX_MODEL_LEN = 160
EOS = 7
RANDOM_RUNS = 100  # of each kind, or as many more as it takes until all that they should meet has happened
QUICK_RUNS = 50
# What `-m quick` runs: the bookkeeping, the sampler, and one family of models against transformers.
QUICK = ["block_manager", "scheduler", "swap", "beam_search", "sampler", "random_runs", "oracle"]

torch.set_num_threads(1)  # the models are so small that a second thread only waits


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
        if item.path.stem.removeprefix("test_") in QUICK and family in (None, "qwen3"):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device (with one: pytest -m gpu)"))


@pytest.fixture(autouse=True)
def memory_that_was_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small KV caches begin full of NaN, the worst that their memory may hold; large ones would take long."""
    allocate = KVCache.__init__

    def fill(cache: KVCache, *args: object, **options: object) -> None:
        allocate(cache, *args, **options)
        for blocks in (cache.data, cache.host):
            if blocks.is_cpu and blocks.is_floating_point() and blocks.nbytes < 1 << 25:
                blocks.fill_(math.nan)

    monkeypatch.setattr(KVCache, "__init__", fill)


SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,  # wide, so that greedy choices are clear-cut
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAMILIES: dict[str, Callable[..., transformers.PreTrainedModel]] = {
    "llama": lambda **changes: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SHAPE | {"head_dim": 20, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False} | changes
        )
    ),
    "qwen2": lambda **changes: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SHAPE | {"num_attention_heads": 4, "tie_word_embeddings": False} | changes)
    ),
    "qwen3": lambda **changes: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHAPE | {"head_dim": 16, "tie_word_embeddings": True} | changes)
    ),
}


def make_checkpoint(family: str, folder: Path, **changes: object) -> transformers.PreTrainedModel:
    """A random model of the family, saved to `folder`. Biases and norms are random, too.

    Args:
        changes: to its config.
    """
    torch.manual_seed(sum(map(ord, family)))
    model = FAMILIES[family](**changes).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


class Oracle:
    """The outputs of transformers, one prompt at a time, with its plain (eager) attention."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.model = make_checkpoint(family, folder)

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

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: row p holds the log-probabilities of the token at p + 1."""
        return self.model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="session", params=list(FAMILIES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """One for each family."""
    return Oracle(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """For tests that do not depend on the family."""
    return Oracle("qwen3", tmp_path_factory.mktemp("qwen3-alone"))


def random_prompts(num: int, seed: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def tokens(first: int, num: int) -> list[int]:
    """A prompt that shares nothing with those of another `first`."""
    return [first] + [(first + i) % 90 for i in range(1, num)]
