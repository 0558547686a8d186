"""Read a model's config.json, and refuse models that this engine would compute wrongly.

transformers parses the file, whatever version wrote it, and fills in the defaults of the family.
If the file names no dtype, the weights do.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from nanopaged.config import DTYPES
from nanopaged.terminal import one_line

FAMILIES = {  # model_type → how it differs from Llama
    "llama": {},
    "qwen2": {"qkv_bias": True, "o_bias": False},
    "qwen3": {"qk_norm": True},
}
# setting → the values that are supported. A setting that is missing has the first of them.
CHOICES = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None, {}),
    "rope_type": ("default", "llama3"),
    "full_attention": (None,),  # rope parameters for one of several kinds of layers
    "partial_rotary_factor": (1.0, None),
    "dtype": DTYPES[1:],
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "configuration_files": (None,),  # other files in place of config.json
    "transformers_weights": (None,),  # another file in place of model.safetensors
}
WEIGHT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' name → ours
NUMBERS = (  # settings that must be finite numbers above 0, if they are there
    "rms_norm_eps",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder, and the details in which the families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # as transformers has them, see `decoder.rotary_frequencies`
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each head of q and k
    tie_word_embeddings: bool  # the output projection uses the embedding's weights
    dtype: str  # the checkpoint's, e.g. "bfloat16"

    def for_rank_of(self, size: int) -> ModelConfig:
        """The sizes of one of `size` ranks. With fewer KV heads than ranks, several share a head.

        8 query heads and 2 KV heads on 4 ranks: each rank has 2 query heads and 1 KV head, and
        ranks 0 and 1 have the same KV head.
        """
        heads_fit = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        if self.num_heads % size or self.intermediate_size % size or not heads_fit:
            raise ValueError(
                f"tensor_parallel_size is {size}, but must divide the model's num_heads of"
                f" {self.num_heads} and intermediate_size of {self.intermediate_size}, and"
                f" divide its {self.num_kv_heads} KV heads or be a multiple of them"
            )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
            vocab_size=-(-self.vocab_size // size),  # ceil division
        )


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, or {} if there is none."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError, RecursionError) as error:  # OSError: it may be a folder
        raise ValueError(f"{path} cannot be read as a JSON object: {error}") from error


def find_weights(folder: Path) -> dict[str, Any]:
    """The name of each weight of a checkpoint → its slice, which is read when it is indexed.

    As in transformers, an index counts only if there is no model.safetensors. It only says which
    files there are; of several weights with one name the last one counts.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is broken or outside the folder.
    """
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map")
    if isinstance(weight_map, dict) and not (folder / names[0]).is_file():
        names = sorted({str(name) for name in weight_map.values()})
    weights = {}
    for name in names:
        file = folder / name
        if Path(name).name != name:  # the file itself may be a link, as in the hub's cache
            raise ValueError(f"{index} lists {name!r}, but only files in {folder} itself are read")
        if not os.path.isfile(file):  # unlike Path's, False for a name that is too long
            raise FileNotFoundError(
                f"{file} is no file: convert the weights, or set load_format='dummy'"
            )
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    weights[key] = tensors.get_slice(key)
        except SafetensorError as error:
            raise ValueError(f"{file} is broken or cut short: {error}") from error
    return weights


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises ValueError for a setting that this engine cannot run."""
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"no config.json in {folder}: is it a Hugging Face model folder?")
    for path in folder.glob("*.[jm]*"):  # reading a pipe or a device may never end
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a file nor a folder")
    raw = read_json(file)
    hf = _parse(raw, file)
    try:
        weights = find_weights(folder)
    except (OSError, ValueError):  # `load_model` raises it again, unless it draws random weights
        weights = {}
    dtypes = [WEIGHT_DTYPES.get(weight.get_dtype()) for weight in weights.values()]
    first_dtype = next(filter(None, dtypes), "float32")  # what transformers takes
    dtype = str(hf.dtype or first_dtype).removeprefix("torch.")
    settings = raw | hf.rope_parameters | {"dtype": dtype}
    _check_settings(settings, hf, file)
    sizes = _sizes_of(hf, file)
    bias = settings.get("attention_bias", False)
    family = {"qkv_bias": bias, "o_bias": bias, "qk_norm": False} | FAMILIES[raw["model_type"]]
    return ModelConfig(
        **sizes,
        **family,
        mlp_bias=settings.get("mlp_bias", False),
        rms_norm_eps=hf.rms_norm_eps,
        rope_parameters=hf.rope_parameters,
        # As in transformers, an output projection in the checkpoint counts, whatever the file says.
        tie_word_embeddings=hf.tie_word_embeddings and "lm_head.weight" not in weights,
        dtype=dtype,
    )


def _parse(raw: dict[str, Any], file: Path) -> Any:
    """The settings as transformers reads them, with the defaults of the family."""
    if str(raw.get("model_type")) not in FAMILIES:
        raise ValueError(
            f"{file} has model_type {raw.get('model_type')!r}, but only"
            f" {' or '.join(FAMILIES)} is supported"
        )
    num_layers = raw.get("num_hidden_layers")
    if type(num_layers) is int and num_layers > 1000:  # many millions would take minutes
        raise ValueError(f"{file} has num_hidden_layers {num_layers}, but must have at most 1000")
    try:
        hf: Any = AutoConfig.for_model(**raw)
        hf.standardize_rope_params()  # transformers does so again when it makes a model
    except Exception as error:  # the message of transformers says what is wrong, in several lines
        raise ValueError(
            f"{file} cannot be used: {one_line(error)} (rope_scaling {raw.get('rope_scaling')!r},"
            f" rope_parameters {raw.get('rope_parameters')!r})"
        ) from error
    return hf


def _check_settings(settings: dict[str, Any], hf: Any, file: Path) -> None:
    """Raise ValueError for a setting that is not supported."""
    for name in NUMBERS:  # transformers fails later
        value = settings.get(name, 1)
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise ValueError(
                f"{file} has {name} {value!r}, but only a finite number above 0 is supported"
            )
    for name, choices in CHOICES.items():
        value = settings.get(name, choices[0])
        if value not in choices:
            supported = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"{file} has {name} {value!r}, but only {supported} is supported")
    if settings["rope_type"] == "llama3":
        low = settings["low_freq_factor"]
        high = settings["high_freq_factor"]
        if low >= high:
            raise ValueError(
                f"{file} has low_freq_factor {low}, but only a number below high_freq_factor,"
                f" {high}, is supported"
            )
    layer_types = getattr(hf, "layer_types", None)
    window = getattr(hf, "sliding_window", None)
    if set(layer_types or ()) - {"full_attention"} or (window and not layer_types):
        raise ValueError(
            f"{file} has sliding_window {window!r} and layer_types {layer_types!r}, but only full"
            " attention is supported"
        )


def _sizes_of(hf: Any, file: Path) -> dict[str, Any]:
    """The sizes of the model, as `ModelConfig` names them."""
    num_heads = hf.num_attention_heads
    sizes = {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "max_position_embeddings": hf.max_position_embeddings,
        "num_layers": hf.num_hidden_layers,
        "num_heads": num_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // max(num_heads, 1),
    }
    if min(sizes.values()) < 1 or num_heads % sizes["num_kv_heads"] or sizes["head_dim"] % 2:
        raise ValueError(
            f"{file} has sizes {sizes}, but sizes must be above 0, num_heads a multiple of"
            " num_kv_heads, and head_dim even"
        )
    return sizes
