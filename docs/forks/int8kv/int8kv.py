"""K/V in 8 bits: half the memory of bfloat16, so that the same memory has about twice as many blocks.

The K or V of one head of a token is a slot. It is stored as whole numbers from -127 to 127 and a scale of its
own, its largest number / 127, in the two bytes of a bfloat16:

    12.5 -31.75 0.7 0      scale 0.25, numbers 50 -127 3 0      read as  12.5 -31.75 0.75 0

The numbers are divided by the scale as it is stored, rounded to bfloat16, so each changes by at most half a
scale. A scale for a whole block would have to change, and all numbers with it, when a larger token joins.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nanopaged
from nanopaged.config import EngineConfig
from nanopaged.engine import LLMEngine
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model_runner import ModelRunner

SCALE = torch.bfloat16  # has the range of float32


def pack(kv: Tensor) -> Tensor:
    """K or V [..., head_dim] → slots, int8 [..., head_dim + 2]. What is not finite stays so."""
    kv = kv.float()
    # The minimum keeps zeros from being divided by zero.
    scale = kv.abs().amax(-1, keepdim=True).div_(127).clamp_min_(torch.finfo(SCALE).tiny).to(SCALE)
    numbers = (kv / scale).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), -1)


def unpack(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Slots, int8 [..., head_dim + 2] → K or V [..., head_dim]. Slots of zeros are zeros."""
    numbers, scale = slots.split((slots.shape[-1] - SCALE.itemsize, SCALE.itemsize), -1)
    return numbers.float().mul_(scale.view(SCALE)).to(dtype)


class Slots:
    """K or V of a layer, [num_blocks, num_kv_heads, block_size, head_dim], as far as attention uses a tensor.

    `slots[blocks, :, offsets] = k` stores, and the other two methods read.
    """

    def __init__(self, stored: Tensor, dtype: torch.dtype) -> None:
        self.stored, self.dtype = stored, dtype
        self.shape = (*stored.shape[:-1], stored.shape[-1] - SCALE.itemsize)

    def __setitem__(self, where: Any, kv: Tensor) -> None:
        self.stored[where] = pack(kv)

    def __getitem__(self, where: Any) -> Tensor:
        return unpack(self.stored[where], self.dtype)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        return unpack(self.stored.index_select(dim, index), self.dtype)


@dataclass(frozen=True)
class Int8Shape(KVShape):
    """The sizes of the K/V of one token, and the dtype in which it is computed."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of all layers. A head of 128 has 130 bytes; in bfloat16 it has 256."""
        return stored(self).block_bytes(block_size)


def stored(shape: KVShape) -> KVShape:
    """The shape of the tensor: the bytes of a slot count as numbers."""
    return KVShape(**vars(shape) | {"head_dim": shape.head_dim + SCALE.itemsize, "dtype": torch.int8})


class Int8Cache(KVCache):
    """A KV cache whose layers pack what is stored, and unpack what is read."""

    def __init__(self, shape: KVShape, **options: Any) -> None:
        super().__init__(stored(shape), **options)
        self.shape = shape  # that attention computes with

    def layer(self, layer: int) -> Any:
        """K and V of a layer, each a `Slots`."""
        return tuple(Slots(half, self.shape.dtype) for half in super().layer(layer))


@dataclass(frozen=True, kw_only=True)
class Int8Config(EngineConfig):
    """The options of an engine. Raises ValueError for backends whose kernels cannot read int8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("attention_backend", ("auto", "torch", "reference"))
        if self.attention_backend == "auto":
            self.keep("attention_backend", "torch")


class Int8Runner(ModelRunner):
    """A `ModelRunner` over an `Int8Cache`."""

    make_shape, make_cache = Int8Shape, Int8Cache


class Int8Engine(LLMEngine):
    make_config, make_runner = Int8Config, Int8Runner


class LLM(nanopaged.LLM):
    engine_class = Int8Engine
