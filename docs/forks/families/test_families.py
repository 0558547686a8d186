"""Mistral and Qwen3-MoE against transformers: the same greedy tokens, and log-probabilities to 1e-4."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import harness
import pytest
from families import LLM, FamiliesEngine
from harness import GREEDY, Oracle, Run, random_runs, serve

PROMPTS = harness.random_prompts(6, seed=6, longest=20)
SCORED = replace(GREEDY, logprobs=2, prompt_logprobs=0)
PARAMS = [replace(SCORED, max_tokens=n) for n in (8, 3, 14, 5, 11, 16)]
DENSE = {"tie_word_embeddings": False, "sliding_window": None}
SPARSE = DENSE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
SPARSE |= {"experts_implementation": "eager"}
SECOND = {"decoder_sparse_step": 2, "num_hidden_layers": 3, "num_experts_per_tok": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family and its config
    "mistral": ("Mistral", DENSE),
    "mistral tied": ("Mistral", DENSE | {"tie_word_embeddings": True, "head_dim": 20}),
    "moe": ("Qwen3Moe", SPARSE | {"norm_topk_prob": False}),
    "moe normalised": ("Qwen3Moe", SPARSE | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "moe dense first": ("Qwen3Moe", SPARSE | {"mlp_only_layers": [0], "attention_bias": True}),
    "moe second": ("Qwen3Moe", SPARSE | SECOND),
}
SIZES = {"num_blocks": 200, "block_size": 4, "dtype": "float32"}


@cache
def oracle_of(name: str) -> Oracle:
    family, config = MODELS[name]
    return Oracle(harness.make_model(family, **config), Path(mkdtemp()))


def check(name: str, **options: Any) -> None:
    """All prompts together are served as transformers does, with the prompts' scores."""
    oracle = oracle_of(name)
    oracle.check(serve(LLM(oracle.folder, **SIZES | options), PROMPTS, PARAMS))


@pytest.mark.parametrize("name", MODELS)
def test_batches_chunks_and_single_requests(name: str) -> None:
    """In chunks beside decodes, with whole prompts, and alone, when most experts have no token."""
    check(name, max_num_batched_tokens=9)
    check(name, enable_chunked_prefill=False)
    llm = LLM(oracle_of(name).folder, **SIZES)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        oracle_of(name).check(serve(llm, [prompt], params))


class FamiliesRun(Run):
    engine_class = alone_class = FamiliesEngine


def test_random_workloads() -> None:
    events = ["swap", "recompute", "cache hit", "copy on write", "abort"]
    random_runs(FamiliesRun, oracle_of("moe").folder, 6, events)


@pytest.mark.parametrize("name", ["moe", "moe second"])
def test_two_ranks(name: str) -> None:
    """Real processes; each has half of the columns of every expert, and of every dense MLP."""
    check(name, tensor_parallel_size=2)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Mistral", {"sliding_window": 4096}, {}, "has sliding_window 4096 .* but only full attention"),
    ("Qwen3Moe", {"moe_intermediate_size": 21}, {"tensor_parallel_size": 2}, "is 2, but must divide .* 21"),
]


@pytest.mark.parametrize(("family", "config", "options", "message"), REFUSED)
def test_what_is_refused(family: str, config: dict, options: dict, message: str, tmp_path: Path) -> None:
    Oracle(harness.make_model(family, **SPARSE | config), tmp_path)
    harness.check_refused(LLM, [({"model": tmp_path} | options, message)])
