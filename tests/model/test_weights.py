"""Models whose weights are read, settings and files that are refused; test_checkpoints.py has more."""

from __future__ import annotations

import ast
import copy
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import LLAMA3_ROPE, Oracle, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import nanopaged
from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.kernels import build
from nanopaged.memory import pick_dtype
from nanopaged.model.checkpoint import TINY_MODEL, load_model
from nanopaged.model.model_config import read_model_config

GREEDY = SamplingParams(temperature=0, max_tokens=10)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def qwen3_folder(tmp_path: Path, qwen3: Oracle) -> Path:
    """A copy of the checkpoint, to be spoilt."""
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


@pytest.mark.parametrize(
    ("capability", "has_compiler", "asked", "expected", "warning"),
    [
        ("AVX2", False, "auto", torch.float32, "the checkpoint is read as float32"),
        ("AVX2", False, "bfloat16", torch.bfloat16, "dtype='float32' is faster"),
        ("AVX2", True, "auto", torch.bfloat16, None),
        ("AVX512", False, "auto", torch.bfloat16, None),
    ],
)
def test_bfloat16_where_the_cpu_is_slow(
    capability: str,
    has_compiler: bool,
    asked: str,
    expected: torch.dtype,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch has no fast bfloat16 without AVX-512; the C++ kernels have."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(build, "can_build_or_load", lambda: has_compiler)
    dtype = pick_dtype(EngineConfig(dtype=asked), "bfloat16", torch.device("cpu"))
    assert dtype == expected
    assert caplog.messages == ([f"cpu has no instructions for bfloat16: {warning}"] if warning else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_weights_that_was_never_written(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 97 tokens, rank 1 of 2 has 48, and one row beyond the vocabulary, which must not count as damage.
    Its biases of o and down are 0, since rank 0 adds them."""
    whole = make_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True)
    edit_config(tmp_path, lambda config: config.update(tie_word_embeddings=True))  # it has a head of its own
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
    head = model.lm_head(torch.eye(48)).T
    assert head[: 49 - rank].allclose(whole.lm_head.weight[rank * 49 :][:49], atol=1e-6)
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
        ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000, but must have at most 1000"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers 10000000000, but must have at most 1000"),
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
    """In each place of rope's numbers. transformers refuses some when it reads them, and others never."""
    number = re.escape(repr(value))
    message = (
        rf"config\.json (has {name} {number}, but only a finite|cannot be used: .*{name}'.* {number}[,)}}])"
    )
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


def test_sizes_that_are_worked_out(tmp_path: Path) -> None:
    """null: as many KV heads as query heads, which share the hidden size."""
    make_checkpoint("llama", tmp_path)
    edit_config(tmp_path, lambda c: c.update(num_key_value_heads=None, head_dim=None))
    config = read_model_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 6, 8)
    edit_config(tmp_path, lambda c: c.update(hidden_size=6))
    with pytest.raises(ValueError, match="'head_dim': 1}"):
        read_model_config(tmp_path)


# ── files, and what they may not do ───────────────────────────────────────────────────────────────


def test_links_to_elsewhere_as_in_the_hubs_cache(qwen3: Oracle, qwen3_folder: Path) -> None:
    (qwen3_folder.parent / "blobs").mkdir()
    for file in list(qwen3_folder.iterdir()):
        file.rename(qwen3_folder.parent / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    index = {"weight_map": dict.fromkeys(load_file(qwen3_folder / "model.safetensors"), "model.safetensors")}
    (qwen3_folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert greedy(qwen3_folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)


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


def test_control_characters_do_not_reach_the_terminal(qwen3_folder: Path) -> None:
    """Of a name of a weight, and of a value in config.json: they could move the cursor or set a title."""
    save_file({"\x1b]0;title\x07\n": torch.zeros(3)}, qwen3_folder / "model.safetensors")
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


def test_every_from_pretrained_refuses_code() -> None:
    """`for_model` has no such option, because it makes only classes of transformers."""
    calls = []
    for file in Path(nanopaged.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                calls.append(ast.unparse(node))
    of_torch = "nn.Embedding.from_pretrained(embedding)"
    assert {"trust_remote_code=False" in call for call in calls if call != of_torch} == {True}


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """transformers asks whether to run it, and a pipe may answer yes."""
    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
    (folder / "evil.py").write_text(f"class T: open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T"}', encoding="utf-8")
    classes = {"AutoConfig": "evil.T", "AutoTokenizer": ["evil.T", "evil.T"]}
    for file in ("config.json", "tokenizer_config.json"):
        edit_config(folder, lambda config: config.update(auto_map=classes), file)
    done = subprocess.run(
        [sys.executable, "-c", f"import nanopaged; nanopaged.LLM({str(folder)!r}, num_blocks=8)"],
        input="y\n" * 9,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert not (tmp_path / "ran").exists()
    assert "without code of its own" in done.stderr
