"""What the block size costs and gains: wasted slots, prefixes found, speed of decoding (paper, §7.2).

    python docs/experiments/blocksize.py --plot docs/book/figures/blocksize.svg

Large blocks waste the slots behind the end of each sequence, and only whole blocks of a prefix are found
again. Small blocks make longer tables and shorter contiguous reads. The requests are ShareGPT-like, ten to a
prefix of 50 to 300 tokens; they go through the real scheduler and block manager without a model. Then one
layer's decode of 32 sequences is timed, with the attention backend that "auto" picks on this machine.
"""

from __future__ import annotations

import argparse
import random

from common import add_plot_argument, at_least, make_parser, pick_device, save_lines, time_call
from no_model import TRACES, NoModel, make_request, make_scheduler
from tqdm import tqdm

from nanopaged import SamplingParams
from nanopaged.terminal import run_program

GROUP = 10  # requests with the same prefix


def main() -> None:
    parser = make_parser(__doc__)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    parser.add_argument("--block-size", type=at_least(1), nargs="+", default=sizes, help="tokens in a block")
    parser.add_argument("--requests", type=at_least(1), default=200, help="of the replay")
    parser.add_argument(
        "--slots", type=at_least(2048), default=15700, help="tokens for which there is memory"
    )
    add_plot_argument(parser)
    args = parser.parse_args()
    print(f"{args.requests} requests, {args.slots} slots")
    print(f"{'block size':>10} {'slots wasted':>13} {'prefix found':>13} {'decode, us':>11}")
    columns: dict[str, list[float]] = {"allocated slots without a token": [], "prefix tokens not found": []}
    for block_size in args.block_size:
        wasted, found = replay(block_size, args)
        seconds = time_decode(block_size, args.seed)
        for column, share in zip(columns.values(), (wasted, 1 - found), strict=True):
            column.append(100 * share)
        print(f"{block_size:10} {wasted:13.1%} {found:13.1%} {1e6 * seconds:11.1f}", flush=True)
    if args.plot:
        save_lines(args.plot, args.block_size, columns, "block size (tokens)", "share (%)")


def replay(block_size: int, args: argparse.Namespace) -> tuple[float, float]:
    """(share of allocated slots without a token, share of the shared prefixes' tokens that were found)."""
    rng = random.Random(args.seed)
    scheduler = make_scheduler(
        args.slots // block_size, block_size, max_num_seqs=32, max_num_batched_tokens=2048
    )
    sharable = 0
    for i in range(args.requests):
        if i % GROUP == 0:
            prefix = [rng.randrange(32000) for _ in range(rng.randint(50, 300))]
        elif i >= GROUP:  # the first group is admitted together, before anything is computed
            sharable += len(prefix)
        num_input, num_output = (1 + int(rng.expovariate(1 / mean)) for mean in TRACES["ShareGPT-like"])
        prompt = prefix + [rng.randrange(32000) for _ in range(min(1000, num_input))]
        scheduler.add(make_request(str(i), prompt, SamplingParams(max_tokens=min(500, num_output))))
    runner, allocated, filled, found = NoModel(args.seed), 0, 0, 0
    with tqdm(total=args.requests, desc=f"blocks of {block_size}", leave=False) as bar:
        while scheduler.running or scheduler.waiting:
            batch = scheduler.schedule()
            for seq in scheduler.running_sequences:
                # A block that two tables share counts twice, as allocated and as filled.
                allocated += len(seq.block_table) * block_size
                filled += min(seq.num_tokens, len(seq.block_table) * block_size)
            for request in scheduler.update(batch, runner.execute(batch)):
                if request.finished:
                    bar.update()
                    found += (request.num_cached_tokens or 0) if int(request.request_id) >= GROUP else 0
    return 1 - filled / allocated, found / max(1, sharable)


def time_decode(block_size: int, seed: int) -> float:
    """Seconds for one layer of 32 sequences with 64 to 1,024 keys each."""
    import torch
    from decode_case import DecodeCase, KVSizes

    device = pick_device()
    rng = random.Random(seed)
    lens = [rng.randint(64, 1024) for _ in range(32)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = KVSizes(num_layers=2, num_kv_heads=4, group=3, head_dim=64, dtype=dtype)
    with torch.inference_mode():
        return time_call(DecodeCase(lens, block_size, sizes, device, seed).paged(), device)


if __name__ == "__main__":
    run_program(main)
