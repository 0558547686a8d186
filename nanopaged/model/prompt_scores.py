"""The log-probabilities of a prompt's tokens, which `prompt_logprobs` asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanopaged.kv_cache import take_rows, to_device
from nanopaged.model.decoder import Model
from nanopaged.sampler import gather_logprobs
from nanopaged.sequence import Request, Sequence
from nanopaged.text.outputs import Logprobs

LOGITS_TILE = 256  # positions whose logits are computed at once: [256, vocab_size] in float32


@dataclass(slots=True)
class PromptTile:
    """Positions of a prompt that one call of the model's `logits` scores.

    Fields:
        rows: the rows of the flat batch; row i scores the i-th of the `scored` tokens.
    """

    seq: Sequence
    rows: list[int]
    scored: list[int]


def prompt_tiles(seq: Sequence, row: int) -> list[PromptTile]:
    """What to score of a prompt in this step.

    The hidden state at position p scores the token at p + 1: of a prompt a b c d e, if b c d are computed,
    they score c, d and e. Positions that have been scored before (the request was preempted) are left out.

    Args:
        row: of the first token that the step computes, in the flat batch.
    """
    start, tiles = seq.num_computed_tokens, []
    first = max(start, len(seq.request.prompt_logprobs or ()) - 1)
    end = min(start + seq.num_scheduled_tokens, seq.request.num_prompt_tokens - 1)
    for lo in range(first, end, LOGITS_TILE):
        hi = min(lo + LOGITS_TILE, end)
        rows = list(range(row + lo - start, row + hi - start))
        tiles.append(PromptTile(seq, rows, seq.token_ids[lo + 1 : hi + 1]))
    return tiles


def score_prompts(tiles: list[PromptTile], hidden: Tensor, model: Model) -> dict[Request, list[Logprobs]]:
    """For each request of the tiles, the log-probabilities of the tokens scored.

    Args:
        hidden: [num_tokens, hidden_size], of the whole batch.
    """
    scores: dict[Request, list[Logprobs]] = {}
    for tile in tiles:
        logprobs = model.logits(take_rows(hidden, tile.rows)).log_softmax(-1)
        actual, request = to_device(np.array(tile.scored), logprobs.device), tile.seq.request
        tokens = gather_logprobs(logprobs, actual, [request.params.prompt_logprobs] * len(tile.rows))
        scores.setdefault(request, []).extend(token.logprobs or {} for token in tokens)
    return scores
