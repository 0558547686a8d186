"""Our linear layers on a CPU next to PyTorch's, and as shares of what this machine reads and multiplies.

    OMP_NUM_THREADS=1 python docs/experiments/linear.py --dtype bfloat16

With one token, each weight is used once, so reading the weights is the lower bound: here the speed of a dot
product of two long vectors. With many tokens, each is used many times, and the arithmetic is the lower bound:
here PyTorch's speed in a large product.
"""

from __future__ import annotations

from lib.common import DTYPES, at_least, machine, make_parser, product_speed, time_call

from nanopaged.terminal import run_program

WEIGHT_BYTES = 256 << 20  # of all layers together, so that no cache holds them


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=at_least(1), nargs="+", default=[1, 8, 32, 512], help="tokens in a step")
    add("--inputs", type=at_least(1), default=768, help="inputs of a layer")
    add("--outputs", type=at_least(1), default=4096, help="outputs of a layer")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights")
    args = parser.parse_args()

    import torch
    import torch.nn.functional as F

    from nanopaged.kernels import cpp

    device = torch.device("cpu")
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    layer_bytes = args.inputs * args.outputs * dtype.itemsize
    weights = [torch.randn(args.outputs, args.inputs).to(dtype) for _ in range(WEIGHT_BYTES // layer_bytes)]
    packed = [cpp.PackedLinear(weight, None) for weight in weights]
    a, b = torch.ones(2, WEIGHT_BYTES // 4 // 2)
    bandwidth = WEIGHT_BYTES / time_call(lambda: torch.dot(a, b), device, best=True)
    speed = product_speed(args.dtype)
    print(machine())
    print(f"layers of {args.inputs} inputs and {args.outputs} outputs, {args.dtype}")
    print(f"a dot product reads {bandwidth / 1e9:.1f} GB/s; a large product does {speed / 1e9:.0f} GFLOP/s")
    print("\ntokens    F.linear       ours  ratio    GB/s  share  GFLOP/s  share")
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, args.inputs).to(dtype)
        plain = time_call(lambda x=x: [F.linear(x, weight) for weight in weights], device) / len(weights)
        ours = time_call(lambda x=x: [layer(x) for layer in packed], device) / len(packed)
        read = layer_bytes / ours
        flops = 2 * num_tokens * args.inputs * args.outputs / ours
        print(
            f"{num_tokens:6} {1e6 * plain:7.0f} us {1e6 * ours:7.0f} us {plain / ours:6.2f}"
            f" {read / 1e9:7.1f} {read / bandwidth:6.0%} {flops / 1e9:8.0f} {flops / speed:6.0%}",
            flush=True,
        )


if __name__ == "__main__":
    run_program(main)
