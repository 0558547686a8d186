"""Stage 9: shares and layers of one rank beside the source's, and ranks as threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import engines_own
from tensors import check, difference, shown
from torch import Tensor

from nanopaged import EngineConfig, parallel
from nanopaged.model.checkpoint import TINY_MODEL, _rank_slices, _weight_targets, load_model
from nanopaged.model.decoder import ALONE, Linear, Model
from nanopaged.model.model_config import read_model_config
from nanopaged.parallel import Ranks

parallel.STEP_TIMEOUT = 15.0  # seconds that rank 0 waits for the others
SECONDS = 20.0  # for all ranks
CPU = torch.device("cpu")
TINY = read_model_config(TINY_MODEL)
SIZES = {"hidden_size": 8, "intermediate_size": 16, "head_dim": 2, "num_layers": 1}
SMALL = replace(TINY, **SIZES, qkv_bias=True, o_bias=True)


class EqualRanks(Ranks):
    """One of `size` ranks, without the others: as if they had the same x."""

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return x.mul_(self.size)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=1)


def equal_ranks(size: int, rank: int = 0) -> Ranks:
    return EqualRanks(rank, size, store=None)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [(8, 2, 24), (8, 8, 6), (12, 6, 12), (6, 2, 24), (12, 4, 6), (12, 12, 24)])
def test_for_rank_of(sizes: tuple[int, int, int], size: int) -> None:
    """Ranks divide heads and columns, and round up the vocabulary. What cannot be divided is a ValueError."""
    num_heads, num_kv_heads, width = sizes
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    config = replace(SMALL, **heads, intermediate_size=width, vocab_size=97)

    def for_rank_of(size: int) -> Any:
        try:
            return config.for_rank_of(size)
        except ValueError:
            return "a ValueError"

    rule = f"{num_heads} query heads, {num_kv_heads} KV heads, intermediate_size {width}, 97 tokens"
    check(rule, for_rank_of, size)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", [16, 97, 5])
def test__rank_slices(vocab_size: int, size: int) -> None:
    """Where a target has fewer rows or columns than the weight, a rank takes its own. KV heads are shared."""
    config = replace(SMALL, vocab_size=vocab_size, tie_word_embeddings=False)
    whole = _weight_targets(Model(config))
    for rank in range(size):
        ranks = equal_ranks(size, rank)
        for name, target in _weight_targets(Model(config, ranks)).items():
            shape = list(whole[name].shape)
            weight = torch.arange(math.prod(shape)).view(shape)
            rule = f"Rank {rank} of {size} has room for {list(target.shape)} of a weight that holds 0 1 2 …"
            check(rule, _rank_slices, name, torch.zeros(target.shape), shape, ranks, view=weight.__getitem__)


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns on each rank. The ranks are threads, connected as processes would be."""
    store = dist.HashStore()
    all_ranks = [Ranks(rank, size, store) for rank in range(size)]  # connected until all are done
    results: list[Any] = [RuntimeError("it waits for another rank in vain")] * size

    def run(ranks: Ranks) -> None:
        try:
            ranks.meet(CPU)
            results[ranks.rank] = work(ranks)
        except Exception as error:
            results[ranks.rank] = error

    threads = [Thread(target=run, args=(ranks,), daemon=True) for ranks in all_ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:  # a RuntimeError may say only that another rank is gone
        raise min(errors, key=lambda error: isinstance(error, RuntimeError))
    return results


WHOLE = torch.arange(1.0, 7.0).view(2, 3)
GATHERED = "Each rank has the columns of all ranks"


@pytest.mark.parametrize(("function", "rule", "x"), [
    ("all_reduce", "On each rank x becomes the sum of the x of all ranks, and is returned", WHOLE),
    ("all_reduce", "The sum has the dtype of x", WHOLE.bfloat16()),
    ("gather", GATHERED, WHOLE),
    ("gather", f"{GATHERED}, also if x is a transposed one; a contiguous one is sent", WHOLE.T),
])  # fmt: skip
def test_an_exchange(function: str, rule: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    send = dist.all_gather

    def checked(parts: list[Tensor], x: Tensor, **options: Any) -> None:
        assert x.is_contiguous(), f"{rule}: not every group takes another x."
        send(parts, x, **options)

    monkeypatch.setattr(dist, "all_gather", checked)
    xs = [x.clone(), 10 * x, 100 * x]
    if function == "all_reduce":
        right = after = [111 * x] * 3
    else:
        after = [x, 10 * x, 100 * x]
        right = [torch.cat(after, dim=1)] * 3
    for rank, found in enumerate(on_ranks(3, lambda ranks: getattr(ranks, function)(xs[ranks.rank]))):
        wrong = difference(found, right[rank]) or difference(xs[rank], after[rank])
        assert not wrong, f"{rule}: {shown(x)} times 1, 10, 100 on three ranks; on rank {rank} {wrong}."


def fill(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    module.requires_grad_(False).to(dtype).to_empty(device=CPU)
    for weight in module.parameters():
        weight.data.normal_()
    return module


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_forward(size: int, bias: bool, packed: bool) -> None:
    """x Wᵀ + b, summed over all `ranks` of the layer."""
    linear = fill(Linear(3, 5, bias, equal_ranks(size)))
    if packed:
        weight, linear.weight = linear.weight, None
        linear.packed = lambda x: F.linear(x, weight, linear.bias)
    check(f"A linear layer, bias {bias}, packed {packed}, ranks {size}", linear.forward, torch.randn(4, 3))


@pytest.mark.parametrize(("vocab_size", "size"), [(8, 2), (11, 2), (10, 4), (4, 4)])
def test__embed_rows(vocab_size: int, size: int) -> None:
    """A rank has some rows of the embedding. Other tokens are zeros, and the ranks add up."""
    ids = 3 * torch.arange(9) % vocab_size
    for rank in range(size):
        model = fill(Model(replace(SMALL, vocab_size=vocab_size), equal_ranks(size, rank)))
        check(f"Rank {rank} of {size}, {vocab_size} tokens in all", model._embed_rows, ids)


@pytest.mark.parametrize(("rule", "size", "dtype"), [
    ("With one rank the logits are hidden · lm_headᵀ", 1, torch.float32),
    ("Logits have the dtype of the model", 1, torch.bfloat16),
    ("Logits of all ranks are gathered, and those beyond the 11 tokens cut off", 2, torch.float32),
    ("Logits have the dtype of the model", 4, torch.bfloat16),
])  # fmt: skip
def test_logits(rule: str, size: int, dtype: torch.dtype) -> None:
    model = fill(Model(replace(SMALL, vocab_size=11), equal_ranks(size)), dtype)
    check(rule, model.logits, torch.randn(3, SMALL.hidden_size).to(dtype))


def run_model(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of a few tokens."""

    def attention(layer: int, *inputs: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in inputs)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    config = EngineConfig(max_model_len=32, tensor_parallel_size=ranks.size)
    model = load_model(config, TINY, TINY_MODEL, torch.float32, CPU, ranks)
    hidden = model(torch.arange(500, 508), torch.arange(8), attention)
    return hidden, model.logits(hidden)


def test_a_model_on_ranks() -> None:
    """Several ranks compute what one process computes."""
    with engines_own():
        right_hidden, right_logits = run_model(ALONE)
    for size in (2, 4):
        for rank, (hidden, logits) in enumerate(on_ranks(size, run_model)):
            wrong = difference(hidden, right_hidden) or difference(logits, right_logits)
            assert not wrong, f"The tiny model on {size} ranks: of the result of rank {rank}, {wrong}."
