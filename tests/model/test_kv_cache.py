"""The KV cache tensor: its layout, and the moves of blocks."""

from __future__ import annotations

import pytest
import torch

from nanopaged import LLM
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.sequence import Moves

CPU = torch.device("cpu")


def test_moves_keep_every_bit() -> None:
    """Blocks 3 and 0 go out and come back as 1 and 2, then two are copied. Other blocks stay unchanged."""
    cache = KVCache(KVShape(num_layers=3, num_kv_heads=2, head_dim=5, dtype=torch.float32), 5, 4, CPU, 3)
    cache.data.normal_()
    before = cache.data.clone()
    cache.move_blocks(Moves(swap_out=[(3, 2), (0, 1)]))
    cache.data[[3, 0]] = 0.0
    cache.move_blocks(Moves(swap_in=[(2, 1), (1, 2)]))
    assert torch.equal(cache.data[1], before[3])
    assert torch.equal(cache.data[2], before[0])
    assert torch.equal(cache.data[4], before[4])
    cache.move_blocks(Moves(copies=[(4, 0), (1, 3)]))
    assert torch.equal(cache.data[0], before[4])
    assert torch.equal(cache.data[3], before[3])


def test_the_order_of_moves_within_a_step() -> None:
    """Block 1 is swapped out and given to another request in the same step, which forks at once."""
    cache = KVCache(KVShape(1, 1, 2, torch.float32), 3, 4, CPU, num_host_blocks=2)
    cache.data[1], cache.host[0] = 1.0, 7.0
    cache.move_blocks(Moves(swap_out=[(1, 1)], swap_in=[(0, 1)], copies=[(1, 2)]))
    assert (cache.host[1] == 1.0).all()
    assert (cache.data[1:] == 7.0).all()


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_blocks": 10**9, "block_size": 10**6},
        {"num_blocks": 10**30},  # more than 64 bits can hold
        {"num_blocks": 2, "num_host_blocks": 10**30},
        {"num_blocks": 2, "block_size": 10**30},
    ],
)
def test_more_blocks_than_memory_has(sizes: dict[str, int]) -> None:
    """The tiny model in float32 has 2 · 4 layers · 2 heads · 32 · 4 B = 2 KiB of K/V a token."""
    num_blocks = max(sizes["num_blocks"], sizes.get("num_host_blocks", 0))
    block_size = sizes.get("block_size", 16)
    num_bytes = num_blocks * block_size * 2048
    message = f"{num_blocks:,} blocks of {block_size:,} tokens need {num_bytes:,} bytes on cpu, .*"
    with pytest.raises(ValueError, match=message + "lower num_blocks, num_host_blocks or block_size"):
        LLM(dtype="float32", device="cpu", **sizes)


def test_block_major_blocks_are_contiguous() -> None:
    """So all layers of a block are moved by one copy."""
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=5, dtype=torch.bfloat16)
    assert KVCache(shape, 4, 8, CPU).data[1].is_contiguous()
    assert shape.block_bytes(8) == 3 * 2 * 2 * 5 * 2 * 8
