"""Overlapped scheduling: the next step is scheduled while this one computes.

A worker thread computes. Step 1 is scheduled before the tokens of step 0 are known. The scheduler needs only
their number, so it sees the place holder UNKNOWN. The worker sees a twin of each sequence, and appends the
tokens there itself:

    prompt a b; c and d follow     the engine's sequence    the worker's twin
    step 1 is scheduled            a b UNKNOWN              a b
    step 0 has been computed       a b                      a b c              step 1 reads c there
    step 0 is updated              a b c                    a b c, soon a b c d
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import nanopaged
from nanopaged import EngineConfig, LLMEngine
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult

UNKNOWN = -1  # the last of `Sequence.token_ids` while the step behind its computation is scheduled

# Of a sequence in a step: num_computed_tokens, num_scheduled_tokens and a copy of the block table.
Place = tuple[int, int, list[int]]


@dataclass
class Step:
    """A step that the worker computes, or will compute when the step before it is done."""

    batch: ScheduledBatch
    twins: dict[Sequence, Sequence]  # of the sequences of the batch; only the worker changes them
    result: Future[StepResult]


def compute(
    runner: Any, batch: ScheduledBatch, places: list[Place], before: Future[StepResult] | None
) -> StepResult:
    """The work of the worker: one step, of the twins. If the step `before` has failed, so does this one."""
    if before is not None:
        before.result()
    for twin, place in zip(batch.sequences, places, strict=True):
        twin.num_computed_tokens, twin.num_scheduled_tokens, twin.block_table = place
    result = runner.execute(batch) if batch.sequences else StepResult([])
    for twin, samples in zip(batch.sequences, result.samples, strict=True):
        if samples:  # several, of beams and forks, are for twins that the next step will not use
            twin.token_ids.append(samples[0].token_id)
    return result


class LateBlockManager(BlockManager):
    """A block manager that publishes no block with UNKNOWN, which has no key yet."""

    def publish(self, seq: Sequence) -> None:
        """As `BlockManager.publish`. `publish_last` does the rest when the token is known."""
        is_unknown = seq.needs_sample and seq.token_ids[-1] == UNKNOWN
        seq.num_scheduled_tokens -= is_unknown
        super().publish(seq)
        seq.num_scheduled_tokens += is_unknown

    def publish_last(self, seq: Sequence) -> None:
        """Publish the block that the step ahead fills, if it fills one: its last token is known now."""
        if seq.num_tokens % self.block_size == 0:
            seq.num_computed_tokens, seq.num_scheduled_tokens = seq.num_tokens - 1, 1
            super().publish(seq)
            seq.num_computed_tokens, seq.num_scheduled_tokens = seq.num_tokens, 0


class OverlappedScheduler(Scheduler):
    """A scheduler that forgets the step ahead, and UNKNOWN, when a step has failed."""

    ahead: Step | None = None  # it is computed between two calls of `OverlappedEngine.run_step`

    def start_over(self, requests: Iterable[Request]) -> None:
        self.ahead, requests = None, list(requests)
        for seq in (seq for request in requests for seq in request.sequences):
            if seq.token_ids[-1] == UNKNOWN:
                seq.token_ids.pop()
        super().start_over(requests)


class OverlappedEngine(LLMEngine):
    """An `LLMEngine` whose worker computes one step while the next one is scheduled."""

    make_block_manager = LateBlockManager
    make_scheduler = OverlappedScheduler

    def __init__(self, config: EngineConfig, runner: Any = None) -> None:
        if config.trace is not None:
            what = f"trace={str(config.trace)!r} shows one step after the other, but here two overlap"
            raise ValueError(f"{what}: leave it out, or use nanopaged.LLM")
        super().__init__(config, runner)
        device: Any = getattr(self.runner, "device", None)
        on_gpu = getattr(device, "type", "") == "cuda"
        self.worker = ThreadPoolExecutor(1, "", partial(torch.cuda.set_device, device) if on_gpu else None)

    def run_step(self) -> list[Request]:
        """As `LLMEngine.run_step`. The step whose requests it returns was begun by the call before."""
        if not self.requests:
            self.scheduler.ahead = None  # of requests that were aborted
            return []
        with self.changing():
            step = self.scheduler.ahead or self.launch(self.scheduler.schedule())
            self.scheduler.ahead = self.schedule_ahead(step)
            advanced = self.update(step)
            for listener in self.listeners:
                listener.step_ended(step.batch)
        self.num_steps += 1
        return advanced

    def launch(self, batch: ScheduledBatch, before: Step | None = None) -> Step:
        """Give the worker a batch. From now on its tokens count as computed."""
        for listener in self.listeners:
            listener.batch_scheduled(batch)
        known = before.twins if before is not None else {}
        twins, places = dict[Sequence, Sequence](), list[Place]()
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
        for request in (seq.request for seq in step.batch.sequences):
            if request.is_beam_search or request.awaits_fork or request.wants_prompt_logprobs:
                return None
        # Not those that have ended meanwhile: of them no token is computed.
        guessed = [seq for seq in step.batch.sequences if seq.num_computed_tokens == seq.num_tokens]
        ended = [seq for seq in guessed if seq.num_tokens + 1 >= seq.request.stop_rules.max_length]
        for seq in guessed:
            seq.token_ids.append(UNKNOWN)
        for seq in ended:
            self.block_manager.free(seq)
            seq.request.live.remove(seq)
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
        result, sequences, ahead = step.result.result(), step.batch.sequences, self.scheduler.ahead
        samples = [[] if seq.finished else its for seq, its in zip(sequences, result.samples, strict=True)]
        running = self.scheduler.running  # without what ended or was preempted for the step ahead
        self.scheduler.running = list(dict.fromkeys([*running, *(seq.request for seq in sequences)]))
        advanced = self.scheduler.update(step.batch, StepResult(samples, result.prompt_logprobs))
        self.scheduler.running = [request for request in running if request.live]
        for request in advanced:
            if request.finished and request in self.scheduler.waiting:  # preempted for the step ahead
                self.scheduler.waiting.remove(request)
            if not request.is_swapped:  # else the next swap-in frees what ended outputs have left, too
                self.scheduler.swapper.release(request)
        for seq in sequences:
            is_known = not seq.finished and seq.num_computed_tokens == seq.num_tokens
            if is_known and ahead is not None and seq in ahead.twins:
                self.block_manager.publish_last(seq)
        return advanced


class LLM(nanopaged.LLM):
    engine_class = OverlappedEngine
