"""Stage 1: attention over a block table, compared with a softmax over all keys at once in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from nanopaged.attention.reference_backend import reference_paged_attention
from nanopaged.attention.torch_backend import attend, gather_context

torch.set_num_threads(1)
ScoreMod = Callable[[Tensor, Tensor, Tensor], Tensor]


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def shown(x: Tensor) -> str:
    """The numbers of a small tensor: 1.6571 3.1192 nan."""
    return " ".join(f"{each:.4f}".rstrip("0").rstrip(".") for each in x.double().flatten().tolist())


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    return got.shape == expected.shape and torch.allclose(
        got.double(), expected.double(), atol=tolerance, rtol=tolerance
    )


def difference(got: Tensor, expected: Tensor) -> str:
    """Where two tensors differ most, in words."""
    if got.shape != expected.shape:
        return f"the shape is {list(got.shape)} instead of {list(expected.shape)}"
    distance = (got.double() - expected.double()).abs().nan_to_num(math.inf, math.inf)
    where = [int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)]
    return (
        f"at {where} there is {got[tuple(where)].item():.5g} instead of {expected[tuple(where)].item():.5g}"
    )


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, score_mod: ScoreMod | None = None) -> Tensor:
    """The last queries of a context attend to it, in float64.

    q [queries, heads, head_dim], k and v [KV heads, keys, head_dim]
    """
    group, num_keys = q.shape[1] // k.shape[0], k.shape[1]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = scale * torch.einsum("qhd,hkd->hqk", q.double(), k)
    keys = torch.arange(num_keys)
    queries = keys[num_keys - len(q) :, None]
    if score_mod is not None:
        scores = score_mod(scores, queries, keys)
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(keys > queries, -math.inf).softmax(-1), v)


def slope(scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """A far key counts less, and no score exceeds 3."""
    return 3 * (scores / 3).tanh() - 0.1 * (queries - keys)


def window(scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Only the last three keys, the query's own included."""
    return scores.masked_fill(keys <= queries - 3, -math.inf)


def previous(scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Only the token before the query's own (and token 0 for itself)."""
    return scores.masked_fill(keys != (queries - 1).clamp(min=0), -math.inf)


MODS: dict[str, ScoreMod | None] = {"no score_mod": None, "slope": slope, "window": window}


def scatter(k: Tensor, block_size: int, rng: random.Random, table: list[int] | None = None) -> tuple:
    """K [KV heads, keys, width] in scattered blocks; all other slots hold NaN. → (cache, block table)."""
    needed = -(-k.shape[1] // block_size)
    table = table or rng.sample(range(needed + 4), needed + 1)  # with one block for tokens to come
    # Between the K/V of other layers, as in the engine: a view, whose memory is not contiguous.
    whole = torch.full((needed + 4, 2, 2, len(k), block_size, k.shape[2]), math.nan, dtype=k.dtype)
    cache = whole[:, 1, 0]
    for p in range(k.shape[1]):
        cache[table[p // block_size], :, p % block_size] = k[:, p]
    return cache, table


# ── gather_context ────────────────────────────────────────────────────────────────────────────────


def test_gather_by_hand() -> None:
    cache = torch.tensor([10.0 * block + offset for block in range(3) for offset in range(2)]).view(
        3, 1, 2, 1
    )
    for context_len, expected in ((1, "20"), (2, "20 21"), (3, "20 21 0"), (4, "20 21 0 1")):
        got = gather_context(cache, torch.tensor([2, 0]), context_len)
        assert shown(got) == expected, (
            f"The slots hold 10 · block + offset; with blocks of 2 and the table [2, 0], gather_context of "
            f"num_keys={context_len} gives {shown(got)} instead of {expected}."
        )


def test_gather_keeps_heads_apart() -> None:
    """[num_kv_heads, num_keys, head_dim]"""
    cache = torch.arange(3 * 2 * 2 * 2).view(3, 2, 2, 2)  # 3 blocks, 2 KV heads, 2 slots, width 2
    got = gather_context(cache, torch.tensor([1, 2]), 3)
    assert got.shape == (2, 3, 2), (
        f"gather_context of 3 keys, 2 KV heads and head_dim 2 has the shape {list(got.shape)} instead of "
        "[num_kv_heads, num_keys, head_dim] = [2, 3, 2]."
    )
    for head in range(2):
        expected = torch.stack([cache[1, head, 0], cache[1, head, 1], cache[2, head, 0]])
        assert torch.equal(got[head], expected), (
            f"gather_context of table [1, 2] and 3 keys: KV head {head} has {shown(got[head])} instead of "
            f"{shown(expected)}, which are its slots in block 1 and the first of block 2."
        )


def test_gather_every_length() -> None:
    rng = random.Random(1)
    for block_size in (1, 4, 16):
        for num_keys in (1, 3, 4, 5, 16, 17, 33, 700):
            k = torch.randn(2, num_keys, 3)
            cache, table = scatter(k, block_size, rng)
            before, ids = cache.clone(), torch.tensor(table)
            got = gather_context(cache, ids, num_keys)
            is_as_before = (
                torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0)) and ids.tolist() == table
            )
            assert is_as_before, "gather_context has changed the cache or the block table: it only copies."
            assert got.shape == k.shape, (
                f"gather_context of {num_keys} keys in blocks of {block_size}, with the table {table}, gives "
                f"{list(got.shape)} instead of {list(k.shape)}."
            )
            assert torch.equal(got, k), (
                f"gather_context of {num_keys} keys in blocks of {block_size}, with the table {table}: "
                f"{difference(got, k)}."
            )
            got[:] = 0.0
            kept = gather_context(cache, torch.tensor(table), num_keys)
            assert torch.equal(kept, k), "gather_context must copy: a write to its result changed the cache."


def test_gather_of_several_sequences() -> None:
    """[..., num_kv_heads, num_keys, head_dim]"""
    cache = torch.randn(5, 2, 2, 3)
    tables = torch.tensor([[4, 0, 1], [2, 3, 0]])
    for num_keys in (1, 2, 3, 5):
        got = gather_context(cache, tables, num_keys)
        assert got.shape == (2, 2, num_keys, 3), (
            f"gather_context of 2 tables, {num_keys} keys each, 2 KV heads and head_dim 3 has "
            f"the shape {list(got.shape)} instead of [2, 2, {num_keys}, 3]."
        )
        expected = torch.stack([gather_context(cache, table, num_keys) for table in tables])
        assert torch.equal(got, expected), (
            f"gather_context of the tables {tables.tolist()}, {num_keys} keys each, differs from that "
            f"of one table after the other: {difference(got, expected)}."
        )


# ── attend ────────────────────────────────────────────────────────────────────────────────────────


def test_attend_by_hand() -> None:
    """All scores are 0, so each output is the mean of the values that a row may read."""
    v = torch.tensor([3.0, 5.0, 10.0]).view(1, 3, 1)
    for positions, expected in (([2], "6"), ([0], "3"), ([0, 2, 1, 1], "3 6 4 4")):
        for num_seen in (0, min(positions) + 1):
            queries, q = torch.tensor(positions)[:, None], torch.zeros(1, len(positions), 1)
            got = attend(q, torch.zeros(1, 3, 1), v, queries, num_seen, None)
            assert shown(got) == expected, (
                f"With the values 3 5 10, equal scores and rows at the positions {positions}, attend "
                f"(num_seen={num_seen}) gives {shown(got)} instead of {expected}: each row reads the keys up "
                "to its own position."
            )


def test_attend_of_two_sequences() -> None:
    v = torch.tensor([[3.0, 5.0, 10.0], [1.0, 2.0, 9.0]]).view(2, 1, 3, 1)
    queries = torch.tensor([2, 1]).view(2, 1, 1, 1)
    got = attend(torch.zeros(2, 1, 2, 1), torch.zeros(2, 1, 3, 1), v, queries, 0, None)
    assert shown(got) == "6 6 1.5 1.5", (
        "Two sequences with the values 3 5 10 and 1 2 9, two query heads each, at the positions 2 and 1, and "
        f"equal scores: attend gives {shown(got)} instead of 6 6 1.5 1.5."
    )


def test_attend_equals_dense_attention() -> None:
    torch.manual_seed(4)
    for before in ((), (3,)):
        for num_heads, num_rows, num_keys in ((1, 1, 1), (2, 3, 5), (2, 6, 40), (1, 1, 700)):
            for name, mod in MODS.items():
                q = torch.randn(*before, num_heads, num_rows, 4)
                k, v = torch.randn(2, *before, num_heads, num_keys, 4)
                queries = torch.randint(num_keys, (*before, *[1] * len(before), num_rows, 1))
                given = q.clone(), k.clone(), v.clone()
                keys = torch.arange(num_keys)
                scores = q.double() @ k.double().mT
                scores = scores if mod is None else mod(scores, queries, keys)
                expected = scores.masked_fill(keys > queries, -math.inf).softmax(-1) @ v.double()
                got = attend(q, k, v, queries, int(queries.min()) + 1, mod)
                assert close(got, expected), (
                    f"attend of q {list(q.shape)} and k {list(k.shape)} at the positions "
                    f"{queries.flatten().tolist()}, {name}: {difference(got, expected)}."
                )
                assert all(map(torch.equal, given, (q, k, v))), "attend changed its q, k or v."


def test_attend_by_a_score_mod() -> None:
    v, positions = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 5, 1), torch.arange(5)[:, None]
    for mod, expected, why in (
        (previous, "1 1 2 3 4", "masks all keys but the one before the query"),
        (lambda s, q, k: s * 0, "1 1.5 2 2.5 3", "makes all scores 0, before the later keys are masked"),
    ):
        got = attend(torch.zeros(1, 5, 1), torch.zeros(1, 5, 1), v, positions, 1, mod)
        assert shown(got) == expected, (
            f"A score_mod {why}; with the values 1 2 3 4 5 and rows at the positions 0 to 4 attend gives "
            f"{shown(got)} instead of {expected}."
        )


def test_attend_in_half_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = torch.randn(2, 9, 8).to(dtype), *torch.randn(2, 2, 12, 8).to(dtype)
        got = attend(q, k, v, torch.tensor([[11]]), 12, None)
        expected = (q.double() @ k.double().mT).softmax(-1) @ v.double()
        assert got.dtype == dtype, f"attend of a {dtype} q gives {got.dtype}."
        assert close(got, expected, 5e-2), f"attend in {dtype}: {difference(got, expected)}."
    full = torch.full((1, 200, 8), 1000.0, dtype=torch.float16)
    got = attend(torch.zeros(1, 1, 8, dtype=torch.float16), full, full, torch.tensor([[199]]), 200, None)
    assert close(got, full[:, :1]), (
        f"200 values of 1000 in float16 have the mean 1000; attend gives {got.flatten()[0].item()}: float16 "
        "ends at 65504, so divide before you add, or add in float32."
    )
    zeros, ones = torch.zeros(1, 1000, 1, dtype=torch.bfloat16), torch.ones(1, 1000, 1, dtype=torch.bfloat16)
    got = attend(zeros[:, :1], zeros, ones, torch.tensor([[999]]), 1000, None)
    assert close(got, ones[:, :1], 1e-2), (
        f"1000 values of 1 in bfloat16, with equal scores, have the mean 1; attend gives {got.item():.3f}: "
        "in bfloat16 256 + 1 is 256, so add the weights in float32."
    )


def test_attend_to_scores_beyond_exp() -> None:
    """exp(89) is infinite in float32."""
    for scores in ((1000.0, 990.0), (-1000.0, -1010.0), (0.0, -3e4), (200.0, 0.0), (-1e30, -3e30)):
        k, v = torch.tensor(scores).view(1, 2, 1), torch.tensor([4.0, 3.0]).view(1, 2, 1)
        expected = k.double().softmax(1).mul(v).sum(1, keepdim=True)
        got = attend(torch.ones(1, 1, 1), k, v, torch.tensor([[1]]), 2, None)
        assert close(got, expected), (
            f"Scores {scores[0]:g} and {scores[1]:g} with the values 4 and 3: attend gives {shown(got)}, not "
            f"{shown(expected)}; the softmax needs its maximum subtracted."
        )
    k, v = torch.full((1, 3, 1), -2e4), torch.tensor([3.0, 5.0, 10.0]).view(1, 3, 1)
    got = attend(torch.ones(1, 1, 1), k, v, torch.tensor([[1]]), 0, None)
    assert close(got, torch.full((1, 1, 1), 4.0)), (
        f"Three scores of -20000 with the values 3 5 10, and a row at position 1: attend gives {shown(got)}, "
        "not 4; mask with -inf, since a score may be below any other number."
    )


# ── reference_paged_attention ─────────────────────────────────────────────────────────────────────


def test_the_example_of_the_chapter() -> None:
    """Scores -1 1 | 0 2 in blocks 2 and 0, values 4 3 | 2 1. The other slots hold NaN."""
    k = torch.zeros(1, 4, 4)
    k[0, :, 0] = torch.tensor([-1.0, 1.0, 0.0, 2.0])
    v = torch.tensor([4.0, 3.0, 2.0, 1.0]).view(1, 4, 1).expand(1, 4, 4)
    q = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    for context_len, expected in ((1, 4.0), (2, 3.1192), (3, 2.8453), (4, 1.6571)):
        (k_cache, _), (v_cache, _) = (
            scatter(x[:, :context_len], 2, random.Random(0), [2, 0, 1]) for x in (k, v)
        )
        table, before = [2, 0, 1], q.clone()
        got = reference_paged_attention(q, k_cache, v_cache, table, context_len, 0.5)
        assert table == [2, 0, 1], (
            f"reference_paged_attention has changed its block table [2, 0, 1] to {table}, the sequence's own."
        )
        assert torch.equal(q, before), (
            f"reference_paged_attention has changed its q from {shown(before)} to {shown(q)}: it only reads."
        )
        assert got.shape == (1, 4), (
            f"reference_paged_attention of q [1, 4] has the shape {list(got.shape)} instead of [1, 4]."
        )
        assert close(got, torch.full((1, 4), expected)), (
            f"Scores -1 1 | 0 2, values 4 3 | 2 1, table [2, 0, 1], context_len={context_len}: "
            f"reference_paged_attention gives {got[0, 0].item():.4f} instead of {expected:.4f} (after block "
            "0 m, l, acc are 1, 1.1353, 3.5413, and after block 1 they are 2, 1.5530, 2.5735)."
        )


def test_each_query_head_has_its_own_sums() -> None:
    k = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(2, 2, 1)
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 2, 1)
    (k_cache, _), (v_cache, _) = (scatter(x, 1, random.Random(0), [1, 3, 0]) for x in (k, v))
    got = reference_paged_attention(torch.tensor([[90.0], [-90.0]] * 2), k_cache, v_cache, [1, 3, 0], 2, 1.0)
    assert got.shape == (4, 1), (
        f"reference_paged_attention of q [4, 1] has the shape {list(got.shape)} instead of [4, 1]."
    )
    assert close(got, torch.tensor([[2.0], [1.0], [3.0], [4.0]])), (
        "4 query heads, 2 KV heads: heads 0 and 1 read the values 1 2, heads 2 and 3 read 3 4, each almost "
        f"only one of them; reference_paged_attention gives {shown(got)} instead of 2 1 3 4."
    )


def test_the_maximum_may_come_in_any_block() -> None:
    """Scores far beyond 88, where exp overflows in float32."""
    risen, fallen = (100.0, 200.0, 300.0), (300.0, 200.0, 100.0)
    low = (-500.0, -400.0, -450.0), (-6e3, -5e3, -5500.0), (-3e30, -1e30, -2e30)
    for scores in (risen, fallen, (0.0, 1e4, -1e4), *low):
        for block_size in (1, 2):
            k = torch.tensor(scores).view(1, 3, 1)
            v = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
            (k_cache, table), (v_cache, _) = (scatter(x, block_size, random.Random(5)) for x in (k, v))
            got = reference_paged_attention(torch.ones(1, 1), k_cache, v_cache, table, 3, 1.0)
            expected = v.flatten()[k.argmax()].view(1, 1)
            assert close(got, expected), (
                f"Scores {scores} in blocks of {block_size} with the values 1 2 3: reference_paged_attention "
                f"gives {shown(got)} instead of {shown(expected)}, the value of the largest score "
                "(scores may be far below 0: begin with the lowest finite number)."
            )


def test_a_score_mod_may_mask_whole_blocks() -> None:
    k, v = torch.zeros(1, 7, 1), torch.arange(7.0).view(1, 7, 1)
    for block_size in (1, 2, 4):
        (k_cache, table), (v_cache, _) = (scatter(x, block_size, random.Random(2)) for x in (k, v))
        for name, mod, expected in (
            ("all keys but the last three", window, 5.0),
            ("all keys but the one before the query", previous, 5.0),
            ("all keys but the first two", lambda s, q, k: s.masked_fill(k > 1, -math.inf), 0.5),
        ):
            got = reference_paged_attention(torch.ones(1, 1), k_cache, v_cache, table, 7, 1.0, mod)
            assert close(got, torch.tensor([[expected]])), (
                f"A score_mod masks {name} of 7 with -inf, in blocks of {block_size}: the values 0 to 6 give "
                f"{shown(got)} instead of {expected} (-inf - -inf is NaN; a block may be masked wholly)."
            )


def test_it_goes_block_by_block() -> None:
    """A score_mod sees which keys are computed together."""
    seen: list[list[int]] = []

    def look(scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        assert torch.all(queries == 6), (
            f"The query of 7 keys has position 6; reference_paged_attention gives the score_mod "
            f"{shown(queries)}."
        )
        seen.append(keys.unique().tolist())
        return scores

    k = torch.randn(1, 7, 1)
    cache, table = scatter(k, 2, random.Random(2))
    reference_paged_attention(torch.ones(1, 1), cache, cache, table, 7, 1.0, look)
    assert {p for keys in seen for p in keys} == set(range(7)), (
        f"With 7 keys in blocks of 2, reference_paged_attention gives the score_mod the key positions "
        f"{seen}: together they should be 0 to 6."
    )
    assert max(map(len, seen)) <= 2, (
        f"With blocks of 2, reference_paged_attention computes the scores of {max(map(len, seen))} keys at "
        "once; it should read block by block."
    )


def test_reference_equals_dense_attention() -> None:
    torch.manual_seed(2)
    rng = random.Random(3)
    for num_heads, num_kv_heads, head_dim in ((1, 1, 4), (6, 2, 5), (4, 4, 8)):
        for block_size in (1, 4, 16):
            for num_keys in (1, 3, 4, 5, 16, 17, 40):
                q, k, v = (
                    torch.randn(1, num_heads, head_dim),
                    *torch.randn(2, num_kv_heads, num_keys, head_dim),
                )
                k_cache, table = scatter(k, block_size, rng)
                v_cache, _ = scatter(v, block_size, rng, table)
                for name, mod in MODS.items():
                    given = [x.clone() for x in (q, k_cache, v_cache)], list(table)
                    got = reference_paged_attention(q[0], k_cache, v_cache, table, num_keys, 0.7, mod)
                    for name_of, x, before in zip(
                        ("q", "k_cache", "v_cache"), (q, k_cache, v_cache), given[0], strict=True
                    ):
                        assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)), (
                            f"reference_paged_attention has written to its {name_of}: it only reads."
                        )
                    assert table == given[1], (
                        f"reference_paged_attention has changed the block table {given[1]} to {table}: it is "
                        "the sequence's, so go through it without taking anything out."
                    )
                    expected = dense(q, k, v, 0.7, mod)[0]
                    assert close(got, expected), (
                        f"reference_paged_attention (keys: {num_keys}, block_size: {block_size}, query "
                        f"heads: {num_heads}, KV heads: {num_kv_heads}, scale 0.7, {name}): "
                        f"{difference(got, expected)} ([head, dimension])."
                    )


def test_reference_in_half_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = torch.randn(1, 4, 8).to(dtype), *torch.randn(2, 2, 12, 8).to(dtype)
        (k_cache, table), (v_cache, _) = (scatter(x, 4, random.Random(4)) for x in (k, v))
        got = reference_paged_attention(q[0], k_cache, v_cache, table, 12, 0.5)
        expected = dense(q, k, v, 0.5)[0]
        assert got.dtype == dtype, f"reference_paged_attention of a {dtype} q gives {got.dtype}."
        assert close(got, expected, 2e-2), (
            f"reference_paged_attention in {dtype}: {difference(got, expected)}."
        )
    full = torch.full((1, 200, 8), 1000.0, dtype=torch.float16)
    cache, table = scatter(full, 16, random.Random(4))
    got = reference_paged_attention(torch.zeros(1, 8, dtype=torch.float16), cache, cache, table, 200, 1.0)
    assert close(got, full[0, :1]), (
        f"200 values of 1000 in float16 have the mean 1000; reference_paged_attention gives "
        f"{got[0, 0].item()}: float16 ends at 65504, so add in float32."
    )


def test_products_beyond_float16() -> None:
    """300 · 300 · 8 is 720000, and float16 ends at 65504."""
    q, k = torch.full((1, 8), 300.0, dtype=torch.float16), torch.full((1, 2, 8), 300.0, dtype=torch.float16)
    (k_cache, table), (v_cache, _) = (scatter(x, 1, random.Random(4)) for x in (k, torch.ones_like(k)))
    got = reference_paged_attention(q, k_cache, v_cache, table, 2, 8**-0.5)
    assert close(got, torch.ones(1, 8)), (
        f"Queries and keys of 300 in float16, head_dim 8 and values of 1: reference_paged_attention gives "
        f"{got[0, 0].item()} instead of 1: a product is 720000, so multiply in float32."
    )


def test_a_masked_value_has_no_weight() -> None:
    k, v = torch.zeros(1, 2, 1), torch.tensor([1e9, 1.0]).view(1, 2, 1)
    for size in (1, 2):
        (k_cache, table), (v_cache, _) = (scatter(x, size, random.Random(2)) for x in (k, v))
        first = lambda s, q, k: s.masked_fill(k == 0, -math.inf)  # noqa: E731
        got = reference_paged_attention(torch.ones(1, 1), k_cache, v_cache, table, 2, 1.0, first)
        assert close(got, torch.ones(1, 1)), (
            f"A score_mod masks the first of two keys with -inf, in blocks of {size}, and the values are 1e9 "
            f"and 1: reference_paged_attention gives {shown(got)} instead of 1: exp(-inf) is exactly 0."
        )


def test_sums_of_many_blocks_in_bfloat16() -> None:
    """In bfloat16 256 + 1 is 256."""
    k = torch.zeros(1, 600, 1, dtype=torch.bfloat16)
    v = torch.tensor([0.0] * 300 + [1.0] * 300, dtype=torch.bfloat16).view(1, 600, 1)
    (k_cache, table), (v_cache, _) = (scatter(x, 1, random.Random(4)) for x in (k, v))
    got = reference_paged_attention(k[0, :1], k_cache, v_cache, table, 600, 1.0)
    assert close(got, torch.tensor([[0.5]]), 1e-2), (
        f"600 keys with equal scores in bfloat16, in blocks of 1, half of the values 0 and half 1, have the "
        f"mean 0.5; reference_paged_attention gives {got.item()}: l and acc must be float32, because in "
        "bfloat16 256 + 1 is 256."
    )
