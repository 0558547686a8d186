"""Exercise 5.3, read a shared prefix once: see docs/book/05-attention.md."""

import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanopaged.attention.reference_backend import reference_paged_attention
from nanopaged.attention.torch_backend import gather_context  # noqa: F401  for the solution


def combine(outs: Tensor, lses: Tensor) -> Tensor:
    """Exercise 2, for parts that are not empty: outs [parts, …, head_dim], lses [parts, …]."""
    return (lses.softmax(0)[..., None] * outs).sum(0)


def shared_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix: list[int],
    suffixes: list[list[int]],
    context_lens: list[int],
    scale: float,
) -> Tensor:
    """Attention of one query of each sequence; the prefix is read once.

    Args:
        q: [num_seqs, num_heads, head_dim], returned in the same shape.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        prefix: the full blocks that every block table begins with.
        suffixes: for each sequence the other blocks of its table.
        context_lens: for each sequence its keys, those of the prefix included.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


class Reads(TorchDispatchMode):
    """Counts how often each block of a cache is read: by its id in an index, or by any operation on a view.

    Attributes:
        times: block → the share of it that was read, K and V together; 2 if both were read once.
    """

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.memory = cache.untyped_storage().data_ptr()  # [K and V, blocks, …]
        self.num_blocks, self.block = cache.shape[1], cache[0, 0].numel()
        self.times: Counter[int] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not self.holds(out):  # else it is a view, and nothing is read
            for i, x in enumerate(args):
                if self.holds(x):
                    self.note(x, args[i + 1 :], out)
        return out

    def holds(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() == self.memory

    def note(self, x: Tensor, others: Any, out: Tensor) -> None:
        indices: list[tuple[int, Any]] = []  # (dimension of x, ids)
        if len(others) == 2 and isinstance(others[0], int):  # index_select
            indices = [(others[0], others[1])]
        elif len(others) == 1 and isinstance(others[0], list):  # x[ids]
            indices = list(enumerate(others[0]))
        for dim, ids in indices:
            if isinstance(ids, Tensor) and x.stride(dim) == self.block:
                for block in ids.flatten().tolist():
                    self.times[block % self.num_blocks] += out.numel() / ids.numel() / self.block
                return
        offsets = torch.tensor(x.storage_offset())
        for dim in range(x.dim()):
            offsets = offsets[..., None] + torch.arange(x.shape[dim] if x.stride(dim) else 1) * x.stride(dim)
        for offset in offsets.flatten().tolist():
            self.times[offset // self.block % self.num_blocks] += 1 / self.block


def run(num_prefix: int, own: list[int]) -> tuple[Tensor, Tensor, Counter[int], list[int], list[list[int]]]:
    """One decode: the outputs, those of the reference backend, what was read, the prefix, the suffixes."""
    torch.manual_seed(num_prefix)
    size, cache = 4, torch.randn(2, 90, 2, 4, 8)
    k_cache, v_cache = cache
    ids = random.Random(num_prefix).sample(range(90), 90)
    prefix = [ids.pop() for _ in range(num_prefix)]
    suffixes = [[ids.pop() for _ in range(-(-n // size))] for n in own]
    context_lens = [num_prefix * size + n for n in own]
    q, reads = torch.randn(len(own), 4, 8), Reads(cache)
    with reads:
        got = shared_decode(q, k_cache, v_cache, prefix, suffixes, context_lens, 0.3)
    want = [
        reference_paged_attention(x, k_cache, v_cache, prefix + suffix, n, 0.3)
        for x, suffix, n in zip(q, suffixes, context_lens, strict=True)
    ]
    return got, torch.stack(want), reads.times, prefix, suffixes


def test_the_outputs_are_those_of_the_reference_backend() -> None:
    for num_prefix, own in ((10, [1, 4, 5, 10, 11, 12]), (1, [3]), (20, [9, 2])):
        got, want, *_ = run(num_prefix, own)
        assert got.shape == want.shape, (
            f"shared_decode gives {list(got.shape)} instead of {list(want.shape)}."
        )
        error = (got - want).abs().amax((1, 2))
        worst = int(error.argmax())
        assert error[worst] < 1e-4, (
            f"With {num_prefix} blocks of prefix and {own[worst]} own keys, "
            f"an output is wrong by {error[worst]:.2g}."
        )


def test_the_prefix_is_read_once() -> None:
    *_, reads, prefix, suffixes = run(10, [1, 4, 5, 10, 11, 12])
    times = sum(reads[block] for block in prefix) / len(prefix) / 2
    assert times < 1.01, f"For six sequences, shared_decode reads the prefix {times:.1f} times."
    others = set(reads) - {block for blocks in [prefix, *suffixes] for block in blocks}
    assert not others, f"shared_decode reads {len(others)} blocks that belong to none of the sequences."
    times = max(reads[block] for blocks in suffixes for block in blocks) / 2
    assert times < 1.01, f"shared_decode reads a block of one sequence {times:.1f} times."
