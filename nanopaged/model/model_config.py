"""Read a checkpoint's config.json, and refuse models that this engine cannot run.

transformers parses the file and fills in the defaults of each family. Some models that transformers accepts
are not supported here (another architecture, a quantised checkpoint, another rope type); the error names the
reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from nanopaged.config import DTYPES

FAMILIES = {  # model_type → its architecture that generates text
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
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
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int
    qkv_bias: bool  # always in Qwen2, sometimes in Llama
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # Qwen3: RMSNorm of each head of q and k
    tie_word_embeddings: bool  # the output projection uses the embedding's weights
    dtype: str  # the checkpoint's, e.g. "bfloat16"


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
    raw = read_json(folder / "config.json")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}: is it a Hugging Face model folder?")
    _refuse_unsupported(raw, folder)
    dtype = _read_dtype(raw)
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the message of transformers says what is wrong
        raise ValueError(f"the config.json in {folder} cannot be used: {error}") from error
    family = hf.model_type
    attention_bias = bool(getattr(hf, "attention_bias", False))
    rope_theta, rope_scaling = _read_rope(hf.to_dict(), raw)
    return ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=hf.max_position_embeddings,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        dtype=dtype,
    )


def _read_dtype(raw: dict[str, Any]) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES[1:]:
        raise ValueError(f"config.json has dtype {dtype!r}, which is not one of {', '.join(DTYPES[1:])}")
    return dtype


def _refuse_unsupported(raw: dict[str, Any], folder: Path) -> None:
    model_type = raw.get("model_type")
    supported = ", ".join(FAMILIES.values())
    name = ", ".join(raw.get("architectures") or []) or f"model_type {model_type!r}"
    if model_type not in FAMILIES or name not in (FAMILIES[model_type], f"model_type {model_type!r}"):
        raise ValueError(f"{folder} holds {name}, which is not supported; supported are {supported}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "an unnamed method")
        raise ValueError(
            f"{folder} is quantised ({method}), which is not supported: use the float checkpoint"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation {activation!r} is not supported, only 'silu'")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window is set, but sliding-window attention is not supported")


def _read_rope(parsed: dict[str, Any], raw: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """(theta, scaling) of the rotary embedding, from a config of any version of transformers.

    transformers 5 writes everything under `rope_parameters`. Earlier versions have `rope_theta` at top level
    and the rest under `rope_scaling`, whose `rope_type` was once called `type`. The values of the file itself
    override the parsed ones, since an older transformers ignores what a newer one wrote.
    """
    rope: dict[str, Any] = {}
    for config in (parsed, raw):
        if config.get("rope_theta") is not None:
            rope["rope_theta"] = config["rope_theta"]
        rope |= config.get("rope_scaling") or {}
        rope |= config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope type {rope_type!r} is not supported, only 'default' and 'llama3'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported, only 1.0")
    if rope_type == "default":
        return float(rope["rope_theta"]), None
    scaling = {field.name: rope[field.name] for field in fields(Llama3Scaling)}
    return float(rope["rope_theta"]), Llama3Scaling(**scaling)
