"""Read a checkpoint's config.json, and refuse models that this engine cannot run.

transformers parses the file and fills in the defaults of each family. Some models that transformers accepts
are not supported here (another architecture, a quantised checkpoint, another rope type); the error names the
reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from nanopaged.config import DTYPES


@dataclass(frozen=True)
class Family:
    """How a family of models differs from Llama.

    Fields:
        architecture: the name of its model that generates text.
        qkv_bias, o_bias: None is what the config says (`attention_bias`).
        qk_norm: RMSNorm of each head of q and k.
        activations: of the MLP, the names that a config may have; `layers.ACTIVATIONS` has the functions.
    """

    architecture: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    activations: tuple[str, ...] = ("silu", "swish")


FAMILIES = {  # model_type → family
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, o_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
}

# Numbers are above 0 and at most this, and whole if the limit is. Token ids and positions pass through
# float32, which is exact up to 2**24.
LIMITS: dict[str, int | float] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"), 1e30),
    "original_max_position_embeddings": 1 << 24,
    "num_hidden_layers": 1 << 12,
}
MAY_BE_NULL = ("num_key_value_heads", "head_dim")  # worked out from the others then
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": (*DTYPES[1:], None),
    "torch_dtype": (*DTYPES[1:], None),  # its name in transformers 4
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (1.0, None),
}


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 and later scale their rotary frequencies; see `layers.rotary_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
    activation: str  # of the MLP
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # see `Family`
    tie_word_embeddings: bool  # the output projection uses the embedding's weights
    dtype: str  # the checkpoint's, e.g. "bfloat16"

    def share(self, size: int) -> ModelConfig:
        """The layers of one of `size` ranks. With fewer KV heads than ranks, several ranks have the same one.

        8 query heads and 2 KV heads on 4 ranks: each has 2 query heads and 1 KV head, ranks 0 and 1 the same

        Raises:
            ValueError: heads or columns cannot be divided equally.
        """
        for name in ("num_heads", "intermediate_size"):
            if getattr(self, name) % size:
                raise ValueError(
                    f"tensor_parallel_size is {size}, which does not divide the model's {name} of "
                    f"{getattr(self, name)}"
                )
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {size}, which neither divides the model's {self.num_kv_heads} KV "
                "heads nor is a multiple of them"
            )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, {} if there is none. Raises ValueError if it is broken."""
    if not path.exists():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:  # OSError: e.g. a folder of this name
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds a {type(contents).__name__}, but must hold a JSON object")
    return contents


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it describes something that this engine cannot run; the message names it.
    """
    file = folder / "config.json"
    raw = read_json(file)
    if not file.exists():
        raise FileNotFoundError(f"no config.json in {folder}: is it a Hugging Face model folder?")
    _refuse_unsupported(raw, file)
    _check_settings(raw, file)
    rope_theta, rope_scaling = _read_rope(raw, file)
    raw.pop("num_labels", None)  # transformers would make a dict of so many names
    try:
        hf = AutoConfig.for_model(**raw)
    except Exception as error:  # the message of transformers says what is wrong
        raise ValueError(f"{file} cannot be used: {error}") from error
    family, num_heads = FAMILIES[hf.model_type], hf.num_attention_heads
    num_kv_heads = hf.num_key_value_heads or num_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2 or head_dim == 0:
        raise ValueError(
            f"{file} has num_attention_heads {num_heads}, num_key_value_heads {num_kv_heads} and head_dim "
            f"{head_dim}, but the first must be a multiple of the second, and head_dim even"
        )
    window = getattr(hf, "sliding_window", None)  # a family's default, even if the file has none
    others = sorted(set(getattr(hf, "layer_types", None) or ()) - {"full_attention"})
    window_in_all_layers = window is not None and not hasattr(type(hf)(), "layer_types")
    if others or window_in_all_layers:
        what = f"layers of type {others}" if others else f"sliding_window {window}"
        raise ValueError(f"{file} has {what}, but only full attention is supported")
    attention_bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        activation=hf.hidden_act,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=hf.max_position_embeddings,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _refuse_unsupported(raw: dict[str, Any], file: Path) -> None:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    family = FAMILIES.get(str(model_type))
    if family is None or architectures not in (None, [], family.architecture, [family.architecture]):
        supported = ", ".join(each.architecture for each in FAMILIES.values())
        raise ValueError(
            f"{file} has architectures {architectures!r} and model_type {model_type!r}, which is not "
            f"supported; supported are {supported}, each with its own model_type"
        )
    activation = raw.get("hidden_act", family.activations[0])
    if activation not in family.activations:
        choices = " or ".join(map(repr, family.activations))
        raise ValueError(f"{file} has hidden_act {activation!r}, but only {choices} is supported")
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", quantised) if isinstance(quantised, dict) else quantised
        raise ValueError(
            f"{file} is of a quantised model ({method}), which is not supported: use the float one"
        )


def _check_settings(settings: dict[str, Any], file: Path) -> None:
    """Raise ValueError unless all of `settings` that are in `LIMITS` or `CHOICES` keep to them."""
    for name, value in settings.items():
        most = LIMITS.get(name)
        if most is not None and not (value is None and name in MAY_BE_NULL):
            number, types = ("whole number", int) if isinstance(most, int) else ("number", (int, float))
            if not isinstance(value, types) or isinstance(value, bool) or not 0 < value <= most:
                raise ValueError(f"{file} has {name} {value!r}, but needs a {number} above 0, at most {most}")
        if value not in CHOICES.get(name, (value,)):
            choices = " or ".join(map(repr, CHOICES[name]))
            raise ValueError(f"{file} has {name} {value!r}, but only {choices} is supported")


def _read_rope(raw: dict[str, Any], file: Path) -> tuple[float, Llama3Scaling | None]:
    """(theta, scaling) of the rotary embedding, from a config of any version of transformers.

    transformers 5 writes everything under `rope_parameters`. Earlier versions have `rope_theta` at top level
    and the rest under `rope_scaling`, whose `rope_type` was once called `type`. If a file has both, then
    `rope_scaling` counts and `rope_parameters`, with its theta, does not (as in transformers).
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{file} has rope settings {given!r}, but needs one JSON object, for all layers")
    rope: dict[str, Any] = {
        "rope_theta": raw.get("rope_theta", 10000.0),
        "rope_type": given.get("type", "default"),
        "original_max_position_embeddings": raw.get("max_position_embeddings"),
        **given,
    }
    llama3 = [field.name for field in fields(Llama3Scaling)] if rope["rope_type"] == "llama3" else []
    names = ("rope_type", "rope_theta", "partial_rotary_factor", *llama3)
    _check_settings({name: rope.get(name) for name in names}, file)
    scaling = Llama3Scaling(**{name: rope[name] for name in llama3}) if llama3 else None
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(f"{file} has {scaling}, but low_freq_factor must be below high_freq_factor")
    return float(rope["rope_theta"]), scaling
