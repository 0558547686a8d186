"""Exercise 3.3, paging moves K/V, it does not change it: see docs/book/03-blocks.md."""

import random

import torch
from torch import Tensor

from nanopaged import LLM, LLMEngine, SamplingParams
from nanopaged.sequence import Sequence


def keys_in_order(engine: LLMEngine, seq: Sequence, layer: int) -> Tensor:
    """The keys of a sequence's computed tokens in the order of their positions.

    They are read from `engine.runner.kv_cache.data`: [num_computed_tokens, num_kv_heads, head_dim].
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

PROMPT = list(range(100, 130))
LAYERS = 4
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def make_engine(**config: int) -> LLMEngine:
    options = {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch",
        "enable_prefix_caching": False,
    }
    return LLM(**options, **config).engine


def keys_of_the_model() -> list[Tensor]:
    """What the model passes to attention in each layer: of the prompt at once, then token by token."""
    engine, keys = make_engine(block_size=64, num_blocks=4), [[] for _ in range(LAYERS)]
    attention = engine.runner.attention
    store = attention.store

    def record(layer: int, k: Tensor, v: Tensor) -> None:
        keys[layer].append(k.clone())
        store(layer, k, v)

    attention.store = record
    engine.add_request("A", PROMPT, PARAMS)
    while engine.has_unfinished_requests():
        engine.step()
    return [torch.cat(each) for each in keys]


def test_chunks_in_scattered_blocks() -> None:
    right = keys_of_the_model()
    engine = make_engine(block_size=4, num_blocks=32, max_num_batched_tokens=7)
    random.Random(0).shuffle(engine.block_manager.free_ids)
    engine.add_request("A", PROMPT, PARAMS)
    seq = engine.requests["A"].sequences[0]
    for _ in range(12):  # 5 chunks of the prompt, then 7 generated tokens
        engine.step()
        for layer in range(LAYERS):
            keys = keys_in_order(engine, seq, layer)
            shape = [seq.num_computed_tokens, *right[layer].shape[1:]]
            call = (
                f"With {seq.num_computed_tokens} computed tokens in blocks {seq.block_table}, layer {layer}"
            )
            assert list(keys.shape) == shape, (
                f"{call}: the keys have the shape {list(keys.shape)}, not {shape}."
            )
            for position in range(seq.num_computed_tokens):
                assert torch.allclose(keys[position], right[layer][position], atol=1e-4), (
                    f"{call}: the key of position {position} is not the one that the model has computed."
                )
