"""Weights in 8 bits: a quarter of the memory of float32, half of that of bfloat16.

Activations are never rounded (weight-only quantisation). Each row of a matrix has a scale: the largest number
of the row becomes ±127, and the others the nearest whole numbers, so none changes by more than half a scale:

    a row    0.50  -0.20   0.03   -1.27        scale  1.27 / 127 = 0.01
    int8       50    -20      3    -127        read as  0.50  -0.20  0.03  -1.27

A row of W makes one number of y = x Wᵀ, so its scale is a factor of that number: y = (x Qᵀ) · scales, where Q
has the whole numbers. `Int8Linear` reads Q as float32, a few rows at a time: they fit in the cache of a CPU.
The embedding is rounded in the same way. If the output projection is tied to it, both are one table.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import nanopaged
from nanopaged.engine import LLMEngine
from nanopaged.model.checkpoint import load_model
from nanopaged.model.decoder import ALONE, Linear, Model, Operations
from nanopaged.model_runner import ModelRunner
from nanopaged.parallel import Ranks

TILE = 1 << 18  # numbers of a matrix that are read at once: as float32 they are 1 MiB
SMALLEST = 1e-28  # in place of the largest number of a row of zeros


def quantize(weight: Tensor, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """Round a matrix [num_rows, num_columns] → int8 of the same shape, and float32 scales [num_rows].

    If each of `ranks` has some of the columns, all find the largest number of a whole row.
    """
    largest = torch.maximum(weight.amax(1), -weight.amin(1)).float()
    ranks.all_reduce(largest, dist.ReduceOp.MAX)
    largest.clamp_(min=SMALLEST)
    # Multiplied first, which is exact for 16-bit checkpoints: half of the largest number is a tie, 63.5.
    rounded = weight.float().mul(127).div_(largest[:, None]).round_()
    return rounded.to(torch.int8), largest / 127


class Int8Linear(Linear):
    """y = x Wᵀ + b, with int8 `weight` [out_features, in_features] and float32 `scales` [out_features]."""

    def __init__(self, linear: Linear, rounded: Tensor, scales: Tensor) -> None:
        super().__init__(rounded.shape[1], rounded.shape[0], bias=False, ranks=linear.ranks)
        self.bias, self.scales = linear.bias, scales
        self.weight = nn.Parameter(rounded, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → [num_tokens, out_features], of the same dtype.

        The sums are in float32: in float16, those of numbers up to 127 could overflow.
        """
        floats = x.float()
        tiles = self.weight.split(max(1, TILE // x.shape[1]))
        out = torch.cat([F.linear(floats, rows.float()) for rows in tiles], dim=-1)
        out.mul_(self.scales)
        if self.bias is not None:
            out.add_(self.bias)
        return self.ranks.all_reduce(out.to(x.dtype))


class Int8Embedding(nn.Module):
    """The embedding, rounded in the same way: a look-up reads rows, and returns them in `dtype`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rounded, self.scales = quantize(weight)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.dtype, self.num_embeddings = weight.dtype, len(weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [num_tokens] → [num_tokens, hidden_size]."""
        return (self.weight[input_ids] * self.scales[input_ids, None]).to(self.dtype)


def quantize_model(model: Model) -> None:
    """Round the matrices of a loaded model, one after another; each frees the weights that it replaces."""
    table = Int8Embedding(model.embed_tokens.weight)
    for name in [name for name, part in model.named_modules() if isinstance(part, Linear)]:
        parent, _, own_name = name.rpartition(".")
        linear: Any = model.get_submodule(name)
        is_tied = linear is model.lm_head and model.config.tie_word_embeddings
        pair = (table.weight, table.scales) if is_tied else quantize(linear.weight, linear.ranks)
        setattr(model.get_submodule(parent), own_name, Int8Linear(linear, *pair))
    model.embed_tokens = table


class Int8Runner(ModelRunner):
    def make_model(self, operations: Operations, **options: Any) -> Model:
        """As `load_model`. Until the weights are rounded, they take their full memory."""
        model = load_model(operations=replace(operations, packed_linear=None), **options)
        model.ranks.meet(self.device)  # they compare their weights
        quantize_model(model)
        return model


class Int8Engine(LLMEngine):
    make_runner = Int8Runner


class LLM(nanopaged.LLM):
    engine_class = Int8Engine
