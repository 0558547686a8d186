"""Every Triton kernel: its error, and its share of the speed at which the machine copies memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import torch
from common import copy_bandwidth, time_call
from decode_case import DecodeCase, KVSizes, copy_call, store_call
from torch import Tensor

from light import Light, NotRun, worst

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest value


class Table:
    """Rows of kernels; for a sentence, the shares of each kernel, and the errors of each dtype."""

    def __init__(self, light: Light) -> None:
        self.light, self.num_rows = light, 0
        self.shares: dict[str, list[float]] = {}
        self.errors: dict[str, list[float]] = {}
        light.now("copying memory")
        self.bandwidth = copy_bandwidth(light.device)
        light.say(f"Shares are of {self.bandwidth / 1e9:,.1f} GB/s: memory copied on this machine.")
        light.table("kernel", "work", "dtype", "largest error", "µs", "GB/s", "share")

    def add(
        self,
        kernel: str,
        work: str,
        call: Callable[[], object],
        num_bytes: int,
        actual: Tensor,
        expected: Tensor,
        tolerance: float | None = None,
    ) -> None:
        """Check and time one call, and add a row.

        Args:
            num_bytes: what the call reads and writes.
            actual, expected: some of its output; compared relative to the largest value expected.
            tolerance: of the error; None is that of the dtype.
        """
        dtype, name = actual.dtype, str(actual.dtype).removeprefix("torch.")
        error = (actual.double() - expected.double()).abs().max().item()
        error /= max(expected.double().abs().max().item(), 1e-9)
        self.num_rows += 1
        self.errors.setdefault(name, []).append(error)
        most = TOLERANCE[dtype] if tolerance is None else tolerance
        if not error <= most:  # NaN is not below anything
            self.light.wrong(f"{kernel}, {work}, {name}: error {error:.1e}, more than {most:.0e}")
        timed = ["–"] * 3
        if self.light.on_gpu:  # the interpreter's time says nothing
            seconds = time_call(call, self.light.device)
            share = num_bytes / seconds / self.bandwidth
            self.shares.setdefault(kernel, []).append(share)
            timed = [f"{1e6 * seconds:,.1f}", f"{num_bytes / seconds / 1e9:,.0f}", f"{share:.0%}"]
        self.light.row(kernel, work, name, f"{error:.1e}", *timed)

    def sentence(self) -> str:
        errors = ", ".join(f"{worst(e):.1e} in {name}" for name, e in self.errors.items())
        shares = "; ".join(f"{name} {min(s):.0%} to {max(s):.0%}" for name, s in self.shares.items())
        return f"{self.num_rows} cases, largest error {errors}" + (f"; shares: {shares}" if shares else "")


def kernels(light: Light) -> str:
    """Decode over batches, contexts, block sizes and dtypes; store and copy; other settings of the decode."""
    if light.no_kernels is not None:
        raise NotRun(light.no_kernels)
    if not light.on_gpu:
        light.cannot("time the kernels: they are interpreted")
    torch.manual_seed(0)
    table = Table(light)
    with torch.inference_mode():
        add_decodes(table, light)
        add_moves(table, light)
        return f"{table.sentence()}; {best_settings(light)}"


# ── decode ────────────────────────────────────────────────────────────────────────────────────────


def add_decodes(table: Table, light: Light) -> None:
    """The whole grid in one dtype and block size; at two points of it other ones, and other heads."""
    usual, kv_heads = light.dtype, light.pick(8, 8, 2)
    batches = light.pick([1, 8, 64, 256], [1, 64, 256], [1, 3])
    contexts = light.pick([256, 1024, 4096, 16384], [256, 4096], [40, 300])
    cases = [(batch, context, 16, usual, (kv_heads, 2), 128) for batch in batches for context in contexts]
    for batch, context in light.pick([(64, 4096), (1, 16384)], [(64, 4096)], [(3, 70)]):
        sizes = light.pick([1, 8, 32, 128, 256], [32], [1, 7])
        cases += [(batch, context, size, usual, (kv_heads, 2), 128) for size in sizes]
        cases += [(batch, context, 16, dtype, (kv_heads, 2), 128) for dtype in TOLERANCE if dtype != usual]
        heads = [((kv_heads, 4), 128), ((8, 4), 64), ((4, 3), 64), ((8, 1), 128)]
        cases += [(batch, context, 16, usual, *each) for each in light.pick(heads, heads[:1], heads[:1])]
    for batch, context, block_size, dtype, (num_kv_heads, group), head_dim in cases:
        work = f"{batch} of {context:,}, blocks of {block_size}, {num_kv_heads} x {group} heads of {head_dim}"
        sizes = KVSizes(2, num_kv_heads, group, head_dim, dtype)
        needed = 2 * batch * context * sizes.bytes_per_token()
        if light.on_gpu:
            torch.cuda.empty_cache()
            if 1.3 * needed > torch.cuda.mem_get_info(light.device)[0]:
                light.row("decode", work, str(dtype).removeprefix("torch."), "does not fit", "–", "–", "–")
                continue
        with light.trying(f"decode, {work}, {dtype}"):
            # The longest is first; the lengths differ, so that splits and last tiles do, too.
            lens = [context] + [context - random.Random(i).randrange(context // 8) for i in range(1, batch)]
            case = DecodeCase(lens, block_size, sizes, light.device, seed=0)
            call, some = case.paged(backend="triton"), sorted({0, batch // 2, batch - 1})
            expected = torch.stack([case.exact(i) for i in some])
            table.add("decode", work, call, case.num_bytes, torch.stack([call()[i] for i in some]), expected)
            del case, call


def best_settings(light: Light) -> str:
    """Time the decode with other tiles, stages and warps than `decode_settings` has for this GPU."""
    from triton.runtime.errors import OutOfResources

    from nanopaged.kernels import paged_attention as triton_kernels

    sizes = KVSizes(2, light.pick(8, 8, 2), 2, 128, light.dtype)
    case = DecodeCase([light.pick(4096, 4096, 70)] * light.pick(64, 64, 2), 16, sizes, light.device, seed=0)
    settings, call, seconds = triton_kernels.decode_settings, case.paged(backend="triton"), {}
    capability = torch.cuda.get_device_capability(light.device) if light.on_gpu else (9, 0)
    constants, options = settings(capability, 2, 128, light.dtype)
    ours = constants["TILE"], options["num_stages"], options["num_warps"]
    grid = set(product((16, 32, 64, 128), (2, 3, 4), (4, 8))) if light.size == "full" else set()
    grid |= {ours, (16, 3, 4), (64, 3, 4), (32, 3, 8), (32, 4, 4)}
    light.table("tile", "stages", "warps", "µs of a decode of 64 times 4,096 keys")
    for tile, stages, warps in sorted(grid):
        with light.trying(f"decode with tiles of {tile}, {stages} stages, {warps} warps"):
            tried = constants | {"TILE": tile}, {"num_stages": stages, "num_warps": warps}
            triton_kernels.decode_settings = lambda *_, tried=tried: tried
            try:
                call()
                timed = time_call(call, light.device) if light.on_gpu else math.inf
                seconds[tile, stages, warps] = timed
                light.row(tile, stages, warps, f"{1e6 * timed:,.1f}" if light.on_gpu else "–")
            except OutOfResources:
                light.row(tile, stages, warps, "does not fit")
            finally:
                triton_kernels.decode_settings = settings
    if not light.on_gpu:
        return f"{len(seconds)} settings run"
    best = min(seconds, key=seconds.__getitem__)
    gain = f"{seconds[ours] / seconds[best]:.2f} times as fast as the engine's {ours}"
    return f"the best tile, stages and warps are {best}, {gain}"


# ── store, copy ───────────────────────────────────────────────────────────────────────────────────


def add_moves(table: Table, light: Light) -> None:
    """Bits must arrive as they are; a slot or a block beside the target keeps its value."""
    sizes, rng, num_blocks = KVSizes(2, 8, 2, 128, light.dtype), random.Random(0), light.pick(1024, 1024, 64)
    cache = sizes.make_cache(num_blocks, 16, light.device)
    for num_tokens in light.pick([1, 64, 256, 8192], [64, 8192], [5]):
        with light.trying(f"store of {num_tokens} tokens"):
            slots = rng.sample(range(num_blocks * 16), num_tokens)
            k, v = torch.randn(2, num_tokens, 8, 128).to(light.device, light.dtype)
            call = store_call(cache, slots, k, v, layer=1, backend="triton")
            expected = cache.data.clone()
            where = torch.tensor(slots).to(light.device)
            for part, new in enumerate((k, v)):
                expected[:, 1, part][where // 16, :, where % 16] = new
            call()
            num_bytes = 2 * num_tokens * sizes.bytes_per_token()  # read and written
            table.add("store", f"{num_tokens:,} tokens", call, num_bytes, cache.data, expected, 0.0)
    for num_pairs in light.pick([1, 16, 512], [512], [3]):
        with light.trying(f"copy of {num_pairs} blocks"):
            blocks, expected = rng.sample(range(num_blocks), 2 * num_pairs), cache.data.clone()
            sources, copies = torch.tensor(blocks).to(light.device).view(2, -1)
            expected[copies] = expected[sources]
            call = copy_call(cache, list(zip(blocks[:num_pairs], blocks[num_pairs:], strict=True)))
            call()
            num_bytes = 2 * num_pairs * cache.data[0].nbytes
            table.add("copy", f"{num_pairs:,} blocks of 16", call, num_bytes, cache.data, expected, 0.0)
