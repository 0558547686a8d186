"""Read a model's config.json, and refuse models that this engine would compute wrongly.

transformers parses the file, of any of its versions, and fills in the defaults of each family.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from nanopaged.config import DTYPES
from nanopaged.terminal import one_line

FAMILIES: dict[str, dict[str, bool]] = {  # model_type → how it differs from Llama
    "llama": {},
    "qwen2": {"qkv_bias": True, "o_bias": False},
    "qwen3": {"qk_norm": True},
}
CHOICES: dict[
    str, tuple[Any, ...]
] = {  # setting → what is supported; the first is what a missing one means
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None, {}),
    "rope_type": (None, "default", "llama3"),
    "partial_rotary_factor": (1.0, None),
    "dtype": DTYPES[1:],
    "is_causal": (True,),
    "per_layer_config": (None, {}),
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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
    attention_scale: float  # the factor of q · k
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float] | None  # the values of LLAMA3, see `decoder.rotary_frequencies`
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each head of q and k
    tie_word_embeddings: bool  # the output projection uses the embedding's weights
    dtype: str  # the checkpoint's, e.g. "bfloat16"

    def share(self, size: int) -> ModelConfig:
        """The layers of one of `size` ranks. With fewer KV heads than ranks, several ranks have the same one.

        8 query heads and 2 KV heads on 4 ranks: each has 2 query heads and 1 KV head, ranks 0 and 1 the same
        """
        heads, kv_heads, columns = self.num_heads, self.num_kv_heads, self.intermediate_size
        if heads % size or columns % size or (kv_heads % size and size % kv_heads):
            both = f"num_heads of {heads} and intermediate_size of {columns}"
            what = f"tensor_parallel_size is {size}, but must divide the model's {both}"
            raise ValueError(f"{what}, and divide its {kv_heads} KV heads or be a multiple of them")
        shares = {"num_heads": heads // size, "num_kv_heads": max(1, kv_heads // size)}
        rows = -(-self.vocab_size // size)  # ceil division
        return replace(self, **shares, intermediate_size=columns // size, vocab_size=rows)


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, {} if there is none."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (
        ValueError,
        TypeError,
        OSError,
        RecursionError,
    ) as error:  # OSError: e.g. a folder of this name
        raise ValueError(f"{path} cannot be read as a JSON object: {error}") from error


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises ValueError for what this engine cannot run; the message names it."""
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"no config.json in {folder}: is it a Hugging Face model folder?")
    for path in folder.glob("*.[jm]*"):  # reading a pipe or a device may never end
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a file nor a folder")
    raw = read_json(file)
    if (differences := FAMILIES.get(str(raw.get("model_type")))) is None:
        raise _unsupported(file, "model_type", raw.get("model_type"), " or ".join(FAMILIES))
    try:
        hf = AutoConfig.for_model(**copy.deepcopy(raw))  # it changes its arguments
    except Exception as error:  # the message of transformers says what is wrong, in several lines
        raise ValueError(f"{file} cannot be used: {one_line(error)}") from error
    rope, dtype = hf.rope_parameters, str(hf.dtype or "float32").removeprefix("torch.")
    settings = {**raw, **rope, "dtype": dtype}
    for name, choices in CHOICES.items():
        if (value := settings.get(name, choices[0])) not in choices:
            raise _unsupported(file, name, value, " or ".join(map(repr, choices)))
    layer_types, window = getattr(hf, "layer_types", None), getattr(hf, "sliding_window", None)
    if set(layer_types or ()) - {"full_attention"} or (window and not layer_types):
        raise _unsupported(
            file, f"sliding_window {window} and layer_types", layer_types, "full attention"
        )
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // max(heads, 1)
    names = "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"
    sizes = {name: getattr(hf, name) for name in names} | {"num_layers": hf.num_hidden_layers}
    sizes |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    if min(sizes.values()) < 1 or heads % kv_heads or head_dim % 2:
        allowed = "sizes above 0, num_heads a multiple of num_kv_heads, head_dim even"
        raise _unsupported(file, "sizes", sizes, allowed)
    bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        **sizes,
        **{"qkv_bias": bias, "o_bias": bias, "qk_norm": False} | differences,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        attention_scale=head_dim**-0.5,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling={name: rope[name] for name in LLAMA3}
        if rope["rope_type"] == "llama3"
        else None,
        tie_word_embeddings=hf.tie_word_embeddings,
        dtype=dtype,
    )


def _unsupported(file: Path, name: str, value: Any, supported: str) -> ValueError:
    return ValueError(f"{file} has {name} {value!r}, but only {supported} is supported")
