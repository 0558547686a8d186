"""The keywords of `LLM(…)`, for editors and type checkers: the fields of `EngineConfig`, without defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict


class EngineOptions(TypedDict, total=False):
    """See `EngineConfig`. (`model` is a parameter of `LLM` itself.)"""

    dtype: str
    device: str
    block_size: int
    num_blocks: int | None
    num_host_blocks: int | None
    memory_utilization: float | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_model_len: int | None
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    preemption: str
    watermark: float
    attention_backend: str
    enforce_eager: bool
    tensor_parallel_size: int
    load_format: str
    seed: int
    trace: str | Path | None
