"""Exercise 3.2, a paged cache of your own: see docs/book/03-blocks.md."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Pages:
    """The K/V of one head of one sequence, in pages of `size` slots. All memory is NaN at the start."""

    k: Tensor  # [num_pages, size, dim]
    v: Tensor  # the same
    free: list[int]  # pages; the next one is taken from the end
    table: list[int]  # the pages of the sequence, in order

    def __init__(self, num_pages: int, size: int, dim: int) -> None:
        raise NotImplementedError

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store a token: k and v [dim]. A page is taken when the token needs its first slot."""
        raise NotImplementedError

    def attend(self, q: Tensor) -> Tensor:
        """Attention of a query over all tokens, page by page: q → out, both [dim]."""
        raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def filled(num_tokens: int, size: int, dim: int) -> tuple[Pages, Tensor, Tensor, list[int]]:
    """Pages in disorder with random tokens, these tokens' K and V, and the pages in the order of taking."""
    torch.manual_seed(num_tokens)
    pages, k, v = Pages(9, size, dim), torch.randn(num_tokens, dim), torch.randn(num_tokens, dim)
    assert sorted(pages.free) == list(range(9)), f"The free list of 9 pages begins as {pages.free}."
    pages.free[:] = [4, 0, 7, 2, 8, 1, 6, 3, 5]
    k[:, 0], taken = 1, []
    for i in range(num_tokens):
        if i % size == 0:
            taken.append(pages.free[-1])
        pages.append(k[i], v[i])
        assert list(pages.table) == taken, (
            f"After {i + 1} calls of append, with pages of {size}, the table is {pages.table}, but from the "
            f"end of the free list come the pages {taken}."
        )
    return pages, k, v, taken


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(k @ q / math.sqrt(len(q)), dim=0) @ v


def test_tokens_lie_in_their_pages() -> None:
    for num_tokens, size in ((1, 4), (8, 4), (13, 4), (5, 1)):
        pages, k, v, taken = filled(num_tokens, size, dim=6)
        for name, memory, right in (("k", pages.k, k), ("v", pages.v, v)):
            shape = list(memory.shape)
            assert shape == [9, size, 6], f"{name} has the shape {shape}, not {[9, size, 6]}."
            for i in range(num_tokens):
                page, offset = taken[i // size], i % size
                assert torch.equal(memory[page, offset], right[i]), (
                    f"Token {i} belongs to page {page}, offset {offset}, but its {name} is not there."
                )
            written = int((~memory.isnan()).any(-1).sum())
            assert written == num_tokens, f"{num_tokens} tokens have written {written} slots of {name}."


def test_attention_is_right() -> None:
    for num_tokens, size, dim in ((1, 4, 8), (8, 4, 16), (13, 4, 8), (20, 8, 32)):
        pages, k, v, _ = filled(num_tokens, size, dim)
        for first in (0, -1000, 1000):  # the exponential function makes 0 or infinity of the large scores
            q = torch.randn(dim)
            q[0] = first
            scores = (k @ q / math.sqrt(dim)).tolist()
            error = float((pages.attend(q) - attention(q, k, v)).abs().max())
            assert error < 1e-3, (
                f"With {num_tokens} tokens of dimension {dim} in pages of {size}, and scores from "
                f"{min(scores):.0f} to {max(scores):.0f}, attend(q) is off by {error:.2g} from "
                "softmax(K q / sqrt(dim)) V."
            )


def test_it_reads_through_the_table() -> None:
    pages, k, v, taken = filled(11, 4, dim=8)
    q, page = torch.randn(8), pages.free.pop()
    k, v = k.clone(), v.clone()
    k[4:8], v[4:8] = torch.randn(2, 4, 8)
    pages.k[page], pages.v[page], pages.table[1] = k[4:8], v[4:8], page
    pages.k[taken[1]], pages.v[taken[1]] = math.nan, math.nan
    assert torch.allclose(pages.attend(q), attention(q, k, v), atol=1e-4), (
        f"If page {taken[1]} of the table is replaced by page {page} with other K/V, attend(q) is not the "
        "attention over that: it does not read K/V through the table."
    )


class Largest(TorchFunctionMode):
    """The most numbers in a tensor that an operation makes, views apart."""

    def __init__(self, pages: Pages) -> None:
        super().__init__()
        self.memory = {memory.untyped_storage().data_ptr() for memory in (pages.k, pages.v)}
        self.num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.memory:
            self.num = max(self.num, out.numel())
        return out


def test_pages_are_not_copied_together() -> None:
    pages, _, _, _ = filled(20, 4, dim=16)
    with Largest(pages) as largest:
        pages.attend(torch.randn(16))
    assert largest.num <= 4 * 16, (
        f"attend(q) makes a tensor of {largest.num} numbers, but a page has {4 * 16}: "
        "it copies pages together."
    )
