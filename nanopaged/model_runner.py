"""Runs a scheduled batch: it becomes tensors, a forward pass, and sampled tokens.

The runner has the model and the KV cache. It reads sequences and block tables, and changes neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import choose_backend, make_attention
from nanopaged.attention.metadata import AttentionMetadata, StepInputs
from nanopaged.config import EngineConfig
from nanopaged.kernels import cpp
from nanopaged.kv_cache import KVCache, KVShape, take_rows, to_device
from nanopaged.memory import cheaper_preemption, count_blocks, pick_dtype
from nanopaged.model.checkpoint import load_model
from nanopaged.model.decoder import PLAIN, Operations, norm_rotate, rms_norm, silu_mul
from nanopaged.model.model_config import ModelConfig
from nanopaged.outputs import Logprobs
from nanopaged.parallel import Ranks, pick_device
from nanopaged.sampler import LOGITS_TILE, gather_logprobs, sample_next_tokens
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult

PromptTile = tuple[Request, list[int], list[int]]
"""Rows of the flat batch whose logits are computed at once, and the prompt's tokens that they score."""


class ModelRunner:
    """Computes batches; the engine calls `execute` once in each step."""

    make_model: Any = staticmethod(load_model)  # a fork has others
    make_shape: Any = KVShape
    make_cache: Any = KVCache
    make_attention: Any = staticmethod(make_attention)
    sample: Any = staticmethod(sample_next_tokens)

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,
        max_model_len: int,
        max_num_batched_tokens: int,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.ranks = ranks
        self.device = device if device is not None else pick_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # for Triton's kernels and CUDA graphs
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.block_size, self.budget = config.block_size, max_num_batched_tokens
        share = model_config.share(
            ranks.size if ranks is not None else 1
        )  # the sizes of this rank's layers
        shape = self.make_shape(share.num_layers, share.num_kv_heads, share.head_dim, self.dtype)
        backend = choose_backend(config.attention_backend, self.device, shape)
        operations = choose_operations(backend, self.device, config.enforce_eager)
        self.model = self.make_model(
            config=config,
            model_config=model_config,
            folder=folder,
            max_model_len=max_model_len,
            dtype=self.dtype,
            device=self.device,
            ranks=ranks,
            operations=operations,
        )
        self.num_blocks, self.num_host_blocks = count_blocks(
            config=config,
            model=self.model,
            shape=shape,
            ranks=ranks,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        pool = self.num_blocks, config.block_size, self.device, self.num_host_blocks
        self.kv_cache = self.make_cache(shape, *pool)
        self.attention = self.make_attention(backend, self.kv_cache, model_config.attention_scale)
        self.graphs = None
        if (
            self.device.type == "cuda"
            and self.attention.supports_cuda_graphs
            and not config.enforce_eager
        ):
            from nanopaged.cuda_graphs import DecodeGraphs

            self.graphs = DecodeGraphs(
                self.model, self.attention, config.max_num_seqs, max_model_len
            )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: move blocks, compute, sample.

        A GPU runs asynchronously: `forward` returns while it still computes, and the host waits only when it
        reads the sampled tokens.
        """
        inputs, tiles = prepare(batch, self.block_size)
        ready = inputs.logit_rows[0]
        try:
            if self.ranks is not None:
                self.ranks.send(inputs)
            hidden = self.forward(inputs)
            logits = self.model.logits(take_rows(hidden, ready)) if ready else None
            prompt_logprobs = self.score_prompts(tiles, hidden) if tiles else {}
            if self.ranks is not None and self.device.type == "cuda":
                self.ranks.check()
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.end(error)
            raise
        samples = self.sample(batch, logits) if logits is not None else [[]] * len(batch.sequences)
        return StepResult(samples, prompt_logprobs)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Move blocks and run the model → hidden states [num_tokens, hidden_size]."""
        self.kv_cache.move_blocks(inputs.moves)
        if self.graphs is not None and inputs.metadata.num_decodes == len(
            inputs.metadata.query_lens
        ):
            return self.graphs.run(inputs.input_ids, inputs.positions, inputs.metadata)
        self.attention.begin_step(inputs.metadata)
        ids, where = to_device(np.stack((inputs.input_ids, inputs.positions)), self.device)
        return self.model(ids, where, self.attention)

    def score_prompts(
        self, tiles: list[PromptTile], hidden: Tensor
    ) -> dict[Request, list[Logprobs]]:
        """For each request of the tiles, the log-probabilities of the tokens scored."""
        scores: dict[Request, list[Logprobs]] = {}
        for request, rows, scored in tiles:
            logprobs = self.model.logits(take_rows(hidden, rows)).log_softmax(-1)
            actual, num = (
                to_device(np.array(scored), logprobs.device),
                request.params.prompt_logprobs or 0,
            )
            tokens = gather_logprobs(logprobs, actual, [num] * len(rows), logprobs)
            scores.setdefault(request, []).extend(token.logprobs or {} for token in tokens)
        return scores

    @torch.inference_mode()
    def serve(self) -> None:
        """As a worker, compute what rank 0 computes, in the order of `execute`, until it ends."""
        assert self.ranks is not None
        while True:
            if (inputs := self.ranks.receive()) is None:
                self.cheaper_preemption()
                continue
            hidden = self.forward(inputs)
            for rows in filter(None, inputs.logit_rows):
                self.model.logits(take_rows(hidden, rows))

    @torch.inference_mode()
    def cheaper_preemption(self) -> str:
        """The faster way ("swap" or "recompute") to restore a block, measured now, by all ranks together."""
        if self.ranks is not None and self.ranks.rank == 0:
            self.ranks.send(None)
        return cheaper_preemption(self.model, self.kv_cache, self.budget)


def choose_operations(backend: str, device: torch.device, enforce_eager: bool) -> Operations:
    """What computes the small operations of the layers: each is one pass over memory, where that can be."""
    if backend == "cpp":
        return Operations(cpp.rms_norm, cpp.norm_rotate, cpp.silu_mul)
    if device.type == "cuda" and not enforce_eager:  # for any number of tokens
        return Operations(
            *(torch.compile(f, dynamic=True) for f in (rms_norm, norm_rotate, silu_mul))
        )
    return PLAIN


def prepare(batch: ScheduledBatch, block_size: int) -> tuple[StepInputs, list[PromptTile]]:
    """Lay the tokens of a batch out end to end. Returns them, and what of the prompts is to be scored.

    block_size = 4, table [7, 2], 3 of 6 tokens computed: positions 3 4 5, slots 7·4+3, 2·4+0, 2·4+1
    """
    # The first `logit_rows` are of the tokens to sample from: of 1, 1 and 4 new tokens 0, 1 and 5.
    input_ids, logit_rows, tiles = [], [[]], []
    for seq in batch.sequences:
        start, n = seq.num_computed_tokens, seq.num_scheduled_tokens
        input_ids += seq.token_ids[start : start + n]
        if start + n == len(seq.token_ids):  # `needs_sample`
            logit_rows[0].append(len(input_ids) - 1)
        if seq.request.prompt_logprobs is not None:
            for tile in prompt_tiles(seq, row=len(input_ids) - n):
                tiles.append(tile)
                logit_rows.append(tile[1])
    # All tokens at once: a sequence ends before row e, with a context of c tokens; row i is at c - (e - i).
    query_lens = np.array([seq.num_scheduled_tokens for seq in batch.sequences])
    context_lens = query_lens + [seq.num_computed_tokens for seq in batch.sequences]
    positions = np.arange(len(input_ids)) - np.repeat(
        query_lens.cumsum() - context_lens, query_lens
    )
    tables, ids = [seq.block_table for seq in batch.sequences], list(map(id, batch.sequences))
    owners = np.repeat(np.arange(len(tables)), query_lens).tolist()
    blocks = [tables[i][j] for i, j in zip(owners, (positions // block_size).tolist(), strict=True)]
    slots = np.array(blocks) * block_size + positions % block_size
    metadata = AttentionMetadata(query_lens, context_lens, tables, slots, batch.num_decodes, ids)
    return StepInputs(batch.moves, np.array(input_ids), positions, metadata, logit_rows), tiles


def prompt_tiles(seq: Sequence, row: int) -> Iterator[PromptTile]:
    """What to score of a prompt in this step.

    The hidden state at position p scores the token at p + 1: of a prompt a b c d e, if b c d are computed,
    they score c, d and e. Positions that have been scored before (the request was preempted) are left out.

    Args:
        row: of the first token that the step computes, in the flat batch.
    """
    start, request = seq.num_computed_tokens, seq.request
    first = max(start, len(request.prompt_logprobs or ()) - 1)
    end = min(start + seq.num_scheduled_tokens, request.num_prompt_tokens - 1)
    for lo in range(first, end, LOGITS_TILE):
        hi = min(lo + LOGITS_TILE, end)
        yield (
            request,
            list(range(row + lo - start, row + hi - start)),
            seq.token_ids[lo + 1 : hi + 1],
        )
