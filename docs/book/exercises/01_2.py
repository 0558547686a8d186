"""Exercise 1.2, ranges of equal length: see docs/book/01-why-paging.md."""

import random
from collections.abc import Callable

from lib.no_model import TRACES, draw_lengths, run_contiguous


def rounded(unit: int) -> Callable[[int, int], int]:
    """A policy: a function of a request's prompt tokens and output tokens that returns the slots to reserve.

    It reserves the whole length, rounded up to a multiple of `unit`.
    """
    raise NotImplementedError


# Each is one of "reserved", "internal" and "external".
rises: str = ""  # its share of the pool rises with the unit
vanishes: str = ""  # its share falls to zero
stays: str = ""  # no unit removes it


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def test_the_whole_length_is_rounded_up() -> None:
    rng = random.Random(0)
    for unit in (1, 16, 128, 2048):
        policy = rounded(unit)
        for num_input, num_output in (
            (unit, unit),
            *((rng.randint(1, 999), rng.randint(1, 999)) for _ in range(20)),
        ):
            size, length = policy(num_input, num_output), num_input + num_output
            call = f"rounded({unit})({num_input}, {num_output}) is {size}"
            assert size % unit == 0, f"{call}, which is not a multiple of {unit}."
            assert size >= length, f"{call}, but the request has {length} tokens in the end."
            assert size < length + unit, f"{call}, a multiple of {unit} too many for {length} tokens."


def test_the_kinds_of_waste() -> None:
    if not (rises and vanishes and stays):
        raise NotImplementedError("rises, vanishes and stays are to be one kind of waste each.")
    lengths, units, shares = draw_lengths(TRACES["ShareGPT-like"], num=300, seed=0), (1, 128, 512, 2048), {}
    for unit in units:
        for kind, share in run_contiguous(lengths, 15700, rounded(unit)).shares.items():
            shares.setdefault(kind, []).append(share)
    for name, kind in (("rises", rises), ("vanishes", vanishes), ("stays", stays)):
        assert kind in ("reserved", "internal", "external"), f"{name} is {kind!r}, which is no kind of waste."
    said = {
        kind: f"with units of 1, 128, 512 and 2048 the {kind} share is " + ", ".join(f"{x:.1%}" for x in its)
        for kind, its in shares.items()
    }
    assert shares[rises] == sorted(shares[rises]), f"rises is {rises!r}, but {said[rises]}."
    assert shares[vanishes][-1] == 0, f"vanishes is {vanishes!r}, but {said[vanishes]}."
    assert min(shares[stays]) > 0, f"stays is {stays!r}, but {said[stays]}."
