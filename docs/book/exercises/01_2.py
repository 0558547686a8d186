"""Exercise 1.2, is a decode step ever compute-bound?: see docs/book/01-why-paging.md."""

WEIGHTS = 8_030_261_248 - 128_256 * 4096  # of Llama-3-8B that a step reads: all but the input embedding
OPERATIONS = 989e12  # bfloat16 operations that an H200 computes in a second
BANDWIDTH = 4.8e12  # bytes that it reads in a second


def longest_context(bytes_per_token: float) -> float:
    """The context length from which on a decode step is memory-bound with any number of requests.

    For each request a step computes two operations for each weight. It reads all weights once (2 bytes each),
    and `bytes_per_token` bytes of K/V for each token of the context of each request.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def seconds(num_requests: int, context: float, bytes_per_token: float) -> tuple[float, float]:
    """The time to read and the time to compute of one decode step."""
    num_bytes = 2 * WEIGHTS + num_requests * context * bytes_per_token
    return num_bytes / BANDWIDTH, num_requests * 2 * WEIGHTS / OPERATIONS


def test_longer_contexts_are_memory_bound() -> None:
    for size in (131_072, 65_536, 819_200):
        answer = longest_context(size)
        for num_requests in (10, 10**4, 10**9):
            read, compute = seconds(num_requests, 1.01 * answer, size)
            assert read > compute, (
                f"longest_context({size}) is {answer:.1f}, but {num_requests:,} requests of 1 % more tokens "
                f"take {read:.3g} s to read and {compute:.3g} s to compute: that is compute-bound."
            )


def test_shorter_contexts_become_compute_bound() -> None:
    for size in (131_072, 65_536, 819_200):
        answer = longest_context(size)
        read, compute = seconds(10**9, 0.99 * answer, size)
        assert read < compute, (
            f"longest_context({size}) is {answer:.1f}, but a billion requests of 1 % fewer tokens are "
            "memory-bound, too: a shorter context is enough."
        )
