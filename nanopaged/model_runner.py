"""Runs a scheduled batch: it becomes tensors, a forward pass, and sampled tokens.

The runner has the model and the KV cache. It reads sequences and block tables, and changes neither.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import choose_backend, make_backend
from nanopaged.attention.metadata import AttentionMetadata, StepInputs
from nanopaged.attention.reference_backend import ScoreMod
from nanopaged.config import EngineConfig
from nanopaged.kernels import cpp
from nanopaged.kv_cache import KVCache, KVShape, take_rows, to_device
from nanopaged.memory import choose_num_blocks, measure_preemption, pick_device, pick_dtype
from nanopaged.model.checkpoint import load_model
from nanopaged.model.decoder import ALONE, PLAIN, Operations, add_norm, norm_rotate, silu_mul
from nanopaged.model.model_config import ModelConfig
from nanopaged.outputs import Logprobs
from nanopaged.parallel import Ranks
from nanopaged.sampler import LOGITS_TILE, gather_logprobs, sample_next_tokens
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult


class ModelRunner:
    """Computes batches; the engine calls `execute` once in each step."""

    # A fork replaces these, or `make_attention`.
    make_model = staticmethod(load_model)
    make_shape = KVShape
    make_cache = KVCache
    sample_next_tokens = staticmethod(sample_next_tokens)
    score_mod: ScoreMod | None = None

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.device = pick_device(config.device, ranks)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # for Triton's kernels and CUDA graphs
        self.dtype = pick_dtype(config, model_config.dtype, self.device)
        self.block_size = config.block_size
        rank_config = model_config.for_rank_of(config.tensor_parallel_size)
        shape = self.make_shape(
            num_layers=rank_config.num_layers,
            num_kv_heads=rank_config.num_kv_heads,
            head_dim=rank_config.head_dim,
            dtype=self.dtype,
        )
        backend = choose_backend(config.attention_backend, self.device, shape, self.score_mod)
        is_eager = config.enforce_eager or self.device.type != "cuda"
        self.model = self.make_model(
            config=config,
            model_config=model_config,
            folder=folder,
            dtype=self.dtype,
            device=self.device,
            ranks=ranks,
            operations=choose_operations(backend, self.dtype, is_eager),
        )
        ranks.meet(self.device)
        self.num_blocks, self.num_host_blocks = choose_num_blocks(
            config, self.model, shape, ranks, backend
        )
        self.kv_cache = self.make_cache(
            shape,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            device=self.device,
            num_host_blocks=self.num_host_blocks,
        )
        scale = model_config.head_dim**-0.5  # the factor of q · k
        self.attention = self.make_attention(backend, self.kv_cache, scale)
        self.graphs = None
        if self.attention.supports_cuda_graphs and not is_eager:
            from nanopaged.cuda_graphs import DecodeGraphs

            self.graphs = DecodeGraphs(
                self.model,
                self.attention,
                max_num_seqs=config.max_num_seqs,
                max_context_len=config.max_model_len,
            )
        if config.preemption == "auto":
            self.cheaper_preemption = measure_preemption(
                self.model, self.kv_cache, config.max_num_batched_tokens
            )

    def make_attention(self, backend: str, cache: KVCache, scale: float) -> Any:
        """The attention of all layers, over `cache`."""
        return make_backend(backend, cache, scale, self.score_mod)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: move blocks, compute, sample.

        A GPU runs asynchronously. `forward` returns while the GPU still computes, and the host
        waits only when it reads the sampled tokens.
        """
        inputs = prepare(batch, self.block_size)
        with self.ranks.step(inputs):
            logits, prompt_logprobs = self.compute(inputs)
        samples = self.sample_next_tokens(batch, logits)
        return StepResult(samples, logprobs_by_request(batch.sequences, prompt_logprobs))

    def compute(self, inputs: StepInputs) -> tuple[Tensor, list[Logprobs]]:
        """What all ranks compute: logits to sample from, and log-probabilities of prompt tokens."""
        sampled, scored = self.forward(inputs)
        logits = self.model.logits(sampled)
        prompt_logprobs = []
        for start in range(0, len(scored), LOGITS_TILE):
            tile = slice(start, start + LOGITS_TILE)
            tile_logits = self.model.logits(scored[tile])
            token_ids = to_device(inputs.score_ids[tile], tile_logits.device)
            samples = gather_logprobs(tile_logits, token_ids, inputs.num_logprobs[tile])
            prompt_logprobs += [sample.logprobs for sample in samples]
        return logits, prompt_logprobs

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Move blocks and run the model.

        Returns:
            The hidden states [n, hidden_size] of `sample_rows`, and those of `score_rows`.
        """
        self.kv_cache.move_blocks(inputs.moves)
        metadata = inputs.metadata
        needed = inputs.sample_rows + inputs.score_rows  # rows of the batch
        if self.graphs is not None and metadata.num_decodes == len(metadata.query_lens):
            hidden = self.graphs.run(inputs.input_ids, inputs.positions, metadata)
            hidden = take_rows(hidden, needed)
        else:
            self.attention.begin_step(metadata)
            # One copy for both.
            input_ids, positions = to_device((inputs.input_ids, inputs.positions), self.device)
            rows = to_device(np.array(needed, dtype=np.int64), self.device)
            hidden = self.model(input_ids, positions, self.attention, rows=rows)
        num_samples = len(inputs.sample_rows)
        return hidden[:num_samples], hidden[num_samples:]

    @torch.inference_mode()
    def serve(self) -> None:
        """As a worker, compute what rank 0 computes, until it ends. Rank 0 has the same results."""
        while True:
            self.compute(self.ranks.receive())


def choose_operations(backend: str, dtype: torch.dtype, is_eager: bool) -> Operations:
    """A layer's small operations: our C++ kernels, plain PyTorch, or PyTorch compiled.

    torch.compile keeps eight versions of a function in a process, for all engines together. It runs
    what needs a ninth one uncompiled, and warns.
    """
    if backend == "cpp":
        return Operations(
            add_norm=partial(add_norm, norm=cpp.rms_norm),
            norm_rotate=cpp.norm_rotate,
            silu_mul=cpp.silu_mul,
            packed_linear=cpp.PackedLinear if cpp.has_linear(dtype) else None,
        )
    if is_eager:
        return PLAIN
    compiled = partial(torch.compile, dynamic=True)  # for any number of tokens
    return Operations(compiled(add_norm), compiled(norm_rotate), compiled(silu_mul))


def prepare(batch: ScheduledBatch, block_size: int) -> StepInputs:
    """Lay the tokens of a batch out end to end.

    block_size = 4, table [7, 2], 3 of 6 tokens computed: positions 3 4 5, slots 7·4+3, 2·4+0, 2·4+1
    """
    input_ids = []
    positions = []
    slots = []
    sample_rows = []  # of 1, 1 and 4 new tokens: rows 0, 1 and 5
    score_rows = []
    score_ids = []
    num_logprobs = []
    query_lens = []
    context_lens = []
    for seq in batch.sequences:
        first_row = len(input_ids)
        start = seq.num_computed_tokens
        end = start + seq.num_scheduled_tokens
        query_lens.append(seq.num_scheduled_tokens)
        context_lens.append(end)
        input_ids += seq.token_ids[start:end]
        positions += range(start, end)
        for position in range(start, end):
            block_id = seq.block_table[position // block_size]
            slots.append(block_id * block_size + position % block_size)
        if seq.needs_sample:
            sample_rows.append(len(input_ids) - 1)
        if seq.request.wants_prompt_logprobs:
            for position in scored_positions(seq):
                score_rows.append(first_row + position - start)
                score_ids.append(seq.token_ids[position + 1])
                num_logprobs.append(seq.request.params.prompt_logprobs)
    metadata = AttentionMetadata(
        query_lens=np.array(query_lens),
        context_lens=np.array(context_lens),
        block_tables=[seq.block_table for seq in batch.sequences],
        slot_mapping=np.array(slots),
        num_decodes=batch.num_decodes,
        seq_ids=[id(seq) for seq in batch.sequences],
    )
    return StepInputs(
        moves=batch.moves,
        input_ids=np.array(input_ids),
        positions=np.array(positions),
        metadata=metadata,
        sample_rows=sample_rows,
        score_rows=score_rows,
        score_ids=score_ids,
        num_logprobs=num_logprobs,
    )


def scored_positions(seq: Sequence) -> range:
    """The positions of a prompt that are computed in this step, and whose logits score it.

    The hidden state at position p scores the token at p + 1. If b c d of a prompt a b c d e are
    computed, they score c, d and e. Positions that were scored before the request was preempted are
    left out.
    """
    request = seq.request
    start = seq.num_computed_tokens
    first = max(start, len(request.prompt_logprobs or ()) - 1)
    return range(first, min(start + seq.num_scheduled_tokens, request.num_prompt_tokens - 1))


def logprobs_by_request(
    sequences: list[Sequence], prompt_logprobs: list[Logprobs]
) -> dict[Request, list[Logprobs]]:
    """Each request of these sequences whose prompt is scored → its part of `prompt_logprobs`."""
    parts = {}
    for seq in sequences:
        if seq.request.wants_prompt_logprobs:
            num_scored = len(scored_positions(seq))
            parts[seq.request] = prompt_logprobs[:num_scored]
            prompt_logprobs = prompt_logprobs[num_scored:]
    return parts
