"""Exercise 8.2, from which block size on is swapping cheaper: see docs/book/08-preemption.md."""


def swap_us(block_size: int, copies_per_block: int) -> float:
    """Microseconds a token to swap a block out and in again."""
    raise NotImplementedError


def recompute_us() -> float:
    """Microseconds a token to compute it again."""
    raise NotImplementedError


layer_major: int | None = None  # the smallest power of two from which on swapping is cheaper
block_major: int | None = None


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def test_the_time_of_a_swap() -> None:
    # In blocks of 8, by hand: the bytes of a token take 2.62 µs each way, the start of a copy 10 / 8 µs.
    for block_size, copies, want in ((8, 1, 7.74), (8, 64, 165.24), (256, 1, 5.32), (1, 1, 25.24)):
        got = swap_us(block_size, copies)
        assert abs(got - want) < 0.01, (
            f"swap_us({block_size}, {copies}) is {got:.2f} µs a token, but a swap takes {want}."
        )


def test_the_time_of_recomputing() -> None:
    got = recompute_us()
    assert abs(got - 28.2) < 0.01, f"recompute_us() is {got:.2f} µs, but 13.96 · 10⁹ operations take 28.2."


def test_where_swapping_becomes_cheaper() -> None:
    if layer_major is None or block_major is None:
        raise NotImplementedError("layer_major and block_major are block sizes.")
    # By hand: a token has 28.2 µs, of which both ways of its bytes take 5.24. The starts of its copies take
    # 20 µs · copies / block size, which must be less than 22.96.
    for name, size, want in (("layer_major", layer_major, 64), ("block_major", block_major, 1)):
        copies = 64 if name == "layer_major" else 1
        swap = f"there a swap takes {20 * copies / size + 5.24:.1f} µs a token, and recomputing 28.2"
        assert size >= want, f"{name} = {size}: {swap}."
        assert size <= want, f"{name} = {size} is not the smallest block size: {swap}."
