"""Triton's decode kernel on a CPU: interpreted, over blocks in any order, beside the reference.

    python docs/experiments/interpreted.py

A slot without a key holds NaN. One NaN that is read and not masked would make a whole output NaN. Triton's
interpreter runs the programs of a kernel one after another, with numpy.
"""

from __future__ import annotations

import math
import os

from lib.common import at_least, make_parser

from nanopaged.terminal import run_program

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--keys", type=at_least(1), nargs="+", default=[5, 37, 300], help="of each sequence")
    parser.add_argument("--cuts", type=at_least(1), nargs="+", default=[1, 2, 4], help="see `split_contexts`")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="slots in a block")
    args = parser.parse_args()

    import numpy as np
    import torch
    from lib.decode_case import DecodeCase, KVSizes
    from torch.nn.utils.rnn import pad_sequence

    from nanopaged.attention.reference_backend import reference_paged_attention

    try:
        from nanopaged.kernels.paged_attention import paged_decode, split_contexts
    except ImportError as error:
        raise SystemExit(f"Triton, which pip installs on Linux only, cannot be imported: {error}") from None

    torch.manual_seed(0)
    sizes = KVSizes(num_layers=1, num_kv_heads=2, group=2, head_dim=64, dtype=torch.float32)
    case = DecodeCase(args.keys, args.block_size, sizes, torch.device("cpu"), seed=0)
    scale = sizes.head_dim**-0.5
    is_key = torch.zeros(len(case.cache.data), args.block_size, dtype=torch.bool)
    expected = []
    for q, table, num_keys in zip(case.q, case.tables, args.keys, strict=True):
        for position in range(num_keys):
            is_key[table[position // args.block_size], position % args.block_size] = True
        expected.append(reference_paged_attention(q, case.k, case.v, table, num_keys, scale))
    for cache in (case.k, case.v):  # [num_blocks, num_kv_heads, block_size, head_dim]
        cache.transpose(1, 2)[~is_key] = math.nan

    tables = pad_sequence([torch.tensor(table, dtype=torch.int32) for table in case.tables], batch_first=True)
    print(f"sequences of {args.keys} keys, blocks of {args.block_size}")
    print("cuts  keys of a split  programs  largest difference from the reference")
    for cuts in args.cuts:
        splits, firsts = split_contexts(np.array(args.keys), max_splits=cuts)
        out = paged_decode(
            case.q,
            case.k,
            case.v,
            block_tables=tables,
            rows=torch.arange(len(tables)),
            splits=torch.from_numpy(splits),
            firsts=torch.from_numpy(firsts),
            scale=scale,
        )
        difference = (out - torch.stack(expected)).abs().max().item()  # NaN is not below anything
        verdict = "below 0.000001" if difference < 1e-6 else f"{difference}"
        longest = int((splits[:, 2] - splits[:, 1]).max())
        print(f"{cuts:4}  {longest:15}  {len(splits) * sizes.num_kv_heads:8}  {verdict}")


if __name__ == "__main__":
    run_program(main)
