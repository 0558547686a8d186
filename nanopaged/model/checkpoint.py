"""Load a model's weights and its tokenizer, from a folder or from the Hugging Face hub.

The projections q, k and v of a checkpoint become one matrix of ours, and so do gate and up: one large matrix
product is faster than several small ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanopaged.config import EngineConfig
from nanopaged.model.decoder import PLAIN, Linear, Model, Operations, allocate
from nanopaged.model.model_config import ModelConfig, read_json
from nanopaged.parallel import Ranks

TINY_MODEL = Path(__file__).parents[1] / "tiny"
CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

logger = logging.getLogger("nanopaged")


def find_model(model: str | Path | None, with_weights: bool = True) -> Path:
    """The folder of a model: the tiny model for None, a local folder, or a download from the hub."""
    folder = Path(os.path.expanduser(model)) if model is not None else TINY_MODEL
    if os.path.isdir(folder):  # unlike Path's, False for a name that is too long
        return folder
    if isinstance(model, Path) or str(model).startswith(("/", ".", "~")):
        raise FileNotFoundError(
            f"{folder} is not a folder: name the one that holds config.json, or a hub id"
        )
    try:
        patterns = CONFIG_FILES + ["*.safetensors"] * with_weights
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (OSError, ValueError) as error:  # huggingface's own errors are of these types
        raise FileNotFoundError(
            f"{model!r} is not a folder, nor a hub id to download: {error}"
        ) from error


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
    operations: Operations = PLAIN,
) -> Model:
    """The model of `folder` on `device`, ready to run. Each rank reads its part of the weights."""
    rank, size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    try:
        model = Model(model_config, ranks, operations)
        allocate(model, dtype, device)
        model.rotary.compute(model_config, max_model_len, dtype, device)
    except (
        RuntimeError,
        OverflowError,
        TypeError,
    ) as error:  # out-of-memory errors are RuntimeErrors
        advice = f"lower max_model_len, {max_model_len}: {model_config}"
        raise ValueError(f"the model cannot be allocated on {device}, {advice}") from error
    if config.load_format == "dummy":
        _draw_weights(model, config.seed + rank)
    else:
        _read_weights(model, folder, rank, size)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    if reasons := {linear.reorder_weight() for linear in linears} - {None}:
        logger.info(
            "linear layers run without oneDNN's packed weights, and slower: %s", reasons.pop()
        )
    if ranks is not None:
        ranks.meet()
    return model.eval()


def _draw_weights(model: Model, seed: int) -> None:
    """For benchmarks: random weights with the usual scale."""
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed % 2**63)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, 0.02, generator=generator)


def _read_weights(model: Model, folder: Path, rank: int, size: int) -> None:
    """Fill the model's weights, or this rank's shares of them, from the safetensors files."""
    slots, files = _weight_slots(model), _weight_files(folder)
    # Old checkpoints carry rotary frequencies, and some tied ones a copy of the embedding.
    redundant = (
        "rotary_emb.inv_freq",
        "lm_head.weight" if model.config.tie_word_embeddings else "inv_freq",
    )
    missing = sorted(slots.keys() - files.keys())[:8]
    unexpected = sorted(
        name for name in files.keys() - slots.keys() if not name.endswith(redundant)
    )[:8]
    if missing or unexpected:
        lost, odd = (
            ", ".join(repr(name)[1:-1] for name in names) for names in (missing, unexpected)
        )
        named = f"missing: {lost}; unexpected: {odd}"
        raise ValueError(f"the weights in {folder} do not match its config.json; {named}")
    shapes = _weight_slots(Model(model.config))  # without memory, for the shapes of unsplit weights
    for file in sorted(set(files.values())):
        with _open_weights(file) as tensors:
            for name, slot in [each for each in slots.items() if files[each[0]] == file]:
                weight, shape = tensors.get_slice(name), list(shapes[name].shape)
                dtype, found = weight.get_dtype(), weight.get_shape()
                if found != shape or dtype not in ("F32", "F16", "BF16"):  # others may be quantised
                    raise ValueError(
                        f"{name} is {dtype} {found}, but must be F32, F16 or BF16 {shape}"
                    )
                part = weight[_share(name, slot, shape, rank, size)]
                if rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias")):
                    part = part[
                        :0
                    ]  # the ranks' results are added up, so only one may have the bias
                slot[: len(part)].copy_(part)
                slot[len(part) :].zero_()  # rows beyond the vocabulary
                if not torch.stack(slot.aminmax()).isfinite().all():
                    raise ValueError(f"{name} is not finite in {slot.dtype}: use a wider dtype")


@contextmanager
def _open_weights(file: Path) -> Iterator[safe_open]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is no file: convert the weights, or set load_format='dummy'"
        )
    try:
        with torch.device("cpu"), safe_open(file, framework="pt") as tensors:  # not torch's default
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is broken or cut short, or not what the index says: {error}"
        ) from error


def _weight_slots(model: Model) -> dict[str, Tensor]:
    """The name of a weight in the checkpoint → the part of our weights that it fills.

    q, k and v of a layer are the rows of its `qkv_proj`, in this order (4 query heads and 2 KV heads of
    dimension 8: rows 0-31, 32-47, 48-63); gate and up are the halves of its `gate_up_proj`.
    """
    config = model.share
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {  # our matrix → the checkpoint's projections, and their rows
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        },
    }
    slots: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        name = name if name.startswith("lm_head") else f"model.{name}"
        matrix = name.split(".")[-2]
        rows = parts.get(matrix, {matrix: len(weight)})
        for part, piece in zip(rows, weight.data.split(list(rows.values())), strict=True):
            slots[name.replace(matrix, part)] = piece
    return slots


def _weight_files(folder: Path) -> dict[str, Path]:
    """The name of each weight in the checkpoint → its file, which the index says if there is one."""
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict) and index:
        return {name: folder / str(file) for name, file in index.items()}
    with _open_weights(folder / "model.safetensors") as tensors:
        return dict.fromkeys(tensors.keys(), folder / "model.safetensors")


def _share(name: str, slot: Tensor, shape: list[int], rank: int, size: int) -> tuple[slice, ...]:
    """Which part of a weight of this shape goes to the slot: all of it, or some rows, or some columns.

    k_proj with 2 heads of 8 rows, on 4 ranks: ranks 0 and 1 take rows 0-7, ranks 2 and 3 rows 8-15
    """
    parts = []
    for total, mine in zip(shape, slot.shape, strict=True):
        first = rank * total // size // mine * mine if total > mine else 0
        if total > mine and name.startswith(("lm_head", "model.embed_tokens")):
            first = rank * mine  # the last share may be smaller
        parts.append(slice(first, first + mine))
    return tuple(parts)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer. None if there is none; prompts must then be token ids."""
    if not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.encode("a")  # finds wrong types in tokenizer_config.json
        return tokenizer
    except Exception as error:  # transformers and the parser in Rust raise many types
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error


def read_eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """All end-of-sequence ids: those of generation_config.json (else config.json) and the tokenizer's."""
    eos = read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = read_json(folder / "config.json").get("eos_token_id")
    eos = eos if isinstance(eos, list) else [eos]
    eos = [
        token_id
        for token_id in (*eos, getattr(tokenizer, "eos_token_id", None))
        if token_id is not None
    ]
    if not all(type(token_id) is int and token_id >= 0 for token_id in eos):
        raise ValueError(f"{folder} has eos_token_id {eos}, but token ids are ints from 0 on")
    return frozenset(eos)
