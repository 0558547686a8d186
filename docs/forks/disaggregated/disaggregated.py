"""Disaggregated prefill: one process computes prompts, and another one decodes.

A long prompt delays no decode. README.md draws how a request returns: as one that was swapped out.
"""

import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import torch

import nanopaged
from nanopaged.block_manager import blocks_needed
from nanopaged.config import EngineConfig
from nanopaged.model_runner import ModelRunner
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sample, ScheduledBatch, StepResult


class KVRunner(ModelRunner):
    """A runner whose blocks are read and written as bytes, which numpy has for every dtype."""

    def read_blocks(self, block_table: list[int]) -> Any:
        """A copy of device blocks: uint8 [num_blocks, num_layers, 2, num_kv_heads, block_size, bytes]."""
        return self.kv_cache.data[block_table].cpu().view(torch.uint8).numpy()

    def write_host_blocks(self, host_table: list[int], kv: Any) -> None:
        """Store in host blocks what `read_blocks` has returned in the other process."""
        torch.get_device_module(self.device).synchronize()  # a GPU may still copy from a block that is free
        self.kv_cache.host[host_table] = torch.from_numpy(kv).view(self.kv_cache.host.dtype)


class PromptEngine(nanopaged.LLMEngine):
    """The engine of the prompt process: it computes prompts, one after the other."""

    make_runner = KVRunner
    runner: Any

    def compute(self, fields: dict[str, Any]) -> tuple[list[Sample], list[Any], int, Any]:
        """The fields that define a request → the samples that follow its prompt, its prompt_logprobs, its
        num_cached_tokens, its blocks. Raises what a step raises."""
        request = Request(request_id="", prompt=None, **fields)
        samples: list[Sample] = []
        with self.changing():  # which forgets the request, as `requests` does not have it
            self.scheduler.add(request)
            while not samples:
                batch = self.scheduler.schedule()
                result = self.runner.execute(batch)
                (samples,) = result.samples
                # Without its samples a prompt counts as unfinished: nothing is appended, forked or freed.
                self.scheduler.update(batch, StepResult([[]], result.prompt_logprobs))
            kv, scores = self.runner.read_blocks(request.live[0].block_table), request.prompt_logprobs or []
            self.scheduler.abort(request)
        return samples, scores[1:], request.num_cached_tokens or 0, kv


ENGINES: list[PromptEngine] = []  # the one of the prompt process


def begin(config: EngineConfig, num_threads: int) -> None:
    """The start of the prompt process, which ends with the other one, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
    Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    ENGINES.append(PromptEngine(config))


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def call(method: str, *arguments: Any) -> Any:
    """In the prompt process: the result of a method of its engine. Raises RuntimeError with the traceback."""
    try:
        return getattr(ENGINES[0], method)(*arguments)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None  # any other might not survive pickling


def start_process(config: EngineConfig) -> Callable[..., Future]:
    """Start the prompt process, which does one job after the other.

    Returns `submit(method of PromptEngine, arguments)`, which returns a Future of the result, or of the
    BrokenExecutor if the process has ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork lacks PyTorch's threads
    arguments = (config, torch.get_num_threads())
    pool = ProcessPoolExecutor(1, context, initializer=begin, initargs=arguments)
    pool.submit(call, "has_unfinished_requests").result()  # it has started, or it raises that it has not
    return partial(pool.submit, call)


class DecodeScheduler(Scheduler):
    """Sends new prompts away, and takes them back at the end of a step."""

    submit: Any  # of `start_process`
    runner: Any
    away: dict[Future, Request]  # in no queue; not by their ids, which may be used again after an abort

    def add(self, request: Request) -> None:
        """Send a new request away, or have its prompt computed here if there are no host blocks for it."""
        num_blocks = blocks_needed(request.num_prompt_tokens, self.block_size)
        if request.rank is None and num_blocks <= len(self.swapper.free_ids):  # not if it starts over
            names = ("prompt_token_ids", "params", "stop_rules", "seed", "cache_salt")
            fields = {name: getattr(request, name) for name in names}
            self.away[self.submit("compute", fields)] = request
            request.live[0].host_table = [self.swapper.free_ids.pop() for _ in range(num_blocks)]
            request.rank = self.rank(request)
        else:
            super().add(request)

    def abort(self, request: Request) -> None:
        """As `Scheduler.abort`, also of a request that is away."""
        for future in [future for future, each in self.away.items() if each is request]:
            future.cancel()  # if its prompt is being computed, no one reads the answer
            super().add(self.away.pop(future))
        super().abort(request)

    def start_over(self, requests: Iterable[Request]) -> None:
        """As `Scheduler.start_over`. Requests that were away wait here, too."""
        while self.away:
            self.away.popitem()[0].cancel()
        super().start_over(requests)

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[Request]:
        """As `Scheduler.update`; then take back the requests that have come."""
        advanced = super().update(batch, result)
        for future in [future for future in self.away if future.done()]:
            request, error = self.away.pop(future), future.exception()
            if error is None or isinstance(error, BrokenExecutor):
                advanced += self._take_back(request, future.result())  # which raises such an error
            else:  # it fails here, too, with an error that names it; or only there something was missing
                logging.getLogger("nanopaged").warning("a prompt is computed here: %s", error)
                self.swapper.release(request)
                super().add(request)
        return advanced

    def _take_back(self, request: Request, computed: tuple[Any, ...]) -> list[Request]:
        """Append the first tokens, write the K/V to its host blocks, and let the request wait."""
        (samples, scores, request.num_cached_tokens, kv), (seq,) = computed, request.live
        host_table, seq.host_table, seq.num_scheduled_tokens = seq.host_table, [], seq.num_tokens
        self.running.append(request)  # where `update` looks for a request that ends
        result = StepResult([samples], {request: scores} if scores else {})
        advanced = super().update(ScheduledBatch([seq]), result)
        if not request.live:  # its first token was its last one
            self.swapper.free_ids += host_table
            return advanced
        self.running.remove(request)
        self.runner.write_host_blocks(host_table, kv)
        for each in request.live:  # forks share the blocks
            each.host_table = list(host_table)
        super().add(request)
        return advanced


class DisaggregatedEngine(nanopaged.LLMEngine):
    make_runner = KVRunner
    make_scheduler = DecodeScheduler
    start_process = staticmethod(start_process)
    prompt_device: str | None = None  # where prompts are computed; None: on the same device

    def __init__(self, config: EngineConfig, runner: Any = None) -> None:
        num = config.num_host_blocks
        mode = config.preemption
        if num == 0 or (num is None and mode == "recompute"):
            raise ValueError(
                f"num_host_blocks is {num} (preemption {mode!r}), but K/V arrives there: set it to 1 or more"
            )
        size = config.tensor_parallel_size
        if size > 1:
            raise ValueError(f"tensor_parallel_size is {size}, but ranks send no K/V: set it to 1")
        if config.trace is not None:
            raise ValueError(f"trace={str(config.trace)!r} would show no prompts: leave it out")
        super().__init__(config, runner)
        chosen: Any = {"dtype": self.runner.dtype, "num_blocks": self.runner.num_blocks, "num_host_blocks": 0}
        config = replace(self.config, device=self.prompt_device or config.device, **chosen)
        self.scheduler.runner, self.scheduler.away = self.runner, {}
        self.scheduler.submit = self.start_process(config)

    def run_step(self) -> list[Request]:
        """As `LLMEngine.run_step`. If all requests are away, it waits for one, and takes it back."""
        if self.scheduler.away and not (self.scheduler.running or self.scheduler.waiting):
            with self.changing():
                wait(self.scheduler.away, return_when=FIRST_COMPLETED)
                return self.scheduler.update(ScheduledBatch(), StepResult([]))
        return super().run_step()

    def reset_prefix_cache(self) -> None:
        """As `LLMEngine.reset_prefix_cache`, in both processes."""
        super().reset_prefix_cache()
        self.scheduler.submit("reset_prefix_cache")


class LLM(nanopaged.LLM):
    engine_class = DisaggregatedEngine
