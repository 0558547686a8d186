"""Stage 8: the decode kernel and its reduce in Triton's interpreter, beside a softmax in float64."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tensors import difference, shown
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
from triton import language as tl  # noqa: E402
from triton.runtime.interpreter import interpreter_builder  # noqa: E402

from nanopaged.kernels.paged_attention import decode_kernel, reduce_kernel  # noqa: E402

NAN = math.nan
LN_2 = math.log(2)
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16


def launch(case: str, kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Run a kernel. An address outside of its tensors is an error here: it could end the process."""
    storages = [argument.untyped_storage() for argument in arguments if isinstance(argument, Tensor)]
    starts = np.array([storage.data_ptr() for storage in storages], dtype=np.uint64)
    ends = np.array([storage.data_ptr() + storage.nbytes() for storage in storages], dtype=np.uint64)

    with pytest.MonkeyPatch.context() as patch:
        for name, mask_place in (("create_masked_load", 1), ("create_masked_store", 2)):
            access = getattr(interpreter_builder, name)

            def guarded(*handles: Any, access: Any = access, mask_place: int = mask_place) -> Any:
                addresses, mask = np.broadcast_arrays(handles[0].data, handles[mask_place].data)
                used = addresses[mask][:, None]
                assert ((starts <= used) & (used < ends)).any(axis=1).all(), (
                    f"{case}: `{kernel.__name__}` uses an address outside of its tensors. Look at the "
                    "strides, the mask of each load and store, the entries of the block table, and the "
                    "bits: block ids are int32, and an address needs `.to(tl.int64)`."
                )
                return access(*handles)

            patch.setattr(interpreter_builder, name, guarded)
        try:
            kernel[grid](*arguments, **constants)
        except Exception as error:
            while error.__cause__ is not None:  # the first error has the line in the kernel
                error = error.__cause__
            raise error from None


@dataclass
class Case:
    """Contexts to attend to."""

    q: Tensor  # [sequences, heads, head_dim]
    contexts: list[tuple[Tensor, ...]]  # keys and values of each sequence, [keys, KV heads, head_dim]
    splits: list[tuple[int, int, int]]  # (sequence, first key, end)
    block_size: int
    gap: int = 3  # elements between two blocks of the cache


ZEROS = [0] * 40
SCATTERED = "Position p is in block table[p // BLOCK_SIZE], at offset p % BLOCK_SIZE"
BY_HAND = (  # rule, scores, ends of the splits, block size; one head, values 10 20 30 …
    ("The output of one key is its value, and the LSE its score", [2], [1], 4),
    ("Split 0 of the page", [1, 3], [2], 4),
    *((SCATTERED, ZEROS[:num_keys], [num_keys], size) for size in (1, 3, 16, 32) for num_keys in (5, 16, 35)),
    ("The maximum may come in any tile", [300 * p for p in range(40)], [40], 4),
    ("The maximum may come in any tile", [-300 * p for p in range(40)], [40], 4),
    ("Scores may be far below 0", [-5000] * 20, [20], 4),
    ("A split has the keys from its first one to its end", ZEROS, [16, 32, 40], 4),
    ("A split may begin anywhere, also in a block", ZEROS, [7, 30, 31, 40], 32),
    ("A split may have many tiles", [0] * 1100, [1100], 16),
)
SIZES = (  # KV heads, query heads of each, head_dim, block size, dtype
    (1, 1, 4, 4, FLOAT),
    (2, 3, 5, 3, FLOAT),
    (3, 1, 20, 1, FLOAT),
    (2, 2, 16, 16, HALF),
    (1, 6, 8, 4, BFLOAT),
)
SPLITS = [(0, 0, 16), (2, 0, 1), (0, 0, 0), (3, 0, 20), (0, 16, 17), (3, 20, 40), (0, 0, 0)]


def cases() -> Iterator[tuple[str, Case]]:
    for rule, scores, ends, block_size in BY_HAND:
        k = torch.tensor(scores).float().view(-1, 1, 1)
        v = 10 * torch.arange(1.0, len(scores) + 1).view(-1, 1, 1)
        splits = [(0, *keys) for keys in zip([0, *ends[:-1]], ends, strict=True)]
        yield rule, Case(torch.ones(1, 1, 1), [(k, v)], splits, block_size)
    far = torch.ones(20, 1, 1, dtype=HALF)
    # Of the five blocks two are so far away, one in each tile of keys.
    case = Case(far[:1], [(far, far)], [(0, 0, 20)], block_size=4, gap=2**31 // 3)
    yield "A cache may have more than 2^31 elements", case
    for heads, group, head_dim, block_size, dtype in SIZES:
        torch.manual_seed(head_dim)
        q = (3 * torch.randn(4, heads * group, head_dim)).to(dtype)
        contexts = [torch.randn(2, num, heads, head_dim).to(dtype).unbind() for num in (17, 0, 1, 40)]
        yield f"{heads} KV heads, {group} query heads of each", Case(q, contexts, SPLITS, block_size)
        broken = deepcopy(contexts)
        broken[3][0][30] = NAN
        yield "NaN appears in the outputs of its own split", Case(q, broken, SPLITS, block_size)


def store(case: Case) -> tuple[Tensor, ...]:
    """The caches of keys and values, the block tables, and the row of each sequence in them.

    Blocks lie in any order, with gaps between heads and blocks. Free slots hold NaN.
    """
    num_seqs, _, head_dim = case.q.shape
    size = case.block_size
    num_heads = case.contexts[0][0].shape[1]
    num_blocks = sum(-(-len(k) // size) for k, _ in case.contexts)
    head_stride = (size + 1) * head_dim
    strides = (2 * num_heads * head_stride + case.gap, head_stride, head_dim, 1)
    shape = (num_blocks, num_heads, size, head_dim)
    memory = torch.empty((num_blocks - 1) * strides[0] + 2 * num_heads * head_stride, dtype=case.q.dtype)
    caches = [memory.as_strided(shape, strides, first).fill_(NAN) for first in (0, num_heads * head_stride)]
    tables = torch.full((num_seqs + 2, num_blocks + 2), 1 << 30, dtype=torch.int32)  # no block's id
    rows = random.Random(8).sample(range(num_seqs + 2), num_seqs)
    free_ids = random.Random(9).sample(range(num_blocks), num_blocks)
    for row, context in zip(rows, case.contexts, strict=True):
        positions = torch.arange(len(context[0]))
        for column in range(-(-len(positions) // size)):
            tables[row, column] = free_ids.pop()
        for cache, x in zip(caches, context, strict=True):
            cache[tables[row, positions // size], :, positions % size] = x
    return *caches, tables, torch.tensor(rows)


@pytest.mark.parametrize(("rule", "case"), list(cases()))
def test_decode_kernel(rule: str, case: Case) -> None:
    """The outputs and LSE of all splits."""
    k_cache, v_cache, tables, rows = store(case)
    num_seqs, num_heads, head_dim = case.q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    dtype = case.q.dtype
    fused = torch.full((num_seqs, num_heads + 3, head_dim), NAN, dtype=dtype)
    q = fused[:, 1:-2]  # a part of a larger tensor, as in the engine
    q[:] = 2 * case.q
    output = torch.full((len(case.splits), num_heads, head_dim), NAN)
    lse = torch.full((len(case.splits), num_heads), NAN)
    title = f"{rule} (blocks of {case.block_size}, {dtype}, scale_log2 0.5)"
    launch(
        title,
        decode_kernel,
        (len(case.splits), num_kv_heads),
        *(q, k_cache, v_cache, tables, rows, torch.tensor(case.splits), output, lse),
        *(0.5, q.stride(0), *k_cache.stride()[:2], tables.stride(0)),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=case.block_size,
        TILE=16,
        GROUP_PAD=16,
        DIM_PAD=32,
        DOT=tl.float16 if dtype == HALF else tl.float32,
    )
    for split, (seq, first, end) in enumerate(case.splits):
        k, v = (x[first:end].double().repeat_interleave(group, dim=1) for x in case.contexts[seq])
        scores = LN_2 * torch.einsum("hd,khd->hk", case.q[seq].double(), k)
        right = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        for what, found, expected in (("output", output, right), ("LSE", lse, scores.logsumexp(-1) / LN_2)):
            precision = HALF if dtype == HALF else FLOAT
            wrong = difference(found[split].to(precision), expected.to(precision))
            where = f"split {split}, the keys {first} to {end - 1} of sequence {seq}"
            is_right = first == end or not wrong  # a split without keys is padding
            assert is_right, f"{title}: of the {what} that `decode_kernel` writes for {where}, {wrong}."


ALL_COUNT = "All splits count, also more than CHUNK"
LARGEST = "Outputs are weighed by 2^LSE, and the largest LSE is subtracted first"
OTHERS = "Sequence i has the splits firsts[i] to firsts[i + 1] - 1"
REDUCES = (  # rule, outputs, LSE, firsts; one head
    ("The two splits of the page", [18, 40], [3.3219, 2], [0, 2]),
    *((ALL_COUNT, range(num), [0] * num, [0, num]) for num in (1, 4, 5, 8, 9, 24)),
    *((LARGEST, range(9), [step * i for i in range(9)], [0, 9]) for step in (1, -1, 1000, -1000)),
    ("An LSE may be far below 0", [1, 2], [-5000, -5001], [0, 2]),
    *((OTHERS, [other, 1, 2, 3, other], [other, 0, 0, 0, other], [1, 4]) for other in (NAN, 500)),
    ("A sequence without splits has zeros", [1, 2, 3], [0, 1, 2], [0, 2, 2, 3, 3]),
)


def reduce_cases() -> Iterator[tuple[str, Tensor, Tensor, list[int]]]:
    for rule, outputs, lses, firsts in REDUCES:
        partial, lse = (torch.tensor([*numbers]).float() for numbers in (outputs, lses))
        case = f"{rule}, outputs {shown(partial[:8])}, LSE {shown(lse[:8])}"
        yield case, partial.view(-1, 1, 1), lse[:, None], firsts
    yield "3 heads and 5 numbers in each output", torch.randn(8, 3, 5), 5 * torch.randn(8, 3), [0, 6, 6, 8]


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(("rule", "partial", "lse", "firsts"), list(reduce_cases()))
def test_reduce_kernel(
    rule: str, partial: Tensor, lse: Tensor, firsts: list[int], dtype: torch.dtype
) -> None:
    _, num_heads, head_dim = partial.shape
    out = torch.full((len(firsts) - 1, num_heads, head_dim), NAN, dtype=dtype)
    title = f"{rule}, firsts {firsts}, CHUNK 4, {dtype}"
    tensors = (partial, lse, torch.tensor(firsts), out)
    launch(title, reduce_kernel, (len(out), num_heads), *tensors, HEAD_DIM=head_dim, DIM_PAD=16, CHUNK=4)
    for seq, (first, end) in enumerate(zip(firsts[:-1], firsts[1:], strict=True)):
        weights = (LN_2 * lse[first:end].double()).softmax(0)[..., None]
        wrong = difference(out[seq], (weights * partial[first:end]).sum(0).to(dtype))
        assert not wrong, f"{title}: of what `reduce_kernel` writes for sequence {seq}, {wrong}."
