"""Stage 9: tensor parallelism. Each function alone; four ranks as threads; then two real processes."""

from __future__ import annotations

import json
import math
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_sentence import wall_limit
from safetensors.torch import save_file
from torch import Tensor, nn

from nanopaged import EngineConfig, parallel
from nanopaged.model import checkpoint
from nanopaged.model.decoder import Linear, Model, Operations, allocate
from nanopaged.model.model_config import ModelConfig
from nanopaged.parallel import Ranks

SECONDS = wall_limit(4)  # that a rank waits for the other, which must load PyTorch
CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=12,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    attention_scale=0.5,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=64,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_word_embeddings=False,
    dtype="float32",
)


class Alone:
    """One rank of `size`, without the others: what it would send stays with it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.num_calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x


# ── ModelConfig.share ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, (8, 2, 24, 97)), (2, (4, 1, 12, 49)), (4, (2, 1, 6, 25)), (8, (1, 1, 3, 13))],
)
def test_the_sizes_of_a_share(size: int, expected: tuple[int, int, int, int]) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 24, "vocab_size": 97}
    whole = replace(CONFIG, **sizes)
    share = whole.share(size)
    got = share.num_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size
    assert got == expected, (
        f"share({size}) of a model with num_heads 8, num_kv_heads 2, intermediate_size 24 and vocab_size 97 "
        f"must have {expected}, but has {got}: the rows of the vocabulary are rounded up."
    )
    back = replace(share, **sizes)
    assert back == whole, f"share({size}) must change nothing but {', '.join(sizes)}: {share}."


def test_more_kv_heads_than_ranks() -> None:
    share = replace(CONFIG, num_heads=12, num_kv_heads=6, intermediate_size=6).share(3)
    assert (share.num_heads, share.num_kv_heads) == (4, 2), (
        "share(3) of a model with 12 query heads and 6 KV heads must have 4 and 2, but has "
        f"{share.num_heads} and {share.num_kv_heads}."
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "inner", "size", "why"),
    [
        (6, 2, 8, 4, "4 does not divide 6 query heads"),
        (8, 2, 6, 4, "4 does not divide an intermediate_size of 6"),
        (6, 2, 6, 3, "2 KV heads cannot be divided among 3 ranks, nor 3 ranks among 2 KV heads"),
        (12, 4, 12, 6, "4 KV heads cannot be divided among 6 ranks, nor 6 ranks among 4 KV heads"),
        (12, 6, 12, 4, "6 KV heads cannot be divided among 4 ranks, nor 4 ranks among 6 KV heads"),
    ],
)
def test_what_cannot_be_shared(num_heads: int, num_kv_heads: int, inner: int, size: int, why: str) -> None:
    config = replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=inner)
    try:
        share = config.share(size)
    except ValueError:
        return
    raise AssertionError(f"share({size}) must raise ValueError, as {why}, but it returns {share}.")


# ── _share: which part of a weight ────────────────────────────────────────────────────────────────


def part_of(name: str, shape: list[int], slot: list[int], rank: int, size: int) -> Tensor:
    """The part of a weight that `_share` names. The weight has the numbers 0, 1, 2, … in order."""
    weight = torch.arange(math.prod(shape)).view(shape)
    return weight[checkpoint._share(name, torch.empty(slot), shape, rank, size)]


Q, K, OUT = (f"model.layers.0.self_attn.{each}_proj.weight" for each in "qko")
GATE, DOWN = (f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "down"))
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "shape", "slot", "size", "rank", "rows", "columns"),
    [
        (Q, [8, 6], [8, 6], 1, 0, (0, 8), (0, 6)),
        (Q, [8, 6], [4, 6], 2, 0, (0, 4), (0, 6)),
        (Q, [8, 6], [4, 6], 2, 1, (4, 8), (0, 6)),
        (GATE, [12, 6], [3, 6], 4, 2, (6, 9), (0, 6)),
        (OUT, [6, 8], [6, 4], 2, 1, (0, 6), (4, 8)),
        (DOWN, [6, 12], [6, 3], 4, 3, (0, 6), (9, 12)),
        (K, [16, 6], [8, 6], 4, 0, (0, 8), (0, 6)),
        (K, [16, 6], [8, 6], 4, 1, (0, 8), (0, 6)),
        (K, [16, 6], [8, 6], 4, 2, (8, 16), (0, 6)),
        (K, [16, 6], [8, 6], 4, 3, (8, 16), (0, 6)),
        (K, [8, 6], [8, 6], 2, 1, (0, 8), (0, 6)),
        (EMBED, [97, 6], [49, 6], 2, 0, (0, 49), (0, 6)),
        (EMBED, [97, 6], [49, 6], 2, 1, (49, 97), (0, 6)),
        (HEAD, [97, 6], [25, 6], 4, 1, (25, 50), (0, 6)),
        (HEAD, [97, 6], [25, 6], 4, 3, (75, 97), (0, 6)),
        (HEAD, [5, 6], [2, 6], 4, 3, (5, 5), (0, 6)),
        (EMBED, [97, 6], [97, 6], 1, 0, (0, 97), (0, 6)),
    ],
)
def test_the_part_of_a_rank(
    name: str,
    shape: list[int],
    slot: list[int],
    size: int,
    rank: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    expected = torch.arange(math.prod(shape)).view(shape)[slice(*rows), slice(*columns)]
    got = part_of(name, shape, slot, rank, size)
    assert torch.equal(got, expected), (
        f"`_share` of {name} {shape} for a slot {slot} on rank {rank} of {size} must name the rows "
        f"{rows[0]} to {rows[1] - 1} and the columns {columns[0]} to {columns[1] - 1}, numbers from "
        f"{numbers(expected)}, but its part {list(got.shape)} has numbers from {numbers(got)}."
    )


def numbers(part: Tensor) -> str:
    return f"{part.min()} to {part.max()}" if part.numel() else "none to none"


def test_weights_with_one_dimension() -> None:
    bias = part_of(Q.replace("weight", "bias"), [8], [4], 1, 2).tolist()
    assert bias == [4, 5, 6, 7], (
        f"`_share` of a bias of q [8] for a slot [4] on rank 1 of 2 must name 4 to 7, but names {bias}."
    )
    norm = part_of(NORM, [6], [6], 1, 2).tolist()
    assert norm == [0, 1, 2, 3, 4, 5], (
        f"The weights of a norm are on every rank, but `_share` names {norm} of [6] on rank 1 of 2."
    )


# ── Linear.forward ────────────────────────────────────────────────────────────────────────────────


class TwiceAsMuch(Alone):
    """The other rank has the same result, so the sum is twice as much."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x.mul_(2)


def keep_as_it_is(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """In place of the kernel that packs weights."""
    return lambda x: F.linear(x, weight, bias)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [None, TwiceAsMuch(0, 2)])
def test_a_linear_layer(ranks: Alone | None, bias: bool, packed: bool) -> None:
    torch.manual_seed(1)
    linear, x = Linear(3, 5, bias, ranks), torch.randn(4, 3)
    weight, b = torch.randn(5, 3), torch.randn(5) if bias else None
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    linear.bias = nn.Parameter(b.clone(), requires_grad=False) if bias else None
    if packed:
        linear.pack(Operations(packed_linear=keep_as_it_is))
    expected = x @ weight.T + (b if bias else 0)
    case = f"A linear layer {'with' if bias else 'without'} bias, "
    case += f"{'packed weights' if packed else 'plain weights'}, "
    if ranks is None:
        case += "and without ranks must return x Wᵀ (+ b)"
    else:
        case += "and with ranks must return the sum over all ranks of x Wᵀ (+ b), here twice that of this one"
        expected, before = 2 * expected, ranks.num_calls
    given = x.clone()
    got = linear(given)
    assert torch.equal(given, x), f"{case}; and x must stay as it is: the layer before it may read it again."
    assert got.shape == expected.shape, f"{case}, {list(expected.shape)}, but returns {list(got.shape)}."
    off = (got - expected).abs().max().item()
    assert off < 1e-4, f"{case}; numbers differ by up to {off:.2g}."
    if ranks is not None:
        num_calls = ranks.num_calls - before
        assert num_calls == 1, f"{case}; `all_reduce` must be called once, not {num_calls} times."


# ── the embedding and the logits ──────────────────────────────────────────────────────────────────


def make_model(config: ModelConfig, ranks: Any = None, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model(config, ranks)
    allocate(model, dtype, CPU)
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.3)
    return model


@pytest.mark.parametrize(("vocab_size", "size"), [(8, 2), (11, 2), (10, 4)])
def test_each_rank_has_some_embeddings(vocab_size: int, size: int) -> None:
    config = replace(CONFIG, vocab_size=vocab_size)
    num_rows = -(-vocab_size // size)
    table = torch.randn(num_rows * size, 12)
    ids = torch.tensor([0, vocab_size - 1, 3, 4, 5, 6, num_rows, num_rows - 1, 3])
    total = torch.zeros(len(ids), 12)
    for rank in range(size):
        ranks = Alone(rank, size)
        model = make_model(config, ranks)
        first, end = rank * num_rows, (rank + 1) * num_rows
        model.embed_tokens.weight.data.copy_(table[first:end])
        given = ids.clone()
        part = model._embed_share(given, ranks)
        case = (
            f"Rank {rank} of {size} has the rows {first} to {end - 1} of an embedding of {vocab_size} tokens."
        )
        assert torch.equal(given, ids), (
            f"{case} `_embed_share` has changed the token ids that it was given from {ids.tolist()} to "
            f"{given.tolist()}."
        )
        assert ranks.num_calls == 1, (
            f"{case} `_embed_share` must call `all_reduce` once, not {ranks.num_calls} times."
        )
        for token_id, row in zip(ids.tolist(), part, strict=True):
            expected = table[token_id] if first <= token_id < end else torch.zeros(12)
            what = "its row" if first <= token_id < end else "zeros, since another rank has it"
            assert torch.equal(row, expected), (
                f"{case} For the tokens {ids.tolist()} it must put {what} in the place of token {token_id}, "
                f"but it puts {row[:3].tolist()}… there."
            )
        total += part
    assert torch.equal(total, table[ids]), "The parts of all ranks must add up to the embeddings."


class Gathering(Alone):
    """Rank 0 of `size`, which knows what the others would send to `gather`."""

    def __init__(self, size: int, others: list[Tensor]) -> None:
        super().__init__(0, size)
        self.others = others

    def gather(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.cat([x, *self.others], dim=-1)


def test_logits_of_one_rank() -> None:
    model, hidden = make_model(CONFIG, dtype=torch.bfloat16), torch.randn(3, 12).to(torch.bfloat16)
    got, expected = model.logits(hidden), hidden @ model.lm_head.weight.T
    assert (got.dtype, got.shape) == (torch.bfloat16, (3, 11)), (
        f"A bfloat16 model without ranks must return bfloat16 logits [3, 11] for 3 tokens, but returns "
        f"{got.dtype} {list(got.shape)}."
    )
    assert torch.allclose(got, expected, atol=0.05), "Without ranks the logits must be hidden · lm_headᵀ."


def test_logits_are_gathered() -> None:
    others = [torch.randn(3, 6)]
    ranks = Gathering(2, others)
    model, hidden = make_model(CONFIG, ranks), torch.randn(3, 12)
    got = model.logits(hidden)
    case = "Two ranks have 6 logits of each token, and the vocabulary has 11 tokens."
    assert ranks.num_calls == 1, f"{case} `gather` must be called once, not {ranks.num_calls} times."
    expected = torch.cat([hidden @ model.lm_head.weight.T, others[0]], dim=-1)[:, :11]
    assert got.shape == expected.shape, (
        f"{case} Rank 0 returns logits [3, 11] of 3 tokens, without the one beyond the vocabulary, but "
        f"returns {list(got.shape)}."
    )
    assert torch.allclose(got, expected, atol=1e-5), (
        f"{case} Rank 0 returns its own logits, then those of rank 1, but they differ by up to "
        f"{(got - expected).abs().max():.2g}."
    )


# ── a whole model on several ranks ────────────────────────────────────────────────────────────────


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of one sequence, computed at once."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * CONFIG.attention_scale
    scores += torch.full_like(scores, -math.inf).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


IDS = [0, 10, 5, 6, 3, 10, 9]


def run_model(model: Model) -> tuple[Tensor, Tensor]:
    hidden = model(torch.tensor(IDS), torch.arange(len(IDS)), attention)
    return hidden, model.logits(hidden)


def load(folder: str, ranks: Any = None) -> Model:
    options = {"max_model_len": 32, "dtype": torch.float32, "device": CPU, "ranks": ranks}
    return checkpoint.load_model(EngineConfig(), CONFIG, Path(folder), **options)


@cache
def whole_model() -> tuple[tempfile.TemporaryDirectory[str], Tensor, Tensor]:
    """A folder with random weights, and what one process computes of them, with plain linear layers."""
    folder, model = tempfile.TemporaryDirectory(), make_model(CONFIG)
    model.rotary.compute(CONFIG, 32, torch.float32, CPU)
    slots = checkpoint._weight_slots(model)
    save_file({name: slot.clone() for name, slot in slots.items()}, f"{folder.name}/model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))
        hidden = model(torch.tensor(IDS), torch.arange(len(IDS)), attention)
    return folder, hidden, hidden @ model.lm_head.weight.T


def check_close(got: Tensor, expected: Tensor, case: str) -> None:
    assert got.shape == expected.shape, (
        f"{case} must have the shape {list(expected.shape)}, but have {list(got.shape)}."
    )
    off = (got - expected).abs().max().item()
    assert off < 1e-3, f"{case} differ from those of one process, which has all weights, by up to {off:.4f}."


def test_one_process_computes_the_whole() -> None:
    folder, hidden, logits = whole_model()
    got = run_model(load(folder.name))
    check_close(got[0], hidden, "Without ranks the hidden states")
    check_close(got[1], logits, "Without ranks the logits")


class Threads:
    """A rank that is a thread: the ranks meet at a barrier, and each sees what the others have put down."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.parts, self.barrier = rank, len(parts), parts, barrier

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.parts[self.rank] = x.clone()
        self.barrier.wait(SECONDS)
        seen = list(self.parts)
        self.barrier.wait(SECONDS)
        return seen

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(sum(self.exchange(x)))

    def gather(self, x: Tensor) -> Tensor:
        seen = self.exchange(x)
        return torch.cat(seen, dim=-1) if self.rank == 0 else x

    def meet(self, *_: Any) -> None:
        self.barrier.wait(SECONDS)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_as_threads(size: int) -> None:
    """On four ranks two have the same KV head."""
    folder, hidden, logits = whole_model()
    results: list[Any] = [None] * size
    parts, barrier = [None] * size, threading.Barrier(size)

    def work(rank: int) -> None:
        try:
            results[rank] = run_model(load(folder.name, Threads(rank, parts, barrier)))
        except Exception as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [f"{type(e).__name__}: {e}" for e in results if isinstance(e, Exception)]
    own = [text for text in errors if not text.startswith("BrokenBarrier")]
    assert not errors, (
        f"{size} ranks in threads compute a model: {(own or ['the ranks do not exchange equally often'])[0]}."
    )
    for rank in range(size):
        check_close(results[rank][0], hidden, f"On rank {rank} of {size} the hidden states")
    check_close(results[0][1], logits, f"On rank 0 of {size} the logits")


class Noting:
    """In the place of the group: notes whether the tensors that it is given are contiguous."""

    def __init__(self) -> None:
        self.contiguous: list[bool] = []

    def allreduce(self, tensors: list[Tensor], *_: Any) -> Noting:
        self.contiguous += [x.is_contiguous() for x in tensors]
        return self

    def gather(self, _outputs: Any, inputs: list[Tensor], *_: Any) -> Noting:
        return self.allreduce(inputs)

    def wait(self) -> None:
        """Nothing is exchanged."""


def test_what_is_sent_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, group = Ranks.__new__(Ranks), Noting()  # a rank without the others
    monkeypatch.setattr(dist, "gather", lambda x, *_, **__: group.allreduce([x]))
    ranks.rank, ranks.size, ranks.group, ranks.device = 1, 2, group, CPU
    ranks.gather(torch.arange(6.0).view(2, 3).T)
    assert group.contiguous, "`gather` on rank 1 calls neither `gather` nor `allreduce` of its group."
    assert all(group.contiguous), (
        "`gather` of a transposed x gives the group a tensor that is not contiguous, which not every group "
        "takes: `x.contiguous()` makes one."
    )


# ── two processes ─────────────────────────────────────────────────────────────────────────────────


def sum_up(ranks: Ranks, folder: str) -> dict[str, Any]:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * 10**ranks.rank
    returned = ranks.all_reduce(x)
    half = ranks.all_reduce(torch.full((3,), 1.5 + ranks.rank, dtype=torch.bfloat16))
    return {"returned": returned.tolist(), "in place": x.tolist(), "half": half.tolist()}


def put_side_by_side(ranks: Ranks, folder: str) -> dict[str, Any]:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * 10**ranks.rank
    turned = torch.arange(6.0).view(2, 3).T + 10 * ranks.rank  # its memory is not contiguous
    return {"x": ranks.gather(x).tolist(), "turned": ranks.gather(turned).tolist()}


def compute(ranks: Ranks, folder: str) -> dict[str, Any]:
    hidden, logits = run_model(load(folder, ranks))
    return {"hidden": hidden.tolist(), "logits": logits.tolist()}


DOING: dict[Callable[[Ranks, str], dict[str, Any]], str] = {
    sum_up: "call `all_reduce`",
    put_side_by_side: "call `gather`",
    compute: "load and run a model",
}
WORK = tuple(DOING)


def do_all(ranks: Ranks, folder: str) -> dict[str, Any]:
    """The results of this rank: name of the work → result, up to the first one that fails."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    try:
        ranks.meet(CPU)
        ranks.meet = lambda *_: None  # `load_model` calls it, too
        for work in WORK:
            results[work.__name__] = work(ranks, folder)
    except Exception as error:
        last = str(error).strip().splitlines()[-1:] or [""]
        waited = "gloo" in str(error)  # the library that connects the processes
        results["waited"] = waited
        results["error"] = (
            "it waits in vain for the other" if waited else f"{type(error).__name__}: {last[0]}"
        )
    return results


def make_ranks(rank: int, folder: str) -> Ranks:
    parallel.STEP_TIMEOUT = float(SECONDS)
    return Ranks(rank, 2, rank, dist.FileStore(f"{folder}/store", 2))


def rank_1(folder: str) -> None:
    """The other process."""
    Path(folder, "results").write_text(json.dumps(do_all(make_ranks(1, folder), folder)), encoding="utf-8")


@cache
def two_processes() -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of rank 0, which is this process, and of rank 1."""
    folder = whole_model()[0].name
    ranks = make_ranks(0, folder)
    worker = get_context("spawn").Process(target=rank_1, args=(folder,), daemon=True)
    worker.start()
    ours = do_all(ranks, folder)
    worker.join(SECONDS)
    theirs = {"error": "it ended without a result"}
    if worker.is_alive():
        theirs = {"error": "it waits for rank 0, which has finished", "waited": True}
    elif Path(folder, "results").exists():
        theirs = json.loads(Path(folder, "results").read_text(encoding="utf-8"))
    worker.kill()
    return ours, theirs


def results_of(work: Callable[..., Any]) -> list[dict[str, Any]]:
    """The results of both ranks."""
    both = two_processes()
    missing = [each for each in WORK if any(each.__name__ not in results for results in both)]
    if missing and work is not missing[0] and work in missing:
        pytest.skip("an earlier test has failed")
    if work in missing:
        failed = [(rank, results) for rank, results in enumerate(both) if "error" in results]
        rank, results = min(
            failed, key=lambda each: each[1].get("waited", False)
        )  # the cause, if it is known
        raise AssertionError(f"Two processes {DOING[work]}, and rank {rank} fails: {results['error']}.")
    return [results[work.__name__] for results in both]


def test_all_reduce_of_two_processes() -> None:
    for rank, got in enumerate(results_of(sum_up)):
        case = "Rank 0 has [[1, 2], [3, 4]] and rank 1 ten times that: after `all_reduce`"
        for what in ("returned", "in place"):
            where = "the tensor itself" if what == "in place" else "what is returned"
            assert got[what] == [[11, 22], [33, 44]], (
                f"{case} {where} is {got[what]} on rank {rank}, and not [[11, 22], [33, 44]]."
            )
        assert got["half"] == [4, 4, 4], (
            f"Three bfloat16 numbers are 1.5 on rank 0 and 2.5 on rank 1: their sums are 4, but rank {rank} "
            f"has {got['half']}."
        )


def test_gather_of_two_processes() -> None:
    first, second = results_of(put_side_by_side)
    case = "Rank 0 has [[1, 2], [3, 4]] and rank 1 ten times that:"
    assert first["x"] == [[1, 2, 10, 20], [3, 4, 30, 40]], (
        f"{case} on rank 0 `gather` must return [[1, 2, 10, 20], [3, 4, 30, 40]], but returns {first['x']}."
    )
    assert second["x"] == [[10, 20], [30, 40]], (
        f"{case} on rank 1 `gather` must return what it was given, but returns {second['x']}."
    )
    expected = [[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]]
    assert first["turned"] == expected, (
        f"The x of `gather` may be transposed, so that its memory is not contiguous: rank 0 must return "
        f"{expected}, but returns {first['turned']}."
    )


def test_a_model_on_two_processes() -> None:
    _, hidden, logits = whole_model()
    for rank, got in enumerate(results_of(compute)):
        check_close(torch.tensor(got["hidden"]), hidden, f"On rank {rank} of 2 processes the hidden states")
        if rank == 0:
            check_close(torch.tensor(got["logits"]), logits, "On rank 0 of 2 processes the logits")
