"""Mistral and Qwen3-MoE against transformers: the same tokens, and log-probabilities to 1e-4."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import random_workloads
import test_random_runs
import torch
from conftest import FAMILIES, SHAPE, Oracle, make_checkpoint, random_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nanopaged import LLM, EngineConfig, LLMEngine, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL, load_model
from nanopaged.model.layers import MixtureOfExperts
from nanopaged.model.model_config import read_model_config
from nanopaged.views.outputs import request_output

TOLERANCE = 1e-4
PROMPTS = random_prompts(5, seed=6, longest=40)
LENGTHS = [8, 3, 14, 5, 11]  # tokens generated for each of them
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}

FAMILIES["mistral"] = lambda **changes: MistralForCausalLM(
    MistralConfig(**SHAPE | {"sliding_window": None, "tie_word_embeddings": False} | changes)
)
FAMILIES["qwen3_moe"] = lambda **changes: Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        **SHAPE | EXPERTS | {"head_dim": 16, "tie_word_embeddings": False} | changes,
        experts_implementation="eager",
    )
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name → family, changes to its config
    "mistral": ("mistral", {}),
    "mistral tied": ("mistral", {"tie_word_embeddings": True, "head_dim": 20}),
    "moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe normalised": ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "moe dense first": ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    "moe every second": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 3, "num_experts_per_tok": 1},
    ),
}
SPARSE = {"moe": (0, 1), "moe normalised": (0, 1), "moe dense first": (1,), "moe every second": (1,)}


class Expected(Oracle):
    """A random model, and what transformers says to `PROMPTS`.

    Attributes:
        tokens: of each prompt, the greedy output.
        logprobs_after: of each prompt, [output tokens, vocab_size].
    """

    def __init__(self, name: str, folder: Path) -> None:
        family, changes = MODELS[name]
        self.folder, self.model = folder, make_checkpoint(family, folder, **changes)
        self.tokens = [self.greedy(p, n, ignore_eos=True) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
        self.logprobs_after = [
            self.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
            for prompt, tokens in zip(PROMPTS, self.tokens, strict=True)
        ]


@cache
def expected(name: str) -> Expected:
    return Expected(name, Path(test_random_runs.SCRATCH.name) / name)


@pytest.fixture
def moe_folder(tmp_path: Path) -> Path:
    """A copy of the checkpoint of "moe", to be spoilt."""
    return Path(shutil.copytree(expected("moe").folder, tmp_path / "model"))


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def check_outputs(folder: Path, oracle: Expected, which: range = range(5), **options: Any) -> LLM:
    """Generate for the prompts `which`, all in one batch, and compare with transformers."""
    llm = LLM(folder, dtype="float32", block_size=4, **{"num_blocks": 100} | options)
    engine = llm.engine
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=2) for n in LENGTHS]
    requests = {i: engine.prompts.make_request(str(i), PROMPTS[i], params[i]) for i in which}
    for request in requests.values():
        engine.queue(request)
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()
    for i, request in requests.items():
        (completion,) = request_output(request).outputs
        assert completion.token_ids == oracle.tokens[i]
        for logprobs, row in zip(completion.logprobs, oracle.logprobs_after[i], strict=True):
            for token_id, logprob in logprobs.items():
                assert logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
    return llm


# ── the same outputs as transformers ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_chunks_and_decodes(name: str) -> None:
    """A step has a few tokens of several sequences; below, prompts are computed whole."""
    check_outputs(expected(name).folder, expected(name), max_num_batched_tokens=9)


def test_each_prompt_alone() -> None:
    """Then most experts have no token in a step."""
    for i in range(len(PROMPTS)):
        check_outputs(expected("moe").folder, expected("moe"), range(i, i + 1))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["mistral", "moe"])
def test_preempted_requests(name: str, preemption: str) -> None:
    oracle = expected(name)
    llm = check_outputs(oracle.folder, oracle, num_blocks=16, preemption=preemption)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0


def test_a_prompt_from_the_prefix_cache() -> None:
    oracle = expected("moe")
    llm = LLM(oracle.folder, dtype="float32", block_size=4, num_blocks=100)
    params = SamplingParams(temperature=0, max_tokens=LENGTHS[0], ignore_eos=True)
    for num_hits in (0, (len(PROMPTS[0]) - 1) // 4 * 4):
        (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert output.outputs[0].token_ids == oracle.tokens[0]
        assert output.metrics.num_cached_tokens == num_hits
    assert num_hits > 0


def test_random_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, beams, preemption and aborts, with experts: each request says what it says alone."""
    make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=1, num_experts=3)

    def make_engine(_: str, config: EngineConfig) -> LLMEngine:
        engine = LLMEngine(replace(config, model=tmp_path, dtype="float32"))
        engine.prompts.tokenizer = test_random_runs.fake_tokenizer()
        return engine

    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    monkeypatch.setattr(test_random_runs, "large_engine", cache(test_random_runs.large_engine.__wrapped__))
    # Workloads of the size for a real model, with the few tokens of the fake one, whose texts are known.
    monkeypatch.setattr(random_workloads, "TINY", random_workloads.FAKE)
    happened: Counter[str] = Counter()
    workloads = [replace(random_workloads.tiny(seed), faults=[]) for seed in range(150)]
    short = [w for w in workloads if sum(asked.params.max_tokens for asked in w.requests) < 20]
    assert len(short) >= 24
    for workload in short[:24]:
        run = test_random_runs.Run(workload)
        run.serve()
        happened += run.happened
    for event in ("swap", "recompute", "cache hit", "copy on write", "prompt scored", "abort while running"):
        assert happened[event] > 0, happened


# ── the layer ─────────────────────────────────────────────────────────────────────────────────────


def layer_of(name: str, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    folder, config, device = expected(name).folder, EngineConfig(max_model_len=8), torch.device("cpu")
    return load_model(config, read_model_config(folder), folder, dtype, device).layers[1].mlp


@torch.inference_mode()
def test_where_bfloat16_is_rounded() -> None:
    """As in transformers: the probabilities are float32, and are rounded after they are normalised."""
    theirs = copy.deepcopy(expected("moe normalised").model.model.layers[1].mlp).bfloat16()
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = layer_of("moe normalised", torch.bfloat16)(x) == theirs(x[None])[0]
    assert same.float().mean() > 0.95, "a softmax in bfloat16 changes a quarter of the numbers"


def test_a_token_does_not_depend_on_the_others() -> None:
    """Alone, in any order, and many times in one batch, a token has the same result but for rounding."""
    layer = layer_of("moe")
    x = torch.randn(11, 48, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1)) % 11
    torch.testing.assert_close(layer(x[order]), together[order], atol=1e-5, rtol=1e-5)
    assert torch.equal(layer(x), together), "the same batch again, bit for bit"


def test_the_sparse_layers() -> None:
    for name, sparse in SPARSE.items():
        assert read_model_config(expected(name).folder).sparse_layers == sparse
    assert read_model_config(expected("mistral").folder).sparse_layers == ()


class Thread(threading.Thread):
    """One of two ranks, in a thread instead of a process: computes `work(rank)`."""

    def __init__(self, rank: int, shared: list[Tensor], barrier: threading.Barrier, work: Callable) -> None:
        super().__init__()
        self.rank, self.size, self.shared, self.barrier, self.work = rank, 2, shared, barrier, work
        self.result: Tensor | None = None

    def run(self) -> None:
        with torch.inference_mode():
            self.result = self.work(self)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.shared[self.rank] = x.clone()
        self.barrier.wait(5)
        x.copy_(self.shared[0] + self.shared[1])
        self.barrier.wait(5)
        return x

    def meet(self) -> None:
        self.barrier.wait(5)


@pytest.mark.parametrize("name", ["mistral", "moe", "moe every second"])
def test_two_ranks_add_up_to_one(name: str) -> None:
    """Each has half of the columns of every expert."""
    folder, ids, device = expected(name).folder, torch.arange(30), torch.device("cpu")
    config = EngineConfig(max_model_len=30)

    def hidden(rank: Thread | None) -> Tensor:
        model = load_model(config, read_model_config(folder), folder, torch.float32, device, rank)
        return model(ids, ids, lambda layer, q, k, v: q)

    shared, barrier = [torch.empty(0)] * 2, threading.Barrier(2)
    threads = [Thread(rank, shared, barrier, hidden) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.inference_mode():
        alone = hidden(None)
    for thread in threads:
        torch.testing.assert_close(thread.result, alone, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["mistral", "moe"])
def test_experts_are_not_captured_in_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; without one, on tensors that claim to be on one."""
    pytest.importorskip("triton")
    from fake_cuda import pretend

    folder = expected(name).folder
    with nullcontext() if torch.cuda.is_available() else pretend(monkeypatch):
        llm = LLM(folder, device="cuda:0", block_size=4, num_blocks=60, max_num_seqs=1, preemption="swap")
        assert (llm.engine.runner.graphs is None) == (name == "moe")


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


def test_the_published_format(tmp_path: Path) -> None:
    """A weight for each expert, in several files, and a config.json in the words of transformers 4."""
    oracle = expected("moe")
    oracle.model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in index["weight_map"]
    assert len(set(index["weight_map"].values())) > 2

    def publish(config: dict[str, Any]) -> None:
        config["num_experts"] = config.pop("num_local_experts")
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["torch_dtype"] = config.pop("dtype")
        config |= {
            "rope_scaling": None,
            "max_window_layers": 2,
            "mlp_only_layers": [],
            "sliding_window": None,
        }

    edit_config(tmp_path, publish)
    check_outputs(tmp_path, oracle)


def test_a_format_with_all_experts_in_one_weight(tmp_path: Path) -> None:
    """transformers writes it only if asked to; it is refused, and the names say why."""
    expected("moe").model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.down_proj"):
        LLM(tmp_path, num_blocks=8)


def test_a_missing_expert_is_named(moe_folder: Path) -> None:
    tensors = load_file(moe_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, moe_folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        LLM(moe_folder, num_blocks=8)


def test_dummy_weights(tmp_path: Path) -> None:
    """The tiny model's sizes and tokenizer, with experts that are drawn at random."""
    shutil.copytree(TINY_MODEL, tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    edit_config(
        tmp_path,
        lambda c: c.update(EXPERTS, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"]),
    )
    llm = LLM(tmp_path, load_format="dummy", num_blocks=16)
    assert all(isinstance(layer.mlp, MixtureOfExperts) for layer in llm.engine.runner.model.layers)
    (output,) = llm.generate("To be", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert output.outputs[0].token_ids


def test_a_mistral_with_a_window_is_refused(tmp_path: Path) -> None:
    """Without the key the window is 4096, as in v0.1; v0.3 says null."""
    shutil.copytree(expected("mistral").folder, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, lambda c: c.pop("sliding_window"))
    with pytest.raises(ValueError, match="sliding_window 4096, but only full attention is supported"):
        LLM(tmp_path, num_blocks=8)
    edit_config(tmp_path, lambda c: c.update(sliding_window=8))
    with pytest.raises(ValueError, match="sliding_window 8, but"):
        LLM(tmp_path, num_blocks=8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_experts_per_tok": 6}, "has num_experts_per_tok 6, but num_experts is 5"),
        ({"num_experts_per_tok": 0}, "has num_experts_per_tok 0, but needs a whole number above 0"),
        ({"num_local_experts": 0}, "has num_local_experts 0, but needs a whole number above 0"),
        ({"num_experts": 1 << 13}, "has num_experts 8192, but needs .* at most 4096"),
        ({"moe_intermediate_size": 2.5}, "has moe_intermediate_size 2.5, but needs a whole number"),
        ({"decoder_sparse_step": 0}, "has decoder_sparse_step 0, but needs a whole number above 0"),
        ({"decoder_sparse_step": None}, "has decoder_sparse_step None, but needs"),
        ({"norm_topk_prob": "yes"}, "cannot be used: .*norm_topk_prob"),
        ({"mlp_only_layers": 1}, "cannot be used: .*mlp_only_layers"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window 8, but only full attention"),
    ],
)
def test_configs_that_are_refused(moe_folder: Path, edit: dict[str, Any], message: str) -> None:
    edit_config(moe_folder, lambda c: c.update(edit))
    with pytest.raises(ValueError, match=message):
        LLM(moe_folder, num_blocks=8)


def test_experts_that_cannot_be_divided(moe_folder: Path) -> None:
    with pytest.raises(ValueError, match="is 3, which does not divide the model's moe_intermediate_size"):
        LLM(moe_folder, num_blocks=8, tensor_parallel_size=3)
