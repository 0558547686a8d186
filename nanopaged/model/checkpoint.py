"""Load a model's weights and its tokenizer, from a folder or from the Hugging Face hub.

Checkpoints are in Hugging Face's format: config.json, one or several safetensors files, tokenizer files,
generation_config.json. The projections q, k and v of a checkpoint become one matrix of ours, and so do gate
and up: one large matrix product is faster than several small ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanopaged.checks.lengths import ResolvedConfig
from nanopaged.model.decoder import Model
from nanopaged.model.layers import allocate
from nanopaged.model.model_config import ModelConfig, read_json
from nanopaged.model.parallel import Ranks

TINY_MODEL = Path(__file__).parents[1] / "tiny"

CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def find_model(model: str | Path | None, with_weights: bool = True) -> Path:
    """The folder of a model: the tiny model for None, a local folder, or a download from the hub.

    Raises:
        FileNotFoundError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    if model is None:
        return TINY_MODEL
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):  # unlike Path's, False for a name that is too long
        return folder
    if os.path.exists(folder):
        raise FileNotFoundError(f"{folder} is a file: name the folder that holds config.json")
    if isinstance(model, Path) or model.startswith(("/", ".", "~")):  # no hub id
        raise FileNotFoundError(f"{folder} is not a folder: name the one that holds config.json, or a hub id")
    try:
        patterns = CONFIG_FILES + (["*.safetensors"] if with_weights else [])
        # Mistral's folders have all weights a second time, in a format of their own.
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{model!r} is not a folder here, and downloading it as a hub id failed: {error}"
        ) from error


def load_model(
    config: ResolvedConfig,
    model_config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Model:
    """The model of `folder` on `device`, ready to run.

    Args:
        config: `load_format` "auto" reads the safetensors files, "dummy" draws random weights from
            `seed`; `max_model_len` is the longest sequence, in tokens.
        ranks: the ranks that share the model; each reads its part of the weights, and waits for the others.

    Raises:
        FileNotFoundError: a weights file is missing.
        ValueError: the weights are broken, or do not fit `model_config`.
    """
    max_positions = config.max_model_len
    try:
        model = Model(model_config, ranks)
        allocate(model, dtype, device)
        model.rotary.compute(model_config, max_positions, dtype, device)
    except (RuntimeError, OverflowError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise ValueError(
            f"a model of these sizes for {max_positions} positions cannot be allocated on {device}: lower "
            f"max_model_len, or use a smaller model; {model_config}"
        ) from error
    if config.load_format == "dummy":
        _draw_weights(model, config.seed + (ranks.rank if ranks is not None else 0))
    else:
        _read_weights(model, folder)
    model.reorder_weights()
    if ranks is not None:
        ranks.meet()
    return model.eval()


def _draw_weights(model: Model, seed: int) -> None:
    """Random weights with the scale of a usual initialisation: for benchmarks; the output is meaningless."""
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed % 2**63)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, 0.02, generator=generator)


def _read_weights(model: Model, folder: Path) -> None:
    slots, files, tied = _weight_slots(model), _weight_files(folder), model.config.tie_word_embeddings
    missing = slots.keys() - files.keys()
    unexpected = {
        name
        for name in files.keys() - slots.keys()  # except these two, which are computed from other weights
        if not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq")
    }
    if missing or unexpected:
        raise ValueError(
            f"the weights in {folder} do not match its config.json"
            + _name_some("missing", missing)
            + _name_some("unexpected", unexpected)
        )
    whole = Model(model.config)  # the shapes of unsplit weights
    shapes = {name: list(slot.shape) for name, slot in _weight_slots(whole).items()}
    for file in set(files.values()):
        with _open_weights(file) as tensors:
            for name, slot in slots.items():
                if files[name] == file:
                    _copy_weight(name, tensors.get_slice(name), slot, shapes[name], model.ranks)


@contextmanager
def _open_weights(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is broken or cut short: {error}") from error


def _weight_slots(model: Model) -> dict[str, Tensor]:
    """The name of a weight in the checkpoint → the part of our weights that it fills.

    q, k and v of a layer are the rows of its `qkv_proj`, in this order (4 query heads and 2 KV heads of
    dimension 8: rows 0-31, 32-47, 48-63); gate and up are the halves of its `gate_up_proj`.
    """
    config = model.share
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {  # our matrix → the checkpoint's projections, and their rows
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    slots: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        name = name if name.startswith("lm_head") else f"model.{name}"
        fused = name.split(".")[-2]
        if fused in parts:
            pieces = weight.data.split(list(parts[fused].values()))
            for part, piece in zip(parts[fused], pieces, strict=True):
                slots[name.replace(fused, part)] = piece
        else:
            slots[name] = weight.data
    return slots


def _weight_files(folder: Path) -> dict[str, Path]:
    """The name of each weight in the checkpoint → its file, which the index says if there is one."""
    index_file = folder / "model.safetensors.index.json"
    if index_file.exists():
        names = read_json(index_file).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{index_file} needs a weight_map, from the names of weights to those of files")
        for name in set(names.values()):
            if Path(name).name != name:  # a link to elsewhere is fine: the hub's cache has nothing else
                raise ValueError(f"{index_file} names {name!r}, but weights must lie in the folder itself")
            if not os.path.isfile(folder / name):
                raise FileNotFoundError(f"{folder / name} is missing, though {index_file.name} names it")
        return {weight: folder / name for weight, name in names.items()}
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"no *.safetensors in {folder}: convert the weights, or use load_format='dummy'"
        )
    where: dict[str, Path] = {}
    for file in files:
        with _open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in where:
                    raise ValueError(f"{name} is in both {where[name]} and {file}: remove one of them")
                where[name] = file
    return where


def _copy_weight(name: str, weight: Any, slot: Tensor, shape: list[int], ranks: Ranks | None) -> None:
    """Copy a weight, or this rank's share of it, to its slot.

    Args:
        weight: of a safetensors file, from `get_slice`: only what is indexed is read.
        shape: that the whole weight must have.
    """
    if weight.get_shape() != shape:
        raise ValueError(
            f"{name} has shape {weight.get_shape()} in the checkpoint, but config.json asks for {shape}"
        )
    if ranks is not None and ranks.rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias")):
        slot.zero_()  # the ranks' results are added up, so only one may have the bias
        return
    tensor = weight[_share(name, slot, shape, ranks)]
    if not tensor.is_floating_point() or tensor.itemsize == 1:  # the floats of one byte are quantised
        raise ValueError(f"{name} is of {tensor.dtype}, but weights must be floats of 16, 32 or 64 bits")
    slot[: len(tensor)].copy_(tensor)
    slot[len(tensor) :].zero_()  # rows beyond the vocabulary
    if not torch.stack(slot.aminmax()).isfinite().all():
        raise ValueError(
            f"{name} has weights that are not finite in {slot.dtype}: the file is damaged, or needs a dtype "
            "with a wider range"
        )


def _share(name: str, slot: Tensor, shape: list[int], ranks: Ranks | None) -> tuple[slice, ...]:
    """Which part of a weight of this shape goes to the slot: all of it, or some rows, or some columns.

    k_proj with 2 heads of 8 rows, on 4 ranks: ranks 0 and 1 take rows 0-7, ranks 2 and 3 rows 8-15
    """
    rank, size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    parts = []
    for total, mine in zip(shape, slot.shape, strict=True):
        first = 0
        if total > mine and name.startswith(("lm_head", "model.embed_tokens")):
            first = rank * mine  # the last share may be smaller
        elif total > mine:
            first = rank * total // size // mine * mine
        parts.append(slice(first, first + mine))
    return tuple(parts)


def _name_some(what: str, names: set[str], most: int = 8) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"; {what}: {', '.join(sorted(names)[:most])}{more}"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer. None if there is none; prompts must then be token ids.

    Raises:
        ValueError: the tokenizer is broken, or has no fast version.
    """
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and the parser in Rust raise many types
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{folder} has only a slow tokenizer: save it again with a tokenizer.json")
    return tokenizer


def read_eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """All end-of-sequence ids: those of generation_config.json (else config.json) and the tokenizer's.

    A chat model often has several, e.g. one that ends a turn and one that ends the document.

    Raises:
        ValueError: one of these files is broken, or has something else as an id.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = read_json(folder / name).get("eos_token_id")
        if eos is not None:
            eos = eos if isinstance(eos, list) else [eos]
            if not all(type(token_id) is int and token_id >= 0 for token_id in eos):
                raise ValueError(f"{folder / name} has eos_token_id {eos}, but token ids are ints from 0 on")
            ids.update(eos)
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
