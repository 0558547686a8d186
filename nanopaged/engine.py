"""The engine: the loop of continuous batching.

`LLMEngine.step` is one turn of it. `Scheduler` chooses the batch, a `Runner` computes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig, Params, SamplingParams, resolve_lengths, with_hints
from nanopaged.model.checkpoint import find_model, load_tokenizer, read_eos_token_ids
from nanopaged.model.model_config import read_model_config
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import EngineStats, RequestOutput
from nanopaged.parallel import start
from nanopaged.prompts import Prompt, PromptProcessor
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch, StepResult
from nanopaged.snapshot import (
    Snapshot,
    check_blocks,
    check_host_blocks,
    engine_stats,
    take_snapshot,
)

FORKED = (
    "this engine was made in process {}, and its forks cannot use it: start processes by 'spawn'"
)


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


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Args:
        config: see `EngineConfig`.
        runner: computes the batches; None makes a `ModelRunner` with the model of `config`.

    Attributes:
        listeners: such as a trace. They are told `batch_scheduled(batch)` before anything is computed,
            `step_ended(batch)`, and `step_failed(error)` when all requests wait again.

    A fork (docs/book/12-forks.md) is a subclass with other classes here.

    Raises:
        FileNotFoundError: the model or a file of it is missing.
        ValueError: the model is not supported or broken, or does not fit.
    """

    make_config: Any = EngineConfig
    make_runner: Any = ModelRunner
    make_block_manager: Any = BlockManager
    make_scheduler: Any = Scheduler

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        if not isinstance(config, EngineConfig):
            raise TypeError(f"config must be an EngineConfig, got {config!r}")
        folder = find_model(config.model, with_weights=config.load_format == "auto")
        model_config = read_model_config(folder)
        model_config.share(config.tensor_parallel_size)  # raises ValueError if it cannot be divided
        self.pid = os.getpid()
        self.max_model_len, self.max_num_batched_tokens = resolve_lengths(
            config, model_config.max_position_embeddings
        )
        self.config = config
        self.model_name = str(config.model or folder.name)
        self.vocab_size = model_config.vocab_size
        self.tokenizer = load_tokenizer(folder)
        if runner is None:
            make_runner = partial(
                self.make_runner,
                config=config,
                model_config=model_config,
                folder=folder,
                max_model_len=self.max_model_len,
                max_num_batched_tokens=self.max_num_batched_tokens,
            )
            runner = start(config.tensor_parallel_size, config.device, make_runner)
        self.runner: Runner = runner
        pool = runner.num_blocks, config.block_size, config.enable_prefix_caching
        self.block_manager = self.make_block_manager(*pool)
        limits = config.max_num_seqs, self.max_num_batched_tokens, config.enable_chunked_prefill
        preemption = (
            runner.cheaper_preemption() if config.preemption == "auto" else config.preemption
        )
        swaps = preemption, runner.num_host_blocks, config.watermark
        self.scheduler = self.make_scheduler(self.block_manager, *limits, *swaps)
        eos = read_eos_token_ids(folder, self.tokenizer)
        self.prompts = PromptProcessor(
            config, self.tokenizer, self.vocab_size, runner.num_blocks, eos, self.max_model_len
        )
        self.requests: dict[
            str, Request
        ] = {}  # unfinished or not yet reported, in order of arrival
        self.unreported: dict[str, Request] = {}  # the finished ones among them
        self.num_steps = 0
        self.listeners: list[Any] = []
        if config.trace is not None:
            from nanopaged.trace import Recorder

            self.listeners.append(
                Recorder(config.trace, self.scheduler, self.tokenizer, self.model_name)
            )

    def step(self, report: bool = True) -> list[RequestOutput]:
        """Compute one batch. Returns the outputs of the requests that got a token or have ended.

        If a step fails, its exception is raised and no generated token is lost: every request waits again,
        and its K/V is computed again. The caller can call `step` again, or abort the request that caused the
        failure: a `NonFiniteLogits` has its `request_id`.

        Args:
            report: False returns no outputs, to save their time; the next step reports what has ended.
        """
        if os.getpid() != self.pid:
            raise RuntimeError(FORKED.format(self.pid))
        if not self.requests:
            return []
        with self._or_start_over():
            batch = self.scheduler.schedule()
            for listener in self.listeners:
                listener.batch_scheduled(batch)
            # The batch is empty if all requests have ended, and some are not reported yet.
            result = self.runner.execute(batch) if batch.sequences else StepResult([])
            advanced = self.scheduler.update(batch, result)
            for listener in self.listeners:
                listener.step_ended(batch)
            reported = (*self.unreported.values(), *advanced) if report else ()
            for request in advanced:
                if not request.live:
                    self.unreported[request.request_id] = request
            outputs = list(map(Request.output, reported))
            while report and self.unreported:
                del self.requests[self.unreported.popitem()[0]]
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
                    self.unreported = {
                        name: each for name, each in self.requests.items() if each.finished
                    }
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
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
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
        self.forget(request := self.requests[request_id])
        return request.output()

    def forget(self, request: Request) -> None:
        """Remove a request, and free its blocks if it is unfinished."""
        with self._or_start_over():
            if self.unreported.pop(request.request_id, None) is None:
                self.scheduler.abort(request)
            del self.requests[request.request_id]

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests. Blocks in use can still be shared."""
        with self._or_start_over():
            self.block_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Whether a request is unfinished, or its last output was not returned by `step` yet."""
        return bool(self.requests)

    def stats(self) -> EngineStats:
        """Counts and shares, valid between two steps."""
        return engine_stats(self.num_steps, self.scheduler)

    def snapshot(self) -> Snapshot:
        """Every request, block table and block, valid between two steps. Printed, it is a drawing."""
        return take_snapshot(self.num_steps, self.scheduler, self.requests.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if block tables, pools and prefix index disagree. Call it between steps."""
        check_blocks(self.block_manager, self.scheduler.running_sequences)
        check_host_blocks(self.scheduler.swapper, self.requests.values())
