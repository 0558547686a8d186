"""Random adapters in PEFT's format, and the models of transformers that need none."""

import copy
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from nanopaged.model.checkpoint import TINY_MODEL

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(folder: Path, model: nn.Module, seed: int, std: float, **fields: object) -> Path:
    """Random A and B for projections of a model, in PEFT's files; `fields` are of adapter_config.json."""
    config = {"peft_type": "LORA", "bias": "none", "r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS}
    config |= {"megatron_core": "megatron.core", "fan_in_fan_out": False} | fields  # as PEFT writes them
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, linear in model.named_modules():
        if name.rpartition(".")[2] in config["target_modules"]:
            shapes = {"A": (config["r"], linear.in_features), "B": (linear.out_features, config["r"])}
            for half, shape in shapes.items():
                weight = std * torch.randn(shape, generator=generator)
                weights[f"base_model.model.{name}.lora_{half}.weight"] = weight
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def merge(model: nn.Module, folder: Path) -> nn.Module:
    """A copy of a model of transformers that needs no adapter: W + scale · B A in place of each W."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    weights, rank, merged = load_file(folder / "adapter_model.safetensors"), config["r"], copy.deepcopy(model)
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    for name, linear in merged.named_modules():
        a, b = (weights.get(f"base_model.model.{name}.lora_{half}.weight") for half in "AB")
        if a is not None and b is not None:
            linear.weight.data += scale * b @ a
    return merged


def random_adapters(num: int) -> dict[str, Path]:
    """Adapters of rank 8 on all projections of the tiny model, in a temporary folder."""
    folder, model = Path(tempfile.mkdtemp()), AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    return {str(i): make_adapter(folder / str(i), model, seed=i, std=0.05) for i in range(num)}
