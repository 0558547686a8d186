"""Mistral and Qwen3-MoE against transformers: the same greedy tokens, and log-probabilities to 1e-4."""

import copy
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import conftest
import pytest
import random_workloads
import test_random_runs
import torch
from conftest import SHAPE, Oracle, make_checkpoint, memory_that_was_never_written, random_prompts  # noqa: F401
from families import LLM, FamiliesEngine, MixtureOfExperts
from safetensors.torch import load_file, save_file
from serving import serve, tokens_of
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import nanopaged
from nanopaged import EngineConfig, RequestOutput, SamplingParams
from nanopaged.attention.torch_backend import TorchAttention

PROMPTS = random_prompts(5, seed=6, longest=40)
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
PARAMS = [replace(GREEDY, max_tokens=n) for n in (8, 3, 14, 5, 11)]
DENSE = SHAPE | {"tie_word_embeddings": False, "sliding_window": None}
SPARSE = DENSE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name → family, changes of its config
    "mistral": ("mistral", {}),
    "mistral tied": ("mistral", {"tie_word_embeddings": True, "head_dim": 20}),
    "moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe normalised": ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "moe dense first": ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    "moe second": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3, "num_experts_per_tok": 1}),
}
LAYERS = {"moe": (0, 1), "moe normalised": (0, 1), "moe dense first": (1,), "moe second": (1,)}
SIZES = {"num_blocks": 200, "block_size": 4, "dtype": "float32"}

conftest.FAMILIES["mistral"] = lambda **changes: MistralForCausalLM(MistralConfig(**DENSE | changes))
conftest.FAMILIES["qwen3_moe"] = lambda **changes: Qwen3MoeForCausalLM(
    Qwen3MoeConfig(**SPARSE | changes, experts_implementation="eager")
)


class Model(Oracle):
    """A random model of `MODELS`."""

    def __init__(self, name: str) -> None:
        family, changes = MODELS[name]
        self.folder = Path(test_random_runs.SCRATCH.name) / name
        self.model = make_checkpoint(family, self.folder, **changes)

    def check(self, outputs: list[RequestOutput]) -> None:
        """The outputs of all prompts are those of transformers, and so are the prompts' scores."""
        for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
            (got,), text = output.outputs, prompt + output.outputs[0].token_ids
            assert got.token_ids == self.greedy(prompt, params.max_tokens, ignore_eos=True)
            right = self.logprobs(text)
            for i, row in enumerate([*output.prompt_logprobs[1:], *got.logprobs]):
                assert text[i + 1] in row
                for token_id, ours in row.items():
                    assert ours.logprob == pytest.approx(right[i, token_id].item(), abs=1e-4)


oracle = cache(Model)


def spoil(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint, with changes of its config.json; ... removes a setting."""
    shutil.copytree(oracle(name).folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# ── the outputs of transformers ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_batches_chunks_and_single_requests(name: str) -> None:
    """In chunks beside decodes, with whole prompts, and alone, when most experts have no token."""
    for options in ({"max_num_batched_tokens": 9}, {"enable_chunked_prefill": False}):
        oracle(name).check(serve(LLM(oracle(name).folder, **SIZES | options), PROMPTS, PARAMS))
    llm = LLM(oracle(name).folder, **SIZES)
    oracle(name).check([serve(llm, [prompt], p)[0] for prompt, p in zip(PROMPTS, PARAMS, strict=True)])


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["mistral", "moe"])
def test_preempted_and_cached_requests(name: str, preemption: str) -> None:
    options = {"num_blocks": 16, "num_host_blocks": 60, "preemption": preemption, "watermark": 0}
    llm = LLM(oracle(name).folder, **SIZES | options)
    oracle(name).check(serve(llm, PROMPTS, PARAMS))
    assert getattr(llm.engine.stats(), f"num_preemptions_{preemption}") > 0
    params = [replace(each, prompt_logprobs=None) for each in PARAMS]
    llm = LLM(oracle(name).folder, **SIZES)
    before, after = serve(llm, PROMPTS, params), serve(llm, PROMPTS, params)
    assert tokens_of(after) == tokens_of(before)
    assert sum(output.metrics.num_cached_tokens for output in after) > 60


def test_random_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, beams, forks, aborts and preemption, with experts: each request says what it says alone."""
    make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=1, num_experts=3)

    def make_engine(_: str, config: EngineConfig) -> FamiliesEngine:
        engine = FamiliesEngine(replace(config, model=tmp_path, dtype="float32"))
        engine.prompts.tokenizer = test_random_runs.fake_tokenizer()
        return engine

    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    monkeypatch.setattr(test_random_runs, "large_engine", cache(test_random_runs.large_engine.__wrapped__))
    # The few tokens of the fake model, whose texts are known.
    monkeypatch.setattr(random_workloads, "TINY", random_workloads.FAKE)
    events = ["swap", "recompute", "cache hit", "copy on write", "prompt scored", "abort while running"]
    test_random_runs.serve_random(random_workloads.tiny, 8, events)


@pytest.mark.parametrize("name", ["moe", "moe second"])
def test_two_ranks(name: str) -> None:
    """Real processes; each has half of the columns of every expert, and of every dense MLP."""
    oracle(name).check(serve(LLM(oracle(name).folder, tensor_parallel_size=2, **SIZES), PROMPTS, PARAMS))


@torch.inference_mode()
def test_where_bfloat16_is_rounded() -> None:
    """As in transformers: the probabilities are float32, and are rounded after they are normalised."""
    theirs = copy.deepcopy(oracle("moe normalised").model.model.layers[1].mlp).bfloat16()
    llm = LLM(oracle("moe normalised").folder, **SIZES | {"dtype": "bfloat16"})
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = llm.engine.runner.model.layers[1].mlp(x) == theirs(x[None])[0]
    assert same.float().mean() > 0.95, "a softmax in bfloat16 changes a quarter of the numbers"


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_which_layers_have_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights. A GPU's steps of a model with experts are not recorded."""
    monkeypatch.setattr(TorchAttention, "supports_cuda_graphs", True)
    runner = LLM(oracle(name).folder, load_format="dummy", **SIZES).engine.runner
    layers = enumerate(runner.model.layers)
    assert LAYERS.get(name, ()) == tuple(i for i, each in layers if isinstance(each.mlp, MixtureOfExperts))
    assert runner.attention.supports_cuda_graphs == (name not in LAYERS)


def test_the_published_format(tmp_path: Path) -> None:
    """Several files, and a config.json in the words of transformers 4."""
    theta = oracle("moe").model.config.rope_parameters["rope_theta"]
    names = {"num_experts": 5, "num_local_experts": ..., "rope_theta": theta, "rope_parameters": ...}
    oracle("moe").model.save_pretrained(tmp_path, max_shard_size="40KB")
    spoil("moe", tmp_path, **names, torch_dtype="float32", dtype=...)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    oracle("moe").check(serve(LLM(tmp_path, **SIZES), PROMPTS, PARAMS))


def test_weights_that_are_refused(tmp_path: Path) -> None:
    """One that is missing; all experts in one. The plain engine refuses all of them, and reads Mistral."""
    weights = load_file(spoil("moe", tmp_path) / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected: model.layers.0.mlp.experts.0.down_proj"):
        nanopaged.LLM(tmp_path, **SIZES)
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing: model.layers.1.mlp.experts.3.up_proj.weight; unex"):
        LLM(tmp_path, **SIZES)
    oracle("moe").model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match="unexpected: model.layers.0.mlp.experts.down_proj"):
        LLM(tmp_path, **SIZES)
    oracle("mistral").check(serve(nanopaged.LLM(oracle("mistral").folder, **SIZES), PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": ...}, "has sliding_window 4096 .* but only full attention"),
        ("moe", {"num_experts_per_tok": 6}, "num_experts_per_tok 6, but num_experts is 5, and no"),
        ("moe", {"num_local_experts": 0}, "has num_experts 0, but only numbers above 0"),
        ("moe", {"decoder_sparse_step": 0}, "has decoder_sparse_step 0, but only numbers above 0"),
        ("moe", {"moe_intermediate_size": 2.5}, "config.json cannot be used: .*moe_intermediate_size"),
        ("moe", {"moe_intermediate_size": 21}, "is 2, but must divide .* moe_intermediate_size of 21"),
    ],
)
def test_configs_that_are_refused(name: str, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(spoil(name, tmp_path, **changes), tensor_parallel_size=1 + (21 in changes.values()), **SIZES)
