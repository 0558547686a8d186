"""Weights in 8 bits. The oracle is transformers, with weights that numpy has rounded, matrix by matrix."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import int8w
import numpy as np
import pytest
import test_random_runs
import torch
from conftest import FAMILIES, make_checkpoint, memory_that_was_never_written, random_prompts
from int8w import LLM, Int8Engine, Int8Linear, quantize
from random_workloads import Workload, tiny
from serving import serve, tokens_of
from test_random_runs import Run, large_engine, serve_random
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import nanopaged
from nanopaged import EngineConfig, LLMEngine, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.model.decoder import Linear

assert memory_that_was_never_written  # a fixture: small KV caches begin full of NaN
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
BIASES = {"attention_bias": True, "mlp_bias": True}  # of Llama


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the numbers that int8 and one scale for each row can say, in every matrix."""
    model = deepcopy(model)
    for weight in {id(weight): weight for weight in model.parameters() if weight.ndim == 2}.values():
        rows = weight.detach().double().numpy()
        most = np.abs(rows).max(1, keepdims=True).clip(1e-20)  # padding is a row of zeros
        weight.data = torch.from_numpy(np.rint(rows * 127 / most) * most / 127).float()
    return model


def check(
    llm: nanopaged.LLM, model: PreTrainedModel, prompts: list[list[int]], tolerance: float = 1e-4
) -> None:
    """Greedy tokens, and the log-probabilities of prompts and outputs, are those of transformers."""
    for prompt, output in zip(prompts, serve(llm, prompts, GREEDY), strict=True):
        text = prompt + output.outputs[0].token_ids
        with torch.inference_mode():
            right = model(torch.tensor([text])).logits[0].log_softmax(-1)
        rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        ours = [row[token].logprob for row, token in zip(rows, text[1:], strict=True)]
        assert ours == pytest.approx(right[range(len(text) - 1), text[1:]].tolist(), abs=tolerance)
        if tolerance <= 1e-4:
            assert text[len(prompt) :] == right[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(("is_tied", "tile"), [(True, 1000), (False, 7)], ids=["tied", "untied, row by row"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_with_rounded_weights_says_the_same(
    family: str, is_tied: bool, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches, chunks of prompts, a pool that is too small; and the rounding can be told from none."""
    monkeypatch.setattr(int8w, "TILE", tile)
    changes = {"tie_word_embeddings": is_tied} | (BIASES if family == "llama" else {})
    model = make_checkpoint(family, tmp_path, **changes)
    options = {"num_blocks": 30, "block_size": 4, "max_num_batched_tokens": 24, "preemption": "swap"}
    prompts = random_prompts(9, seed=3)
    check(llm := LLM(tmp_path, **options), rounded(model), prompts)
    assert llm.engine.stats().num_preemptions_swap > 0
    plain = nanopaged.LLM(tmp_path, **options)
    assert tokens_of(serve(llm, prompts, GREEDY)) != tokens_of(serve(plain, prompts, GREEDY))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.02), ("bfloat16", 0.2)])
def test_other_dtypes(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """As near to rounded weights in float32 as the activations are; weights that are not rounded are not."""
    model = make_checkpoint("llama", tmp_path, initializer_range=0.1, **BIASES)
    check(LLM(tmp_path, num_blocks=200, dtype=dtype), rounded(model), random_prompts(3, seed=1), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_a_layer_rounds_its_result_and_nothing_else(dtype: torch.dtype, num_tokens: int) -> None:
    """The error is that of one rounding to the dtype. In float16 Σ x·q would overflow, scaled it does not."""
    torch.manual_seed(num_tokens)
    linear, weight = Linear(60, 37, bias=True), torch.randn(37, 60) * torch.logspace(-5, 0, 37)[:, None]
    linear.bias, x = nn.Parameter(torch.randn(37).to(dtype)), (40 + torch.randn(num_tokens, 60)).to(dtype)
    layer = Int8Linear(linear, *quantize(weight.to(dtype)))
    right = x.double() @ (layer.weight.double() * layer.scales.double()[:, None]).T + linear.bias.double()
    y = layer(x)
    assert y.dtype == dtype
    # Sums in float32 have an error of their own, of what is added up.
    sums = x.double().abs() @ weight.double().abs().T
    assert ((y.double() - right).abs() <= torch.finfo(dtype).eps * right.abs() + 1e-6 * sums + 1e-7).all()


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """A row that two ranks share has one scale; else its halves would be rounded otherwise."""
    shape = {"num_attention_heads": 4, "head_dim": 12, "tie_word_embeddings": True}
    model = make_checkpoint("llama", tmp_path, **shape, **BIASES)
    llm = LLM(tmp_path, num_blocks=60, block_size=4, tensor_parallel_size=2)
    check(llm, rounded(model), random_prompts(4, seed=8))


def test_random_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, beams, aborts, faults, preemption: all say what a plain engine with rounded weights says."""
    rounded(AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)).save_pretrained(tmp_path)
    for file in (*TINY_MODEL.glob("token*"), *TINY_MODEL.glob("generation*")):
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def make_engine(config: EngineConfig) -> LLMEngine:
        is_alone = config.num_blocks == 64 and not config.enable_prefix_caching
        return (
            LLMEngine(EngineConfig(**vars(config) | {"model": tmp_path})) if is_alone else Int8Engine(config)
        )

    def make_run(workload: Workload) -> Run:
        run = Run(workload)
        assert [type(each) for each in (run.engine, large_engine("tiny"))] == [Int8Engine, LLMEngine]
        return run

    monkeypatch.setattr(test_random_runs, "LLMEngine", make_engine)
    large_engine.cache_clear()
    serve_random(tiny, 5, ["swap", "recompute", "copy on write", "finished"], make_run)
    large_engine.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_number_changes_by_more_than_half_a_scale(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with scales of many sizes, a row of zeros, one of the smallest numbers, and one outlier."""
    monkeypatch.setattr(int8w, "TILE", 100)
    torch.manual_seed(0)
    weight = torch.randn(50, 33) * torch.logspace(-3, 3, 50)[:, None]
    weight[7], weight[8], weight[9, 5] = 0, torch.finfo(dtype).smallest_normal, -4000
    q, scales = quantize(weight := weight.to(dtype))
    assert (q.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert (scales > 0).all()
    error = (weight.double() - q.double() * scales.double()[:, None]).abs()
    assert (error <= scales.double()[:, None] * (0.5 + 1e-4)).all()
    largest = q.int().abs().amax(1)
    assert (largest[torch.arange(50) >= 9] == 127).all()
    assert not q[7].any()
    torch.testing.assert_close(scales, weight.float().abs().amax(1) / 127, rtol=1e-6, atol=1e-29)


def tensors(model: nn.Module) -> dict[int, Tensor]:
    """All that the model holds, at their addresses."""
    found: dict[int, Tensor] = {}
    for part in model.modules():
        for x in (*part._parameters.values(), *(x for x in vars(part).values() if isinstance(x, Tensor))):
            if x is not None:
                found[x.data_ptr()] = x
    return found


@pytest.mark.parametrize(("dtype", "least"), [("float32", 3.5), ("bfloat16", 1.8), ("float16", 1.8)])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_bytes_of_the_weights_by_hand(is_tied: bool, dtype: str, least: float, tmp_path: Path) -> None:
    """Qwen3 of two layers: a hidden size of 96, 6 heads and 2 KV heads of 16, an MLP of 200, 97 tokens."""
    make_checkpoint("qwen3", tmp_path, hidden_size=96, intermediate_size=200, tie_word_embeddings=is_tied)
    itemsize = getattr(torch, dtype).itemsize
    rows = {96: [6 * 16 + 2 * 2 * 16, 2 * 200, 96], 200: [96]}  # columns → rows of a layer's matrices
    numbers = 2 * sum(columns * sum(each) for columns, each in rows.items()) + (2 - is_tied) * 97 * 96
    scales = 2 * sum(map(sum, rows.values())) + (2 - is_tied) * 97
    norms = 2 * (2 * 96 + 2 * 16) + 96
    model = LLM(tmp_path, num_blocks=8, dtype=dtype).engine.runner.model
    num_bytes = sum(x.nbytes for x in tensors(model).values())
    assert num_bytes == numbers + 4 * scales + itemsize * norms
    plain = itemsize * (numbers + norms)
    assert least < plain / num_bytes < itemsize


CHILD = """import json, sys, psutil, torch; from types import SimpleNamespace
sys.path[:0] = sys.argv[3:]; import int8w, nanopaged; nanopaged.LLM(num_blocks=8)  # imports and tables
rss = lambda: psutil.Process().memory_info().rss
most = rss() + (200 << 20); psutil.virtual_memory = lambda: SimpleNamespace(available=most - rss())
make = int8w.LLM if sys.argv[1] == "int8" else nanopaged.LLM
options = {"preemption": "recompute", "dtype": "float32", "attention_backend": "torch"}
llm = make(sys.argv[2], load_format="dummy", memory_utilization=1.0, **options)
print(json.dumps([llm.engine.runner.num_blocks, llm.engine.runner.kv_cache.shape.block_bytes(16)]))"""


def test_a_measured_pool_has_more_blocks(tmp_path: Path) -> None:
    """Of 200 MiB, less what a process of its own really holds: what weights do not take, blocks get."""
    shape: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}
    shape |= {"vocab_size": 8192, "max_position_embeddings": 4096}
    model = make_checkpoint("qwen3", tmp_path, **shape)
    num_weights = sum(weight.numel() for weight in model.parameters())
    command = [sys.executable, "-c", CHILD]
    paths = [str(tmp_path), str(Path(int8w.__file__).parent)]
    children = [
        subprocess.Popen([*command, way, *paths], stdout=subprocess.PIPE) for way in ("plain", "int8")
    ]
    (plain, block_bytes), (ours, _) = (json.loads(child.communicate()[0]) for child in children)
    more = (ours - plain) * block_bytes
    assert 0.9 * 3 * num_weights < more < 1.1 * 3 * num_weights
