"""Runs a scheduled batch: it becomes tensors, a forward pass, and sampled tokens.

The runner has the model and the KV cache, and measures at start-up how many blocks fit in memory. It reads
sequences and block tables, and changes neither. It knows no queues and no prefix cache.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import make_attention
from nanopaged.attention.metadata import GATHER_KEYS, AttentionMetadata, StepInputs, slots_of
from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.kv_cache import KVCache, KVShape, is_ampere, pick_device, to_device
from nanopaged.model.checkpoint import load_model
from nanopaged.model.decoder import Model
from nanopaged.model.model_config import ModelConfig
from nanopaged.model.parallel import Ranks
from nanopaged.sampler import (
    SampleRow,
    SamplingMetadata,
    gather_logprobs,
    sample,
    sample_next_tokens,
    take_rows,
)
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult
from nanopaged.text.outputs import Logprobs

# The most host memory for a KV cache on a CPU, and for swapped requests, of all ranks, unless configured.
HOST_BYTES = 4 << 30
LOGITS_TILE = 256  # prompt positions whose logits are computed at once: [256, vocab_size] in float32

logger = logging.getLogger("nanopaged")


class ModelRunner:
    """Computes batches; the engine calls `execute` once in each step.

    Attributes:
        num_blocks: blocks in the KV cache; measured if `config.num_blocks` is None.
        num_host_blocks: blocks in host memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,
        max_model_len: int,
        token_budget: int,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.ranks = ranks
        self.together = ranks.together if ranks is not None else nullcontext  # see `execute`
        self.device = device if device is not None else pick_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # for Triton's kernels and CUDA graphs
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.block_size = config.block_size
        self.model = load_model(
            model_config,
            folder,
            config.load_format,
            max_model_len,
            self.dtype,
            self.device,
            config.seed,
            ranks,
        )
        if ranks is not None:
            ranks.meet()
        share = self.model.share
        shape = KVShape(share.num_layers, share.num_kv_heads, share.head_dim, self.dtype)
        self.num_blocks = config.num_blocks or measure_num_blocks(
            config, self.model, shape, max_model_len, token_budget
        )
        if ranks is not None and config.num_blocks is None:
            self.num_blocks = ranks.smallest(self.num_blocks)
        self.num_host_blocks = config.num_host_blocks
        if self.num_host_blocks is None:
            most = HOST_BYTES // config.tensor_parallel_size // shape.block_bytes(config.block_size)
            self.num_host_blocks = 0 if config.preemption == "recompute" else min(self.num_blocks, most)
        self.kv_cache = KVCache(shape, self.num_blocks, config.block_size, self.device, self.num_host_blocks)
        mebibytes = self.num_blocks * shape.block_bytes(config.block_size) >> 20
        size = f"{self.num_blocks:,} blocks of {config.block_size} tokens ({mebibytes:,} MiB)"
        logger.info("KV cache: %s, and %s blocks for swapped requests", size, f"{self.num_host_blocks:,}")
        self.attention = make_attention(config.attention_backend, self.kv_cache, model_config.attention_scale)
        self.graphs = None
        if self.device.type == "cuda" and self.attention.supports_cuda_graphs and not config.enforce_eager:
            from nanopaged.model.cuda_graphs import DecodeGraphs

            self.graphs = DecodeGraphs(self.model, self.attention, config.max_num_seqs, max_model_len)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: move blocks, compute, sample.

        A GPU runs asynchronously: `self.model(...)` returns while the GPU still computes. The inputs of the
        sampling are therefore prepared after that call, and the host waits only when it reads the tokens.

        Raises:
            NonFiniteLogits: the model's logits for a request are not finite.
        """
        inputs, tiles = prepare(batch, self.block_size)
        with self.together(inputs):
            hidden = self.forward(inputs)
            ready, *tile_rows = inputs.logit_rows
            samples: list[list[Sample]] = [[]] * len(batch.sequences)
            if ready:
                samples = sample_next_tokens(batch, self.model.logits(take_rows(hidden, ready)))
            prompt_logprobs: dict[Request, list[Logprobs]] = {}
            for (seq, lo, hi), rows in zip(tiles, tile_rows, strict=True):
                logprobs = self.model.logits(take_rows(hidden, rows)).log_softmax(-1)
                actual = to_device(np.array(seq.token_ids[lo + 1 : hi + 1]), self.device)
                scored = gather_logprobs(logprobs, actual, [seq.request.params.prompt_logprobs] * len(rows))
                prompt_logprobs.setdefault(seq.request, []).extend(token.logprobs for token in scored)
        return StepResult(samples, prompt_logprobs)

    @torch.inference_mode()
    def follow(self, inputs: StepInputs) -> None:
        """The part of the workers in `execute`: the same forward pass, and their share of the logits."""
        hidden = self.forward(inputs)
        for rows in filter(None, inputs.logit_rows):
            self.model.logits(take_rows(hidden, rows))

    def forward(self, inputs: StepInputs) -> Tensor:
        """Move blocks and run the model → hidden states [num_tokens, hidden_size]."""
        self.kv_cache.move_blocks(*inputs.moves)
        input_ids, positions, metadata = inputs.input_ids, inputs.positions, inputs.metadata
        if self.ranks is not None and self.ranks.meeting > 0:
            self.graphs = None  # they have the connections of the first meeting
        if self.graphs is not None and metadata.num_decodes == len(metadata.query_lens):
            return self.graphs.run(input_ids, positions, metadata)
        self.attention.begin_step(metadata)
        return self.model(
            to_device(input_ids, self.device), to_device(positions, self.device), self.attention
        )

    @torch.inference_mode()
    def cheaper_preemption(self) -> str:
        """The faster way ("swap" or "recompute") to restore a block, measured now.

        The time to copy a block out and in is compared with its share of a short prefill. Without host blocks
        it is "recompute", and nothing is measured.
        """
        if self.num_host_blocks == 0:
            return "recompute"
        moves = [(i, i) for i in range(min(8, self.num_blocks, self.num_host_blocks))]
        swap = self._seconds(lambda: self.kv_cache.move_blocks(moves, moves, [])) / len(moves)
        num_tokens = 64  # a short prefill, without its attention
        ids = torch.arange(num_tokens, device=self.device) % self.model.config.vocab_size
        with self.together("cheaper_preemption"):
            prefill = self._seconds(lambda: self.model(ids, ids * 0, lambda layer, q, k, v: q))
        recompute = prefill * self.block_size / num_tokens
        choice = "swap" if swap < recompute else "recompute"
        measured = f"{1e3 * swap:.3f} ms to swap a block out and in, {1e3 * recompute:.3f} ms to recompute it"
        logger.info("preemption by %s: %s", choice, measured)
        return choice

    def _seconds(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes, the best of three runs."""
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return min(seconds)


def pick_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and K/V.

    Args:
        name: of `EngineConfig`. "auto" is the checkpoint's dtype, but float16 where bfloat16 would be slow.
    """
    dtype = checkpoint if name == "auto" else name
    if dtype == "bfloat16" and device.type == "cuda" and not is_ampere(device):
        if name == "auto":
            dtype = "float16"
        advice = "dtype='float16' is faster" if dtype == "bfloat16" else "the checkpoint is read as float16"
        logger.warning("%s has no instructions for bfloat16: %s", device, advice)
    return getattr(torch, dtype)


PromptTile = tuple[Sequence, int, int]


def prepare(batch: ScheduledBatch, block_size: int) -> tuple[StepInputs, list[PromptTile]]:
    """Lay the tokens of a batch out end to end. Returns them, and what of `logit_rows` scores prompts.

    block_size = 4, table [7, 2], 3 of 6 tokens computed: positions 3 4 5, slots 7·4+3, 2·4+0, 2·4+1
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_lens: list[int] = []
    context_lens: list[int] = []
    block_tables: list[list[int]] = []
    last_tokens: list[int] = []  # of sequences that need a sample: 1, 4 and 1 new tokens, rows 0 and 5
    tiles: list[PromptTile] = []
    tile_rows: list[list[int]] = []
    for seq in batch.sequences:
        start, n, table = seq.num_computed_tokens, seq.num_scheduled_tokens, seq.block_table
        row = len(input_ids)
        query_lens.append(n)
        context_lens.append(start + n)
        block_tables.append(table)
        if n == 1:  # there may be hundreds of decodes, so no numpy for a single token
            input_ids.append(seq.token_ids[start])
            positions.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)
        else:
            input_ids += seq.token_ids[start : start + n]
            positions += range(start, start + n)
            slots += slots_of(table, np.arange(start, start + n), block_size).tolist()
        if seq.needs_sample:
            last_tokens.append(row + n - 1)
        if seq.request.wants_prompt_logprobs:
            tiles += (its_tiles := prompt_tiles(seq))
            tile_rows += [list(range(row + lo - start, row + hi - start)) for _, lo, hi in its_tiles]
    metadata = AttentionMetadata(
        query_lens=np.array(query_lens, dtype=np.int64),
        context_lens=np.array(context_lens, dtype=np.int64),
        block_tables=block_tables,
        slot_mapping=np.array(slots, dtype=np.int64),
        num_decodes=batch.num_decodes,
        seq_ids=list(map(id, batch.sequences)),
    )
    return StepInputs(
        moves=(batch.swap_out, batch.swap_in, batch.copies),
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        metadata=metadata,
        logit_rows=[last_tokens, *tile_rows],
    ), tiles


def prompt_tiles(seq: Sequence) -> list[PromptTile]:
    """The positions of a prompt to score in this step, in tiles (sequence, first, end).

    The hidden state at position p scores the token at p + 1: of a prompt a b c d e, if b c d are computed,
    they score c, d and e. Positions that have been scored before (the request was preempted) are left out.
    """
    request, start = seq.request, seq.num_computed_tokens
    first = max(start, len(request.prompt_logprobs) - 1)
    end = min(start + seq.num_scheduled_tokens, request.num_prompt_tokens - 1)
    return [(seq, lo, min(lo + LOGITS_TILE, end)) for lo in range(first, end, LOGITS_TILE)]


# ── the profile run: how many blocks fit ──────────────────────────────────────────────────────────


def measure_num_blocks(
    config: EngineConfig, model: Model, shape: KVShape, max_model_len: int, token_budget: int
) -> int:
    """Blocks for the KV cache: as many as fit in memory with the largest step, and no more than can be used.

    On a GPU the largest step is run, and its peak memory beyond the weights is set aside:

        total · memory_utilization  =  in use (weights, other programs)  +  the largest step  +  blocks

    CUDA graphs, captured later, use the memory left over: 10 % of the GPU's by default.

    On a CPU, where other programs need the memory too, they take at most `HOST_BYTES`, unless a share is
    configured or a single sequence needs more. All ranks share this memory.

    Raises:
        ValueError: not even one sequence of `max_model_len` tokens fits.
    """
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        peak = peak_memory(lambda: largest_step(config, model, shape, max_model_len, token_budget), device)
        free, total = torch.cuda.mem_get_info(device)
        num_bytes = int(total * (config.memory_utilization or 0.9)) - (total - free) - peak
    else:
        num_bytes = int(available_memory() / config.tensor_parallel_size * (config.memory_utilization or 0.5))
    block_bytes = shape.block_bytes(config.block_size)
    fit = max(0, num_bytes) // block_bytes
    needed = -(-max_model_len // config.block_size)  # blocks of one sequence: ceil division
    if fit < needed:
        raise ValueError(
            f"one sequence of max_model_len tokens needs {needed} blocks of {block_bytes:,} bytes of "
            f"K/V, but only {fit} fit in the {num_bytes:,} bytes left for them: lower max_model_len "
            "or block_size, raise memory_utilization, or set num_blocks yourself"
        )
    useful = needed * config.max_num_seqs
    if device.type == "cpu" and config.memory_utilization is None:
        useful = min(useful, max(needed, HOST_BYTES // config.tensor_parallel_size // block_bytes))
    return min(fit, useful)


def peak_memory(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes of GPU memory that `work` uses at any time, beyond the bytes in use before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def largest_step(
    config: EngineConfig, model: Model, shape: KVShape, max_model_len: int, token_budget: int
) -> None:
    """Run a step that needs the most memory: the whole budget, the longest contexts, the most samples.

    Each prefill is the end of a context of `max_model_len` tokens, and there are enough prefills for flash
    attention to gather its maximum of keys. All share the blocks of one small cache, whose single layer
    stands in for all layers.
    """
    device = model.embed_tokens.weight.device
    at_least = -(-token_budget // max_model_len)
    num_seqs = max(at_least, min(config.max_num_seqs, token_budget, -(-GATHER_KEYS // max_model_len)))
    query_lens = np.full(num_seqs, token_budget // num_seqs)
    query_lens[: token_budget % num_seqs] += 1
    positions = np.concatenate([np.arange(max_model_len - n, max_model_len) for n in query_lens])
    num_blocks = -(-max_model_len // config.block_size)
    one_layer = KVShape(1, shape.num_kv_heads, shape.head_dim, shape.dtype)
    cache = KVCache(one_layer, num_blocks, config.block_size, device)
    # The reference backend would take hours for this step, and needs less memory than any other.
    backend = "auto" if config.attention_backend == "reference" else config.attention_backend
    attention = make_attention(backend, cache, 1.0)
    attention.begin_step(
        AttentionMetadata(
            query_lens=query_lens,
            context_lens=np.full(num_seqs, max_model_len),
            block_tables=[list(range(num_blocks))] * num_seqs,
            slot_mapping=positions,  # the blocks are 0, 1, 2, ..., so a slot is a position
            num_decodes=0,
            seq_ids=list(range(num_seqs)),
        )
    )
    positions = to_device(positions, device)
    hidden = model(positions * 0, positions, lambda layer, q, k, v: attention(0, q, k, v))
    # Top-p sorts all probabilities. Penalties make a copy of the logits, so do banned tokens, and forks and
    # beams (`clone`).
    params = (
        SamplingParams(top_k=10, presence_penalty=1),
        SamplingParams(top_p=0.9, min_p=0.1, presence_penalty=1),
    )
    num_rows = max(config.max_num_seqs, LOGITS_TILE)
    rows = [SampleRow(params[i % 2], 0, i, 0, [0], {0: 1}) for i in range(num_rows)]
    logits = model.logits(hidden[:1].expand(len(rows), -1))
    sample(logits.clone(), SamplingMetadata(rows, device))


def available_memory() -> int:
    """Bytes of this computer's memory that are free now."""
    try:
        with open("/proc/meminfo") as meminfo:  # Linux: includes the memory of file caches
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except OSError:
        pass
    try:  # macOS reports only the total: assume that half is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30  # Windows: assume 4 GiB
