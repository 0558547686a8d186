"""Exercise 10.1, bytes of a block on a rank: see docs/book/10-parallel.md."""

from dataclasses import replace
from pathlib import Path

import torch

import nanopaged
from nanopaged.kv_cache import KVShape
from nanopaged.model.model_config import ModelConfig, read_model_config


def rank_bytes(config: ModelConfig, size: int) -> int:
    """Bytes of a block of 16 tokens, in bfloat16, on one of `size` ranks.

    Use `config.num_layers`, `config.num_kv_heads` and `config.head_dim`: those of the whole model.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

TINY = read_model_config(Path(nanopaged.__file__).parent / "tiny")
MODELS = {  # layers, query heads, KV heads, head_dim
    "Llama-3-8B": (32, 32, 8, 128),
    "Llama-3-70B": (80, 64, 8, 128),
    "OPT-13B": (40, 40, 40, 128),
    "the tiny model": (4, 8, 2, 32),
    "a model with one KV head": (3, 16, 1, 64),
    "a model with 6 KV heads": (5, 24, 6, 96),
}


def test_the_engine_allocates_as_much() -> None:
    for name, (layers, heads, kv_heads, head_dim) in MODELS.items():
        config = replace(
            TINY,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=480,
        )
        for size in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40):
            try:
                rank_config = config.for_rank_of(size)
            except ValueError:  # this number of ranks cannot divide the model
                continue
            right = KVShape(
                rank_config.num_layers, rank_config.num_kv_heads, rank_config.head_dim, torch.bfloat16
            ).block_bytes(16)
            given = rank_bytes(config, size)
            heads = f"{rank_config.num_kv_heads} of {kv_heads} KV heads"
            assert given == right, (
                f"{name}: rank_bytes(config, {size}) is {given}, but {heads} take {right} bytes."
            )
