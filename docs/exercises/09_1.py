"""Exercise 9.1, splits on paper: see docs/09-gpu.md.

python -m pytest docs/exercises/09_1.py
"""

import pytest

predicted: dict[str, tuple[int, int]] = {}  # "a", "b" and "c": (splits, programs)


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

CASES = {"a": (4, 8192), "b": (40, 8192), "c": (2, 700)}  # sequences, keys of each


def test_the_engine_takes_as_many_splits() -> None:
    if not predicted:
        raise NotImplementedError
    for case in CASES:
        assert case in predicted, f"`predicted` has no numbers for ({case})."
    pytest.importorskip(
        "triton", reason="the numbers are Triton's: it is installed on Linux with x86-64 only"
    )
    from nanopaged.kernels.paged_attention import choose_num_splits

    for case, (num_seqs, num_keys) in CASES.items():
        splits, programs = predicted[case]
        right = choose_num_splits(num_seqs * 4, num_keys, num_processors=132)
        call = f"({case}), {num_seqs} sequences of {num_keys:,} keys"
        assert splits == right, f"{call}: the engine takes {right} splits, not {splits}."
        wanted = num_seqs * 4 * right
        assert programs == wanted, f"{call}: {right} splits are {wanted} programs, not {programs}."
