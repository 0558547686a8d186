"""Bans and penalties: which tokens may not be drawn, and which are drawn less often.

Both change logits of single tokens, so they are sent to the device as lists of (row, token id). A step
without them sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from nanopaged.config import SamplingParams
from nanopaged.kv_cache import to_device
from nanopaged.sequence import Sequence

Penalties = tuple[float, float, float]
"""(repetition, frequency, presence) of `SamplingParams.penalties`."""


def token_counts(seq: Sequence) -> dict[int, int]:
    """Each token that penalties change → how often it was generated.

    Only a repetition penalty changes tokens of the prompt that were never generated; their count is 0.
    """
    end, params = seq.request.num_prompt_tokens, seq.request.params
    assert isinstance(params, SamplingParams)  # beams have no penalties
    prompt = seq.token_ids[:end] if params.repetition_penalty != 1 else ()
    return dict.fromkeys(prompt, 0) | Counter(seq.token_ids[end:])


def send_banned(token_ids: list[Collection[int]], device: torch.device) -> Tensor:
    """The tokens banned in each row, as indices [2 (row, token id), num_banned] on the device.

    [[], [3, 5]], nothing banned in row 0, becomes rows 1 1, token ids 3 5.
    """
    pairs = [(row, token_id) for row, ids in enumerate(token_ids) for token_id in ids]
    return to_device(np.array(pairs).T, device)


def send_penalties(
    penalties: list[Penalties | None], token_counts: list[dict[int, int] | None], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The logits that penalties change: those of the tokens counted.

    Args:
        penalties, token_counts: of each row; None if it has none.

    Returns:
        [2 (row, token id), num], and for each of them [4 (times generated, repetition, frequency, presence
        penalty), num] in float32.
    """
    counted = [counts or {} for counts in token_counts]
    lengths = [len(counts) for counts in counted]
    ids = [token_id for counts in counted for token_id in counts]
    counts = [count for its_counts in counted for count in its_counts.values()]
    of_rows = np.array([its_penalties or (1, 0, 0) for its_penalties in penalties])  # [num_rows, 3]
    where = np.stack((np.repeat(np.arange(len(counted)), lengths), ids))
    numbers = np.vstack((counts, np.repeat(of_rows, lengths, axis=0).T)).astype(np.float32)
    return to_device(where, device), to_device(numbers, device)


def penalize(logits: Tensor, where: Tensor, numbers: Tensor) -> Tensor:
    """A copy of the logits with penalties applied, as vLLM defines them; see `SamplingParams`.

        repetition 2, frequency 0.5, presence 1; logits 3 and -3 of a token generated 4 times:
        3 / 2 - 4 · 0.5 - 1 = -1.5 and -3 · 2 - 4 · 0.5 - 1 = -9

    Args:
        logits: [num_rows, vocab_size].
        where, numbers: see `send_penalties`.
    """
    count, repetition, frequency, presence = numbers
    values = logits[tuple(where)]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count + presence * (count > 0)
    return logits.index_put(tuple(where), values)
