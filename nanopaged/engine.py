"""The engine: the loop of continuous batching.

`LLMEngine.run_step` is one turn of it. `Scheduler` chooses the batch, `ModelRunner` computes it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig, Params, choose_lengths
from nanopaged.memory import usual_budget
from nanopaged.model.checkpoint import find_model, load_tokenizer, read_eos_token_ids
from nanopaged.model.model_config import read_model_config
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import EngineStats, RequestOutput
from nanopaged.parallel import start_ranks
from nanopaged.prompts import Prompt, PromptProcessor
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request
from nanopaged.snapshot import (
    Snapshot,
    check_blocks,
    check_host_blocks,
    engine_stats,
    take_snapshot,
)


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Args:
        config: see `EngineConfig`.
        runner: computes the batches; None makes a `ModelRunner` with the model of `config`. One of
            another class, as in tests, has `execute`, `cheaper_preemption` (for "auto"),
            `num_blocks` and `num_host_blocks`.

    Attributes:
        config: the options, with the lengths that were chosen for those that were None.
        requests: id → request, in order of arrival. A finished one is here until `step` returns it.
        listeners: such as a trace. The engine calls `batch_scheduled(batch)` before anything is
            computed, `step_ended(batch)`, and `step_failed(error)` when all requests wait again.

    A fork (docs/book/12-forks.md) is a subclass that replaces `make_config`, `make_prompts`,
    `make_runner`, `make_block_manager` or `make_scheduler`.

    Raises:
        TypeError: the config is of another class.
        FileNotFoundError: the model or a file of it is missing.
        ValueError: the model is not supported or broken, or does not fit.
        RuntimeError: another rank cannot start.
    """

    make_config = EngineConfig
    make_prompts = PromptProcessor
    make_runner = ModelRunner
    make_block_manager = BlockManager
    make_scheduler = Scheduler

    def __init__(self, config: EngineConfig, runner: Any = None) -> None:
        if not isinstance(config, EngineConfig):
            raise TypeError(f"config must be an EngineConfig, got {config!r}")
        folder = find_model(config.model, with_weights=config.load_format == "auto")
        model_config = read_model_config(folder)
        config = choose_lengths(
            config, model_config.max_position_embeddings, usual_budget(config.device)
        )
        self.config = config
        self.model_name = str(config.model or folder.name)
        self.tokenizer = load_tokenizer(folder)
        if runner is None:
            make_runner = partial(
                self.make_runner,
                config=config,
                model_config=model_config,
                folder=folder,
            )
            runner = start_ranks(config.tensor_parallel_size, make_runner)
        self.runner = runner
        self.block_manager = self.make_block_manager(
            num_blocks=runner.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        preemption = config.preemption
        if preemption == "auto":
            preemption = runner.cheaper_preemption
        self.scheduler = self.make_scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            preemption=preemption,
            num_host_blocks=runner.num_host_blocks,
            watermark=config.watermark,
        )
        self.prompts = self.make_prompts(
            config,
            tokenizer=self.tokenizer,
            vocab_size=model_config.vocab_size,
            num_blocks=runner.num_blocks,
            eos_token_ids=read_eos_token_ids(folder, self.tokenizer),
        )
        self.requests: dict[str, Request] = {}
        self.is_changing = False  # within `changing`, when Python may close a stream at any line
        self.to_forget: list[Request] = []  # the requests of streams that were closed then
        self.num_steps = 0
        self.listeners: list[Any] = []
        if config.trace is not None:
            from nanopaged.trace import Recorder

            self.listeners.append(
                Recorder(
                    config.trace,
                    scheduler=self.scheduler,
                    tokenizer=self.tokenizer,
                    model_name=self.model_name,
                )
            )

    def step(self) -> list[RequestOutput]:
        """Compute one batch. Returns the outputs of the requests that got a token or have ended.

        A step that fails raises its exception and loses no generated token. Every request waits
        again, and its K/V is computed again. The caller can call `step` again, or abort the request
        that caused the failure; `NonFiniteLogits` has its `request_id`.
        """
        # Requests that ended in a step of `LLM`, or in one that failed, are returned by this one.
        ended = [request for request in self.requests.values() if request.finished]
        advanced = self.run_step()
        with self.changing():
            outputs = [request.output() for request in ended + advanced]
            for output in outputs:
                if output.finished:  # its stream may have been closed, and the request forgotten
                    self.requests.pop(output.request_id, None)
        return outputs

    def run_step(self) -> list[Request]:
        """Compute one batch. Returns the requests that got a token. (`LLM` makes outputs later.)"""
        if not (self.scheduler.running or self.scheduler.waiting):
            return []
        with self.changing():
            batch = self.scheduler.schedule()
            for listener in self.listeners:
                listener.batch_scheduled(batch)
            result = self.runner.execute(batch)
            advanced = self.scheduler.update(batch, result)
            for listener in self.listeners:
                listener.step_ended(batch)
        self.num_steps += 1
        return advanced

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around each change of requests, queues and tables. If it fails, all requests wait again.

        Python's garbage collector may close a stream of `LLM` while a change is going on. `forget`
        then only notes the stream's request, which is removed when the change has ended.
        """
        try:
            self.is_changing = True
            yield
        except BaseException as error:
            self.scheduler.start_over(self.requests.values())
            for listener in self.listeners:
                listener.step_failed(error)
            raise
        finally:
            self.is_changing = False
            while self.to_forget:
                self.forget(self.to_forget.pop())

    def add_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> None:
        """Queue a prompt (a text, token ids, or a dict of one of them) for generation.

        Raises:
            TypeError, ValueError: the prompt or its params cannot be served, or the id is taken.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        self.queue(self.prompts.make_request(request_id, prompt, params))

    def queue(self, request: Request) -> None:
        """Put a request of `PromptProcessor` into the waiting queue.

        Raises:
            ValueError: its id is taken.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is taken by an unfinished request")
        request.arrival_time = time.monotonic()
        with self.changing():
            self.scheduler.add(request)  # first, because a `rank` that somebody wrote may raise
            self.requests[request.request_id] = request

    def abort_request(self, request_id: str) -> RequestOutput:
        """Stop a running or waiting request and free its blocks. Returns its output so far.

        Raises:
            ValueError: no request has this id, or `step` has returned it as finished.
        """
        if not isinstance(request_id, str) or request_id not in self.requests:
            raise ValueError(f"no unfinished request has the id {request_id!r}")
        request = self.requests[request_id]
        self.forget(request)
        return request.output()

    def forget(self, request: Request) -> None:
        """Remove a request if it is still here, and free its blocks if it is unfinished."""
        if self.is_changing:
            self.to_forget.append(request)
        elif self.requests.get(request.request_id) is request:
            with self.changing():
                if not request.finished:
                    self.scheduler.abort(request)
                del self.requests[request.request_id]

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests. Blocks in use can still be shared."""
        with self.changing():
            self.block_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Whether a request is unfinished, or its last output was not returned by `step` yet."""
        return bool(self.requests)

    def stats(self) -> EngineStats:
        """Counts and shares, valid between two steps."""
        return engine_stats(self.num_steps, self.scheduler)

    def snapshot(self) -> Snapshot:
        """Every request, block table and block, between two steps. Printed, it is a drawing."""
        return take_snapshot(self.num_steps, self.scheduler, self.requests.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if tables, pools and prefix index disagree, between two steps."""
        check_blocks(self.block_manager, self.scheduler.running_sequences)
        check_host_blocks(self.scheduler.swapper, self.requests.values())
