"""Runs a scheduled batch: it becomes tensors, a forward pass, and sampled tokens.

The runner has the model and the KV cache. It reads sequences and block tables, and changes neither. It knows
no queues and no prefix cache.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import make_attention
from nanopaged.attention.metadata import AttentionMetadata, StepInputs, slots_of
from nanopaged.checks.lengths import ResolvedConfig
from nanopaged.kernels.devices import pick_device
from nanopaged.kv_cache import KVCache, KVShape, take_rows, to_device
from nanopaged.model.checkpoint import load_model
from nanopaged.model.layers import Operations
from nanopaged.model.model_config import ModelConfig
from nanopaged.model.parallel import Ranks
from nanopaged.model.prompt_scores import PromptTile, prompt_tiles, score_prompts
from nanopaged.model.sizing import cheaper_preemption, count_blocks, pick_dtype
from nanopaged.sampler import sample_next_tokens
from nanopaged.sequence import Sample, ScheduledBatch, StepResult


class ModelRunner:
    """Computes batches; the engine calls `execute` once in each step.

    Attributes:
        num_blocks: blocks in the KV cache; measured if `config.num_blocks` is None.
        num_host_blocks: blocks in host memory.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        folder: Path,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.ranks = ranks
        self.together = ranks.together if ranks is not None else nullcontext  # computing with other processes
        self.device = device if device is not None else pick_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # for Triton's kernels and CUDA graphs
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.block_size = config.block_size
        self.model = load_model(config, model_config, folder, self.dtype, self.device, ranks)
        share = self.model.share  # the sizes of this rank's layers
        shape = KVShape(share.num_layers, share.num_kv_heads, share.head_dim, self.dtype)
        self.num_blocks, self.num_host_blocks = count_blocks(config, self.model, shape, ranks)
        self.kv_cache = KVCache(shape, self.num_blocks, config.block_size, self.device, self.num_host_blocks)
        self.attention = make_attention(config.attention_backend, self.kv_cache, model_config.attention_scale)
        self.model.use(Operations(**self.attention.fused))
        self.graphs = None
        if self.device.type == "cuda" and self.attention.supports_cuda_graphs and not config.enforce_eager:
            from nanopaged.model.cuda_graphs import DecodeGraphs

            self.graphs = DecodeGraphs(self.model, self.attention, config.max_num_seqs, config.max_model_len)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: move blocks, compute, sample.

        A GPU runs asynchronously: `forward` returns while it still computes. So the inputs of the sampling
        are prepared after that call, and the host waits only when it reads the tokens.

        Raises:
            NonFiniteLogits: the model's logits for a request are not finite.
        """
        inputs, tiles = prepare(batch, self.block_size)
        with self.together(inputs):
            hidden = self.forward(inputs)
            ready = inputs.logit_rows[0]
            samples: list[list[Sample]] = [[]] * len(batch.sequences)
            if ready:
                samples = sample_next_tokens(batch, self.model.logits(take_rows(hidden, ready)))
            prompt_logprobs = score_prompts(tiles, hidden, self.model) if tiles else {}
        return StepResult(samples, prompt_logprobs)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Move blocks and run the model → hidden states [num_tokens, hidden_size]."""
        self.kv_cache.move_blocks(*inputs.moves)
        input_ids, positions, metadata = inputs.input_ids, inputs.positions, inputs.metadata
        if self.graphs is not None and self.graphs.can_run(metadata):
            return self.graphs.run(input_ids, positions, metadata)
        self.attention.begin_step(metadata)
        return self.model(
            to_device(input_ids, self.device), to_device(positions, self.device), self.attention
        )

    @torch.inference_mode()
    def cheaper_preemption(self) -> str:
        """The faster way ("swap" or "recompute") to restore a block, measured now."""
        return cheaper_preemption(self.model, self.kv_cache, self.together)


def prepare(batch: ScheduledBatch, block_size: int) -> tuple[StepInputs, list[PromptTile]]:
    """Lay the tokens of a batch out end to end. Returns them, and what of the prompts is to be scored.

    block_size = 4, table [7, 2], 3 of 6 tokens computed: positions 3 4 5, slots 7·4+3, 2·4+0, 2·4+1
    """
    input_ids, positions, slots = [], [], []  # of each token
    query_lens, context_lens, block_tables = [], [], []  # of each sequence
    last_tokens = []  # rows of the tokens that are sampled from: with 1, 1 and 4 new tokens 0, 1 and 5
    logit_rows, tiles = [last_tokens], []
    for seq in batch.sequences:
        start, n, table = seq.num_computed_tokens, seq.num_scheduled_tokens, seq.block_table
        query_lens.append(n)
        context_lens.append(start + n)
        block_tables.append(table)
        if n == 1:  # there may be hundreds of decodes, so no numpy for a single token
            input_ids.append(seq.token_ids[start])
            positions.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)  # as in `slots_of`
        else:
            input_ids += seq.token_ids[start : start + n]
            positions += range(start, start + n)
            slots += slots_of(table, np.arange(start, start + n), block_size).tolist()
        if seq.needs_sample:
            last_tokens.append(len(input_ids) - 1)
        if seq.request.wants_prompt_logprobs:
            for tile in prompt_tiles(seq, row=len(input_ids) - n):
                tiles.append(tile)
                logit_rows.append(tile.rows)
    metadata = AttentionMetadata(
        query_lens=np.array(query_lens, dtype=np.int64),
        context_lens=np.array(context_lens, dtype=np.int64),
        block_tables=block_tables,
        slot_mapping=np.array(slots, dtype=np.int64),
        num_decodes=batch.num_decodes,
        seq_ids=list(map(id, batch.sequences)),
    )
    moves = batch.swap_out, batch.swap_in, batch.copies
    input_ids, positions = np.array((input_ids, positions), dtype=np.int64)
    return StepInputs(moves, input_ids, positions, metadata, logit_rows), tiles
