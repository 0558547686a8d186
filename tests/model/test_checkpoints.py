"""A table of checkpoints: for each, the loader answers as transformers does, or with one error.

A row is a list of changes to a small random checkpoint. In `REFUSED` the pattern of the error follows.
"""

from __future__ import annotations

import json
import os
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
def make_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


# ── the tables ────────────────────────────────────────────────────────────────────────────────────

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RAMP = torch.linspace(2, 1, 48)  # other values for the weight of a norm
TIED, NO_DTYPE, NO_ROPE = entries(tie_word_embeddings=True), entries(dtype=...), entries(rope_parameters=...)
NO_HEAD, NO_EMBEDDING = weights(lambda t: t.pop(HEAD)), weights(lambda t: t.pop(EMBEDDING))
COPY = weights(lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
ROPE = {"rope_type": "default", "rope_theta": 500.0}
MILLION = entries(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
ROPE_4 = {"type": "llama3"} | {name: LLAMA3_ROPE[name] for name in list(LLAMA3_ROPE)[2:]}


def frequencies(theta: float) -> torch.Tensor:
    """As old checkpoints have them; the heads have 20 dimensions."""
    return theta ** (-torch.arange(0, 20, 2) / 20)


AS_TRANSFORMERS = {
    "one file": [],
    "shards": [shards()],
    "listed in the wrong shard": [shards(**{NORM: A})],
    "not listed": [shards(**{NORM: ...})],
    "listed and nowhere": [shards(ghost=A)],
    "in two shards": [shards(), put("model.layers.0.input_layernorm.weight", RAMP, B)],
    "shards and one file that differ": [shards(keep=True), put(NORM, RAMP)],
    "tied": [TIED, NO_HEAD],
    "tied, with a head of its own": [TIED],
    "tied, with a head of its own in shards": [TIED, shards()],
    "tied, with a copy": [TIED, COPY],
    "tied, with a rounded copy": [TIED, COPY, cast(BF16, HEAD)],
    # rotary frequencies, with which nothing computes
    "frequencies": [entries(rope_parameters=ROPE), put(FREQUENCIES, frequencies(500.0))],
    "rounded frequencies": [MILLION, put(FREQUENCIES, frequencies(1e6).to(F16))],
    "no dtype": [NO_DTYPE],
    "no dtype, float16": [NO_DTYPE, cast(F16)],
    "no dtype, bfloat16": [NO_DTYPE, cast(BF16)],
    "no dtype, two in a file": [NO_DTYPE, cast(BF16, HEAD)],
    "no dtype, two in shards": [NO_DTYPE, shards(), cast(F16, "", A)],
    "dtype null": [entries(dtype=None), cast(BF16)],
    "torch_dtype": [entries(dtype=..., torch_dtype="bfloat16")],
    "torch_dtype and dtype": [entries(dtype="float16", torch_dtype="bfloat16")],
    "theta at top level": [NO_ROPE, entries(rope_theta=500.0)],
    "no theta": [NO_ROPE],
    "two thetas": [entries(rope_parameters=ROPE, rope_theta=77.0)],
    "two thetas, one null": [entries(rope_parameters=ROPE, rope_theta=None)],
    "as transformers 4 wrote it": [NO_ROPE, entries(rope_scaling=ROPE_4, rope_theta=500.0)],
    "as it wrote it later": [NO_ROPE, entries(rope_scaling=ROPE_4 | {"rope_type": "llama3"})],
    "scaling null": [NO_ROPE, entries(rope_scaling=None, rope_theta=500.0)],
    "scaling after parameters": [entries(rope_parameters=ROPE, rope_scaling=ROPE_4)],
    "scaling before parameters": [NO_ROPE, entries(rope_scaling=ROPE_4, rope_parameters=ROPE)],
    "scaling {} and parameters": [entries(rope_parameters=ROPE, rope_scaling={})],
    "two original lengths": [entries(original_max_position_embeddings=16)],
    # the tokens that end an output; 13 ends two of the three
    "an end": [entries(GENERATION, eos_token_id=13)],
    "ends": [entries(GENERATION, eos_token_id=[13, 17])],
    "an end in config.json": [write(GENERATION, None), entries(eos_token_id=13)],
    "ends in both": [entries(GENERATION, eos_token_id=13), entries(eos_token_id=1)],
    "an end in config.json alone": [entries(GENERATION, eos_token_id=...), entries(eos_token_id=13)],
    "an end in config.json beside null": [entries(GENERATION, eos_token_id=None), entries(eos_token_id=13)],
    "no end": [write(GENERATION, None), entries(eos_token_id=...)],
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
    "without its config": [write(TOKENIZER, None)],
    "vocabulary and merges": [*VOCABULARY, QWEN2],
    "an unknown class": [entries(TOKENIZER, tokenizer_class="NoTokenizer")],
    "an added token": [entries(TOKENIZER, added_tokens_decoder={"1024": ADDED})],
    "an added token at an id of another": [entries(TOKENIZER, added_tokens_decoder={"9": ADDED})],
    "added_tokens.json": [entries("added_tokens.json", ROMEO=1024)],
    "two ends": [entries("special_tokens_map.json", eos_token="<|im_start|>")],
    "a template": [entries(TOKENIZER, chat_template=NAMED)],
    "a template in a file": [entries(TOKENIZER, chat_template=...), write("chat_template.jinja", NAMED)],
    "a template in both": [write("chat_template.jinja", NAMED)],
    "a template in chat_template.json": [entries("chat_template.json", chat_template=NAMED)],
    "two templates": [entries(TOKENIZER, chat_template=TWO)],
}

ODD = f"{FREQUENCIES} in .* is not what config.json says, with rope_theta "
TEXT = "the tokenizer in .* cannot be read: "
SLOW = f"{TEXT}.*backend_tokenizer.* must run on the tokenizers library"
REFUSED = {
    "a missing weight": (weights(lambda t: t.pop(NORM)), f"config.json; missing: {NORM}; unexpected"),
    "an unknown weight": (put("sinks", RAMP), "config.json; missing: ; unexpected: sinks"),
    "an unknown weight in a shard": (shards(), put("sinks", RAMP, A), "config.json; .*unexpected: sinks"),
    "a missing shard": (shards(), write(B, None), f"{B} is no file: convert the weights"),
    "half a file": (lambda folder: os.truncate(folder / WEIGHTS, 9999), f"{WEIGHTS} is broken or cut short"),
    "a folder": (make_folder(WEIGHTS), f"{WEIGHTS} is no file: convert the weights"),
    "another file": (entries(transformers_weights=B), f"transformers_weights '{B}', but only None"),
    "another config": (entries(configuration_files=["x"]), "configuration_files .'x'., but only None"),
    "a head that does not fit": (TIED, put(HEAD, RAMP), rf"{HEAD} is F32 \[48\], .* \[97, 48\]"),
    "a head of another model": (put(f"draft.{HEAD}", RAMP), f"config.json; .*unexpected: draft.{HEAD}"),
    "tied, without embedding": (TIED, NO_EMBEDDING, f"config.json; missing: {EMBEDDING}"),
    "not tied, without head": (NO_HEAD, f"config.json; missing: {HEAD}"),
    "another theta": (entries(rope_parameters=ROPE), put(FREQUENCIES, frequencies(1e4)), f"{ODD}500"),
    "another scaling": (put(FREQUENCIES, frequencies(1e4)), f"{ODD}10000.* scaling .*'factor': 8"),
    "three frequencies": (put(FREQUENCIES, torch.ones(3)), ODD),
    "a length of -1": (entries(original_max_position_embeddings=-1), "_embeddings -1, but only a fin"),
    "NaN": (put(NORM, (-RAMP).log()), f"{NORM} is not finite in torch.float32"),
    "infinity": (put(NORM, RAMP / 0), f"{NORM} is not finite in torch.float32"),
    "too large": (put(NORM, RAMP * 1e5), entries(dtype="float16"), f"{NORM} is not finite in torch.float16"),
    "no family": (write("config.json", "{}"), "model_type None, but only llama or qwen2 or qwen3"),
    "a slow tokenizer": (entries(TOKENIZER, tokenizer_class="ByT5Tokenizer"), SLOW),
    "a tokenizer that is a folder": (make_folder("tokenizer.json"), TEXT),
}
# Quantised weights without a quantization_config would be read as numbers that they are not.
for dtype in (F64, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
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

# ── the rows are held to transformers, or to an error ─────────────────────────────────────────────


@pytest.mark.parametrize("row", AS_TRANSFORMERS)
@torch.inference_mode()
def test_a_checkpoint(row: str, tmp_path: Path) -> None:
    """The dtype, and the greedy tokens in float32."""
    make_checkpoint("llama", tmp_path)
    for change in AS_TRANSFORMERS[row]:
        change(tmp_path)
    llm = LLM(tmp_path, num_blocks=32)
    assert llm.engine.runner.dtype == AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype
    llm = LLM(tmp_path, num_blocks=32, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F32, attn_implementation="eager").eval()
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
def test_a_checkpoint_that_is_refused(row: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    for file in ("tokenizer.json", TOKENIZER):
        shutil.copy(TINY_MODEL / file, tmp_path)
    *changes, error = REFUSED[row]
    for change in changes:
        change(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        LLM(tmp_path, num_blocks=8)


OUTSIDE = [f"../model/{A}", f"{{}}/{A}", f"inside/{A}", f"inside/../{A}"]
NO_FILES = ["x" * 300, "no\0name", "..", "", 5, None, [A], {A: 5}]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_FILES], ids=lambda name: repr(name)[:30])
def test_an_index_lists_only_files_of_its_folder(name: object, tmp_path: Path) -> None:
    """Even where the name leads to a file, because a folder in it may be a link to elsewhere."""
    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    message = "is no file: convert"
    if name in OUTSIDE:
        name = str(name).format(folder)
        message = f"{INDEX} lists {name!r}, but only files in {folder} itself are read"
    shards(**{NORM: name})(folder)
    (folder / "inside").symlink_to(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        LLM(folder, num_blocks=8)
    assert message in str(error.value)
