"""A batch as plain data: its tokens, and what attention needs to know about them."""

from dataclasses import dataclass

import numpy as np

from nanopaged.sequence import Moves

GATHER_KEYS = 1 << 16  # how many keys of cached contexts are gathered together


@dataclass
class AttentionMetadata:
    """Where the K/V of a flat batch is stored. Decodes (sequences with one new token) come first.

    Two decodes and a prefill of three tokens, block_size = 4:

        query_lens      1    1    3          flat batch    q₀ q₁ q₂ q₂ q₂
        context_lens    6    4    7          tokens in the cache, the new ones included
        block_tables  [5,2] [0] [3,8]        slot_mapping  2·4+1  0·4+3  8·4+0 8·4+1 8·4+2

    Fields:
        query_lens, context_lens: [num_seqs].
        block_tables: for each sequence, its physical block ids.
        slot_mapping: [num_tokens], block · block_size + offset.
        num_decodes: how many sequences, from the first on, are decodes.
        seq_ids: [num_seqs], a number that stays with a sequence, see `BlockTables`.
    """

    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: list[list[int]]
    slot_mapping: np.ndarray
    num_decodes: int
    seq_ids: list[int]


@dataclass
class StepInputs:
    """All that the model, the KV cache and attention need to compute a batch.

    Fields:
        input_ids, positions: int64 [num_tokens].
        moves: the blocks that `KVCache.move_blocks` moves before the model runs.
        sample_rows: the tokens of the flat batch whose logits are sampled from.
        score_rows: the tokens of the flat batch whose logits score prompts.
        score_ids: for each of them, the token after it, which is scored.
        num_logprobs: for each of them, how many of the most likely tokens are wanted.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    metadata: AttentionMetadata
    moves: Moves
    sample_rows: list[int]
    score_rows: list[int]
    score_ids: list[int]
    num_logprobs: list[int | None]


def slots_of(block_table: list[int], positions: np.ndarray, block_size: int) -> np.ndarray:
    """The slots of a sequence's tokens.

    block_size = 4, table [7, 2], positions 2 3 4 5 → 30 31 8 9
    """
    return np.array(block_table)[positions // block_size] * block_size + positions % block_size


def gather_groups(context_lens: np.ndarray, start: int = 0) -> list[slice]:
    """Cut the sequences from `start` on into groups of at most GATHER_KEYS keys, padding included.

    A longer context is a group by itself.

        GATHER_KEYS = 10    context_lens 4 5 3    two sequences are 2 · 5 keys: groups 0:2, 2:3
    """
    end = len(context_lens)
    step = max(1, GATHER_KEYS // int(context_lens[start:].max()))
    return [slice(i, min(i + step, end)) for i in range(start, end, step)]
