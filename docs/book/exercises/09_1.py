"""Exercise 9.1, splits on paper: see docs/book/09-gpu.md."""

import numpy as np
import pytest

predicted: dict[str, tuple[int, int]] = {}  # "a", "b" and "c": (keys of a split, programs)


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

CASES = {"a": (4, 8192), "b": (64, 8192), "c": (2, 700)}  # sequences, keys of each


def test_the_engine_cuts_as_predicted() -> None:
    if not predicted:
        raise NotImplementedError
    for case in CASES:
        assert case in predicted, f"`predicted` has no numbers for ({case})."
    pytest.importorskip(
        "triton", reason="the numbers are Triton's, which the package installs on Linux with x86-64 only"
    )
    from nanopaged.kernels.paged_attention import split_contexts

    for case, (num_seqs, num_keys) in CASES.items():
        length, programs = predicted[case]
        splits, _ = split_contexts(np.full(num_seqs, num_keys), max_splits=264)
        right, wanted = int((splits[:, 2] - splits[:, 1]).max()), len(splits) * 4
        call = f"({case}), {num_seqs} sequences of {num_keys:,} keys"
        assert length == right, f"{call}: the engine's splits have {right} keys, not {length}."
        assert programs == wanted, f"{call}: {wanted // 4} splits are {wanted} programs, not {programs}."
