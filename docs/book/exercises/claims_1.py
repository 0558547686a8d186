"""Exercise 1, recompute a table of the paper: see docs/reference/wrong-claims.md."""

import torch

from nanopaged.kv_cache import KVShape


def slots(gigabytes: float, layers: int, hidden: int) -> int:
    """Tokens whose K/V fits into `gigabytes` · 2**30 bytes, for a model without grouped-query attention."""
    raise NotImplementedError


least: float = 0.0  # gigabytes, to one decimal, from which on the entry that seems wrong is right


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

TABLE_1 = {  # GB, layers, hidden size, slots
    "OPT-13B": (12, 40, 5120, "15.7K"),
    "OPT-66B": (21, 64, 9216, "9.7K"),
    "OPT-175B": (264, 96, 12288, "60.1K"),
}


def capacity(gigabytes: float, layers: int, hidden: int) -> int:
    return int(gigabytes * 2**30) // KVShape(layers, 1, hidden, torch.float16).block_bytes(1)


def test_slots_is_the_memory_over_the_bytes_of_a_token() -> None:
    models = [*TABLE_1.values(), (1, 1, 64, ""), (0.5, 24, 2048, ""), (21.3, 64, 9216, "")]
    for gigabytes, layers, hidden, _ in models:
        found, right = slots(gigabytes, layers, hidden), capacity(gigabytes, layers, hidden)
        call = f"slots({gigabytes}, {layers}, {hidden})"
        size = KVShape(layers, 1, hidden, torch.float16).block_bytes(1)
        assert abs(found - right) < 1, (
            f"{call} is {found:,}, but a token has {size:,} bytes, so {right:,} tokens fit."
        )


def test_least_gives_the_entry_that_seems_wrong() -> None:
    if not least:
        raise NotImplementedError("assign a number to `least`")
    for memory, as_printed in ((least, True), (least - 0.1, False)):
        for name, (_, layers, hidden, printed) in TABLE_1.items():
            if printed != f"{capacity(TABLE_1[name][0], layers, hidden) / 1000:.1f}K":
                rounded = f"{capacity(memory, layers, hidden) / 1000:.1f}K"
                assert (rounded == printed) == as_printed, (
                    f"{memory:.1f} GB are {rounded} slots of {name}, so {least} is not the least memory."
                )
