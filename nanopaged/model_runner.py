"""Carries out what the scheduler decided: a batch becomes tensors, a forward pass, and tokens.

The runner owns the model and the K/V memory. It takes the block tables as they are and has no queue of
its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention.metadata import PagedBatch, make_attention, slots_of
from nanopaged.config import EngineConfig
from nanopaged.device import pick_device, send
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.memory_budget import size_pool
from nanopaged.model.checkpoint import load_model
from nanopaged.model.model_config import ModelConfig
from nanopaged.next_tokens import draw_next_tokens
from nanopaged.sampler import LOGITS_TILE, describe
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult
from nanopaged.text.outputs import Logprobs

if TYPE_CHECKING:
    from nanopaged.model.cuda_graphs import DecodeGraphs

HOST_BYTES = 4 << 30  # of host memory for swapped requests, if the config leaves it open


class ModelRunner:
    """`execute(batch)` is all the engine needs of it.

    Attributes:
        num_blocks: blocks in the K/V pool, measured if the config left it open.
        num_host_blocks: blocks in host memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,
        max_model_len: int,
        step_budget: int,
    ) -> None:
        self.device = pick_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where Triton's kernels and CUDA's graphs go
        dtype_name = model_config.dtype if config.dtype == "auto" else config.dtype
        self.dtype = getattr(torch, dtype_name)
        self.block_size = config.block_size
        self.model = load_model(
            model_config, folder, config.load_format, max_model_len, self.dtype, self.device, config.seed
        )
        shape = KVShape(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, self.dtype)
        self.num_blocks = config.num_blocks or size_pool(
            config, self.model, shape, max_model_len, step_budget
        )
        self.num_host_blocks = config.num_host_blocks
        if self.num_host_blocks is None:
            most = HOST_BYTES // shape.block_bytes(config.block_size)
            self.num_host_blocks = 0 if config.preemption == "recompute" else min(self.num_blocks, most)
        self.kv_cache = KVCache(shape, self.num_blocks, config.block_size, self.device, self.num_host_blocks)
        scale = model_config.head_dim**-0.5
        self.attention = make_attention(config.attention_backend, self.kv_cache, scale)
        self.graphs: DecodeGraphs | None = None
        tables = self.attention.tables
        if self.device.type == "cuda" and tables is not None and not config.enforce_eager:
            from nanopaged.model.cuda_graphs import DecodeGraphs

            self.graphs = DecodeGraphs(
                self.model, self.kv_cache, scale, tables, config.max_num_seqs, max_model_len
            )

    @torch.inference_mode()
    def cheaper_preemption(self) -> str:
        """ "swap" or "recompute": which takes less time for a block, measured now."""
        num_tokens, moves = 64, [(i, i) for i in range(min(8, self.num_blocks, self.num_host_blocks))]
        if not moves:
            return "recompute"
        ids = torch.arange(num_tokens, device=self.device) % self.model.config.vocab_size
        out_and_in = 2 * self._time(lambda: self.kv_cache.swap_out(moves)) / len(moves)
        prefill = self._time(lambda: self.model(ids, ids * 0, lambda layer, q, k, v: q))
        return "swap" if out_and_in < prefill / num_tokens * self.block_size else "recompute"

    def _time(self, work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: move blocks, compute, sample.

        A GPU is behind: it still computes when the host has long sent it the work. So what is needed last,
        to draw tokens, is made last; the host waits for the device there.
        """
        self.kv_cache.swap_out(batch.swap_out)
        self.kv_cache.swap_in(batch.swap_in)
        self.kv_cache.copy_blocks(batch.copies)
        input_ids, positions, paged = prepare(batch, self.block_size)
        if self.graphs is not None and batch.num_decodes == len(batch.sequences):
            hidden = self.graphs.run(input_ids, positions, paged)
        else:
            attend = self.attention.plan(paged)
            hidden = self.model(send(input_ids, self.device), send(positions, self.device), attend)
        samples = draw_next_tokens(batch, hidden, self.model.logits)
        return StepResult(samples, self._score_prompts(batch, hidden))

    def _score_prompts(self, batch: ScheduledBatch, hidden: Tensor) -> dict[Request, list[Logprobs]]:
        """Log-probabilities of prompt tokens, for the requests that are still owed some."""
        scored, row = {}, 0
        for seq in batch.sequences:
            if seq.request.wants_prompt_logprobs:
                scored[seq.request] = self._score_prompt(seq, hidden[row : row + seq.num_scheduled_tokens])
            row += seq.num_scheduled_tokens
        return scored

    def _score_prompt(self, seq: Sequence, hidden: Tensor) -> list[Logprobs]:
        """The hidden state at position p tells how likely the token at p + 1 was.

        prompt a b c d e, chunk b c d: the states of b, c, d score c, d, e. What is on record already
        (a preempted request computes its prompt again) is left out.
        """
        request, start = seq.request, seq.num_computed_tokens
        first = max(start, len(request.prompt_logprobs) - 1)
        end = min(start + seq.num_scheduled_tokens, request.num_prompt_tokens - 1)
        scored: list[Logprobs] = []
        for lo in range(first, end, LOGITS_TILE):
            hi = min(lo + LOGITS_TILE, end)
            logprobs = self.model.logits(hidden[lo - start : hi - start]).log_softmax(-1)
            actual = send(np.array(seq.token_ids[lo + 1 : hi + 1]), self.device)
            wanted = [request.params.prompt_logprobs] * (hi - lo)
            scored += [token.logprobs for token in describe(logprobs, actual, wanted)]
        return scored


def prepare(batch: ScheduledBatch, block_size: int) -> tuple[np.ndarray, np.ndarray, PagedBatch]:
    """Lay the batch out flat: (input_ids [num_tokens], positions [num_tokens], where they live).

    block_size = 4, table [7, 2], 3 of 6 tokens computed: positions 3 4 5, slots 7·4+3, 2·4+0, 2·4+1
    """
    computed = [seq.num_computed_tokens for seq in batch.sequences]
    tables = [seq.block_table for seq in batch.sequences]
    query_lens = np.array([seq.num_scheduled_tokens for seq in batch.sequences])
    n = batch.num_decodes  # of these there may be hundreds, each with one token, so they go as lists
    decodes = zip(batch.sequences[:n], computed, strict=False)
    input_ids = [[seq.token_ids[p] for seq, p in decodes]]
    positions = [computed[:n]]
    slots = [
        [t[p // block_size] * block_size + p % block_size for t, p in zip(tables[:n], computed, strict=False)]
    ]
    for seq in batch.sequences[n:]:
        chunk = np.arange(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens)
        input_ids.append(seq.token_ids[chunk[0] : chunk[-1] + 1])
        positions.append(chunk)
        slots.append(slots_of(seq.block_table, chunk, block_size))
    paged = PagedBatch(
        query_lens=query_lens,
        context_lens=np.array(computed) + query_lens,
        block_tables=tables,
        slot_mapping=_flat(slots),
        num_decodes=n,
        owners=list(map(id, batch.sequences)),
    )
    return _flat(input_ids), _flat(positions), paged


def _flat(parts: list[list[int] | np.ndarray]) -> np.ndarray:
    """Integers end to end, as int64."""
    arrays = [np.array(part, dtype=np.int64) for part in parts]
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
