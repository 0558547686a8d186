"""Stage 8: the decode kernel and its reduce, run by Triton's interpreter on small cases.

Each test has a process of its own, because a wrong address may end the process.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
try:
    import resource

    from nanopaged.kernels import paged_attention as kernels
except ImportError as problem:
    pytest.skip(
        f"Stage 8 needs Triton, which pip installs on Linux with x86-64 only: {problem}",
        allow_module_level=True,
    )
if not kernels.INTERPRETED:
    pytest.skip("Stage 8 needs Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

from nanopaged.kv_cache import KVCache, KVShape  # noqa: E402

torch.set_num_threads(1)
TILE = 16  # keys; in the engine 64 to 128
CPU_SECONDS = 20  # for one test
NAN = math.nan


# ── a process for each test ───────────────────────────────────────────────────────────────────────

NOTE = mmap.mmap(-1, 1 << 14)  # what a child process says: the launch that it is at, or what is wrong


ENDLESS: list[str] = []  # the launch that did not end: one is enough to wait for


def note(text: str) -> None:
    NOTE[:] = text.encode()[: len(NOTE)].ljust(len(NOTE), b"\0")


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a child process, and say what is wrong, also if it crashes or does not end."""

    @wraps(test)
    def wrapper() -> None:
        if ENDLESS:
            pytest.skip("a launch did not end")
        note("The first launch")
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
            os._exit(failed(test))
        _, status = os.waitpid(child, 0)
        said = NOTE[:].rstrip(b"\0").decode(errors="replace")
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended == signal.SIGXCPU:
            ENDLESS.append(said)
            raise AssertionError(f"{said} does not end: is there a loop that misses its end?")
        assert ended == 0, (
            f"{said} crashes (signal {ended}): it reads or writes at an address outside its tensors. Look at "
            "the strides, at the mask of each load and store, and at the entries of the block table."
        )
        assert status == 0, said

    return wrapper


def failed(test: Callable[[], None]) -> bool:
    """Run a test, and note what is wrong."""
    try:
        test()
    except AssertionError as error:
        note(str(error).split("\nassert ")[0])  # without what pytest adds
    except Exception as error:
        call = NOTE[:].rstrip(b"\0").decode()
        note(f"{call} stops with {told(error)}.")
    else:
        return False
    return True


def told(error: BaseException) -> str:
    """An error inside a kernel, with its line: the interpreter raises another error from it."""
    while error.__cause__ is not None:
        error = error.__cause__
    place, frame = "", error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name in ("decode_kernel", "reduce_kernel"):
            place = f" (paged_attention.py:{frame.tb_lineno})"
        frame = frame.tb_next
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{place}"


# ── cases ─────────────────────────────────────────────────────────────────────────────────────────


class Case:
    """Contexts in scattered blocks, between NaN: rows of block tables, queries, and the dense result."""

    def __init__(
        self,
        lens: Sequence[int],
        block_size: int = 4,
        heads: tuple[int, int] = (1, 1),
        head_dim: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Args: heads: query heads and KV heads."""
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.lens, self.block_size, self.head_dim = list(lens), block_size, head_dim
        self.num_heads, self.num_kv_heads = heads
        needed = [-(-n // block_size) for n in lens]
        ids = rng.sample(range(sum(needed) + 5), sum(needed))
        self.cache = KVCache(
            KVShape(2, heads[1], head_dim, dtype), sum(needed) + 5, block_size, torch.device("cpu")
        )
        self.cache.data.fill_(NAN)
        self.k_cache, self.v_cache = self.cache.layer(1)
        self.rows = rng.sample(range(len(lens) + 2), len(lens))  # of the block tables
        # What lies behind a context in a block table must not be read.
        self.tables = torch.full((len(lens) + 2, max(needed) + 2), 1 << 30, dtype=torch.int32)
        self.q = torch.randn(len(lens), heads[0] + 3, head_dim).to(dtype)[
            :, 1:-2
        ]  # as out of a fused projection
        self.keys = [torch.randn(n, heads[1], head_dim).to(dtype) for n in lens]
        self.values = [torch.randn(n, heads[1], head_dim).to(dtype) for n in lens]
        self.table_of = [[ids.pop() for _ in range(n)] for n in needed]

    def store(self) -> None:
        """Write keys and values to their slots."""
        for row, table, k, v in zip(self.rows, self.table_of, self.keys, self.values, strict=True):
            self.tables[row, : len(table)] = torch.tensor(table)
            for p in range(len(k)):
                self.k_cache[table[p // self.block_size], :, p % self.block_size] = k[p]
                self.v_cache[table[p // self.block_size], :, p % self.block_size] = v[p]

    def inputs(self) -> tuple[Tensor, ...]:
        self.store()
        lens, rows = torch.tensor(self.lens), torch.tensor(self.rows)
        return self.q, self.k_cache, self.v_cache, self.tables, rows, lens

    def partial(self, call: str, num_splits: int, scale_log2: float = 1.0) -> tuple[Tensor, Tensor]:
        """`decode_kernel` alone: its outputs [seqs, heads, splits, head_dim] and LSE [seqs, heads, "
        "splits]."""
        inputs, (num_seqs, heads) = self.inputs(), self.q.shape[:2]
        # Before NaN, which must stay.
        shape = num_seqs, heads, num_splits, self.head_dim
        whole, end = (
            torch.full((math.prod(shape) + 16 * num_splits * self.head_dim + 16,), NAN),
            math.prod(shape),
        )
        out = whole[:end].view(shape)
        lses = torch.full((num_seqs * heads + 16, num_splits), NAN)

        note(call)
        kernels.decode_kernel[(num_seqs, self.num_kv_heads, num_splits)](
            *inputs,
            out,
            lses,
            scale_log2,
            self.q.stride(0),
            *self.k_cache.stride()[:2],
            self.tables.stride(0),
            GROUP=heads // self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.block_size,
            NUM_SPLITS=num_splits,
            TILE=TILE,
            GROUP_PAD=16,
            DIM_PAD=16,
            DOT=kernels.tl.float32,
        )
        assert whole[end:].isnan().all(), (
            f"{call} writes an output beyond its {heads} heads, {num_splits} splits or {self.head_dim} dims: "
            "the store needs a mask."
        )
        assert lses[num_seqs * heads :].isnan().all(), (
            f"{call} writes an LSE beyond its {num_seqs} · {heads} · {num_splits}: the store needs a mask."
        )
        return out, lses[: num_seqs * heads].view(num_seqs, heads, num_splits)

    def decode(self, call: str, num_splits: int, scale: float) -> Tensor:
        """Both kernels, as `paged_decode` launches them, with small tiles."""
        settings = kernels.decode_settings

        def small(*args: Any) -> tuple[dict[str, Any], dict[str, int]]:
            constants, options = settings(*args)
            return constants | {"TILE": TILE}, options

        kernels.decode_settings = small
        note(call)
        out = kernels.paged_decode(*self.inputs(), scale, num_splits)
        kernels.decode_settings = settings
        return out

    def dense(self, scale: float) -> Tensor:
        """[seqs, heads, head_dim], in float64; zeros without keys."""
        group, out = self.num_heads // self.num_kv_heads, torch.zeros(self.q.shape, dtype=torch.float64)
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            for head in range(self.num_heads if len(k) else 0):
                scores = scale * (k[:, head // group].double() @ self.q[i, head].double())
                out[i, head] = scores.softmax(0) @ v[:, head // group].double()
        return out


def simple(scores: Sequence[float], values: Sequence[float], block_size: int = 4) -> Case:
    """One sequence, one head: scale · q · k are the scores, and all dims of a value are the same."""
    case = Case([len(scores)], block_size)
    case.q[:] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    case.keys[0][:, 0, 0] = torch.tensor(scores)
    case.values[0][:] = torch.tensor(values).view(-1, 1, 1)
    return case


def near(got: float, expected: float) -> bool:
    return math.isclose(got, expected, rel_tol=1e-4, abs_tol=1e-4)


def difference(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> str:
    """Where two tensors differ most, in words; "" if they do not."""
    if torch.allclose(got.double(), expected.double(), atol=tolerance, rtol=tolerance):
        return ""
    distance = (got.double() - expected.double()).abs().nan_to_num(math.inf, math.inf)
    where = [int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)]
    return (
        f"at {where} there is {got[tuple(where)].item():.5g} instead of {expected[tuple(where)].item():.5g}"
    )


# ── decode_kernel ─────────────────────────────────────────────────────────────────────────────────


@alone
def test_one_key() -> None:
    out, lse = simple([2.0], [7.0]).partial("decode_kernel of one key", 1)
    got = out.flatten().tolist()
    assert all(near(x, 7.0) for x in got), f"decode_kernel of one key with the value 7 7 7 7 writes {got}."
    assert near(lse.item(), 2.0), (
        f"decode_kernel of one key with the score 2 (scale_log2 · q · k) writes the LSE {lse.item():g} "
        "instead of 2."
    )


@alone
def test_two_keys_by_hand() -> None:
    """Chapter 9: scores 1 and 3 in base 2, values 10 and 20: m = 3, l = 1.25."""
    out, lse = simple([1.0, 3.0], [10.0, 20.0]).partial("decode_kernel of two keys", 1)
    assert near(out[0, 0, 0, 0].item(), 18.0), (
        f"Scores 1 and 3 (in base 2), values 10 and 20: decode_kernel writes {out[0, 0, 0, 0].item():g} "
        "instead of 18 = (10 · 2^-2 + 20) / 1.25; the slots behind hold NaN."
    )
    assert near(lse.item(), 3.3219), (
        f"Scores 1 and 3 (in base 2): decode_kernel writes the LSE {lse.item():g} instead of 3.3219 = 3 + "
        "log2(1.25)."
    )
    out, _ = simple([1.0, 3.0], [10.0, 20.0]).partial("decode_kernel with scale_log2 = 0", 1, 0.0)
    assert near(out[0, 0, 0, 0].item(), 15.0), (
        f"With scale_log2 = 0 all scores are 0, and the values 10 and 20 give 15; decode_kernel writes "
        f"{out[0, 0, 0, 0].item():g}."
    )


@alone
def test_keys_in_scattered_blocks() -> None:
    """With equal scores the output is the mean of the values 1, 2, 3, …"""
    for block_size in (1, 3, 16, 32):
        for n in (5, 16, 35):
            call = f"decode_kernel of {n} keys in blocks of {block_size} and tiles of {TILE}"
            case = simple([0.0] * n, [1.0 + p for p in range(n)], block_size)
            out, lse = case.partial(call, 1)
            assert near(out[0, 0, 0, 0].item(), (n + 1) / 2), (
                f"{call} (scattered, equal scores, values 1 to {n}) writes "
                f"{out[0, 0, 0, 0].item():g} instead of their mean {(n + 1) / 2:g}."
            )
            assert near(lse.item(), math.log2(n)), (
                f"{call}, all with the score 0, writes the LSE {lse.item():g} instead of log2({n}) = "
                f"{math.log2(n):g}."
            )


@alone
def test_the_maximum_may_come_in_any_tile() -> None:
    """Scores far beyond 128, where 2^x overflows in float32."""
    for step in (10.0, -10.0, 300.0, -300.0):
        scores = [step * p for p in range(40)]
        values = [float(p) for p in range(40)]
        out, lse = simple(scores, values).partial(
            f"decode_kernel of 40 keys with the scores 0, {step:g}, …", 1
        )
        weights = [2 ** (s - max(scores)) for s in scores]
        expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert near(out[0, 0, 0, 0].item(), expected), (
            f"Scores 0, {step:g}, {2 * step:g}, … of 40 keys in three tiles, values 0 to 39: decode_kernel "
            f"writes {out[0, 0, 0, 0].item():g} instead of {expected:g}."
        )
        expected = max(scores) + math.log2(sum(weights))
        assert near(lse.item(), expected), (
            f"Scores 0, {step:g}, {2 * step:g}, … of 40 keys: decode_kernel writes the LSE {lse.item():g} "
            f"instead of {expected:g}."
        )


@alone
def test_the_splits_of_a_context() -> None:
    """40 keys are three tiles of 16; two splits have 2 and 1 of them, four splits have 1, 1, 1, 0."""
    for num_splits, ranges in ((1, [(0, 40)]), (2, [(0, 32), (32, 40)]), (4, [(0, 16), (16, 32), (32, 40)])):
        call = f"decode_kernel of 40 keys, tiles of {TILE}, num_splits = {num_splits}"
        out, lse = simple([0.0] * 40, [float(p) for p in range(40)]).partial(call, num_splits)
        for split, (first, end) in enumerate(ranges):
            mean = (first + end - 1) / 2
            assert near(out[0, 0, split, 0].item(), mean), (
                f"{call} (equal scores, values 0 to 39): split {split} has the keys {first} to {end - 1} "
                f"with the mean {mean:g}, and its output is {out[0, 0, split, 0].item():g}."
            )
            assert near(lse[0, 0, split].item(), math.log2(end - first)), (
                f"{call}: split {split} has {end - first} keys of score 0, and its LSE is "
                f"{lse[0, 0, split].item():g} instead of {math.log2(end - first):g}."
            )


@alone
def test_a_group_of_query_heads() -> None:
    """6 query heads on 2 KV heads; each head chooses another key."""
    case = Case([6], 4, (6, 2), head_dim=6)
    case.q[0] = 40 * torch.eye(6)
    case.keys[0][:] = torch.eye(6)[:, None]
    case.values[0][:, 0] = torch.arange(6.0)[:, None]
    case.values[0][:, 1] = 10 + torch.arange(6.0)[:, None]
    out, lse = case.partial("decode_kernel of 6 query heads and 2 KV heads", 1)
    got, expected = [round(x, 3) for x in out[0, :, 0, 0].tolist()], [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]
    assert got == expected, (
        "Query head i has a high score for key i; key i has the value i in KV head 0 and 10 + i in KV head "
        f"1: the heads get {got} instead of {expected}, because heads 0 to 2 share KV head 0."
    )
    got = [round(x, 3) for x in lse.flatten().tolist()]
    assert got == [40.0] * 6, (
        f"Each head's scores are 40 and five times 0, but the LSEs are {got} instead of 40."
    )


@alone
def test_an_empty_context() -> None:
    for num_splits in (1, 3):
        call = f"paged_decode with the context lengths 0 and 2 and num_splits = {num_splits}"
        out = Case([0, 2]).decode(call, num_splits, 1.0)
        got = out[0].flatten().tolist()
        assert got == [0.0] * 4, f"{call} gives {got} for the empty context instead of zeros."


# ── reduce_kernel ─────────────────────────────────────────────────────────────────────────────────


def reduced(call: str, partial: Tensor, lse: Tensor, lens: Sequence[int]) -> Tensor:
    """`reduce_kernel` of partial [seqs, heads, splits, head_dim] → [seqs, heads, head_dim]."""
    num_seqs, heads, num_splits, head_dim = partial.shape
    whole, end = (
        torch.full((num_seqs * heads * head_dim + 16,), NAN),
        num_seqs * heads * head_dim,
    )  # NaN behind it
    out = whole[:end].view(num_seqs, heads, head_dim)

    note(call)
    kernels.reduce_kernel[(num_seqs, heads)](
        partial.contiguous(),
        lse.contiguous(),
        torch.tensor(lens),
        out,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        TILE=TILE,
        SPLITS_PAD=8,
        DIM_PAD=16,
    )
    assert whole[end:].isnan().all(), (
        f"{call} writes beyond its {heads} heads or {head_dim} dims: mask the store."
    )
    return out


@alone
def test_two_splits_by_hand() -> None:
    """Chapter 9: outputs 18 and 40, LSE 3.3219 and 2: weights 1 and 0.4."""
    partial = torch.tensor([18.0, 40.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    lse = torch.tensor([[[3 + math.log2(1.25), 2.0]]])
    got = reduced("reduce_kernel of two splits", partial, lse, [20])
    assert difference(got, torch.full((1, 1, 4), 34 / 1.4)) == "", (
        f"Outputs 18 and 40 with the LSE 3.3219 and 2: reduce_kernel writes {got.flatten().tolist()} instead "
        "of 24.2857 = (18 + 0.4 · 40) / 1.4."
    )


@alone
def test_splits_far_apart() -> None:
    for lses, expected in (
        ((1000.0, 0.0), 1.0),
        ((0.0, 1000.0), 2.0),
        ((-500.0, -500.0), 1.5),
        ((300.0, 300.0), 1.5),
    ):
        partial = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
        got = reduced("reduce_kernel of two splits", partial, torch.tensor([[lses]]), [32]).item()
        assert near(got, expected), (
            f"Outputs 1 and 2 with the LSE {lses[0]:g} and {lses[1]:g}: reduce_kernel writes {got:g} instead "
            f"of {expected:g}; the largest LSE must be subtracted first."
        )


@alone
def test_empty_splits_are_skipped() -> None:
    """Their memory was not written. Here it holds NaN, or a number with a large LSE."""
    for num_splits, context_len, used in (
        (4, 40, 3),
        (4, 32, 2),
        (4, 1, 1),
        (8, 100, 7),
        (3, 64, 2),
    ):
        for rest in (NAN, 500.0):
            partial, lse = torch.full((1, 1, num_splits, 1), rest), torch.full((1, 1, num_splits), rest)
            partial[0, 0, :used, 0], lse[0, 0, :used] = torch.arange(1.0, used + 1), 0.0
            got = reduced(f"reduce_kernel with num_splits = {num_splits}", partial, lse, [context_len]).item()
            assert near(got, (used + 1) / 2), (
                f"{context_len} keys in tiles of {TILE} and {num_splits} splits: {used} of them have keys, "
                f"here with the outputs 1 to {used} and equal LSE; the others hold {rest:g}. reduce_kernel "
                f"writes {got:g} instead of {(used + 1) / 2:g}."
            )
    partial, lse = torch.full((1, 1, 3, 1), NAN), torch.full((1, 1, 3), NAN)
    partial[0, 0, 0], lse[0, 0, 0] = 0.0, 0.0
    got = reduced("reduce_kernel of an empty context", partial, lse, [0]).item()
    assert got == 0.0, f"An empty context has one split, of zeros: reduce_kernel writes {got:g} instead of 0."


@alone
def test_each_head_has_its_own_splits() -> None:
    torch.manual_seed(3)
    partial, lse = torch.randn(2, 3, 4, 5), 5 * torch.randn(2, 3, 4)
    lens = [100, 20]  # 2 · 16 keys in a split, so four have keys; 16 in a split, so two have
    expected = torch.stack(
        [
            (torch.softmax(lse[i, :, :used] * math.log(2), -1)[..., None] * partial[i, :, :used]).sum(1)
            for i, used in enumerate((4, 2))
        ]
    )
    call = "reduce_kernel of 2 sequences (100 and 20 keys), 3 heads and 4 splits"
    wrong = difference(reduced(call, partial, lse, lens), expected)
    assert not wrong, f"{call}: {wrong} ([sequence, head, dim])."


# ── both ──────────────────────────────────────────────────────────────────────────────────────────


@alone
def test_both_kernels_equal_dense_attention() -> None:
    """`paged_decode` of sequences of all lengths, in tiles of 16."""
    for heads, head_dim, block_size in (((6, 2), 5, 3), ((2, 2), 16, 16), ((3, 1), 8, 1)):
        for num_splits in (1, 3):
            case = Case([17, 0, 1, 40], block_size, heads, head_dim, seed=num_splits)
            case.q *= 5
            scale = head_dim**-0.5
            call = (
                f"paged_decode with num_splits = {num_splits}, blocks of {block_size}, heads and KV heads "
                f"{heads}"
            )
            wrong = difference(case.decode(call, num_splits, scale), case.dense(scale))
            assert not wrong, f"{call}, contexts of 17, 0, 1 and 40 keys: {wrong} ([sequence, head, dim])."


@alone
def test_half_precision() -> None:
    for num_splits in (1, 2):
        case = Case([33], 4, (4, 2), 16, dtype=torch.float16)
        call = f"paged_decode of 33 keys in float16 with num_splits = {num_splits}"
        wrong = difference(case.decode(call, num_splits, 0.25), case.dense(0.25), 5e-3)
        assert not wrong, f"{call}: {wrong} ([sequence, head, dim])."
