"""Checkpoints of old and new formats, in one file or several, and those that must be refused."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import LLAMA3_ROPE, Oracle, make_checkpoint, random_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL, load_model, read_eos_token_ids
from nanopaged.model.decoder import Linear
from nanopaged.model.model_config import read_model_config

GREEDY = SamplingParams(temperature=0, max_tokens=10)
INDEX = "model.safetensors.index.json"


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


@torch.inference_mode()
def compare_logprobs(llm: LLM, model: PreTrainedModel, tolerance: float = 1e-4) -> None:
    """Of a prompt and of the tokens that follow it."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    tokens = prompt + completion.token_ids
    rows = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    got = [*output.prompt_logprobs[1:], *completion.logprobs]
    for row, token_id, logprobs in zip(rows, tokens[1:], got, strict=True):
        assert logprobs[token_id] == pytest.approx(row[token_id].item(), abs=tolerance)


def greedy(folder: Path | str, prompt: list[int], **config: object) -> list[int]:
    llm = LLM(folder, num_blocks=64, **config)
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


# ── what must load ────────────────────────────────────────────────────────────────────────────────


def test_sharded_checkpoints(qwen3: Oracle, tmp_path: Path) -> None:
    """Whole; without a shard; and with an index that lists a shard without the weight."""
    qwen3.model.save_pretrained(tmp_path, max_shard_size="20KB")
    _, victim, *_ = sorted(tmp_path.glob("*.safetensors"))
    (prompt,) = random_prompts(1, seed=0)
    assert greedy(tmp_path, prompt) == qwen3.greedy(prompt, 10)
    away = victim.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=victim.name):
        LLM(tmp_path, num_blocks=8)
    away.rename(victim)
    name = "model.norm.weight"
    other = min(set(json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    edit_config(tmp_path, lambda c: c["weight_map"].update({name: other}), INDEX)
    with pytest.raises(ValueError, match=rf"{other} .*model\.norm\.weight"):
        LLM(tmp_path, num_blocks=8)


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
    """As in transformers, which then also forgets the theta of rope_parameters."""
    scaling = {key: "llama3"} | {name: LLAMA3_ROPE[name] for name in list(LLAMA3_ROPE)[2:]}

    def edit(config: dict) -> None:
        config["rope_parameters"]["rope_theta"] = 123.0
        settings = [("rope_scaling", scaling), ("rope_parameters", config.pop("rope_parameters"))]
        config.update(settings if first else reversed(settings))

    edit_config(qwen3_folder, edit)
    reference = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    compare_logprobs(LLM(qwen3_folder, num_blocks=8), reference)


def test_llama_with_biases_everywhere(tmp_path: Path) -> None:
    """attention_bias and mlp_bias: rare, but a checkpoint that has them must not be misread."""
    model = make_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True)
    compare_logprobs(LLM(tmp_path, num_blocks=8), model)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_qwen2_has_the_same_biases_in_all_checkpoints(tmp_path: Path, attention_bias: bool) -> None:
    make_checkpoint("qwen2", tmp_path)
    edit_config(tmp_path, lambda c: c.update(attention_bias=attention_bias))
    config = read_model_config(tmp_path)
    assert (config.qkv_bias, config.o_bias) == (True, False)


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "layer_types": None}


@pytest.mark.parametrize("used", [True, False])
def test_a_window_that_no_layer_uses(qwen3_folder: Path, qwen3: Oracle, used: bool) -> None:
    """From layer 2 on, of two layers; or the field is there and not used, as in many Qwen2 checkpoints."""
    edit_config(qwen3_folder, lambda c: c.update(WINDOW, use_sliding_window=used))
    assert greedy(qwen3_folder, [1, 2, 3] * 5) == qwen3.greedy([1, 2, 3] * 5, 10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(oracle: Oracle, dtype: str) -> None:
    """Computed in that dtype, with log-probabilities close to those of float32."""
    llm = LLM(oracle.folder, num_blocks=8, dtype=dtype)
    assert llm.engine.runner.dtype == getattr(torch, dtype)
    compare_logprobs(llm, oracle.model, 0.7 if dtype != "float32" else 1e-4)


WITHOUT_PACKING = "linear layers run without oneDNN's packed weights, and slower"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_packed_where_the_cpu_can(
    oracle: Oracle, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them, or none and a line in the log: no test of outputs would notice that they are slower."""
    asked = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}.get(dtype)
    works = torch.backends.mkldnn.is_available() and (not asked or getattr(torch.ops.mkldnn, asked)())
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

    if missing:
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    else:
        error = RuntimeError("no such instruction\nand much more")
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Mock(side_effect=error))
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
    model = load_model(
        config=EngineConfig(),
        model_config=read_model_config(tmp_path),
        folder=tmp_path,
        max_model_len=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranks=SimpleNamespace(rank=rank, size=2, meet=lambda device: None),
    )
    assert all(weight.isfinite().all() for weight in model.parameters())
    rows = model.embed_tokens.weight
    assert rows.shape[0] == 49
    assert torch.equal(rows[: 49 - rank], whole.get_input_embeddings().weight[rank * 49 :][:49])
    assert bool(model.layers[0].mlp.down_proj.bias.any()) == (rank == 0)


def test_dummy_weights_need_only_a_config(qwen3_folder: Path) -> None:
    (qwen3_folder / "model.safetensors").unlink()
    first, again, *others = (
        greedy(qwen3_folder, [1, 2, 3], load_format="dummy", seed=seed) for seed in (0, 0, 1, 10**30)
    )
    assert len(first) > 0
    assert first == again
    assert first not in others
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
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    edit_config(folder, lambda c: c.update(eos_token_id=[40, 41]), "generation_config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert read_eos_token_ids(folder, tokenizer) == {40, 41, tokenizer.eos_token_id}
    assert read_eos_token_ids(folder, None) == {40, 41}
    (folder / "generation_config.json").unlink()
    edit_config(folder, lambda c: c.update(eos_token_id=42))
    assert read_eos_token_ids(folder, None) == {42}
    edit_config(folder, lambda c: c.update(eos_token_id=None))
    assert read_eos_token_ids(folder, None) == frozenset()


@pytest.mark.parametrize("eos", ["7", ["7"], -1, True, 7.0, math.nan, {"a": 1}, [[7]], [7, None]])
def test_eos_ids_that_are_no_ids(qwen3_folder: Path, eos: object) -> None:
    """The message names the file. transformers has more to say of some of these in config.json."""
    edit_config(qwen3_folder, lambda c: c.update(eos_token_id=eos), "generation_config.json")
    message = rf"generation_config\.json has eos_token_id .*{re.escape(str(eos))}.*, but token ids are"
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_folder, num_blocks=8)
    (qwen3_folder / "generation_config.json").unlink()
    edit_config(qwen3_folder, lambda c: c.update(eos_token_id=eos))
    with pytest.raises(ValueError, match=rf"/config\.json .*eos_token_id.*{re.escape(str(eos))}"):
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


# ── what must be refused, by name ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2', but only llama or qwen2 or qwen3 is supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq"),
        ({"num_attention_heads": 0}, "'num_heads': 0.*, but only sizes above 0"),
        ({"num_key_value_heads": 4}, "num_heads a multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": 48.0}, "'hidden_size' expected int"),
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 24}, "vocab_size=16777216, hidden_size=16777216"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "full_attention .*, but only None",
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4.0}},
            r"low_freq_factor 4\.0, but only a number below high_freq_factor, 4\.0",
        ),
        (WINDOW | {"max_window_layers": 1}, "sliding_attention"),
        (WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        # The class of a llama knows no such field, but transformers' cache drops what lies before the window.
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | WINDOW, "sliding_window 4"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"is_causal": False}, "is_causal False"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config"),
        ({"model_type": ["qwen3"]}, "model_type .'qwen3'., but only"),
        ({"model_type": "llama"}, "unexpected: .*q_norm"),
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


NO_NUMBERS = (None, math.nan, math.inf, -1.0, 0, 0.0, "1e4", True, [1.0], 10**400)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:6])
@pytest.mark.parametrize("name", ["rms_norm_eps", *list(LLAMA3_ROPE)[1:]])
def test_numbers_that_cannot_be_computed_with(qwen3_folder: Path, name: str, value: object) -> None:
    """In each place of rope's numbers. transformers refuses some later, others not, and few by name."""
    message = rf"config\.json has {name} {re.escape(repr(value))}, but only a finite number above 0"
    rope = LLAMA3_ROPE | {name: value}
    edits: list[dict[str, object]] = [{"rope_parameters": rope}, {"rope_scaling": rope}]
    if name == "rms_norm_eps":
        edits = [{name: value}]
    if name == "rope_theta":
        edits += [{"rope_parameters": {"rope_type": "default", name: value}}]
        edits += [{"rope_parameters": None, name: value}]
    original = (qwen3_folder / "config.json").read_text(encoding="utf-8")
    for edit in edits:
        (qwen3_folder / "config.json").write_text(original, encoding="utf-8")
        edit_config(qwen3_folder, lambda config, edit=edit: config.update(edit))
        with pytest.raises(ValueError, match=message):
            read_model_config(qwen3_folder)


def test_a_number_that_is_overruled_is_not_checked(qwen3_folder: Path) -> None:
    """As in transformers, the theta of rope_parameters counts before that at top level."""
    edit_config(qwen3_folder, lambda c: c.update(rope_theta=None, rope_scaling=None))
    edit_config(qwen3_folder, lambda c: c["rope_parameters"].update(rope_theta=500))
    assert read_model_config(qwen3_folder).rope_theta == 500.0


def test_sizes_that_are_worked_out(tmp_path: Path) -> None:
    """null: as many KV heads as query heads, which share the hidden size."""
    make_checkpoint("llama", tmp_path)
    edit_config(tmp_path, lambda c: c.update(num_key_value_heads=None, head_dim=None))
    config = read_model_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 6, 8)
    edit_config(tmp_path, lambda c: c.update(hidden_size=6))
    with pytest.raises(ValueError, match="'head_dim': 1}"):
        read_model_config(tmp_path)


def edit_weights(folder: Path, edit: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM, KEYS = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
NO_FLOATS = (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("edit", "dtype", "message"),
    [
        (lambda t: t.pop(KEYS), "auto", f"missing: {KEYS}"),
        (lambda t: t.update(sinks=torch.zeros(3)), "auto", "unexpected: sinks"),
        (lambda t: t.update({NORM: torch.zeros(5)}), "auto", rf"{NORM} is F32 \[5\], but must be .* \[48\]"),
        # Quantised weights without a quantization_config would be read as numbers that they are not.
        *(
            (lambda t, to=to: t.update({NORM: torch.ones(48).to(to)}), "auto", f"{NORM} is .* be F32, F16 or")
            for to in NO_FLOATS
        ),
        *(
            (
                lambda t, value=value: t[KEYS][5, 3].fill_(value),
                dtype,
                f"{KEYS} is not finite in torch.{dtype}",
            )
            for value, dtype in ((math.nan, "float32"), (-math.inf, "float32"), (1e5, "float16"))
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    qwen3_folder: Path, edit: Callable[[dict], object], dtype: str, message: str
) -> None:
    edit_weights(qwen3_folder, edit)
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_folder, num_blocks=8, dtype=dtype)


def test_redundant_weights_are_ignored(qwen3: Oracle, qwen3_folder: Path) -> None:
    """Old checkpoints carry rotary frequencies, and some tied ones a copy of the embedding."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(97, 48),
    }
    edit_weights(qwen3_folder, lambda t: t.update(extra))
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)


# ── which file holds a weight ─────────────────────────────────────────────────────────────────────


def test_links_to_elsewhere_as_in_the_hubs_cache(qwen3: Oracle, qwen3_folder: Path) -> None:
    (qwen3_folder.parent / "blobs").mkdir()
    for file in list(qwen3_folder.iterdir()):
        file.rename(qwen3_folder.parent / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    index = {"weight_map": dict.fromkeys(load_file(qwen3_folder / "model.safetensors"), "model.safetensors")}
    (qwen3_folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
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
    message = r"model\.safetensors is (broken or cut short|no file: convert)"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(qwen3_folder, num_blocks=8)


def test_missing_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("x" * 5000, "no\0name"):
        with pytest.raises(FileNotFoundError, match="is not a folder"):
            LLM(name)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path)
    download = "nanopaged.model.checkpoint.snapshot_download"
    monkeypatch.setattr(download, lambda *_, **__: pytest.fail("a path is not a hub id"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    paths = ("/no/such", "./no-such", "../no-such", "~/no-such", "~not-a-user/model")
    for name in (*paths, *map(Path, paths), tmp_path / "no-such-folder", tmp_path / "file"):
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


@pytest.mark.parametrize(
    "index", ["x", 5, [1], {"lm_head.weight": 5}, {"lm_head.weight": "other"}, "wrong file"]
)
def test_an_index_that_is_wrong(qwen3_folder: Path, index: object) -> None:
    """Types that it cannot have; a file that is not there; a file without the weight."""
    if index == "wrong file":
        save_file({"a": torch.zeros(1)}, qwen3_folder / "other")
        index = dict.fromkeys(load_file(qwen3_folder / "model.safetensors"), "other")
    else:
        (qwen3_folder / "model.safetensors").unlink()
    (qwen3_folder / INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    message = "do not match its config|is no file: convert|broken or cut short, or not what the index says"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(qwen3_folder, num_blocks=8)


@pytest.mark.parametrize("kind", ["parent", "absolute", "link to a folder"])
def test_an_index_that_leads_out_of_the_folder(qwen3_folder: Path, kind: str) -> None:
    """The file is a whole checkpoint, but nothing outside the folder is read because an index says so."""
    outside = qwen3_folder.parent / "outside"
    outside.mkdir()
    (qwen3_folder / "model.safetensors").rename(outside / "model.safetensors")
    name = "../outside/model.safetensors"
    if kind == "absolute":
        name = str(outside / "model.safetensors")
    if kind == "link to a folder":
        (qwen3_folder / "inside").symlink_to(outside)
        name = "inside/model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(outside / "model.safetensors"), name)}
    (qwen3_folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    message = (
        rf"{re.escape(INDEX)} lists '{re.escape(name)}', which is outside {re.escape(str(qwen3_folder))}"
    )
    with pytest.raises(ValueError, match=message):
        LLM(qwen3_folder, num_blocks=8)


def test_an_index_with_a_folder_of_the_checkpoint(qwen3: Oracle, qwen3_folder: Path) -> None:
    (qwen3_folder / "weights").mkdir()
    file = (qwen3_folder / "model.safetensors").rename(qwen3_folder / "weights/model.safetensors")
    for name in ("weights/model.safetensors", "weights/../weights/model.safetensors"):
        index = {"weight_map": dict.fromkeys(load_file(file), name)}
        (qwen3_folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)


def test_control_characters_do_not_reach_the_terminal(qwen3_folder: Path) -> None:
    """Of a name of a weight, and of a value in config.json: they could move the cursor or set a title."""
    edit_weights(qwen3_folder, lambda tensors: tensors.update({"\x1b]0;title\x07\n": torch.zeros(3)}))
    with pytest.raises(ValueError, match="unexpected: ") as first:
        LLM(qwen3_folder, num_blocks=8)
    edit_config(qwen3_folder, lambda config: config.update(dtype="\x1b[31m\n"))
    with pytest.raises(ValueError, match=r"config\.json") as second:
        LLM(qwen3_folder, num_blocks=8)
    assert str(first.value).isprintable()
    assert str(second.value).isprintable()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name on Windows")
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_file_is_not_read(
    qwen3_folder: Path, file: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe would be waited for, and /dev/zero never ends."""
    monkeypatch.chdir(qwen3_folder)  # the name of a socket must be short
    path = qwen3_folder / file
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            listener.bind(file)
    message = f"{re.escape(file)} is (neither a file nor a folder|no file: convert)"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(qwen3_folder, num_blocks=8)


@pytest.mark.parametrize("value", ["x", [], {}, [1]])
def test_wrong_types_in_a_tokenizer_config(tmp_path: Path, value: object) -> None:
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    edit_config(folder, lambda config: config.update(model_max_length=value), "tokenizer_config.json")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be read: "):
        LLM(folder, num_blocks=8)


NO_JSON, NO_TOKENIZER = (
    r"config\.json cannot be read as a JSON object",
    "the tokenizer in .* cannot be read: ",
)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        *(("config.json", text, NO_JSON) for text in ("{", "[" * 100_000, "[1]")),
        ("config.json", "{}", "model_type None, but only"),
        *(("tokenizer.json", text, NO_TOKENIZER) for text in ("[]", '{"version": ', "{}", None)),
    ],
    ids=[*("cut", "deep", "list", "empty"), *("tokenizer list", "cut", "empty", "folder")],
)
def test_broken_json(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    (folder / file).unlink()
    if text is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        LLM(folder, num_blocks=8)
