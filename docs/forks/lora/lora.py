"""Several LoRA adapters in one batch: each request is computed with its own adapter, or with none.

    llm = LLM("Qwen/Qwen3-0.6B", lora_modules={"poet": "adapters/poet", "clerk": "adapters/clerk"})
    llm.generate([{"prompt": "Dear", "adapter": "poet"}, {"prompt": "Dear", "adapter": "clerk"}, "Dear"])

An adapter adds scale · B (A x) to W x. W x is computed for the whole batch, and B (A x) for each adapter and
its own rows:

    tokens    a b c d e f        a: a decode without adapter; b: one of "clerk"; c d e f: a prompt of "poet"
    rows      {"clerk": [1], "poet": [2, 3, 4, 5]}

K and V depend on the adapter, so its name is part of the cache salt. The runner reads it there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import nanopaged
from nanopaged.config import Params, check_int
from nanopaged.engine import LLMEngine
from nanopaged.model.checkpoint import _weight_targets, load_model
from nanopaged.model.decoder import Model
from nanopaged.model.model_config import read_json
from nanopaged.model_runner import ModelRunner
from nanopaged.prompts import Prompt, PromptProcessor
from nanopaged.sequence import Request, ScheduledBatch, StepResult

MARK = b"\xff"  # between a user's salt and the adapter's name: no UTF-8 text has this byte
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")  # a projection → our matrix with its rows
FUSED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")

# Fields of adapter_config.json with more than one good value, and those that need not be read: they are on
# the training, or matter only with others that must be off. Any other field, such as use_dora, must be off.
CHOICES = {"bias": ("none",), "use_rslora": (False, True), "init_lora_weights": (True, False, "gaussian")}
NOTES = {"base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode", "lora_dropout"}
NOTES |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "auto_mapping"}
NOTES |= {"megatron_core", "qalora_group_size"}

Part = tuple[Tensor, Tensor, int]
"""Of one projection: A [r, in_features], scale · B [out_features, r], and its first row in our matrix."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(nanopaged.EngineConfig):
    """With the option `lora_modules`: name → folder of an adapter in PEFT's format, loaded at start."""

    lora_modules: Mapping[str, str | Path] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_types("lora_modules", types=Mapping | None, description="a dict of names and folders")
        folders = {name: Path(folder).expanduser() for name, folder in (self.lora_modules or {}).items()}
        self.keep("lora_modules", folders)
        size = self.tensor_parallel_size
        if folders and size != 1:
            raise ValueError(f"tensor_parallel_size is {size}, but lora_modules needs 1: lower it")


def read_scale(folder: Path) -> tuple[int, float]:
    """The rank r, and the scale: lora_alpha / r, or with use_rslora lora_alpha / √r (arXiv 2312.03732)."""
    config = read_json(folder / "adapter_config.json")
    kind = config.pop("peft_type", None)
    if kind != "LORA":
        raise ValueError(f"adapter_config.json is missing, or its peft_type {kind!r} is not 'LORA'")
    rank = check_int("r", config.pop("r", None), minimum=1)
    alpha = config.pop("lora_alpha", None)
    if type(alpha) not in (int, float) or not abs(alpha) <= 1e6:
        raise ValueError(f"lora_alpha is {alpha!r}, but must be a number in [-1e6, 1e6]")
    for name, value in config.items():
        is_known = value in CHOICES[name] if name in CHOICES else name in NOTES or not value
        if not is_known:
            raise ValueError(
                f"{name}={value!r} in adapter_config.json is not supported: merge the adapter into its model"
            )
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def read_adapter(folder: Path, targets: Mapping[str, Tensor], like: Tensor) -> dict[str, list[Part]]:
    """What an adapter adds to each of our matrices, with the device and the dtype of `like`.

    Of the 64 rows of one matrix of ours q has 0 to 31, and v has 48 to 63:

        adapter of q and v    "layers.0.self_attn.qkv_proj" → [(A_q, B_q, 0), (A_v, B_v, 48)]

    Args: targets: the name of a weight in a checkpoint → the part of our weights that it fills.
    """
    rank, scale = read_scale(folder)
    parts: dict[str, list[Part]] = {}
    weights = load_file(folder / "adapter_model.safetensors")
    for name, target in targets.items():
        stem, projection = f"base_model.model.{name[: -len('weight')]}lora_", name.split(".")[-2]
        halves = [f"{stem}A.weight", f"{stem}B.weight"]
        if not name.endswith("_proj.weight") or not weights.keys() & halves:
            continue
        a, b = (weights.pop(half, torch.empty(0)).float() for half in halves)
        shapes = [list(a.shape), list(b.shape)]
        needed = [[rank, target.shape[1]], [len(target), rank]]
        if shapes != needed:
            raise ValueError(f"{halves} have the shapes {shapes}, but r and the model need {needed}")
        a, b = a.to(like), (scale * b).to(like)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ValueError(f"{halves} are not finite in {like.dtype}")
        matrix = name[len("model.") : -len(".weight")].replace(projection, FUSED.get(projection, projection))
        parts.setdefault(matrix, []).append((a, b, target.storage_offset() // target.shape[1]))
    if weights:
        raise ValueError(f"{sorted(weights)[:4]} are no projections of this model's layers: leave them out")
    if not parts:
        raise ValueError("adapter_model.safetensors has no weights")
    return parts


class LoraRunner(ModelRunner):
    """A `ModelRunner` with adapters. `rows`: name → int64 [its tokens], its rows of the flat batch."""

    def make_model(self, config: nanopaged.EngineConfig, **options: Any) -> Model:
        """The model, with hooks on the layers that adapters change. Raises ValueError for a bad adapter."""
        model = load_model(config, **options)
        folders = getattr(config, "lora_modules", {})
        targets = _weight_targets(Model(model.config)) if folders else {}  # of weights without memory
        matrices: dict[str, dict[str, list[Part]]] = {}  # matrix → adapter → what it adds
        for adapter, folder in folders.items():
            try:
                for matrix, parts in read_adapter(folder, targets, model.embed_tokens.weight).items():
                    matrices.setdefault(matrix, {})[adapter] = parts
            except (OSError, SafetensorError, TypeError, ValueError) as error:
                raise ValueError(f"adapter {adapter!r} in {folder} cannot be used: {error}") from error
        for matrix, by_adapter in matrices.items():
            model.get_submodule(matrix).register_forward_hook(partial(self.add, by_adapter))
        # `add` finds an adapter's tokens by their rows in the flat batch, so every layer computes all rows.
        model.forward = lambda *inputs, rows=...: Model.forward(model, *inputs)[rows]
        self.rows: dict[str, Tensor] = {}
        return model

    def add(self, by_adapter: dict[str, list[Part]], _: nn.Module, x: tuple[Tensor], y: Tensor) -> None:
        """Add scale · B (A x) to y [num_tokens, out_features] in place; x[0] is [num_tokens, in_features]."""
        for adapter in self.rows.keys() & by_adapter.keys():
            rows = self.rows[adapter]
            its_x = x[0][rows]
            for a, b, first in by_adapter[adapter]:
                y[:, first : first + len(b)].index_add_(0, rows, its_x @ a.T @ b.T)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """As `ModelRunner.execute`. A batch with adapters is not replayed from a CUDA graph."""
        first = 0
        rows: dict[str, list[int]] = {}
        graphs = self.graphs
        for seq in batch.sequences:
            _, mark, adapter = seq.request.cache_salt.partition(MARK)
            if mark:
                rows.setdefault(adapter.decode(), []).extend(range(first, first + seq.num_scheduled_tokens))
            first += seq.num_scheduled_tokens
        self.rows = {adapter: torch.tensor(rows[adapter], device=self.device) for adapter in rows}
        self.graphs = None if rows else graphs
        try:
            return super().execute(batch)
        finally:
            self.rows, self.graphs = {}, graphs


class LoraPrompts(PromptProcessor):
    """A `PromptProcessor` for prompts with an adapter: {"prompt": text, "adapter": name}."""

    def make_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> Request:
        """As `PromptProcessor.make_request`. Raises ValueError if there is no adapter of this name."""
        adapter, names = None, getattr(self.config, "lora_modules", {})
        if isinstance(prompt, Mapping):
            adapter, prompt = prompt.get("adapter"), {k: v for k, v in prompt.items() if k != "adapter"}
        if adapter is not None and not (isinstance(adapter, str) and adapter in names):
            raise ValueError(f"no adapter is named {adapter!r}: there are {sorted(names)}; name one, or None")
        request = super().make_request(request_id, prompt, params)
        request.cache_salt += MARK + adapter.encode() if adapter is not None else b""
        return request


class LoraEngine(LLMEngine):
    make_config, make_prompts, make_runner = LoraConfig, LoraPrompts, LoraRunner


class LLM(nanopaged.LLM):
    engine_class = LoraEngine
