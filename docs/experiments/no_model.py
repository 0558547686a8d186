"""The real scheduler and block manager without a model: requests, and a runner that draws random tokens.

Only this file of the experiments uses the inner parts of the bookkeeping.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult
from nanopaged.terminal import load_fork
from nanopaged.text import StopRules

if TYPE_CHECKING:
    from nanopaged.engine import Runner

# The paper's traces (its Fig. 11): mean tokens of input and output.
TRACES = {"Alpaca-like": (19, 58), "ShareGPT-like": (161, 338)}


class NoModel:
    """A runner that returns random tokens: what remains of a step is scheduling and bookkeeping."""

    num_blocks = num_host_blocks = 0  # an engine asks for them

    def __init__(self, seed: int = 0, vocab_size: int = 32000) -> None:
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return StepResult([self._samples(seq) if seq.needs_sample else [] for seq in batch.sequences])

    def _samples(self, seq: Sequence) -> list[Sample]:
        request = seq.request
        if not request.is_beam_search:
            num = request.params.width if request.awaits_fork else 1
            return [Sample(self.rng.randrange(self.vocab_size), -1.0) for _ in range(num)]
        # Beams propose tokens whose probabilities fall off as in text: a few likely ones, a long tail.
        draws = [-self.rng.expovariate(0.5) for _ in range(request.num_candidates)]
        return [Sample(self.rng.randrange(self.vocab_size), logprob) for logprob in draws]


def make_scheduler(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int = 1 << 20,
    max_num_batched_tokens: int = 1 << 20,
    enable_prefix_caching: bool = True,
    watermark: float = 0.0,
    preemption: str = "recompute",
    fork: str | None = None,
) -> Scheduler:
    """A scheduler with a pool of its own. Its limits are so high that only memory makes a request wait.

    Args:
        fork: the file of a fork, whose engine makes the scheduler.

    Raises:
        ValueError: the file has no fork, or one that needs a model.
    """
    if fork is None:
        manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        return Scheduler(
            manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            preemption=preemption,
            num_host_blocks=num_blocks,
            watermark=watermark,
        )
    engine = load_fork(fork).engine_class
    runner = NoModel()
    runner.num_blocks = num_blocks
    runner.num_host_blocks = num_blocks
    config = engine.make_config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        preemption=preemption,
        watermark=watermark,
    )
    try:
        return engine(config, runner).scheduler
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{fork} needs a model: its engine asks the runner for {error}") from error


def make_request(name: str, prompt: list[int], params: SamplingParams | BeamSearchParams) -> Request:
    """A request as the engine builds it."""
    rules = StopRules.of(params, len(prompt), frozenset(), max_model_len=1 << 20)
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=prompt,
        params=params,
        stop_rules=rules,
        seed=0,
    )


@dataclass
class Run:
    """What a scheduler did until all its requests had ended; sums over its steps."""

    num_steps: int = 0
    num_computed: int = 0  # tokens
    num_preempted: int = 0  # requests, each as often as it was preempted
    num_busy_steps: int = 0  # in which a request waits
    num_running: int = 0  # requests in the busy steps
    num_entries: int = 0  # of all block tables
    num_of_requests: int = 0  # blocks, one that several requests share for each of them
    num_used: int = 0  # blocks
    peak: int = 0  # the most blocks in use, not a sum

    @property
    def at_once(self) -> float:
        """Average number of running requests while another one waits."""
        return self.num_running / max(1, self.num_busy_steps)


def serve_all(scheduler: Scheduler, runner: Runner) -> Run:
    """Serve the requests that wait in the scheduler."""
    run = Run()
    with tqdm(total=len(scheduler.waiting), leave=False) as bar:
        while scheduler.running or scheduler.waiting:
            batch = scheduler.schedule()
            run.num_steps += 1
            run.num_computed += sum(seq.num_scheduled_tokens for seq in batch.sequences)
            run.num_preempted += len(batch.preempted)
            if scheduler.waiting:
                run.num_busy_steps += 1
                run.num_running += len(scheduler.running)
            run.peak = max(run.peak, num_used_blocks(scheduler))
            bar.update(sum(request.finished for request in scheduler.update(batch, runner.execute(batch))))
            run.num_used += num_used_blocks(scheduler)
            for request in scheduler.running:
                tables = [seq.block_table for seq in request.live]
                run.num_entries += sum(len(table) for table in tables)
                run.num_of_requests += len(set().union(*tables))
    return run


def rank_again(scheduler: Scheduler) -> None:
    """Take the ranks of all requests again, for a rank that changes while they run."""
    for requests in (scheduler.running, scheduler.waiting):
        for request in requests:
            request.rank = scheduler.rank(request)
        requests.sort(key=lambda request: request.rank)


def num_used_blocks(scheduler: Scheduler) -> int:
    """Blocks that at least one sequence holds."""
    return scheduler.block_manager.num_blocks - scheduler.block_manager.num_free_blocks
