"""A batch as plain data: tokens, and what attention needs to know of them. It knows no sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GATHER_KEYS = 1 << 16  # keys of cached contexts that `FlashAttention` gathers at once


@dataclass
class AttentionMetadata:
    """Where the K/V of a flat batch is stored. Decodes (sequences with one new token) come first.

    Two decodes and a prefill of three tokens, block_size = 4:

        query_lens      1    1    3          flat batch    q₀ q₁ q₂ q₂ q₂
        context_lens    6    4    7          tokens in the cache, the new ones included
        block_tables  [5,2] [0] [3,8]        slot_mapping  2·4+1  0·4+3  8·4+0 8·4+1 8·4+2

    Fields:
        query_lens: [num_seqs], new tokens of each sequence.
        context_lens: [num_seqs], tokens that each sequence attends to, cached and new.
        block_tables: for each sequence, its physical block ids.
        slot_mapping: [num_tokens], the slot of each new token: block · block_size + offset.
        num_decodes: how many sequences, from the first on, are decodes.
        seq_ids: [num_seqs], a number that stays with a sequence; after its end another may reuse it. See
            `BlockTables`.
    """

    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: list[list[int]]
    slot_mapping: np.ndarray
    num_decodes: int
    seq_ids: list[int]


@dataclass
class StepInputs:
    """A batch without sequences: all that the model, the KV cache and attention need to compute it.

    Fields:
        moves: swaps out, swaps in and copies, as in `KVCache.move_blocks`.
        input_ids, positions: int64 [num_tokens].
        logit_rows: the tokens whose logits are wanted: first those that are followed by a sample, then the
            tiles of prompts that want log-probabilities.
    """

    moves: tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]
    input_ids: np.ndarray
    positions: np.ndarray
    metadata: AttentionMetadata
    logit_rows: list[list[int]]


def slots_of(block_table: list[int], positions: np.ndarray, block_size: int) -> np.ndarray:
    """The slots of a sequence's tokens: block_size = 4, table [7, 2], positions 2 3 4 5 → 30 31 8 9."""
    return np.array(block_table)[positions // block_size] * block_size + positions % block_size
