"""The real scheduler and block manager without a model, and contiguous allocation to compare them with.

Only this file of the experiments uses the inner parts of the bookkeeping.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.block_manager import BlockManager, blocks_needed
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult
from nanopaged.terminal import load_fork
from nanopaged.text import StopRules

Lengths = list[tuple[int, int]]  # (input, output) tokens of each request
Reserve = Callable[[int, int], int]  # (input, output) tokens → slots to reserve

KINDS = {  # of slots, see `Run` → their colours in a figure
    "real": "#0b5cad",
    "reserved": "#8ec1f0",
    "internal": "#e8a33d",
    "external": "#a01c61",
    "too few": "#d1d9e0",
}


class NoModel:
    """A runner that returns random tokens: what remains of a step is scheduling and bookkeeping."""

    def __init__(self, seed: int = 0, vocab_size: int = 32000) -> None:
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size
        self.num_blocks = 0  # an engine asks for both
        self.num_host_blocks = 0

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
) -> Scheduler:
    """A scheduler with a pool of its own. Its limits are so high that only memory makes a request wait."""
    return Scheduler(
        BlockManager(num_blocks, block_size, enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption=preemption,
        num_host_blocks=num_blocks,
        watermark=watermark,
    )


def scheduler_of_fork(file: str, num_blocks: int, **config: object) -> Scheduler:
    """The scheduler that the engine of a fork makes.

    Raises:
        ValueError: the file has no fork, or one that needs a model.
    """
    engine = load_fork(file).engine_class
    runner = NoModel()
    runner.num_blocks = num_blocks
    runner.num_host_blocks = num_blocks
    config |= {"num_blocks": num_blocks, "preemption": "recompute", "watermark": 0.0}
    try:
        return engine(engine.make_config(**config), runner).scheduler
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{file} needs a model: its engine asks the runner for {error}") from error


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


def rank_again(scheduler: Scheduler) -> None:
    """Take the ranks of all requests again, for a rank that changes while they run."""
    for requests in (scheduler.running, scheduler.waiting):
        for request in requests:
            request.rank = scheduler.rank(request)
        requests.sort(key=lambda request: request.rank)


def num_used_blocks(scheduler: Scheduler) -> int:
    """Blocks that at least one sequence holds."""
    return scheduler.block_manager.num_blocks - scheduler.block_manager.num_free_blocks


@dataclass
class Run:
    """What happened until all requests had ended; sums over the steps.

    In steps in which a request waits, each slot of the pool is counted as one of these:

    real       it holds the K/V of a token
    reserved   empty; its request will fill it later
    internal   empty; its request holds it and never fills it (internal fragmentation)
    external   free; there are enough free slots for the next request, but not in one range
    too few    free; all free slots together are too few for the next request
    """

    num_slots: int
    num_steps: int = 0
    num_computed: int = 0  # tokens
    num_preempted: int = 0  # requests, each as often as it was preempted
    peak: int = 0  # the most blocks in use, not a sum
    num_busy_steps: int = 0  # in which a request waits
    num_running: int = 0  # requests in the busy steps
    slots: Counter[str] = field(default_factory=Counter)

    def count(self, num_running: int, real: int, final: int, held: int, next_size: int) -> None:
        """Count a busy step: slots with a token now, and in the end, and those that requests hold."""
        free = self.num_slots - held
        self.num_busy_steps += 1
        self.num_running += num_running
        self.slots["real"] += real
        self.slots["reserved"] += final - real
        self.slots["internal"] += held - final
        self.slots["external" if free >= next_size else "too few"] += free

    @property
    def shares(self) -> dict[str, float]:
        """Kind of slot → its average share of the pool. They add up to 1."""
        return {kind: self.slots[kind] / max(1, self.num_busy_steps * self.num_slots) for kind in KINDS}

    @property
    def at_once(self) -> float:
        """Average number of running requests while another one waits."""
        return self.num_running / max(1, self.num_busy_steps)


def serve_all(scheduler: Scheduler, runner: NoModel) -> Run:
    """Serve the requests that wait in the scheduler."""
    size = scheduler.block_size
    run = Run(num_slots=scheduler.block_manager.num_blocks * size)
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        run.num_steps += 1
        run.num_computed += sum(seq.num_scheduled_tokens for seq in batch.sequences)
        run.num_preempted += len(batch.preempted)
        run.peak = max(run.peak, num_used_blocks(scheduler))
        if scheduler.waiting:
            real = held = final = 0
            for seq in scheduler.running_sequences:
                room = len(seq.block_table) * size
                held += room
                real += seq.num_computed_tokens + seq.num_scheduled_tokens
                # The last token needs no K/V.
                final += min(room, seq.request.num_prompt_tokens + seq.request.params.max_tokens - 1)
            next_size = blocks_needed(scheduler.waiting[0].live[0].num_tokens, size) * size
            run.count(len(scheduler.running), real, final, held, next_size)
        scheduler.update(batch, runner.execute(batch))
    return run


def steps_to_end(scheduler: Scheduler, jobs: list[tuple[int, int, int]]) -> list[int]:
    """Serve jobs (step of arrival, prompt tokens, output tokens). Returns how many steps each one takes."""
    runner, times, step = NoModel(), dict[int, int](), 0
    while len(times) < len(jobs):
        for i, (arrival, num_prompt, num_output) in enumerate(jobs):
            if arrival == step:
                request = make_request(str(i), [i] * num_prompt, SamplingParams(max_tokens=num_output))
                request.arrival_time = step
                scheduler.add(request)
        batch, step = scheduler.schedule(), step + 1
        for request in scheduler.update(batch, runner.execute(batch)):
            if request.finished:
                times[int(request.request_id)] = step - jobs[int(request.request_id)][0]
    return [times[i] for i in range(len(jobs))]


# ── contiguous allocation ─────────────────────────────────────────────────────────────────────────


def draw_lengths(means: tuple[int, int], num: int, seed: int, longest: int = 2048) -> Lengths:
    """Exponential around the means; input and output together have at most `longest` tokens."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(num):
        num_input, num_output = (1 + int(rng.expovariate(1 / mean)) for mean in means)
        num_input = min(num_input, longest - 1)
        lengths.append((num_input, min(num_output, longest - num_input)))
    return lengths


def reserve_rules(longest: int) -> dict[str, Reserve]:
    """How many slots contiguous allocation reserves, if no request has more than `longest` tokens.

    max: the longest request possible. pow2: the prompt, and the output's length rounded up to a power of two.
    oracle: the prompt and the output exactly, as if the output's length were known in advance.
    """
    return {
        "max": lambda num_input, num_output: longest,
        "pow2": lambda num_input, num_output: min(longest, num_input + (1 << (num_output - 1).bit_length())),
        "oracle": lambda num_input, num_output: num_input + num_output,
    }


@dataclass
class Range:
    """The slots of a running request."""

    start: int
    size: int
    tokens: int
    final: int  # tokens in the end


def run_contiguous(lengths: Lengths, num_slots: int, reserve: Reserve) -> Run:
    """Serve requests that reserve one range each, first come, first served, first fit."""
    run = Run(num_slots)
    holes = [(0, num_slots)]  # (start, length) of the free ranges, in order
    waiting = lengths[::-1]  # the last one is the next
    running: list[Range] = []
    while waiting or running:
        ended = [request for request in running if request.tokens == request.final]
        ended.sort(key=lambda request: request.start)
        while waiting or ended:
            size = reserve(*waiting[-1]) if waiting else num_slots + 1
            start = take(holes, size)
            if start is not None:
                num_input, num_output = waiting.pop()
                running.append(Range(start, size, num_input, num_input + num_output))
            elif ended:
                request = ended.pop(0)
                running.remove(request)
                give_back(holes, request.start, request.size)
            else:
                break
        if running:
            run.num_steps += 1
        for request in running:
            request.tokens += 1
        if waiting:
            real = sum(request.tokens for request in running)
            final = sum(request.final for request in running)
            held = sum(request.size for request in running)
            run.count(len(running), real, final, held, size)
    return run


def take(holes: list[tuple[int, int]], size: int) -> int | None:
    """Take `size` slots from the first free range that has them; return where they start, or None."""
    for i, (start, length) in enumerate(holes):
        if length >= size:
            holes[i : i + 1] = [(start + size, length - size)] if length > size else []
            return start
    return None


def give_back(holes: list[tuple[int, int]], start: int, length: int) -> None:
    """Free a range, and join it with its neighbours."""
    merged: list[tuple[int, int]] = []
    for hole in sorted([*holes, (start, length)]):
        if merged and sum(merged[-1]) == hole[0]:
            merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
        else:
            merged.append(hole)
    holes[:] = merged
