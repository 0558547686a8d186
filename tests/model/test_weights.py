"""Checkpoints of old and new formats, in one file or several, and those that must be refused."""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, LLAMA3_ROPE, Oracle, make_checkpoint, random_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL, load_model, read_eos_token_ids
from nanopaged.model.decoder import Linear, rotary_frequencies
from nanopaged.model.model_config import read_model_config

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def folder(tmp_path: Path, oracle: Oracle) -> Path:
    """A copy of the family's checkpoint, to be spoilt."""
    return Path(shutil.copytree(oracle.folder, tmp_path / "model"))


@pytest.fixture
def qwen3_folder(tmp_path: Path, qwen3: Oracle) -> Path:
    return Path(shutil.copytree(qwen3.folder, tmp_path / "model"))


def edit_config(folder: Path, edit: Callable[[dict], object], name: str = "config.json") -> None:
    path = folder / name
    config = json.loads(path.read_text(encoding="utf-8"))
    edit(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def greedy(folder: Path | str, prompt: list[int], **config: object) -> list[int]:
    llm = LLM(folder, num_blocks=64, **config)
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


# ── what must load ────────────────────────────────────────────────────────────────────────────────


def test_sharded_checkpoints(oracle: Oracle, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (prompt,) = random_prompts(1, seed=0)
    assert greedy(tmp_path, prompt) == oracle.greedy(prompt, 10)


def old_style(config: dict) -> None:
    """As transformers 4 wrote it: rope_theta at top level, the rest in rope_scaling under `type`."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope_type = rope.pop("rope_type")
    config["rope_scaling"] = None if rope_type == "default" else {"type": rope_type, **rope}
    config["torch_dtype"] = config.pop("dtype")


def test_configs_of_transformers_4_and_5(oracle: Oracle, folder: Path) -> None:
    new = read_model_config(folder)
    edit_config(folder, old_style)
    assert read_model_config(folder) == new
    (prompt,) = random_prompts(1, seed=0)
    assert greedy(folder, prompt) == oracle.greedy(prompt, 10)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("first", [True, False])
def test_rope_scaling_counts_before_rope_parameters(qwen3_folder: Path, key: str, first: bool) -> None:
    """As in transformers, which then forgets the theta of rope_parameters too."""
    scaling = {key: "llama3"} | {name: LLAMA3_ROPE[name] for name in list(LLAMA3_ROPE)[2:]}

    def edit(config: dict) -> None:
        config["rope_parameters"]["rope_theta"] = 123.0
        both = {"rope_scaling": scaling, "rope_parameters": config.pop("rope_parameters")}
        config.update(both if first else dict(reversed(both.items())))

    edit_config(qwen3_folder, edit)
    prompt = [3, 1, 4, 1, 5] * 10
    reference = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = LLM(qwen3_folder, num_blocks=8).generate(prompt, params, use_tqdm=False)
    for row, logprobs in zip(expected, output.prompt_logprobs[1:], strict=True):
        for token_id, logprob in logprobs.items():
            assert logprob == pytest.approx(row[token_id].item(), abs=1e-4)


@pytest.mark.parametrize(("theta", "factor", "original"), [(500000.0, 32.0, 8192), (10000.0, 8.0, 32)])
def test_llama3_frequencies(tmp_path: Path, theta: float, factor: float, original: int) -> None:
    """Llama-3.2-1B's own numbers, and small ones; to transformers' values."""
    rope = LLAMA3_ROPE | {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, num_hidden_layers=1, head_dim=64, rope_parameters=rope
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    torch.testing.assert_close(rotary_frequencies(read_model_config(tmp_path)), expected)


def test_llama_with_biases_everywhere(tmp_path: Path) -> None:
    """attention_bias and mlp_bias: rare, but a checkpoint that has them must not be misread."""
    config = FAMILIES["llama"]().config
    config.attention_bias = config.mlp_bias = True
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path)
    prompt = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (output,) = LLM(tmp_path, num_blocks=8).generate(prompt, params, use_tqdm=False)
    for token_id, logprob in output.outputs[0].logprobs[0].items():
        assert logprob == pytest.approx(expected[token_id].item(), abs=1e-4)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_qwen2_has_the_same_biases_in_all_checkpoints(tmp_path: Path, attention_bias: bool) -> None:
    make_checkpoint("qwen2", tmp_path)
    edit_config(tmp_path, lambda c: c.update(attention_bias=attention_bias))
    config = read_model_config(tmp_path)
    assert (config.qkv_bias, config.o_bias) == (True, False)


@pytest.mark.parametrize("used", [True, False])
def test_a_window_that_no_layer_uses(qwen3_folder: Path, qwen3: Oracle, used: bool) -> None:
    """From layer 2 on, of two layers; or the field is there and not used, as in many Qwen2 checkpoints."""
    window = {"use_sliding_window": used, "sliding_window": 4, "max_window_layers": 2, "layer_types": None}
    edit_config(qwen3_folder, lambda c: c.update(window))
    assert greedy(qwen3_folder, [1, 2, 3] * 5) == qwen3.greedy([1, 2, 3] * 5, 10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(oracle: Oracle, dtype: str) -> None:
    """Computed in that dtype, with first-token log-probabilities close to those of float32."""
    llm = LLM(oracle.folder, num_blocks=8, dtype=dtype)
    assert llm.engine.runner.dtype == getattr(torch, dtype)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    expected = oracle.logprobs([5, 6, 7])[-1]
    for token_id, logprob in output.outputs[0].logprobs[0].items():
        assert logprob == pytest.approx(expected[token_id].item(), abs=0.5 if dtype != "float32" else 1e-4)


WITHOUT_PACKING = "linear layers run without oneDNN's packed weights, and slower"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_packed_where_the_cpu_can(
    oracle: Oracle, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them, or none and a line in the log: no test of outputs would notice that they are slower."""
    works = torch.backends.mkldnn.is_available() and (
        dtype == "float32"
        or (dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        or (dtype == "float16" and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    )
    with caplog.at_level(logging.INFO, "nanopaged"):
        model = LLM(oracle.folder, num_blocks=8, dtype=dtype, device="cpu").engine.runner.model
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 2 * 4 + 1
    assert {linear._reordered is not None for linear in linears} == {works}
    assert caplog.text.count(WITHOUT_PACKING) == (0 if works else 1)


@pytest.mark.parametrize("missing", [True, False])
def test_weights_that_cannot_be_packed(
    qwen3: Oracle, missing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This CPU lacks an instruction; or PyTorch is built without oneDNN, as for Apple's chips."""

    def fail(*args: object) -> None:
        raise RuntimeError("no such instruction\nand much more")

    if missing:
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    else:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", fail)
    with caplog.at_level(logging.INFO, "nanopaged"):
        assert greedy(qwen3.folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    reason = "" if missing else "no such instruction\n"
    assert caplog.text.count(f"{WITHOUT_PACKING}: {reason}") == 1


def test_auto_dtype_is_the_checkpoints(qwen3: Oracle, tmp_path: Path) -> None:
    copy.deepcopy(qwen3.model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert LLM(tmp_path, num_blocks=8).engine.runner.dtype == torch.bfloat16
    assert LLM(qwen3.folder, num_blocks=8).engine.runner.dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_weights_that_was_never_written(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 97 tokens, rank 1 of 2 has 48, and one row beyond the vocabulary, which must not count as damage.
    Its biases of o and down are 0, since rank 0 adds them."""
    whole = make_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kwargs: empty(*sizes, **kwargs).fill_(math.nan))
    ranks, cpu = SimpleNamespace(rank=rank, size=2, meet=lambda: None), torch.device("cpu")
    config, model_config = EngineConfig(max_model_len=8), read_model_config(tmp_path)
    model = load_model(config, model_config, tmp_path, torch.float32, cpu, ranks)
    assert all(weight.isfinite().all() for weight in model.parameters())
    rows = model.embed_tokens.weight
    assert rows.shape[0] == 49
    assert torch.equal(rows[: 49 - rank], whole.get_input_embeddings().weight[rank * 49 :][:49])
    assert bool(model.layers[0].mlp.down_proj.bias.any()) == (rank == 0)


def test_dummy_weights_need_only_a_config(qwen3_folder: Path) -> None:
    (qwen3_folder / "model.safetensors").unlink()
    first = greedy(qwen3_folder, [1, 2, 3], load_format="dummy")
    assert len(first) > 0
    assert greedy(qwen3_folder, [1, 2, 3], load_format="dummy") == first
    for seed in (1, 10**30):
        assert greedy(qwen3_folder, [1, 2, 3], load_format="dummy", seed=seed) != first
    with pytest.raises(FileNotFoundError, match="safetensors"):
        LLM(qwen3_folder, num_blocks=8)


def test_the_tiny_model_loads_in_transformers_and_agrees() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    ids = tokenizer("ROMEO:\nWhat light", return_tensors="pt")
    with torch.inference_mode():
        expected = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    llm = LLM(dtype="float32", num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=40)
    (output,) = llm.generate("ROMEO:\nWhat light", params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.tolist()
    assert sum(file.stat().st_size for file in TINY_MODEL.iterdir()) < 6.3e6


# ── end-of-sequence ids ───────────────────────────────────────────────────────────────────────────


def test_eos_ids_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    folder = tmp_path / "model"
    edit_config(folder, lambda c: c.update(eos_token_id=[40, 41]), "generation_config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert read_eos_token_ids(folder, tokenizer) == {40, 41, tokenizer.eos_token_id}
    assert read_eos_token_ids(folder, None) == {40, 41}
    (folder / "generation_config.json").unlink()
    edit_config(folder, lambda c: c.update(eos_token_id=42))
    assert read_eos_token_ids(folder, None) == {42}
    edit_config(folder, lambda c: c.update(eos_token_id=None))
    assert read_eos_token_ids(folder, None) == frozenset()


@pytest.mark.parametrize("eos", ["7", ["7"], [7, None], -1, True, 7.0, {"a": 1}, [[7]]])
def test_eos_ids_that_are_no_ids(qwen3_folder: Path, eos: object) -> None:
    edit_config(qwen3_folder, lambda c: c.update(eos_token_id=eos), "generation_config.json")
    with pytest.raises(ValueError, match=r"has eos_token_id .*, but token ids are"):
        LLM(qwen3_folder, num_blocks=8)


# ── what a new family may change ──────────────────────────────────────────────────────────────────


def test_the_attention_scale_is_the_configs(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode; transformers has the same scale in each layer."""
    model = copy.deepcopy(qwen3.model)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.07
    monkeypatch.setattr(
        "nanopaged.engine.read_model_config",
        lambda folder: replace(read_model_config(folder), attention_scale=0.07),
    )
    compare_logprobs(LLM(qwen3.folder, num_blocks=8, max_num_batched_tokens=7), model)


@torch.inference_mode()
def compare_logprobs(llm: LLM, model: PreTrainedModel) -> None:
    """Of a prompt and of the tokens that follow it, to 1e-4."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    tokens = prompt + completion.token_ids
    rows = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    got = [*output.prompt_logprobs[1:], *completion.logprobs]
    for row, token_id, logprobs in zip(rows, tokens[1:], got, strict=True):
        assert logprobs[token_id] == pytest.approx(row[token_id].item(), abs=1e-4)


# ── what must be refused, by name ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq"),
        ({"num_attention_heads": 0}, "'num_heads': 0.*, but only sizes above 0"),
        ({"num_key_value_heads": 4}, "num_heads a multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": 48.0}, "'hidden_size' expected int"),
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 24}, "vocab_size=16777216, hidden_size=16777216"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
            "sliding_attention",
        ),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"is_causal": False}, "is_causal False"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config"),
        ({"model_type": ["qwen3"]}, "model_type .'qwen3'., which is not supported"),
        ({"model_type": "llama"}, "Qwen3ForCausalLM.* and model_type 'llama', which is not supported"),
        ({"architectures": "MixtralForCausalLM"}, "architectures 'MixtralForCausalLM'"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"dtype": "auto"}, "auto"),
        # Newer transformers checks the type; to older ones it is a model whose biases are missing.
        ({"attention_bias": "yes"}, "config.json cannot be used: .*'attention_bias'|missing: .*k_proj.bias"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(qwen3_folder: Path, edit: dict, message: str) -> None:
    edit_config(qwen3_folder, lambda c: c.update(edit))
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_folder, num_blocks=8)


def test_sizes_that_are_worked_out(tmp_path: Path) -> None:
    """null: as many KV heads as query heads, which share the hidden size."""
    make_checkpoint("llama", tmp_path)
    edit_config(tmp_path, lambda c: c.update(num_key_value_heads=None, head_dim=None))
    config = read_model_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 6, 8)
    edit_config(tmp_path, lambda c: c.update(hidden_size=6))
    with pytest.raises(ValueError, match="'head_dim': 1,"):
        read_model_config(tmp_path)


def test_a_window_in_a_llama(tmp_path: Path) -> None:
    """Its class knows no such field, but transformers' cache then drops what lies before the window."""
    make_checkpoint("llama", tmp_path)
    edit_config(tmp_path, lambda c: c.update(sliding_window=8))
    with pytest.raises(ValueError, match="sliding_window 8"):
        LLM(tmp_path, num_blocks=8)


def edit_weights(folder: Path, edit: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            r"missing: model\.layers\.1\.self_attn\.k_",
        ),
        (
            lambda t: t.update({"model.layers.0.sinks": torch.zeros(3)}),
            r"unexpected: model\.layers\.0\.sinks",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
            r"model\.norm\.weight has shape \[5\].*\[48\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    qwen3_folder: Path, edit: Callable[[dict], object], message: str
) -> None:
    edit_weights(qwen3_folder, edit)
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_folder, num_blocks=8)


def test_redundant_weights_are_ignored(qwen3: Oracle, qwen3_folder: Path) -> None:
    """Old checkpoints carry rotary frequencies, and some tied ones a copy of the embedding."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(97, 48),
    }
    edit_weights(qwen3_folder, lambda t: t.update(extra))
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_weights_that_are_no_floats(qwen3_folder: Path, dtype: torch.dtype) -> None:
    """Quantised weights without a quantization_config would be read as numbers that they are not."""
    edit_weights(qwen3_folder, lambda t: t.update({"model.norm.weight": torch.ones(48).to(dtype)}))
    with pytest.raises(ValueError, match=rf"model\.norm\.weight is of {dtype}, but weights must be floats"):
        LLM(qwen3_folder, num_blocks=8)


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, "float32"), (-math.inf, "float32"), (1e5, "float16")]
)
def test_weights_that_are_not_finite(qwen3_folder: Path, value: float, dtype: str) -> None:
    """Also if the number in the file is finite, and too large for the dtype."""
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_weights(qwen3_folder, lambda t: t[name][5, 3].fill_(value))
    with pytest.raises(ValueError, match=rf"{name} has weights that are not finite in torch\.{dtype}"):
        LLM(qwen3_folder, num_blocks=8, dtype=dtype)


# ── which file holds a weight ─────────────────────────────────────────────────────────────────────

INDEX = "model.safetensors.index.json"


def test_the_index_names_a_shard_without_the_weight(oracle: Oracle, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, max_shard_size="20KB")
    name = "model.norm.weight"
    other = min(set(json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    edit_config(tmp_path, lambda c: c["weight_map"].update({name: other}), INDEX)
    with pytest.raises(ValueError, match=rf"{other} .*model\.norm\.weight"):
        LLM(tmp_path, num_blocks=8)


def test_links_to_elsewhere_as_in_the_hubs_cache(qwen3: Oracle, qwen3_folder: Path) -> None:
    (qwen3_folder.parent / "blobs").mkdir()
    for file in list(qwen3_folder.iterdir()):
        file.rename(qwen3_folder.parent / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    names = load_file(qwen3_folder / "model.safetensors")
    (qwen3_folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}), encoding="utf-8"
    )
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)


@pytest.mark.parametrize("cut", [True, False])
def test_weights_that_cannot_be_read(qwen3_folder: Path, cut: bool) -> None:
    """Cut short, or a folder."""
    path = qwen3_folder / "model.safetensors"
    contents = path.read_bytes()
    path.unlink()
    if cut:
        path.write_bytes(contents[:-1000])
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is broken or cut short"):
        LLM(qwen3_folder, num_blocks=8)


def test_a_missing_shard(oracle: Oracle, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, max_shard_size="20KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=victim.name):
        LLM(tmp_path, num_blocks=8)


def test_missing_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        LLM(tmp_path / "no-such-folder")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        LLM(tmp_path / "file")
    for name in ("x" * 5000, "no\0name"):
        with pytest.raises(FileNotFoundError, match="is not a folder"):
            LLM(name)


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "../no-such", "~/no-such", "~not-a-user/model"])
def test_a_path_is_not_a_hub_id(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanopaged.model.checkpoint.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    for name in (model, Path(model)):
        with pytest.raises(FileNotFoundError, match="is not a folder: name the one that holds"):
            LLM(name)


def test_a_hub_id_is_downloaded(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo: str, **patterns: list[str]) -> str:
        asked[repo] = patterns
        return str(qwen3.folder)

    monkeypatch.setattr("nanopaged.model.checkpoint.snapshot_download", download)
    assert greedy("some-lab/model", [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    assert "*.safetensors" in asked["some-lab/model"]["allow_patterns"]
    assert fnmatch("consolidated.safetensors", *asked["some-lab/model"]["ignore_patterns"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json cannot be read as a JSON object"),
        ("[" * 100_000, r"config\.json cannot be read as a JSON object"),
        ("[1]", r"config\.json cannot be read as a JSON object"),
        ("{}", "model_type None, which is not supported"),
    ],
    ids=["cut", "deep", "list", "empty"],
)
def test_broken_json(qwen3_folder: Path, text: str, message: str) -> None:
    (qwen3_folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_folder, num_blocks=8)


@pytest.mark.parametrize("text", ["[]", '{"version": ', "{}", None])
def test_a_broken_tokenizer(tmp_path: Path, text: str | None) -> None:
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    if text is None:
        (folder / "tokenizer.json").mkdir()
    else:
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be read: "):
        LLM(folder, num_blocks=8)


def test_make_checkpoint_is_repeatable(tmp_path: Path) -> None:
    """The oracle's models are the same in every run, so a failure can be reproduced."""
    for name in ("a", "b"):
        make_checkpoint("qwen2", tmp_path / name)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(a[key], b[key]) for key in a)
