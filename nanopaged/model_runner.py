"""Carries out what the scheduler decided: a batch becomes tensors, a forward pass, and tokens.

The runner owns the model and the K/V memory. It takes the block tables as they are and has no queue of
its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import PagedBatch, make_attention
from nanopaged.batch import ScheduledBatch, StepResult
from nanopaged.block_pool import blocks_needed
from nanopaged.config import EngineConfig
from nanopaged.kv_cache import KVCache, KVShape, available_memory, blocks_that_fit
from nanopaged.model_config import ModelConfig
from nanopaged.outputs import Logprobs, Sample
from nanopaged.sampler import SampleRow, most_likely, sample, top_logprobs
from nanopaged.sequence import Request, Sequence
from nanopaged.swap import SwapCosts
from nanopaged.weights import load_model

HOST_BYTES = 4 << 30  # of host memory for swapped requests, if the config leaves it open
LOGITS_TILE = 256  # prompt positions projected to the vocabulary at once


class ModelRunner:
    """`execute(batch)` is all the engine needs of it.

    Attributes:
        num_blocks: blocks in the K/V pool, measured if the config left it open.
        num_host_blocks: blocks in host memory.
        swap_costs: what swapping and recomputing take here, if the config wants the cheaper.
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
        dtype_name = model_config.dtype if config.dtype == "auto" else config.dtype
        self.dtype = getattr(torch, dtype_name)
        self.block_size = config.block_size
        self.model = load_model(
            model_config, folder, config.load_format, max_model_len, self.dtype, self.device, config.seed
        )
        shape = KVShape(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, self.dtype)
        self.num_blocks = config.num_blocks or self._size_pool(config, shape, max_model_len, step_budget)
        self.num_host_blocks = config.num_host_blocks
        if self.num_host_blocks is None:
            most = HOST_BYTES // shape.block_bytes(config.block_size)
            self.num_host_blocks = 0 if config.preemption == "recompute" else min(self.num_blocks, most)
        self.kv_cache = KVCache(shape, self.num_blocks, config.block_size, self.device, self.num_host_blocks)
        scale = model_config.head_dim**-0.5
        self.attention = make_attention(config.attention_backend, self.kv_cache, scale)
        self.swap_costs = self._measure_costs() if config.preemption == "auto" else None

    def _size_pool(self, config: EngineConfig, shape: KVShape, max_model_len: int, step_budget: int) -> int:
        """Blocks for which there is memory, once the largest batch has had what it needs."""
        needed = blocks_needed(max_model_len, config.block_size)
        if self.device.type == "cuda":
            utilization = config.memory_utilization or 0.9
            total = torch.cuda.mem_get_info(self.device)[1]
            peak = self._profile(step_budget, config.max_num_seqs)
            used = total - available_memory(self.device)
            free = int(total * utilization) - used - peak
        else:
            free = int(available_memory(self.device) * (config.memory_utilization or 0.5))
        block_bytes = shape.block_bytes(config.block_size)
        return blocks_that_fit(free, block_bytes, needed * config.max_num_seqs, needed)

    @torch.inference_mode()
    def _profile(self, num_tokens: int, num_seqs: int) -> int:
        """Bytes that the largest forward pass takes beyond the weights."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self.model(ids, ids, lambda layer, q, k, v: q)
        self.model.logits(hidden[:num_seqs])
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del ids, hidden
        torch.cuda.empty_cache()
        return peak

    @torch.inference_mode()
    def _measure_costs(self, num_tokens: int = 64) -> SwapCosts:
        """Time a block's way to the host and a short prefill (without its attention), the best of three."""
        ids = torch.arange(num_tokens, device=self.device) % self.model.config.vocab_size
        moves = [(i, i) for i in range(min(8, self.num_blocks, self.num_host_blocks))]
        copying = self._time(lambda: self.kv_cache.swap_out(moves)) / max(1, len(moves))
        prefill = self._time(lambda: self.model(ids, ids * 0, lambda layer, q, k, v: q))
        return SwapCosts(copying, num_tokens / prefill)

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
        """Run one step: move blocks, compute, sample."""
        self.kv_cache.swap_out(batch.swap_out)
        self.kv_cache.swap_in(batch.swap_in)
        self.kv_cache.copy_blocks([(copy.src, copy.dst) for copy in batch.copies])
        input_ids, positions, paged = prepare(batch, self.block_size)
        attend = self.attention.plan(paged)
        hidden = self.model(self._send(input_ids), self._send(positions), attend)
        return StepResult(self._sample(batch, hidden), self._score_prompts(batch, hidden))

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _sample(self, batch: ScheduledBatch, hidden: Tensor) -> list[list[Sample]]:
        """What may follow the sequences that catch up; their last rows alone are projected."""
        samples: list[list[Sample]] = [[] for _ in batch.sequences]
        last_rows = np.cumsum([seq.num_new_tokens for seq in batch.sequences]) - 1
        ready = [i for i, seq in enumerate(batch.sequences) if seq.catches_up]
        if not ready:
            return samples
        logits = self.model.logits(hidden[self._send(last_rows[ready])])
        owners: list[int] = []  # of each row to draw, its row of the logits
        rows: list[SampleRow] = []
        for owner, i in enumerate(ready):
            seq = batch.sequences[i]
            if seq.request.beam_search is not None:
                samples[i] = self._propose(seq, logits[owner])
            else:
                drawn = _sample_rows(seq)
                rows += drawn
                owners += [owner] * len(drawn)
        if owners != list(range(len(ready))):  # some row is drawn from several times, or by beam search
            logits = logits[owners]
        for owner, drawn in zip(owners, sample(logits, rows) if rows else (), strict=True):
            samples[ready[owner]].append(drawn)
        for i in ready:
            self._check_finite(batch.sequences[i], samples[i][0].logprob)
        return samples

    def _propose(self, beam: Sequence, logits: Tensor) -> list[Sample]:
        banned = beam.request.stop_rules.banned_token_ids(beam)
        return most_likely(logits, beam.request.beam_search.num_candidates, banned)

    def _check_finite(self, seq: Sequence, logprob: float) -> None:
        if not math.isfinite(logprob):
            raise FloatingPointError(
                f"the model's scores for request {seq.request.request_id!r} at position {seq.num_tokens} are "
                f"not finite in {self.dtype}: abort the request, or use a dtype with a wider range"
            )

    def _score_prompts(self, batch: ScheduledBatch, hidden: Tensor) -> dict[Request, list[Logprobs]]:
        """Log-probabilities of prompt tokens, for the requests that are still owed some."""
        scored, row = {}, 0
        for seq in batch.sequences:
            if seq.request.wants_prompt_logprobs:
                scored[seq.request] = self._score_prompt(seq, hidden[row : row + seq.num_new_tokens])
            row += seq.num_new_tokens
        return scored

    def _score_prompt(self, seq: Sequence, hidden: Tensor) -> list[Logprobs]:
        """The hidden state at position p tells how likely the token at p + 1 was.

        prompt a b c d e, chunk b c d: the states of b, c, d score c, d, e. What is on record already
        (a preempted request computes its prompt again) is left out.
        """
        request, start = seq.request, seq.num_computed_tokens
        first = max(start, len(request.prompt_logprobs) - 1)
        end = min(start + seq.num_new_tokens, seq.num_prompt_tokens - 1)
        scored: list[Logprobs] = []
        for lo in range(first, end, LOGITS_TILE):
            hi = min(lo + LOGITS_TILE, end)
            logprobs = self.model.logits(hidden[lo - start : hi - start]).log_softmax(-1)
            actual = torch.tensor(seq.token_ids[lo + 1 : hi + 1], device=self.device)
            scored += top_logprobs(logprobs, actual, [request.params.prompt_logprobs] * (hi - lo))
        return scored


def _sample_rows(seq: Sequence) -> list[SampleRow]:
    """The draws to make after `seq`: one, or one for each output if the request is about to fork."""
    request, banned = seq.request, seq.request.stop_rules.banned_token_ids(seq)
    indices = range(request.params.num_sequences) if request.unforked else (seq.index,)
    return [SampleRow(request.params, request.seed, i, seq.num_tokens, banned) for i in indices]


def prepare(batch: ScheduledBatch, block_size: int) -> tuple[np.ndarray, np.ndarray, PagedBatch]:
    """Lay the batch out flat: (input_ids [num_tokens], positions [num_tokens], where they live).

    block_size = 4, table [7, 2], 3 of 6 tokens computed: positions 3 4 5, slots 7·4+3, 2·4+0, 2·4+1
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for seq in batch.sequences:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_new_tokens
        input_ids += seq.token_ids[start:end]
        positions += range(start, end)
        table = seq.block_table
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
    query_lens = np.array([seq.num_new_tokens for seq in batch.sequences])
    computed = np.array([seq.num_computed_tokens for seq in batch.sequences])
    paged = PagedBatch(
        query_lens=query_lens,
        context_lens=computed + query_lens,
        block_tables=[seq.block_table for seq in batch.sequences],
        slot_mapping=np.array(slots),
        num_decodes=batch.num_decodes,
    )
    return np.array(input_ids), np.array(positions), paged


def pick_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} cannot be used here: only 'cpu' and 'cuda' are supported")
    return device
