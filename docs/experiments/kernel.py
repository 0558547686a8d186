"""Paged decode, K/V store and block copy, as shares of the speed at which this machine copies memory.

    python docs/experiments/kernel.py

Decode is memory-bound: the time to read K/V once is its lower bound. On a GPU our Triton kernels are timed,
over batch, context, block size and number of cuts; on a CPU the PyTorch backend. Other ways to the same
result are timed for comparison:

    in place      our C++ kernel (on a CPU, if it was built: python -m nanopaged.kernels.build)
    dense         PyTorch's attention over [num_seqs, num_kv_heads, longest, head_dim]: K/V without blocks
    padded        the same, gathered out of the blocks first (on a CPU)
    one by one    gathered and attended sequence by sequence (on a CPU)
    flash-attn    its own decode over dense K/V, where it is installed (on a GPU)
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

from common import (
    DTYPES,
    add_plot_argument,
    at_least,
    copy_bandwidth,
    machine,
    make_parser,
    pick_device,
    save_bars,
    time_call,
)

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from decode_case import DecodeCase, KVSizes

DENSE_LIMIT = 8 << 30  # bytes of dense K/V that are still worth trying


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--batch", type=at_least(1), nargs="+", help="sequences (default: 1 8 64 256, or 1 8 32 on a CPU)")
    add(
        "--context",
        type=length_range,
        nargs="+",
        help="keys of each sequence, or a range such as 64-1024 (default: 1024 4096 1024-4096 16384, or "
        "128 64-1024 on a CPU)",
    )
    add("--block-size", type=at_least(1), nargs="+", default=[16], help="tokens in a block")
    add("--cuts", type=at_least(1), nargs="+", default=[], help="other numbers of cuts to try, on a GPU")
    add("--kv-heads", type=at_least(1), default=8, help="KV heads")
    add("--group", type=at_least(1), default=4, help="query heads to a KV head")
    add("--head-dim", type=at_least(1), default=128, help="numbers in a head")
    add("--layers", type=at_least(1), default=2, help="layers in the cache; one of them is read")
    add("--dtype", choices=DTYPES, help="of K/V (default: bfloat16, or float32 on a CPU)")
    add_plot_argument(parser)
    args = parser.parse_args()

    import torch
    from decode_case import KVSizes

    device = pick_device()
    on_gpu = device.type == "cuda"
    if args.cuts and not on_gpu:
        parser.error("--cuts is for the Triton kernel, which needs a GPU")
    args.batch = args.batch or ([1, 8, 64, 256] if on_gpu else [1, 8, 32])
    args.context = args.context or (["1024", "4096", "1024-4096", "16384"] if on_gpu else ["128", "64-1024"])
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    sizes = KVSizes(args.layers, args.kv_heads, args.group, args.head_dim, getattr(torch, args.dtype))
    bandwidth = copy_bandwidth(device)
    print(machine())
    print(f"{args.kv_heads} KV heads of {args.head_dim}, {args.group} query heads to each, {args.dtype}")
    print(f"copying memory: {bandwidth / 1e9:.1f} GB/s, read and written; the shares below are of it")
    with torch.inference_mode():
        time_decodes(sizes, args, bandwidth)
        time_moves(sizes, args, bandwidth)


def length_range(text: str) -> tuple[int, int]:
    """A type for argparse: "1024", or "1024-4096" with the smaller first."""
    low, _, high = text.partition("-")
    if not 1 <= int(low) <= int(high or low):
        raise argparse.ArgumentTypeError(f"{text} is not a length, or a range from low to high")
    return int(low), int(high or low)


def time_decodes(sizes: KVSizes, args: argparse.Namespace, bandwidth: float) -> None:
    """Every way to decode, over batches and contexts; ours also over block sizes."""
    from decode_case import DecodeCase

    print(f"\n{'decode':20} {'batch':>5} {'context':>10} {'block':>5} {'us':>9} {'GB/s':>7} {'share':>6}")
    groups: list[str] = []
    bars: dict[str, list[float]] = {}
    for batch, (low, high) in product(args.batch, args.context):
        rng, context = random.Random(args.seed), f"{low}-{high}" if low < high else str(low)
        lens = [rng.randint(low, high) for _ in range(batch)]
        groups.append(f"{batch} of\n{context}")
        for block_size in args.block_size:
            case = DecodeCase(lens, block_size, sizes, pick_device(), args.seed)
            is_first = block_size == args.block_size[0]
            for name, call in ways_to_decode(case, args.cuts, with_others=is_first).items():
                seconds = time_call(call, pick_device())
                rate = case.num_bytes / seconds
                if is_first:
                    bars.setdefault(name, []).append(rate / bandwidth)
                figures = f"{1e6 * seconds:9.1f} {rate / 1e9:7.1f} {rate / bandwidth:6.1%}"
                print(f"{name:20} {batch:5} {context:>10} {block_size:5} {figures}", flush=True)
            del case  # before the next one takes its memory
    if args.plot:
        everywhere = {name: shares for name, shares in bars.items() if len(shares) == len(groups)}
        save_bars(args.plot, groups, everywhere, "share of the copy bandwidth")


def ways_to_decode(case: DecodeCase, cuts: list[int], with_others: bool) -> dict[str, Callable[[], object]]:
    """Our decode, also with other numbers of splits; and the other ways, dense ones only while they fit."""
    from nanopaged.kernels import build

    ways: dict[str, Callable[[], object]] = {
        "paged": case.paged(backend="auto" if case.q.is_cuda else "torch")
    }
    if not case.q.is_cuda and build.library_path().exists():
        ways["in place"] = case.paged(backend="cpp")
    ways |= {f"paged, {n} cuts": case.paged(max_splits=n) for n in cuts}
    if not with_others:
        return ways
    if case.num_bytes * max(case.lens) * len(case.lens) // sum(case.lens) <= DENSE_LIMIT:
        ways["dense"] = case.dense()
        if case.q.is_cuda and (flash := case.flash_attn()) is not None:
            ways["flash-attn"] = flash
    if not case.q.is_cuda:
        ways |= {"padded": case.padded, "one by one": case.one_by_one}
    return ways


def time_moves(sizes: KVSizes, args: argparse.Namespace, bandwidth: float) -> None:
    """Storing new K/V in one layer, and copying whole blocks, of the first block size."""
    import torch
    from decode_case import copy_call, store_call

    device, num_blocks, block_size = pick_device(), 4096, args.block_size[0]
    cache, rng = sizes.make_cache(num_blocks, block_size, device), random.Random(args.seed)
    print(f"\n{'store and copy':20} {'number':>12} {'us':>9} {'GB/s':>7} {'share':>6}")
    rows: list[tuple[str, str, Callable[[], None], int]] = []  # name, number, call, bytes
    for num_tokens in (1, 64, 256, 4096):
        k, v = torch.randn(2, num_tokens, args.kv_heads, args.head_dim).to(device, sizes.dtype)
        call = store_call(
            cache, rng.sample(range(num_blocks * block_size), num_tokens), k, v, args.layers - 1
        )
        rows.append(("store", f"{num_tokens} tokens", call, num_tokens * sizes.bytes_per_token()))
    for num_pairs in (1, 16, 256):
        blocks = rng.sample(range(num_blocks), 2 * num_pairs)
        call = copy_call(cache, list(zip(blocks[::2], blocks[1::2], strict=True)))
        num_bytes = num_pairs * block_size * args.layers * sizes.bytes_per_token()
        rows.append(("copy", f"{num_pairs} blocks", call, num_bytes))
    for name, number, call, num_bytes in rows:
        seconds = time_call(call, device)
        rate = 2 * num_bytes / seconds  # read and written
        print(f"{name:20} {number:>12} {1e6 * seconds:9.1f} {rate / 1e9:7.1f} {rate / bandwidth:6.1%}")


if __name__ == "__main__":
    run_program(main)
