"""A runner with the host's part of a step on a GPU, without the model and the GPU.

Only this file of the experiments uses the inner parts of the model runner.
"""

from __future__ import annotations

import time

import torch

from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.cuda_graphs import DecodeGraphs
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model_runner import prepare
from nanopaged.sampler import sample_next_tokens
from nanopaged.sequence import ScheduledBatch, StepResult

VOCAB = 32
HIDDEN = 8


class HostPath:
    """Stands in for `ModelRunner`; `prepare_seconds` has the time until the launch, for each decode step."""

    def __init__(self, block_size: int, max_num_seqs: int, max_context_len: int) -> None:
        device = torch.device("cpu")
        self.block_size = block_size
        shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=HIDDEN, dtype=torch.float32)
        cache = KVCache(shape, num_blocks=1, block_size=block_size, device=device)
        attention = TritonAttention(cache, scale=1.0)
        attention.max_splits = 132  # as on an H100, for 8 KV heads
        self.hidden = torch.zeros(max_num_seqs, HIDDEN)
        self.logits = torch.randn(max_num_seqs, VOCAB)
        self.graphs = DecodeGraphs(
            model=lambda input_ids, positions, attention: self.hidden[: len(input_ids)],
            attention=attention,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            capture=lambda work: (work(), lambda: None),
        )
        self.prepare_seconds: list[float] = []

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """As `ModelRunner.execute`; prefills are answered without being prepared."""
        began = time.perf_counter()
        if batch.num_decodes == len(batch.sequences):
            inputs, _ = prepare(batch, self.block_size)
            self.graphs.run(inputs.input_ids, inputs.positions, inputs.metadata)
            self.prepare_seconds.append(time.perf_counter() - began)
        num_ready = sum(seq.needs_sample for seq in batch.sequences)
        return StepResult(sample_next_tokens(batch, self.logits[:num_ready]))
