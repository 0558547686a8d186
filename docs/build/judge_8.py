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
from itertools import accumulate
from typing import Any

import pytest
import torch
from one_sentence import cpu_limit
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
TILE = 16  # keys; in the engine 16 to 128
CHUNK = 4  # splits that `reduce_kernel` combines at once; in the engine 16
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
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_limit()), int(cpu_limit()) + 1))
            os._exit(failed(test))
        _, status = os.waitpid(child, 0)
        said = NOTE[:].rstrip(b"\0").decode(errors="replace")
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended == signal.SIGXCPU:
            ENDLESS.append(said)
            raise AssertionError(f"{said} does not end: is there a loop that misses its end?")
        assert ended == 0, (
            f"{said} crashes ({signal.Signals(ended).name}): it reads or writes at an address outside its "
            "tensors. Look at the strides, at the mask of each load and store, at the entries of the block "
            "table, and at the bits: block ids are int32, and an address needs `.to(tl.int64)`."
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


Split = tuple[int, int, int]  # sequence, first key, end
PADDING = (0, 0, 0)  # a split without keys: a CUDA graph has a fixed number of splits


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
        # Some other layout than the engine's: more heads and slots lie between those of the cache.
        whole = torch.full((sum(needed) + 5, 3, heads[1] + 1, block_size + 2, head_dim), NAN, dtype=dtype)
        self.k_cache, self.v_cache = whole[:, :2, :-1, :block_size].unbind(1)
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
        return self.q, self.k_cache, self.v_cache, self.tables, torch.tensor(self.rows)

    def partial(self, call: str, splits: Sequence[Split] = (), scale_log2: float = 1.0) -> tuple[Tensor, ...]:
        """`decode_kernel` alone: its outputs [splits, heads, head_dim] and LSE [splits, heads].

        Args: splits: without any, a context is one split.
        """
        splits, heads = splits or [(i, 0, n) for i, n in enumerate(self.lens)], self.q.shape[1]
        inputs, shape = self.inputs(), (len(splits), heads, self.head_dim)
        # Before NaN, which must stay.
        end = math.prod(shape)
        whole = torch.full((end + 16 * self.head_dim + 16,), NAN)
        lses = torch.full((len(splits) * heads + 16,), NAN)

        note(call)
        kernels.decode_kernel[(len(splits), self.num_kv_heads)](
            *inputs,
            torch.tensor(splits),
            whole,
            lses,
            scale_log2,
            self.q.stride(0),
            *self.k_cache.stride()[:2],
            self.tables.stride(0),
            GROUP=heads // self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.block_size,
            TILE=TILE,
            GROUP_PAD=16,
            DIM_PAD=16,
            DOT=kernels.tl.float32,
        )
        assert whole[end:].isnan().all(), (
            f"{call} writes an output beyond its {len(splits)} splits, {heads} heads or {self.head_dim} "
            "dims: the store needs a mask."
        )
        assert lses[len(splits) * heads :].isnan().all(), (
            f"{call} writes an LSE beyond its {len(splits)} · {heads}: the store needs a mask."
        )
        return whole[:end].view(shape), lses[: len(splits) * heads].view(shape[:2])

    def decode(self, call: str, length: int, scale: float) -> Tensor:
        """Both kernels, as `paged_decode` launches them, with small tiles and splits of this length."""
        settings = kernels.decode_settings

        def small(*args: Any) -> tuple[dict[str, Any], dict[str, int]]:
            constants, options = settings(*args)
            return constants | {"TILE": TILE}, options

        kernels.decode_settings = small
        starts = [range(0, n, length) for n in self.lens]
        splits = [(i, k, min(k + length, n)) for i, n in enumerate(self.lens) for k in starts[i]]
        firsts = firsts_of([len(each) for each in starts])
        note(call)
        out = kernels.paged_decode(*self.inputs(), torch.tensor([*splits, PADDING]), firsts, scale)
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


def firsts_of(counts: Sequence[int]) -> Tensor:
    """Where the splits of each sequence begin, and the end: counts 2 0 1 give 0 2 2 3."""
    return torch.tensor([0, *accumulate(counts)])


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
    out, lse = simple([2.0], [7.0]).partial("decode_kernel of one key")
    got = out.flatten().tolist()
    assert all(near(x, 7.0) for x in got), f"decode_kernel of one key with the value 7 7 7 7 writes {got}."
    assert near(lse.item(), 2.0), (
        f"decode_kernel of one key with the score 2 (scale_log2 · q · k) writes the LSE {lse.item():g} "
        "instead of 2."
    )


@alone
def test_two_keys_by_hand() -> None:
    """Chapter 9: scores 1 and 3 in base 2, values 10 and 20: m = 3, l = 1.25."""
    out, lse = simple([1.0, 3.0], [10.0, 20.0]).partial("decode_kernel of two keys")
    assert near(out[0, 0, 0].item(), 18.0), (
        f"Scores 1 and 3 (in base 2), values 10 and 20: decode_kernel writes {out[0, 0, 0].item():g} "
        "instead of 18 = (10 · 2^-2 + 20) / 1.25; the slots behind hold NaN."
    )
    assert near(lse.item(), 3.3219), (
        f"Scores 1 and 3 (in base 2): decode_kernel writes the LSE {lse.item():g} instead of 3.3219 = 3 + "
        "log2(1.25)."
    )
    out, _ = simple([1.0, 3.0], [10.0, 20.0]).partial("decode_kernel with scale_log2 = 0", scale_log2=0.0)
    assert near(out[0, 0, 0].item(), 15.0), (
        f"With scale_log2 = 0 all scores are 0, and the values 10 and 20 give 15; decode_kernel writes "
        f"{out[0, 0, 0].item():g}."
    )


@alone
def test_keys_in_scattered_blocks() -> None:
    """With equal scores the output is the mean of the values 1, 2, 3, …"""
    for block_size in (1, 3, 16, 32):
        for n in (5, 16, 35):
            call = f"decode_kernel of {n} keys in blocks of {block_size} and tiles of {TILE}"
            case = simple([0.0] * n, [1.0 + p for p in range(n)], block_size)
            out, lse = case.partial(call)
            assert near(out[0, 0, 0].item(), (n + 1) / 2), (
                f"{call} (scattered, equal scores, values 1 to {n}) writes "
                f"{out[0, 0, 0].item():g} instead of their mean {(n + 1) / 2:g}."
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
        out, lse = simple(scores, values).partial(f"decode_kernel of 40 keys with the scores 0, {step:g}, …")
        weights = [2 ** (s - max(scores)) for s in scores]
        expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert near(out[0, 0, 0].item(), expected), (
            f"Scores 0, {step:g}, {2 * step:g}, … of 40 keys in three tiles, values 0 to 39: decode_kernel "
            f"writes {out[0, 0, 0].item():g} instead of {expected:g}."
        )
        expected = max(scores) + math.log2(sum(weights))
        assert near(lse.item(), expected), (
            f"Scores 0, {step:g}, {2 * step:g}, … of 40 keys: decode_kernel writes the LSE {lse.item():g} "
            f"instead of {expected:g}."
        )


@alone
def test_the_splits_of_a_context() -> None:
    """A split has the keys that its row of `splits_ptr` says; it may begin anywhere, also in a block."""
    for block_size in (4, 32):
        for ends in ([40], [32, 40], [16, 32, 40], [7, 30, 31, 40]):
            ranges = list(zip([0, *ends], ends, strict=False))
            call = f"decode_kernel of 40 keys in blocks of {block_size}, tiles of {TILE}, {len(ends)} splits"
            case = simple([0.0] * 40, [float(p) for p in range(40)], block_size)
            out, lse = case.partial(call, [(0, first, end) for first, end in ranges])
            for split, (first, end) in enumerate(ranges):
                mean = (first + end - 1) / 2
                assert near(out[split, 0, 0].item(), mean), (
                    f"{call} (equal scores, values 0 to 39): split {split} has the keys {first} to {end - 1} "
                    f"with the mean {mean:g}, and its output is {out[split, 0, 0].item():g}."
                )
                assert near(lse[split, 0].item(), math.log2(end - first)), (
                    f"{call}: split {split} has {end - first} keys of score 0, and its LSE is "
                    f"{lse[split, 0].item():g} instead of {math.log2(end - first):g}."
                )


@alone
def test_the_sequence_of_a_split() -> None:
    """Three sequences, whose keys have the values 0, 10 and 20; some splits are empty."""
    case = Case([20, 3, 1])
    for i, values in enumerate(case.values):
        values[:] = 10.0 * i
    splits = [(0, 0, 16), (0, 16, 20), (1, 0, 3), (2, 0, 1), PADDING, PADDING]
    out, _ = case.partial("decode_kernel of 3 sequences, 4 splits and 2 empty ones", splits)
    for split, (seq, first, end) in enumerate(splits[:4]):
        got = out[split, 0, 0].item()
        assert near(got, 10 * seq), (
            f"All values of sequence 0, 1, 2 are 0, 10, 20: split {split}, the keys {first} to {end - 1} of "
            f"sequence {seq}, has the output {got:g} instead of {10 * seq}; empty splits follow."
        )


@alone
def test_a_group_of_query_heads() -> None:
    """6 query heads on 2 KV heads; each head chooses another key."""
    case = Case([6], 4, (6, 2), head_dim=6)
    case.q[0] = 40 * torch.eye(6)
    case.keys[0][:] = torch.eye(6)[:, None]
    case.values[0][:, 0] = torch.arange(6.0)[:, None]
    case.values[0][:, 1] = 10 + torch.arange(6.0)[:, None]
    out, lse = case.partial("decode_kernel of 6 query heads and 2 KV heads")
    got, expected = [round(x, 3) for x in out[0, :, 0].tolist()], [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]
    assert got == expected, (
        "Query head i has a high score for key i; key i has the value i in KV head 0 and 10 + i in KV head "
        f"1: the heads get {got} instead of {expected}, because heads 0 to 2 share KV head 0."
    )
    got = [round(x, 3) for x in lse.flatten().tolist()]
    assert got == [40.0] * 6, (
        f"Each head's scores are 40 and five times 0, but the LSEs are {got} instead of 40."
    )


@alone
def test_many_tiles() -> None:
    n = 70 * TILE
    out, _ = simple([0.0] * n, [float(p) for p in range(n)], 16).partial(
        f"decode_kernel of {n} keys in one split"
    )
    assert near(out[0, 0, 0].item(), (n - 1) / 2), (
        f"decode_kernel of {n} keys (equal scores, values 0 to {n - 1}) in 70 tiles of one split writes "
        f"{out[0, 0, 0].item():g} instead of their mean {(n - 1) / 2:g}."
    )


@alone
def test_addresses_of_more_than_32_bits() -> None:
    """A cache of more than 2^31 elements, of which one block is ever touched."""
    shape = KVShape(1, 1, 64, torch.float16)
    cache = KVCache(shape, 2**31 // (2 * 16 * 64) + 4, 16, torch.device("cpu"))
    k_cache, v_cache = cache.layer(0)
    far = len(k_cache) - 1
    k_cache[far, 0, 0], v_cache[far, 0, 0] = 1.0, 7.0
    call = f"paged_decode of one key in block {far}, more than 2^31 elements from the first,"
    note(call)
    where = torch.tensor([[far]], dtype=torch.int32), torch.tensor([0]), torch.tensor([[0, 0, 1]])
    out = kernels.paged_decode(torch.ones(1, 1, 64).half(), k_cache, v_cache, *where, firsts_of([1]), 1.0)
    assert torch.all(out == 7), (
        f"{call} gives {out[0, 0, 0].item():g} instead of 7, its value: block ids are int32, so make "
        "them 64 bits wide (`.to(tl.int64)`) before you multiply."
    )


@alone
def test_nan_in_a_context_is_not_hidden() -> None:
    """It appears in the output of its own sequence, and in no other."""
    case = Case([20, 20])
    case.keys[1][17] = NAN
    for length in (20, 16):
        call = f"paged_decode of two contexts of 20 keys in splits of {length}, key 17 of the second NaN,"
        first, second = case.decode(call, length, 1.0).isnan().flatten(1).unbind()
        assert not first.any(), f"{call} gives the first sequence NaN, too."
        assert second.all(), f"{call} gives the second one numbers: a mistake of the model would be hidden."


@alone
def test_an_empty_context() -> None:
    call = "paged_decode with the context lengths 0 and 2, in splits of 1, and an empty split"
    got = Case([0, 2]).decode(call, 1, 1.0)[0].flatten().tolist()
    assert got == [0.0] * 4, f"{call} gives {got} for the empty context instead of zeros."


# ── reduce_kernel ─────────────────────────────────────────────────────────────────────────────────


def reduced(call: str, partial: Tensor, lse: Tensor, firsts: Tensor) -> Tensor:
    """`reduce_kernel` of partial [splits, heads, head_dim] → [seqs, heads, head_dim]."""
    num_seqs, (heads, head_dim) = len(firsts) - 1, partial.shape[1:]
    end = num_seqs * heads * head_dim
    whole = torch.full((end + 16,), NAN)  # NaN behind it

    note(call)
    kernels.reduce_kernel[(num_seqs, heads)](
        partial.contiguous(),
        lse.contiguous(),
        firsts,
        whole,
        HEAD_DIM=head_dim,
        DIM_PAD=16,
        CHUNK=CHUNK,
    )
    assert whole[end:].isnan().all(), (
        f"{call} writes beyond its {heads} heads or {head_dim} dims: mask the store."
    )
    return whole[:end].view(num_seqs, heads, head_dim)


@alone
def test_two_splits_by_hand() -> None:
    """Chapter 9: outputs 18 and 40, LSE 3.3219 and 2: weights 1 and 0.4."""
    partial = torch.tensor([18.0, 40.0]).view(2, 1, 1).expand(2, 1, 4)
    lse = torch.tensor([[3 + math.log2(1.25)], [2.0]])
    got = reduced("reduce_kernel of two splits", partial, lse, firsts_of([2]))
    assert difference(got, torch.full((1, 1, 4), 34 / 1.4)) == "", (
        f"Outputs 18 and 40 with the LSE 3.3219 and 2: reduce_kernel writes {got.flatten().tolist()} instead "
        "of 24.2857 = (18 + 0.4 · 40) / 1.4."
    )


@alone
def test_any_number_of_splits() -> None:
    """Also more than CHUNK; the LSE may be far apart, and the largest in any chunk."""
    for first, step in ((0, 0), (0, 1), (0, -1), (0, 1000), (1000, -1000), (-500, 0), (300, 0)):
        for count in (2, 4, 5, 8, 9, 24):
            lses = [float(first + step * s) for s in range(count)]
            weights = [2 ** (x - max(lses)) for x in lses]
            expected = sum(w * s for s, w in enumerate(weights, start=1)) / sum(weights)
            partial, lse = torch.arange(1.0, count + 1).view(-1, 1, 1), torch.tensor(lses).view(-1, 1)
            call = f"reduce_kernel of {count} splits with CHUNK = {CHUNK}"
            got = reduced(call, partial, lse, firsts_of([count])).item()
            assert near(got, expected), (
                f"{call}, the outputs 1 to {count} and LSE {', '.join(f'{x:g}' for x in lses)} writes "
                f"{got:g} instead of {expected:g}: all splits count, and the largest LSE is subtracted first."
            )


@alone
def test_splits_of_others_are_not_read() -> None:
    """Sequence i has the splits firsts[i] to firsts[i + 1] - 1; the others hold NaN, or a large LSE."""
    for count in (0, 1, 3, 4, 7):
        for rest in (NAN, 500.0):
            partial, lse = torch.full((count + 6, 1, 1), rest), torch.full((count + 6, 1), rest)
            partial[2 : 2 + count, 0, 0], lse[2 : 2 + count] = torch.arange(1.0, count + 1), 0.0
            firsts = torch.tensor([2, 2 + count])
            got = reduced(f"reduce_kernel of {count} splits among others", partial, lse, firsts).item()
            expected = (count + 1) / 2 if count else 0.0
            assert near(got, expected), (
                f"firsts = 2 {2 + count}: {count} splits, here with the outputs 1, 2, 3, … and equal LSE; "
                f"those before and behind hold {rest:g}. reduce_kernel writes {got:g} instead of "
                f"{expected:g}" + (" (no splits: zeros)." if count == 0 else ".")
            )


@alone
def test_each_head_has_its_own_splits() -> None:
    torch.manual_seed(3)
    counts = [6, 0, 2]
    partial, lse = torch.randn(8, 3, 5), 5 * torch.randn(8, 3)
    weights = [torch.softmax(each * math.log(2), 0)[..., None] for each in lse.split(counts)]
    parts = zip(weights, partial.split(counts), strict=True)
    expected = torch.stack([(weight * each).sum(0) for weight, each in parts])
    call = "reduce_kernel of 3 sequences (6, 0 and 2 splits) and 3 heads"
    wrong = difference(reduced(call, partial, lse, firsts_of(counts)), expected)
    assert not wrong, f"{call}: {wrong} ([sequence, head, dim])."


# ── both ──────────────────────────────────────────────────────────────────────────────────────────


@alone
def test_both_kernels_equal_dense_attention() -> None:
    """`paged_decode` of sequences of all lengths, in tiles of 16."""
    for heads, head_dim, block_size in (((6, 2), 5, 3), ((2, 2), 16, 16), ((3, 1), 8, 1)):
        for length in (64, 16, 2) if block_size == 3 else (64, 16):  # 40 keys: one split, three, more than 16
            case = Case([17, 0, 1, 40], block_size, heads, head_dim, seed=length)
            case.q *= 5
            scale = head_dim**-0.5
            call = f"paged_decode in splits of {length}, blocks of {block_size}, heads and KV heads {heads}"
            wrong = difference(case.decode(call, length, scale), case.dense(scale))
            assert not wrong, f"{call}, contexts of 17, 0, 1 and 40 keys: {wrong} ([sequence, head, dim])."


@alone
def test_half_precision() -> None:
    for length in (64, 16):
        case = Case([33], 4, (4, 2), 16, dtype=torch.float16)
        call = f"paged_decode of 33 keys in float16, in splits of {length}"
        wrong = difference(case.decode(call, length, 0.25), case.dense(0.25), 5e-3)
        assert not wrong, f"{call}: {wrong} ([sequence, head, dim])."
