"""Paged decode, K/V store and block copy, beside the speed at which this machine copies memory.

A decode does little with what it reads, so the time to read K/V once is its lower bound. On a GPU our
kernels are timed, over batch, context, block size, layout and number of splits; elsewhere the PyTorch path
is. Beside them stand other ways to the same result:

    dense         K/V as if never paged, [num_seqs, num_kv_heads, longest, head_dim], in PyTorch's attention
    padded        the same, gathered out of the blocks first
    one by one    gathered and attended sequence by sequence
    flash-attn    its own decode over a dense cache, where it is installed
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    DTYPES,
    add_plot_argument,
    at_least,
    copy_bandwidth,
    machine,
    save_bars,
    time_call,
)
from torch import Tensor

from nanopaged.attention import make_attention
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.torch_backend import gather_context
from nanopaged.block_pool import blocks_needed
from nanopaged.kv_cache import KVCache, KVShape, pick_device

PADDED_LIMIT = 8 << 30  # bytes of a padded K/V that is still worth trying


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=at_least(1), nargs="+", help="default: 1 8 64 256, or 1 8 32 on a CPU"
    )
    parser.add_argument(
        "--context", type=length_range, nargs="+", help="keys of each sequence, or a range: 1024 1024-4096"
    )
    parser.add_argument("--block-size", type=at_least(1), nargs="+", default=[16])
    parser.add_argument("--layout", nargs="+", choices=["block"], default=["block"])
    parser.add_argument(
        "--splits", type=int, nargs="+", default=[], help="try these beside the rule's choice"
    )
    parser.add_argument("--kv-heads", type=at_least(1), default=8)
    parser.add_argument("--group", type=at_least(1), default=4, help="query heads to a KV head")
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument("--layers", type=at_least(1), default=2, help="in the cache; one of them is read")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, or float32 on a CPU")
    add_plot_argument(parser)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    device = pick_device("auto")
    on_gpu = device.type == "cuda"
    if args.splits and not on_gpu:
        raise SystemExit("--splits is for the kernels, which need a GPU: here PyTorch decodes, unsplit")
    args.batch = args.batch or ([1, 8, 64, 256] if on_gpu else [1, 8, 32])
    args.context = args.context or (["1024", "4096", "1024-4096", "16384"] if on_gpu else ["128", "64-1024"])
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    bandwidth = copy_bandwidth(device)
    print(machine())
    print(f"{args.kv_heads} KV heads of {args.head_dim}, {args.group} query heads to each, {args.dtype}")
    print(f"copying memory: {bandwidth / 1e9:.1f} GB/s, read and written; the shares below are of it")
    time_decodes(args, device, bandwidth)
    time_moves(args, device, bandwidth)


# ── decode ────────────────────────────────────────────────────────────────────────────────────────


class Case:
    """A batch of decodes over random, scattered blocks."""

    def __init__(
        self, lens: list[int], block_size: int, layout: str, args: argparse.Namespace, device: torch.device
    ) -> None:
        rng = random.Random(args.seed)
        self.lens, self.block_size, self.layer = lens, block_size, args.layers - 1
        needed = [blocks_needed(n, block_size) for n in lens]
        ids = rng.sample(range(sum(needed) + 8), sum(needed))
        self.tables = [[ids.pop() for _ in range(n)] for n in needed]
        shape = KVShape(args.layers, args.kv_heads, args.head_dim, getattr(torch, args.dtype))
        self.cache = KVCache(shape, sum(needed) + 8, block_size, device)
        for part in self.cache.layer(self.layer):
            part.normal_()
        self.q = torch.randn(len(lens), args.kv_heads * args.group, args.head_dim).to(device, shape.dtype)
        self.kv = torch.randn(2, len(lens), args.kv_heads, args.head_dim).to(device, shape.dtype)
        self.num_bytes = sum(lens) * shape.block_bytes(1) // args.layers

    def batch(self) -> AttentionMetadata:
        size = self.block_size
        slots = [
            t[(n - 1) // size] * size + (n - 1) % size for t, n in zip(self.tables, self.lens, strict=True)
        ]
        n = len(self.lens)
        ones = np.ones(n, dtype=np.int64)
        return AttentionMetadata(ones, np.array(self.lens), self.tables, np.array(slots), n, list(range(n)))

    def paged(self, num_splits: int | None = None) -> Callable[[], Tensor]:
        """Our own decode, the storing left out."""
        attention = make_attention("auto", self.cache, self.q.shape[-1] ** -0.5)
        attention.begin_step(self.batch())
        if num_splits is not None:
            attention.num_splits = num_splits
        return lambda: attention.decode(self.layer, self.q)

    def grouped(self) -> Tensor:
        """The query heads of a KV head as so many queries: [num_seqs, num_kv_heads, group, head_dim]."""
        return self.q.view(len(self.q), self.kv.shape[2], -1, self.q.shape[-1])

    def gathered(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """K and V as [num_seqs, num_kv_heads, longest, head_dim], and a mask if lengths differ."""
        longest = max(self.lens)
        padded = [
            table + [0] * (blocks_needed(longest, self.block_size) - len(table)) for table in self.tables
        ]
        index = torch.tensor(padded, device=self.q.device)
        k, v = (
            part[index].transpose(1, 2).flatten(2, 3)[:, :, :longest] for part in self.cache.layer(self.layer)
        )
        if min(self.lens) == longest:
            return k, v, None
        alive = torch.arange(longest) < torch.tensor(self.lens)[:, None]
        return k, v, alive[:, None, None].to(self.q.device)

    def others(self) -> dict[str, Callable[[], Tensor]]:
        """Other ways to the same result, by name; dense ones only while they fit."""
        ways: dict[str, Callable[[], Tensor]] = {}
        q = self.grouped()
        if self.num_bytes * max(self.lens) * len(self.lens) // sum(self.lens) <= PADDED_LIMIT:
            k, v, mask = self.gathered()
            k, v = k.contiguous(), v.contiguous()
            ways["dense"] = lambda: F.scaled_dot_product_attention(q, k, v, mask)
            try:
                from flash_attn import flash_attn_with_kvcache
            except ImportError:
                pass
            else:
                keys, values = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
                lens = torch.tensor(self.lens, dtype=torch.int32, device=q.device)
                ways["flash-attn"] = lambda: flash_attn_with_kvcache(
                    self.q[:, None], keys, values, cache_seqlens=lens
                )
        if self.q.device.type == "cpu":
            ways["padded"] = self.padded
            ways["one by one"] = self.one_by_one
        return ways

    def padded(self) -> Tensor:
        k, v, mask = self.gathered()
        return F.scaled_dot_product_attention(self.grouped(), k, v, mask)

    def one_by_one(self) -> Tensor:
        outs = []
        for q, table, n in zip(self.grouped(), self.tables, self.lens, strict=True):
            index = torch.tensor(table)
            k, v = (gather_context(part, index, n)[None] for part in self.cache.layer(self.layer))
            outs.append(F.scaled_dot_product_attention(q[None], k, v))
        return torch.cat(outs)


def time_decodes(args: argparse.Namespace, device: torch.device, bandwidth: float) -> None:
    columns = f"{'batch':>5} {'context':>10} {'block':>5} {'layout':>6} {'us':>9} {'GB/s':>7} {'share':>6}"
    print(f"\n{'decode':24} {columns}")
    cases, bars = list(product(args.batch, args.context)), {}
    for batch, context in cases:
        lens = draw_lens(batch, context, args.seed)
        for block_size, layout in product(args.block_size, args.layout):
            with_others = (block_size, layout) == (args.block_size[0], args.layout[0])
            case = Case(lens, block_size, layout, args, device)
            for name, seconds in time_case(case, args.splits, with_others).items():
                rate = case.num_bytes / seconds
                if block_size == args.block_size[0]:
                    bars.setdefault(f"{name}, {layout}-major" if "paged" in name else name, []).append(
                        rate / bandwidth
                    )
                where = f"{batch:5} {context:>10} {block_size:5} {layout:>6}"
                figures = f"{1e6 * seconds:9.1f} {rate / 1e9:7.1f} {rate / bandwidth:6.1%}"
                print(f"{name:24} {where} {figures}", flush=True)
            del case  # before the next takes its memory
    if args.plot:
        whole = {name: shares for name, shares in bars.items() if len(shares) == len(cases)}
        groups = [f"{batch} of\n{context}" for batch, context in cases]
        save_bars(args.plot, groups, whole, "share of the copy bandwidth")


def time_case(case: Case, splits: list[int], with_others: bool) -> dict[str, float]:
    """Seconds of our decode, with other numbers of splits if asked, and of the other ways."""
    device = case.q.device
    ways = {"paged": case.paged()}
    if device.type == "cuda":
        ways |= {f"paged, {n} splits": case.paged(n) for n in splits}
    if with_others:
        ways |= case.others()
    return {name: time_call(call, device) for name, call in ways.items()}


def length_range(text: str) -> str:
    """A type for argparse: "1024", or "1024-4096" with the smaller first."""
    low, _, high = text.partition("-")
    if not 1 <= int(low) <= int(high or low):
        raise argparse.ArgumentTypeError(f"{text} is not a length, or a range from low to high")
    return text


def draw_lens(batch: int, context: str, seed: int) -> list[int]:
    """ "1024-4096": lengths uniform between; "1024": all of them."""
    low, _, high = context.partition("-")
    rng = random.Random(seed)
    return [rng.randint(int(low), int(high or low)) for _ in range(batch)]


# ── storing and copying ───────────────────────────────────────────────────────────────────────────


def time_moves(args: argparse.Namespace, device: torch.device, bandwidth: float) -> None:
    """Storing new K/V in one layer, and copying whole blocks, of the first block size."""
    print(f"\n{'store and copy':24} {'number':>12} {'us':>9} {'GB/s':>7} {'share':>6}")
    shape = KVShape(args.layers, args.kv_heads, args.head_dim, getattr(torch, args.dtype))
    cache = KVCache(shape, 4096, args.block_size[0], device)
    cache.data.normal_()
    rng = random.Random(args.seed)
    num_slots = 4096 * cache.block_size
    rows: list[tuple[str, str, Callable[[], object], int]] = []
    for num_tokens in (1, 64, 256, 4096):
        k, v = torch.randn(2, num_tokens, args.kv_heads, args.head_dim).to(device, shape.dtype)
        slots = np.array(rng.sample(range(num_slots), num_tokens))
        ones = np.ones(num_tokens, dtype=np.int64)
        attention = make_attention("auto", cache, 1.0)
        attention.begin_store(AttentionMetadata(ones, ones, [], slots, num_tokens, []))
        call = lambda store=attention.store, k=k, v=v: store(args.layers - 1, k, v)  # noqa: E731
        rows.append(("store", f"{num_tokens} tokens", call, num_tokens * shape.block_bytes(1) // args.layers))
    for num_pairs in (1, 16, 256):
        blocks = rng.sample(range(4096), 2 * num_pairs)
        pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
        call = lambda pairs=pairs: cache.move_blocks([], [], pairs)  # noqa: E731
        if device.type == "cuda":
            index = torch.tensor(pairs, device=device)
            call = lambda index=index: cache.copy_kernel(cache.data, index)  # noqa: E731
        rows.append(("copy", f"{num_pairs} blocks", call, num_pairs * shape.block_bytes(cache.block_size)))
    for name, number, call, num_bytes in rows:
        seconds = time_call(call, device)
        rate = 2 * num_bytes / seconds  # read and written
        print(f"{name:24} {number:>12} {1e6 * seconds:9.1f} {rate / 1e9:7.1f} {rate / bandwidth:6.1%}")
