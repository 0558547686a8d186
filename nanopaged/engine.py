"""The engine: the loop of continuous batching.

`LLMEngine.step` is one turn of the loop, three calls long. The engine decides nothing: `Scheduler` chooses
the batch, a `Runner` computes it, and `PromptProcessor` checks requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

from nanopaged.block_manager import BlockManager
from nanopaged.checks.foreign_names import with_hints
from nanopaged.checks.lengths import resolve_lengths
from nanopaged.config import EngineConfig, SamplingParams
from nanopaged.model.checkpoint import find_model, load_tokenizer, read_eos_token_ids
from nanopaged.model.model_config import read_model_config
from nanopaged.model.parallel import start
from nanopaged.model_runner import ModelRunner
from nanopaged.prompts import Params, Prompt, PromptProcessor
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch, StepResult
from nanopaged.text.outputs import EngineStats, RequestOutput
from nanopaged.views.invariants import check_blocks, check_host_blocks
from nanopaged.views.outputs import request_output
from nanopaged.views.snapshot import Snapshot, take_snapshot
from nanopaged.views.statistics import Counters, engine_stats


class Runner(Protocol):
    """What computes batches: `ModelRunner`; tests have their own."""

    num_blocks: int
    num_host_blocks: int
    dtype: object
    device: object

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Move blocks, compute the scheduled tokens, sample."""

    def cheaper_preemption(self) -> str:
        """The faster way to preempt, "swap" or "recompute"; called once for preemption="auto"."""


class Listener(Protocol):
    """What an engine tells of its steps, such as to a trace: see `LLMEngine.listeners`."""

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        """The scheduler has chosen the batch and its blocks; nothing is moved or computed yet."""

    def step_ended(self, batch: ScheduledBatch) -> None:
        """The batch is computed, and the sequences have its tokens."""

    def step_failed(self, error: BaseException) -> None:
        """A step failed, or adding or aborting a request: all requests wait again."""


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Args:
        config: see `EngineConfig`.
        runner: computes the batches; None makes a `ModelRunner` with the model of `config`.

    Attributes:
        listeners: are called in every step.

    Raises:
        FileNotFoundError: the model or a file of it is missing.
        ValueError: the model is not supported or broken, or does not fit.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        if not isinstance(config, EngineConfig):
            raise TypeError(f"config must be an EngineConfig, got {config!r}")
        folder = find_model(config.model, with_weights=config.load_format == "auto")
        model_config = read_model_config(folder)
        model_config.share(config.tensor_parallel_size)  # raises ValueError if it cannot be divided
        self.config = config = resolve_lengths(config, model_config.max_position_embeddings)
        self.model_name = str(config.model or folder.name)
        self.max_model_len, self.vocab_size = config.max_model_len, model_config.vocab_size
        self.tokenizer = load_tokenizer(folder)
        if runner is None:
            make_runner = partial(ModelRunner, config, model_config, folder)
            runner = start(config.tensor_parallel_size, config.device, make_runner)
        self.runner: Runner = runner
        self.block_manager = BlockManager(runner.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.enable_chunked_prefill,
            runner.cheaper_preemption() if config.preemption == "auto" else config.preemption,
            runner.num_host_blocks,
            config.watermark,
        )
        eos_token_ids = read_eos_token_ids(folder, self.tokenizer)
        self.prompts = PromptProcessor(
            config, self.tokenizer, self.vocab_size, runner.num_blocks, eos_token_ids
        )
        self.requests: dict[str, Request] = {}  # unfinished or not yet reported, in order of arrival
        self.num_steps, self.counters = 0, Counters()
        self.listeners: list[Listener] = []
        for call in config.on_start:
            call(self)

    def step(self, with_outputs: bool = True, keep: bool = False) -> list[RequestOutput]:
        """Compute one batch. Returns the requests that got a token or have ended.

        If a step fails, its exception is raised and no generated token is lost: every request waits again,
        and its K/V is computed again. The caller can call `step` again, or abort the request that caused the
        failure: a `NonFiniteLogits` has its `request_id`.

        Args:
            with_outputs: False returns an empty list: building hundreds of `RequestOutput`s takes longer than
                scheduling their requests.
            keep: requests of `add_request` that finish now are reported by the next step. `LLM`, which does
                not read what a step returns, steps so.
        """
        if not self.requests:
            return []
        with self._or_start_over():
            # The batch is empty if the last requests finished in a step that then failed.
            batch = self.scheduler.schedule()
            for listener in self.listeners:
                listener.batch_scheduled(batch)
            result = self.runner.execute(batch) if batch.sequences else StepResult([])
            advanced = self.scheduler.update(batch, result)
            if batch.admitted or batch.preempted or batch.copies:
                self.counters.count(batch, self.config.enable_prefix_caching)
            for listener in self.listeners:
                listener.step_ended(batch)
            outputs = [request_output(request) for request in advanced] if with_outputs else []
            for request in [request for request in advanced if request.finished]:
                if keep and not request.is_polled:
                    self.scheduler.unreported.append(request)
                else:
                    del self.requests[request.request_id]
        self.num_steps += 1
        return outputs

    @contextmanager
    def _or_start_over(self) -> Iterator[None]:
        """If the code inside `with` fails, all requests wait again."""
        try:
            yield
        except BaseException as error:
            while True:
                with suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave this half done
                    self.scheduler.start_over(self.requests.values())
                    break
            for listener in self.listeners:
                listener.step_failed(error)
            raise

    @with_hints(SamplingParams)
    def add_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> None:
        """Queue a prompt (a text, token ids, or a dict of one of them) for generation.

        Raises:
            TypeError, ValueError: the prompt or its params cannot be served, or the id is taken.
        """
        self.queue(self.prompts.make_request(request_id, prompt, params))

    def queue(self, request: Request) -> None:
        """Put a request of `PromptProcessor` into the waiting queue. Raises ValueError if its id is taken."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is taken by an unfinished request")
        request.arrival_time = time.monotonic()
        with self._or_start_over():
            self.requests[request.request_id] = request
            self.scheduler.add(request)

    def abort_request(self, request_id: str) -> RequestOutput:
        """Stop a running or waiting request and free its blocks. Returns its output so far.

        Raises:
            ValueError: no unfinished request has this id.
        """
        if not isinstance(request_id, str) or request_id not in self.requests:
            raise ValueError(f"no unfinished request has the id {request_id!r}")
        with self._or_start_over():
            request = self.requests.pop(request_id)
            self.scheduler.abort(request)
        return request_output(request)

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests. Blocks in use can still be shared."""
        with self._or_start_over():
            self.block_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Whether a request is unfinished, or its last output was not returned by `step` yet."""
        return bool(self.requests)

    def stats(self) -> EngineStats:
        """Counts and shares, valid between two steps."""
        return engine_stats(self.num_steps, self.scheduler, self.counters)

    def snapshot(self) -> Snapshot:
        """Every request, block table and block, valid between two steps. Printed, it is a drawing."""
        return take_snapshot(self.num_steps, self.scheduler, self.requests.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if block tables, pools and prefix index disagree. Call it between steps."""
        check_blocks(self.block_manager, self.scheduler.running_sequences)
        check_host_blocks(self.scheduler.swapper, self.requests.values())
