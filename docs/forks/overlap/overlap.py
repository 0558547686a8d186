"""Overlapped scheduling: the next step is scheduled while this one computes.

    llm = OverlappedLLM()  # instead of LLM; or OverlappedEngine instead of LLMEngine

A worker thread computes. The thread of the engine schedules, updates, and returns outputs meanwhile:

    engine   schedule 0 │ schedule 1 │ … │ update 0, schedule 2 │ … │ update 1, schedule 3 │ …
    worker              │ compute 0      │ compute 1                │ compute 2

Step 1 is scheduled before the tokens of step 0 are known. The scheduler needs only their number, so it sees
the place holder UNKNOWN. The worker sees a twin of each sequence, and appends the tokens there itself.

This module knows no tensors. It changes no file of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from nanopaged import LLM, EngineConfig, LLMEngine, RequestOutput
from nanopaged.block_manager import BlockManager
from nanopaged.engine import Runner
from nanopaged.sequence import NonFiniteLogits, Request, ScheduledBatch, Sequence, StepResult

UNKNOWN = -1  # the last of `Sequence.token_ids` while the step behind its computation is scheduled

Place = tuple[int, int, list[int]]
"""Of a sequence in a step: num_computed_tokens, num_scheduled_tokens and a copy of the block table."""


@dataclass
class Step:
    """A step that the worker computes, or will compute when the step before it is done.

    Fields:
        twins: each sequence of the batch → its twin, of which only the worker changes anything.
    """

    batch: ScheduledBatch
    twins: dict[Sequence, Sequence]
    result: Future[StepResult]


def compute(
    runner: Runner, batch: ScheduledBatch, places: list[Place], before: Future[StepResult] | None
) -> StepResult:
    """The work of the worker: one step, of the twins.

    Args:
        before: the step before, whose tokens the twins have; if it has failed, this one fails, too.
    """
    if before is not None:
        before.result()
    for twin, place in zip(batch.sequences, places, strict=True):
        twin.num_computed_tokens, twin.num_scheduled_tokens, twin.block_table = place
    result = runner.execute(batch) if batch.sequences else StepResult([])
    for twin, samples in zip(batch.sequences, result.samples, strict=True):
        if samples:  # several, of beams and forks, are for twins that the next step will not use
            twin.token_ids.append(samples[0].token_id)
    return result


def publish_known(manager: BlockManager, seq: Sequence) -> None:
    """Instead of `BlockManager.publish`: all but a block with UNKNOWN, which has no key yet."""
    is_unknown = seq.needs_sample and seq.token_ids[-1] == UNKNOWN
    seq.num_scheduled_tokens -= is_unknown
    BlockManager.publish(manager, seq)
    seq.num_scheduled_tokens += is_unknown


class OverlappedEngine(LLMEngine):
    """An `LLMEngine` whose worker computes one step while the next one is scheduled.

    Between two calls of `step`, the step `ahead` is being computed. Its tokens count as computed already.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        refuse(config)
        super().__init__(config, runner)
        device = getattr(self.runner, "device", None)
        on_gpu = device is not None and device.type == "cuda"
        self.worker = ThreadPoolExecutor(1, "compute", torch.cuda.set_device if on_gpu else None, (device,))
        self.ahead: Step | None = None
        self.block_manager.publish = partial(publish_known, self.block_manager)

    def step(self, report: bool = True) -> list[RequestOutput]:
        """As `LLMEngine.step`. The step whose outputs it returns was begun by the call before."""
        if not self.requests:
            self.ahead = None
            return []
        try:
            with self._or_start_over():
                step = self.ahead or self.launch(self.scheduler.schedule())
                self.ahead = self.schedule_ahead(step)
                advanced = self.update(step)
                for listener in self.listeners:
                    listener.step_ended(step.batch)
                reported = dict.fromkeys([*self.unreported.values(), *advanced]) if report else {}
                self.unreported |= {request.request_id: request for request in advanced if not request.live}
                outputs = [request.output() for request in reported]
                for request_id in list(self.unreported) if report else ():
                    self.requests.pop(request_id, None)
                    del self.unreported[request_id]
        except NonFiniteLogits as error:
            request = self.requests.get(error.request_id)
            if request is not None and not request.finished:
                raise
            return self.step(report)  # the token was of no use: its sequence has ended meanwhile
        self.num_steps += 1
        return outputs

    def launch(self, batch: ScheduledBatch, before: Step | None = None) -> Step:
        """Give the worker a batch. From now on its tokens count as computed."""
        for listener in self.listeners:
            listener.batch_scheduled(batch)
        known = before.twins if before is not None else {}
        twins: dict[Sequence, Sequence] = {}
        places: list[Place] = []
        for seq in batch.sequences:
            twins[seq] = known.get(seq) or Sequence(seq.request, list(seq.token_ids), seq.index)
            places.append((seq.num_computed_tokens, seq.num_scheduled_tokens, list(seq.block_table)))
            seq.num_computed_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0  # `Scheduler.update` adds it
        its_batch = replace(batch, sequences=list(twins.values()))
        result = before.result if before is not None else None
        return Step(batch, twins, self.worker.submit(compute, self.runner, its_batch, places, result))

    def schedule_ahead(self, step: Step) -> Step | None:
        """Schedule and launch the step behind `step`, or None if this needs the tokens of `step`.

        Every sequence that samples gets UNKNOWN for its token meanwhile. If that token is its last one by
        length, it has ended: its blocks are free for the next step, which the worker computes later.
        """
        guessed, ended = [], []
        for seq in step.batch.sequences:
            request = seq.request
            if request.is_beam_search or request.awaits_fork or request.wants_prompt_logprobs:
                return None
            if seq.num_computed_tokens == seq.num_tokens:  # not if it has ended meanwhile: then it has none
                guessed.append(seq)
        for seq in guessed:
            seq.token_ids.append(UNKNOWN)
            if seq.num_tokens >= seq.request.stop_rules.max_length:
                self.block_manager.free(seq)
                seq.request.live.remove(seq)
                ended.append(seq)
        self.scheduler.running = [request for request in self.scheduler.running if request.live]
        batch = self.scheduler.schedule()
        ahead = self.launch(batch, step) if batch.sequences else None
        for seq in guessed:
            seq.token_ids.pop()
        for seq in ended:  # `Scheduler.update` finds out why
            seq.request.live = [sibling for sibling in seq.request.sequences if not sibling.finished]
        return ahead

    def update(self, step: Step) -> list[Request]:
        """Wait for the worker and update. A token for a sequence that has ended is dropped."""
        result, sequences = step.result.result(), step.batch.sequences
        samples = [[] if seq.finished else its for seq, its in zip(sequences, result.samples, strict=True)]
        running = self.scheduler.running  # without what ended or was preempted for the step ahead
        self.scheduler.running = list(dict.fromkeys([*running, *(seq.request for seq in sequences)]))
        advanced = self.scheduler.update(step.batch, StepResult(samples, result.prompt_logprobs))
        self.scheduler.running = [request for request in running if request.live]
        for request in advanced:
            if request.finished and request in self.scheduler.waiting:  # preempted for the step ahead
                self.scheduler.waiting.remove(request)
        for seq in sequences if self.ahead is not None else ():
            if seq.finished:
                others = {block for sibling in seq.request.live for block in sibling.host_table}
                self.scheduler.swapper.free_ids += set(seq.host_table) - others
                seq.host_table = []
            elif seq.num_computed_tokens == seq.num_tokens and seq in self.ahead.twins:
                self.publish_last(seq)
        return advanced

    def publish_last(self, seq: Sequence) -> None:
        """Publish the block that the step ahead fills, if it fills one: its last token is known now."""
        if seq.num_tokens % self.config.block_size == 0:
            seq.num_computed_tokens, seq.num_scheduled_tokens = seq.num_tokens - 1, 1
            BlockManager.publish(self.block_manager, seq)
            seq.num_computed_tokens, seq.num_scheduled_tokens = seq.num_tokens, 0

    @contextmanager
    def _or_start_over(self) -> Iterator[None]:
        """If the code inside `with` fails, the step ahead is forgotten, too."""
        with super()._or_start_over():
            try:
                yield
            except BaseException:
                while True:
                    with suppress(KeyboardInterrupt):
                        self.ahead = None
                        for request in self.requests.values():
                            for seq in request.sequences:
                                if seq.token_ids[-1] == UNKNOWN:
                                    seq.token_ids.pop()
                        break
                raise


class OverlappedLLM(LLM):
    """An `LLM` with an `OverlappedEngine`."""

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        self.engine = OverlappedEngine(EngineConfig(model=model, **config))
        self._lock, self._door, self._count, self._dropped = Lock(), Lock(), count(), []


def refuse(config: EngineConfig) -> None:
    """Raise ValueError for an option that this engine does not support."""
    if config.trace is not None:
        raise ValueError(
            f"trace={str(config.trace)!r} shows one step after the other, but here two overlap: leave it "
            "out, or use LLMEngine"
        )
    num_drafts = getattr(config, "num_speculative_tokens", 0)  # of the fork speculation
    if num_drafts > 0:
        raise ValueError(
            f"num_speculative_tokens={num_drafts}: a step with drafts gives a number of tokens that is not "
            "known when the next one is scheduled: use 0, or LLMEngine"
        )
