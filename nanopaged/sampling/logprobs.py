"""The log-probabilities of the most likely tokens, for those who ask for them and for beams."""

from __future__ import annotations

from nanopaged.sequence import Sample
from nanopaged.text.outputs import Logprob


def add_most_likely(
    samples: list[Sample],
    ranks: list[float],
    values: list[list[float]],
    token_ids: list[list[float]],
    num_logprobs: list[int | None],
) -> None:
    """Give each sample the log-probabilities of the most likely tokens of its row, and its own.

    Args:
        ranks: of the samples' tokens, 1 for the most likely one.
        values, token_ids: [most, num_rows], of the most likely tokens, in falling order.
        num_logprobs: for each row, how many of them, or None.
    """
    for row, (token, n) in enumerate(zip(samples, num_logprobs, strict=True)):
        if n is not None:
            token.logprobs = {int(token_ids[i][row]): Logprob(values[i][row], i + 1) for i in range(n)}
            token.logprobs.setdefault(token.token_id, Logprob(token.logprob, int(ranks[row])))
