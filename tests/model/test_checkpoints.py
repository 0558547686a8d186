"""A table of checkpoints: for each, the loader answers as transformers does, or with one error.

A row is a list of changes to a small random checkpoint. In `REFUSED` the pattern of the error follows.
test_weights.py has models and files that differ by more than a few changes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import LLAMA3_ROPE, make_checkpoint, random_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanopaged import LLM, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL, read_eos_token_ids
from nanopaged.model.model_config import read_model_config

Step = Callable[[Path], object]
A, B = "a.safetensors", "b.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"

# ── changes ───────────────────────────────────────────────────────────────────────────────────────


def step(change: Callable[..., object]) -> Callable[..., Step]:
    """Without its first argument, the folder, which is given when a row is tested."""
    return lambda *args, **options: lambda folder: change(folder, *args, **options)


@step
def entries(folder: Path, file: str = "config.json", **changes: object) -> None:
    """Change a JSON file, or make it; ... removes an entry."""
    old = json.loads((folder / file).read_text(encoding="utf-8")) if (folder / file).exists() else {}
    new = {name: value for name, value in (old | changes).items() if value is not ...}
    (folder / file).write_text(json.dumps(new), encoding="utf-8")


@step
def weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)


def put(name: str, tensor: torch.Tensor, file: str = WEIGHTS) -> Step:
    return weights(lambda tensors: tensors.update({name: tensor}), file)


def cast(dtype: torch.dtype, part: str = "", file: str = WEIGHTS) -> Step:
    """Weights whose name has this part, to another dtype."""
    return weights(lambda t: t.update({name: t[name].to(dtype) for name in t if part in name}), file)


@step
def shards(folder: Path, keep: bool = False, **listed: object) -> None:
    """Two files and an index, which says `listed` of some weights (...: nothing) in place of the truth."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    for file, part in {A: names[:9], B: names[9:]}.items():
        save_file({name: tensors[name] for name in part}, folder / file)
        listed = dict.fromkeys(part, file) | listed
    weight_map = {name: file for name, file in listed.items() if file is not ...}
    entries(INDEX, metadata={}, weight_map=weight_map)(folder)
    if not keep:
        (folder / WEIGHTS).unlink()


@step
def write(folder: Path, file: str, contents: str | None) -> None:
    """Replace a file; None removes it."""
    (folder / file).unlink(missing_ok=True)
    if contents is not None:
        (folder / file).write_text(contents, encoding="utf-8")


@step
def model(folder: Path, family: str, **changes: object) -> None:
    """Put another model in the place of the Llama."""
    make_checkpoint(family, folder, **changes)


@step
def replace(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


def tiny(folder: Path) -> None:
    """Put the tiny model in the place of the Llama."""
    shutil.copytree(TINY_MODEL, folder, dirs_exist_ok=True)


# ── the tables ────────────────────────────────────────────────────────────────────────────────────

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RAMP = torch.linspace(2, 1, 48)  # other values for the weight of a norm
TIED, NO_DTYPE, NO_ROPE = entries(tie_word_embeddings=True), entries(dtype=...), entries(rope_parameters=...)
NO_HEAD, NO_EMBEDDING = weights(lambda t: t.pop(HEAD)), weights(lambda t: t.pop(EMBEDDING))
COPY = weights(lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
ROPE = {"rope_type": "default", "rope_theta": 500.0}
MILLION = entries(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
QWEN3 = model("qwen3")
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "layer_types": None}
HALF_A_WINDOW = WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}
NULLS = {"num_key_value_heads": None, "head_dim": None}
ROPE_4 = {"type": "llama3"} | {name: LLAMA3_ROPE[name] for name in list(LLAMA3_ROPE)[2:]}


def frequencies(theta: float) -> torch.Tensor:
    """As old checkpoints have them; the heads have 20 dimensions."""
    return theta ** (-torch.arange(0, 20, 2) / 20)


AS_TRANSFORMERS = {
    "one file": [],
    "shards": [shards()],
    "not listed": [shards(**{NORM: ...})],
    "in two shards": [shards(), put("model.layers.0.input_layernorm.weight", RAMP, B)],
    "shards and one file that differ": [shards(keep=True), put(NORM, RAMP)],
    "tied": [TIED, NO_HEAD],
    "tied, with a head of its own": [TIED],
    "tied, with a copy": [TIED, COPY],
    # rotary frequencies, with which nothing computes
    "frequencies": [entries(rope_parameters=ROPE), put(FREQUENCIES, frequencies(500.0))],
    "rounded frequencies": [MILLION, put(FREQUENCIES, frequencies(1e6).to(F16))],
    "no dtype": [NO_DTYPE],
    "no dtype, bfloat16": [NO_DTYPE, cast(BF16)],
    "no dtype, two in a file": [NO_DTYPE, cast(BF16, HEAD)],
    "torch_dtype": [entries(dtype=..., torch_dtype="bfloat16")],
    "theta at top level": [NO_ROPE, entries(rope_theta=500.0)],
    "two thetas": [entries(rope_parameters=ROPE, rope_theta=77.0)],
    "as transformers 4 wrote it": [NO_ROPE, entries(rope_scaling=ROPE_4, rope_theta=500.0)],
    "scaling after parameters": [entries(rope_parameters=ROPE, rope_scaling=ROPE_4)],
    "scaling {} and parameters": [entries(rope_parameters=ROPE, rope_scaling={})],
    # the tokens that end an output; 13 ends two of the three
    "ends": [entries(GENERATION, eos_token_id=[13, 17])],
    "an end in config.json": [write(GENERATION, None), entries(eos_token_id=13)],
    "ends in both": [entries(GENERATION, eos_token_id=13), entries(eos_token_id=1)],
    "an end in config.json alone": [entries(GENERATION, eos_token_id=...), entries(eos_token_id=13)],
    "no end": [write(GENERATION, None), entries(eos_token_id=...)],
    # other models
    "the tiny model": [tiny],
    "biases everywhere": [model("llama", attention_bias=True, mlp_bias=True)],
    "biases of a Qwen2": [model("qwen2"), entries(attention_bias=True)],
    "biases of a Qwen2 that says it has none": [model("qwen2"), entries(attention_bias=False)],
    "sizes that are worked out": [model("llama", num_key_value_heads=6, head_dim=8), entries(**NULLS)],
    "a window from layer 2 on, of two layers": [QWEN3, entries(**WINDOW)],
    "a window that is not used": [QWEN3, entries(**WINDOW | {"use_sliding_window": False})],
}

ADDED = {"content": "ROMEO", "special": True}
NAMED = "{% for message in messages %}NAME {{ message['content'] }}{% endfor %}"
TWO = [{"name": name, "template": NAMED.replace("NAME", name)} for name in ("default", "rag")]
BPE = json.loads((TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8"))["model"]
MERGES = write("merges.txt", "\n".join(" ".join(pair) for pair in BPE["merges"]))
VOCABULARY = [write("vocab.json", json.dumps(BPE["vocab"])), MERGES, write("tokenizer.json", None)]
QWEN2 = entries(TOKENIZER, tokenizer_class="Qwen2Tokenizer")

TOKENIZERS = {
    "fast": [],
    "vocabulary and merges": [*VOCABULARY, QWEN2],
    "an unknown class": [entries(TOKENIZER, tokenizer_class="NoTokenizer")],
    "an added token": [entries(TOKENIZER, added_tokens_decoder={"1024": ADDED})],
    "two ends": [entries("special_tokens_map.json", eos_token="<|im_start|>")],
    "a template in a file": [entries(TOKENIZER, chat_template=...), write("chat_template.jinja", NAMED)],
    "two templates": [entries(TOKENIZER, chat_template=TWO)],
}

ODD = f"{FREQUENCIES} in .* is not what config.json says, with "
TEXT = "the tokenizer in .* cannot be read: "
SLOW = f"{TEXT}.*backend_tokenizer.* must run on the tokenizers library"

REFUSED = {
    "a missing weight": (weights(lambda t: t.pop(NORM)), f"config.json; missing: {NORM}; unexpected"),
    "an unknown weight": (put("sinks", RAMP), "config.json; missing: ; unexpected: sinks"),
    "a missing shard": (shards(), write(B, None), f"{B} is no file: convert the weights"),
    "half a file": (lambda folder: os.truncate(folder / WEIGHTS, 9999), f"{WEIGHTS} is broken or cut short"),
    "a folder": (replace(WEIGHTS, Path.mkdir), f"{WEIGHTS} is no file: convert the weights"),
    "a head that does not fit": (TIED, put(HEAD, RAMP), rf"{HEAD} is F32 \[48\], .* \[97, 48\]"),
    "a head of another model": (put(f"draft.{HEAD}", RAMP), f"config.json; .*unexpected: draft.{HEAD}"),
    "tied, without embedding": (TIED, NO_EMBEDDING, f"config.json; missing: {EMBEDDING}"),
    "another theta": (entries(rope_parameters=ROPE), put(FREQUENCIES, frequencies(1e4)), f"{ODD}.*: 500"),
    "another scaling": (put(FREQUENCIES, frequencies(1e4)), f"{ODD}.*'factor': 8"),
    "NaN": (put(NORM, (-RAMP).log()), f"{NORM} is not finite in torch.float32"),
    "a head_dim that is worked out": (entries(hidden_size=6, **NULLS), "'head_dim': 1}"),
    "control characters in a name": (put("\x1b]0;title\x07\n", RAMP), "unexpected: .*title"),
    "too large": (put(NORM, RAMP * 1e5), entries(dtype="float16"), f"{NORM} is not finite in torch.float16"),
    "a slow tokenizer": (entries(TOKENIZER, tokenizer_class="ByT5Tokenizer"), SLOW),
    "a tokenizer that is a folder": (replace("tokenizer.json", Path.mkdir), TEXT),
    "a window": (QWEN3, entries(**WINDOW | {"max_window_layers": 1}), "sliding_attention"),
    # The class of a Llama knows no such field, but transformers' cache drops what lies before the window.
    "a window of a Llama": (entries(**WINDOW), "sliding_window 4"),
    "chunks": (QWEN3, entries(layer_types=["chunked_attention"] * 2), "chunked_attention"),
}
CONFIGS: dict[str, dict[str, object]] = {  # the pattern of the error → what config.json of a Qwen3 says
    "model_type 'gpt2', but only llama or qwen2 or qwen3 is supported": {"model_type": "gpt2"},
    "model_type .'qwen3'., but only": {"model_type": ["qwen3"]},
    "gelu": {"hidden_act": "gelu"},
    "quantization_config .*awq": {"quantization_config": {"quant_method": "awq"}},
    "num_hidden_layers 10000000, but must have at most 1000": {"num_hidden_layers": 10**7},
    "'num_heads': 0.*, but sizes must be above 0": {"num_attention_heads": 0},
    "num_heads a multiple of num_kv_heads": {"num_key_value_heads": 4},
    "head_dim": {"head_dim": 15},
    "'hidden_size' expected int": {"hidden_size": 48.0},
    "vocab_size=16777216, hidden_size=16777216": {"vocab_size": 1 << 24, "hidden_size": 1 << 24},
    "rope_type 'yarn'": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "full_attention .*, but only None": {"rope_parameters": {"full_attention": ROPE}},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    r"low_freq_factor 4\.0, but only a number below high_freq_factor, 4\.0": {
        "rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4.0}
    },
    "_embeddings -1, but only a fin": {"original_max_position_embeddings": -1},
    "is_causal False": {"is_causal": False},
    "per_layer_config": {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}},
    "dtype 'float64'": {"dtype": "float64"},
    "auto": {"dtype": "auto"},
    # Newer transformers checks the type; to older ones it is a model whose biases are missing.
    "config.json cannot be used: .*'attention_bias'|missing: .*k_proj.bias": {"attention_bias": "yes"},
    f"transformers_weights '{B}', but only None": {"transformers_weights": B},
    "configuration_files .'x'., but only None": {"configuration_files": ["x"]},
}
for pattern, changes in CONFIGS.items():
    REFUSED[pattern] = (QWEN3, entries(**changes), pattern)
# Quantised weights without a quantization_config would be read as numbers that they are not.
for dtype in (F64, torch.int8, torch.bool, torch.float8_e4m3fn):
    REFUSED[f"{dtype}"] = (cast(dtype, NORM), f"{NORM} is .*, but must be F32, F16 or BF16")
    REFUSED[f"all {dtype}"] = (NO_DTYPE, cast(dtype), "is .*, but must be F32, F16 or BF16")
for broken in ("{", "[" * 100_000, "[1]"):
    change = write("config.json", broken)
    REFUSED[f"config.json {broken[:9]}"] = (change, "config.json cannot be read as a JSON object")
for broken in ("[]", '{"version": ', "{}"):
    REFUSED[f"tokenizer.json {broken}"] = (write("tokenizer.json", broken), TEXT)
for value in ("x", [], {}, [1]):
    REFUSED[f"model_max_length {value}"] = (entries(TOKENIZER, model_max_length=value), TEXT)
for name in ("fast_tokenizer_files", "gguf_file", "init_inputs", "merges", "vocab"):
    change = entries(TOKENIZER, **{name: ["../outside/tokenizer.4.0.0.json"]})
    REFUSED[name] = (*VOCABULARY, QWEN2, change, f"{TOKENIZER} in .* has {name}, by which files outside")
# A pipe would be waited for, and /dev/zero never ends.
for file in ("config.json", "tokenizer.json", WEIGHTS, GENERATION) if hasattr(os, "mkfifo") else ():
    no_file = f"{file} is (neither a file nor a folder|no file: convert)"
    REFUSED[f"{file} is a pipe"] = (replace(file, os.mkfifo), no_file)
    REFUSED[f"{file} is a device"] = (replace(file, lambda path: path.symlink_to("/dev/zero")), no_file)
# transformers has more to say of some of these in config.json.
for eos in ("7", -1, True, 7.0, [[7]], [7, None]):
    shown = re.escape(str(eos))
    no_ids = rf"generation_config\.json has eos_token_id .*{shown}.*, but token ids are"
    REFUSED[f"eos {eos}"] = (entries(GENERATION, eos_token_id=eos), no_ids)
    change = (write(GENERATION, None), entries(eos_token_id=eos))
    REFUSED[f"eos {eos} in config.json"] = (*change, rf"/config\.json .*eos_token_id.*{shown}")

# ── the rows are held to transformers, or to an error ─────────────────────────────────────────────


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.mark.parametrize("row", AS_TRANSFORMERS)
@torch.inference_mode()
def test_a_checkpoint(row: str, folder: Path) -> None:
    """The dtype, and the greedy tokens in float32."""
    for change in AS_TRANSFORMERS[row]:
        change(folder)
    dtype = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert read_model_config(folder).dtype == str(dtype).removeprefix("torch.")
    llm = LLM(folder, num_blocks=32, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=F32, attn_implementation="eager").eval()
    prompts = random_prompts(3, seed=1)
    params = SamplingParams(temperature=0, max_tokens=8)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        tokens = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
        assert output.outputs[0].token_ids == tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("row", TOKENIZERS)
def test_a_tokenizer(row: str, tmp_path: Path) -> None:
    """The ids of a text, the end (as in vLLM, the tokenizer's counts, too), and a rendered chat."""
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    for change in TOKENIZERS[row]:
        change(folder)
    llm = LLM(folder, num_blocks=8)
    loaded, expected = llm.get_tokenizer(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert loaded.encode("ROMEO: 12 <|im_end|>") == expected.encode("ROMEO: 12 <|im_end|>")
    assert read_eos_token_ids(folder, loaded) == {0, 2} | {expected.eos_token_id}
    if expected.chat_template is not None:
        chat = [{"role": "user", "content": "What?"}]
        (output,) = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt == expected.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("row", REFUSED)
def test_a_checkpoint_that_is_refused(row: str, folder: Path) -> None:
    for file in ("tokenizer.json", TOKENIZER):
        shutil.copy(TINY_MODEL / file, folder)
    *changes, error = REFUSED[row]
    for change in changes:
        change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=error) as raised:
        LLM(folder, num_blocks=8)
    assert "\x1b" not in str(raised.value), "it could move the cursor of a terminal, or set its title"


NO_NUMBERS = (None, math.nan, math.inf, -1.0, 0, 0.0, "1e4", True, [1.0], 10**400)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:6])
@pytest.mark.parametrize("name", ["rms_norm_eps", *list(LLAMA3_ROPE)[1:]])
def test_numbers_that_cannot_be_computed_with(folder: Path, name: str, value: object) -> None:
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
    original = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for edit in edits:
        write("config.json", json.dumps(original | edit))(folder)
        with pytest.raises(ValueError, match=message):
            read_model_config(folder)


OUTSIDE = [f"../model/{A}", f"{{}}/{A}", f"inside/{A}", f"inside/../{A}"]
NO_FILES = ["x" * 300, "no\0name", "..", "", 5, None, [A], {A: 5}]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_FILES], ids=lambda name: repr(name)[:30])
def test_an_index_lists_only_files_of_its_folder(name: object, folder: Path) -> None:
    """Even where the name leads to a file, because a folder in it may be a link to elsewhere."""
    message = "is no file: convert"
    if name in OUTSIDE:
        name = str(name).format(folder)
        message = f"{INDEX} lists {name!r}, but only files in {folder} itself are read"
    shards(**{NORM: name})(folder)
    (folder / "inside").symlink_to(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        LLM(folder, num_blocks=8)
    assert message in str(error.value)
