"""Load a model's weights and its tokenizer, from a folder or from the Hugging Face hub.

The projections q, k and v of a checkpoint become one matrix here, and so do gate and up, because
one large matrix product is faster than several small ones.
"""

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanopaged.config import EngineConfig
from nanopaged.model.decoder import (
    ALONE,
    PLAIN,
    Linear,
    Model,
    Operations,
    rotary_frequencies,
    rotary_tables,
)
from nanopaged.model.model_config import WEIGHT_DTYPES, ModelConfig, find_weights, read_json
from nanopaged.parallel import Ranks
from nanopaged.terminal import one_line

TINY_MODEL = Path(__file__).parents[1] / "tiny"
CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]


def find_model(model: str | Path | None, with_weights: bool = True) -> Path:
    """The folder of a model: the tiny one for None, a local folder, or a download from the hub."""
    folder = TINY_MODEL if model is None else Path(os.path.expanduser(model))
    if os.path.isdir(folder):  # unlike Path's, False for a name that is too long
        return folder
    if isinstance(model, Path) or str(model).startswith(("/", ".", "~")):
        raise FileNotFoundError(
            f"{folder} is not a folder: name the one that holds config.json, or a hub id"
        )
    try:
        patterns = [*CONFIG_FILES, "*.safetensors"] if with_weights else CONFIG_FILES
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (OSError, ValueError) as error:  # huggingface's own errors are of these types
        raise FileNotFoundError(
            f"{model!r} is not a folder, nor a hub id to download: {error}"
        ) from error


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks = ALONE,
    operations: Operations = PLAIN,
) -> Model:
    """The model of `folder` on `device`, ready to run. Each rank reads its part of the weights."""
    try:
        model = Model(model_config, ranks, operations).requires_grad_(False)
        model.to(dtype).to_empty(device=device)
        model.cos, model.sin = rotary_tables(model_config, config.max_model_len, dtype, device)
    except (RuntimeError, OverflowError, TypeError) as error:  # of the first kind: out of memory
        raise ValueError(
            f"the model does not fit on {device}: take a smaller model or dtype, or lower"
            f" max_model_len, which is {config.max_model_len} ({error}; {model_config})"
        ) from error
    if model_config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    if config.load_format == "dummy":  # for benchmarks: random weights with the usual scale
        generator = torch.Generator(device).manual_seed((config.seed + ranks.rank) % 2**63)
        for weight in model.parameters():
            weight.normal_(0.0, 0.02, generator=generator)
    else:
        with torch.device("cpu"):  # the tensors of the files, whatever torch's default is
            _read_weights(model, folder)
    for part in model.modules():
        if isinstance(part, Linear):
            part.pack(operations)
    return model


def _read_weights(model: Model, folder: Path) -> None:
    """Fill the model's weights, or this rank's shares of them, from the safetensors files."""
    weights = find_weights(folder)
    targets = _weight_targets(model)
    whole = _weight_targets(Model(model.config))  # unsplit: names and shapes, without memory
    frequencies = rotary_frequencies(model.config)
    for name in weights.keys() - whole.keys():
        if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints, and rounded in some
            copy = weights.pop(name)[...].float()
            if copy.shape != frequencies.shape or not copy.allclose(frequencies, rtol=0.05):
                raise ValueError(
                    f"{name} in {folder} is not what config.json says, with"
                    f" {model.config.rope_parameters}"
                )
    missing = sorted(targets.keys() - weights.keys())[:8]
    unexpected = sorted(weights.keys() - whole.keys())[:8]
    if missing or unexpected:
        raise ValueError(
            f"the weights in {folder} do not match its config.json; missing: {', '.join(missing)};"
            f" unexpected: {one_line(', '.join(unexpected))}"
        )
    for name, target in targets.items():
        weight = weights[name]
        shape = list(whole[name].shape)
        found = weight.get_shape()
        dtype = weight.get_dtype()  # a quantised weight has another one than these
        if found != shape or dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{name} is {dtype} {found}, but must be F32, F16 or BF16 {shape}")
        part = weight[_rank_slices(name, target, shape, model.ranks)]
        target[: len(part)].copy_(part)
        target[len(part) :].zero_()  # rows beyond the vocabulary
        if not torch.stack(target.aminmax()).isfinite().all():
            raise ValueError(f"{name} is not finite in {target.dtype}: use a wider dtype")


def _weight_targets(model: Model) -> dict[str, Tensor]:
    """The name of each weight in the checkpoint → the part of the model's weights that it fills.

    The rows of a layer's `qkv_proj` are q, k and v in this order. With 4 query heads and 2 KV heads
    of dimension 8 these are the rows 0-31, 32-47 and 48-63. The halves of `gate_up_proj` are gate
    and up.
    """
    config = model.rank_config
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    width = config.intermediate_size
    parts = {  # the model's matrix → the checkpoint's projections, and their rows
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": width, "up_proj": width},
    }
    targets = {}
    for name, weight in model.named_parameters():
        if not name.startswith("lm_head"):
            name = f"model.{name}"
        matrix = name.split(".")[-2]
        rows = parts.get(matrix, {matrix: len(weight)})
        pieces = weight.split(list(rows.values()))
        for projection, piece in zip(rows, pieces, strict=True):
            targets[name.replace(matrix, projection)] = piece
    return targets


def _rank_slices(name: str, target: Tensor, shape: list[int], ranks: Ranks) -> tuple[slice, ...]:
    """The part of a weight of this shape that goes to the target: all, some rows, or some columns.

    k_proj has 2 heads of 8 rows. Of 4 ranks, 0 and 1 take rows 0-7, and 2 and 3 take rows 8-15.
    """
    parts = []
    for total, length in zip(shape, target.shape, strict=True):
        if total == length:  # it is not divided
            first = 0
        elif name.startswith(("lm_head", "model.embed_tokens")):  # the last rank may have fewer
            first = ranks.rank * length
        else:  # with fewer KV heads than ranks, several ranks take the same one
            first = ranks.rank * total // ranks.size // length * length
        parts.append(slice(first, first + length))
    return tuple(parts)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, or None if there is none. Prompts must then be token ids."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        return None
    settings = read_json(folder / "tokenizer_config.json")
    for name in ("fast_tokenizer_files", "gguf_file", "init_inputs", "merges", "vocab"):
        if settings.get(name):
            raise ValueError(
                f"tokenizer_config.json in {folder} has {name}, by which files outside the folder"
                " may be read: remove it, and name the tokenizer's file tokenizer.json"
            )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        # Finds wrong types in tokenizer_config.json, and a tokenizer that requests cannot use.
        tokenizer.backend_tokenizer.decode(tokenizer.encode("a"))
        return tokenizer
    except Exception as error:  # transformers and the parser in Rust raise many types
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}. It must run on the tokenizers"
            " library, without code of its own. Without its files, prompts can be token ids"
        ) from error


def read_eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, or of config.json without such a file, as
    in transformers; and that of the tokenizer, as in vLLM.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        file = folder / "config.json"
    eos = read_json(file).get("eos_token_id")
    if not isinstance(eos, list):
        eos = [] if eos is None else [eos]
    for token_id in eos:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{file} has eos_token_id {eos}, but token ids are ints from 0 on")
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    return frozenset(eos)
