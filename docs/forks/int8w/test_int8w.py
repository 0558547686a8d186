"""Weights in 8 bits. The oracle is transformers, with weights that numpy has rounded, matrix by matrix."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import harness
import int8w
import numpy as np
import pytest
import torch
from harness import GREEDY, SMALL, Oracle, Run, make_model, num_preempted, random_prompts, random_runs, serve
from int8w import LLM, Int8Engine, Int8Linear, quantize
from torch import nn
from transformers import PreTrainedModel

import nanopaged
from nanopaged.model.decoder import Linear

BIASES = {"attention_bias": True, "mlp_bias": True}  # of Llama


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the numbers that int8 and one scale for each row can say, in every matrix."""
    model = deepcopy(model)
    for weight in {id(weight): weight for weight in model.parameters() if weight.ndim == 2}.values():
        rows = weight.detach().double().numpy()
        most = np.abs(rows).max(1, keepdims=True).clip(1e-20)  # padding is a row of zeros
        weight.data = torch.from_numpy(np.rint(rows * 127 / most) * most / 127).float()
    return model


def make_oracle(family: str, folder: Path, **changes: Any) -> Oracle:
    """The folder has the weights as they were, the oracle the rounded ones."""
    oracle = Oracle(make_model(family, **changes), folder)
    oracle.model = rounded(oracle.model)
    return oracle


@pytest.mark.parametrize(("is_tied", "tile"), [(True, 1000), (False, 7)], ids=["tied", "untied, row by row"])
@pytest.mark.parametrize("family", harness.FAMILIES)
def test_transformers_with_rounded_weights_says_the_same(
    family: str, is_tied: bool, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches, chunks of prompts, a pool that is too small; and the rounding can be told from none."""
    monkeypatch.setattr(int8w, "TILE", tile)
    changes = {"tie_word_embeddings": is_tied} | (BIASES if family == "Llama" else {})
    oracle, prompts = make_oracle(family, tmp_path, **changes), random_prompts(8, seed=3, longest=16)
    llm = LLM(tmp_path, preemption="swap", **SMALL)
    oracle.check(serve(llm, prompts, GREEDY))
    assert num_preempted(llm) > 0
    model = llm.engine.runner.model
    tables = {model.lm_head.weight.data_ptr(), model.embed_tokens.weight.data_ptr()}
    assert (len(tables) == 1) == is_tied, "a tied table is in memory once"
    with pytest.raises(AssertionError):
        oracle.check(serve(nanopaged.LLM(tmp_path, **SMALL), prompts, GREEDY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_rounds_its_weights_and_its_result(dtype: torch.dtype) -> None:
    """Weights change by half a scale; the result is rounded once. In float16, Σ x·q would overflow."""
    torch.manual_seed(1)
    linear, weight = Linear(60, 37, bias=True), torch.randn(37, 60) * torch.logspace(-5, 0, 37)[:, None]
    weight[7] = 0
    linear.bias, x = nn.Parameter(torch.randn(37).to(dtype)), (40 + torch.randn(70, 60)).to(dtype)
    layer = Int8Linear(linear, *quantize(weight.to(dtype)))
    scales = layer.scales.double()[:, None]
    assert (scales > 0).all()
    weight_read = layer.weight.double() * scales
    assert ((weight_read - weight.to(dtype).double()).abs() <= (0.5 + 1e-4) * scales).all()
    right = x.double() @ weight_read.T + linear.bias.double()
    y = layer(x)
    assert y.dtype == dtype
    # Sums in float32 have an error of their own, of what is added up.
    sums = x.double().abs() @ weight.double().abs().T
    assert ((y.double() - right).abs() <= torch.finfo(dtype).eps * right.abs() + 1e-6 * sums + 1e-7).all()


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """A row that two ranks share has one scale; else its halves would be rounded otherwise."""
    shape = {"num_attention_heads": 4, "head_dim": 12, "tie_word_embeddings": True}
    oracle = make_oracle("Llama", tmp_path, **shape, **BIASES)
    llm = LLM(tmp_path, num_blocks=60, block_size=4, tensor_parallel_size=2)
    oracle.check(serve(llm, random_prompts(4, seed=8), GREEDY))


class Int8Run(Run):
    """What a request says alone is computed by a plain engine with rounded weights."""

    engine_class = Int8Engine


def test_random_workloads(qwen3: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded(qwen3.model).save_pretrained(tmp_path)
    monkeypatch.setattr(Int8Run, "alone_options", {"model": tmp_path})
    random_runs(Int8Run, qwen3.folder, 9, ["swap", "recompute", "copy on write", "finished"])
