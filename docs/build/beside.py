"""The reader's functions and the engine's own do the same work, step by step; the first difference is told.

Both sides use the classes of the reader's package. `engines_own` exchanges the bodies of the stage's
functions for the source's, so whatever differs comes from what the reader wrote. A solution may choose block
ids freely: tables are compared as numbers in the order in which the blocks appear, so [7, 2] [7, 5] is 0 1
and 0 2.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fake_runner import FakeRunner
from random_workloads import Asked, Params, Workload, forked, mixed
from stages import STAGES

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, StepResult
from nanopaged.snapshot import check_blocks, check_host_blocks
from nanopaged.text import StopRules

ROOT = Path(__file__).parents[2]
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "preemption")
LIMITS += ("num_host_blocks", "watermark")
FUNCTIONS: dict[FunctionType, CodeType] = {}  # that are judged → the code that the source has for them


def find_functions(number: int, blank: list[str]) -> None:
    """Fill `FUNCTIONS` for a stage. All others, and the blank ones, have the source's code from now on."""
    for file, name in {function for stage in STAGES.values() for function in stage.functions}:
        try:
            module = import_module(file.removesuffix(".py").replace("/", "."))
        except ImportError:  # without Triton its kernels are not used
            continue
        function = reduce(getattr, name.split("."), module)
        function = getattr(function, "fn", function)  # of a kernel
        code = compile((ROOT / file).read_text(encoding="utf-8"), str(ROOT / file), "exec")
        for part in name.split("."):
            code = next(const for const in code.co_consts if getattr(const, "co_name", "") == part)
        if (file, name) in STAGES[number].functions and name not in blank:
            FUNCTIONS[function] = code
        else:
            function.__code__ = code


@contextmanager
def engines_own(except_for: str = "") -> Iterator[None]:
    """In this block the functions of the stage do what the source's do, except for one of them.

    Not a kernel that has run, because the interpreter keeps what it has read of it.
    """
    codes = {function: function.__code__ for function in FUNCTIONS}
    for function, code in FUNCTIONS.items():
        if function.__name__ != except_for:
            function.__code__ = code
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


def make_request(name: str, prompt: list[int], params: Params, salt: bytes = b"") -> Request:
    eos = frozenset({2})  # as in the random workloads
    rules = StopRules.of(params, len(prompt), eos, max_model_len=1 << 20)
    seed = getattr(params, "seed", None) or 0
    return Request(name, None, list(prompt), params, rules, seed=seed, cache_salt=salt)


def renumbered(tables: Iterable[list[int]]) -> list[list[int]]:
    """Tables with blocks numbered as they appear: which entries are the same block, not which block it is."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(block_id, len(numbers)) for block_id in table] for table in tables]


def check_facts(where: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The first fact that differs is told; of a dictionary, only what differs."""
    for fact, right in expected.items():
        wrong = found[fact]
        if isinstance(wrong, dict) and isinstance(right, dict):
            names = [name for name in right | wrong if right.get(name) != wrong.get(name)][:4]
            wrong, right = ({name: side.get(name) for name in names} for side in (wrong, right))
        assert wrong == right, f"{where} {fact} {wrong}, and not {right}."


# ── two engines without a model ───────────────────────────────────────────────────────────────────


class Engine:
    """A scheduler over a runner without a model, which fails if a sequence reads a wrong block."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.num_steps = 0
        self.requests: dict[str, Request] = {}
        options = work.options
        pool = (options["num_blocks"], options["block_size"])
        self.manager = BlockManager(*pool, options["enable_prefix_caching"])
        self.runner = FakeRunner(*pool, options["num_host_blocks"])
        self.scheduler = Scheduler(self.manager, **{name: options[name] for name in LIMITS})
        self.modes = random.Random(work.seed)
        self.ranks = list(range(len(work.requests)))
        if work.is_shuffled:
            self.modes.shuffle(self.ranks)
        self.scheduler.rank = self.rank

    def rank(self, request: Request) -> int:
        """Two requests have one rank, and ranks change from time to time."""
        return (self.ranks[int(request.request_id)] + self.num_steps // 8) // 2

    def arrive_and_leave(self) -> None:
        """Requests come and are aborted as the workload says."""
        for index, asked in enumerate(self.work.requests):
            name = str(index)
            if asked.arrival == self.num_steps:
                salt = (asked.salt or "").encode()
                self.requests[name] = make_request(name, asked.prompt, asked.params, salt)
                self.scheduler.add(self.requests[name])
            elif asked.aborted_after == self.num_steps - asked.arrival and not self.requests[name].finished:
                self.scheduler.abort(self.requests[name])
        if self.work.mixes_preemption:
            self.scheduler.preemption = self.modes.choice(["swap", "recompute"])

    def step(self) -> Iterator[dict[str, Any]]:
        """Serve a step. Yields what two right engines have in common, after scheduling and at the end."""
        self.arrive_and_leave()
        self.num_steps += 1
        batch = self.scheduler.schedule()
        moves = batch.moves
        requests = self.requests.values()
        running = self.scheduler.running_sequences
        is_decode = [seq.num_scheduled_tokens == 1 for seq in batch.sequences]
        computed = {f"{s.request.request_id}.{s.index}": s.num_scheduled_tokens for s in batch.sequences}
        yield {
            "preempted are": [(request.request_id, mode) for request, mode in batch.preempted],
            "the tokens that it computes are": computed,
            "running are": [request.request_id for request in self.scheduler.running],
            "waiting are": [request.request_id for request in self.scheduler.waiting],
            "which sequences of the batch have one token is": is_decode,
            "num_decodes is": batch.num_decodes,
            "the running sequences' blocks are": renumbered(s.block_table for s in running),
            "the swapped sequences' blocks are": renumbered(s.host_table for r in requests for s in r.live),
            "the number of blocks swapped out is": len(moves.swap_out),
            "the number of blocks swapped in is": len(moves.swap_in),
            "the number of blocks copied is": len(moves.copies),
            "num_preemptions are": [request.num_preemptions for request in requests],
            "ranks are": [request.rank for request in requests],
            "who has candidates is": [seq.candidates is not None for r in requests for seq in r.live],
        }
        # A solution may order decodes and prefills freely. From here on both sides have one order.
        batch.sequences.sort(key=lambda s: (s.num_scheduled_tokens > 1, s.request.request_id, s.index))
        result = self.runner.execute(batch) if batch.sequences else StepResult([])
        self.scheduler.update(batch, result)
        check_blocks(self.manager, self.scheduler.running_sequences)
        check_host_blocks(self.scheduler.swapper, requests)
        self.runner.check_findable_blocks(self.manager)
        settings = vars(self.scheduler).items()
        tokens = {name: [seq.token_ids for seq in r.sequences] for name, r in self.requests.items()}
        yield {
            "the scheduler's settings are": {k: v for k, v in settings if isinstance(v, int | float | str)},
            "the tokens of the requests after the step are": tokens,
            "the number of free blocks after the step is": len(self.manager.free_ids),
            "the number of cached blocks after the step is": len(self.manager.cached),
        }


def counts_of(requests: list[Request]) -> dict[str, list[tuple[int, int]]]:
    """(tokens, computed tokens) of each sequence."""
    return {r.request_id: [(s.num_tokens, s.num_computed_tokens) for s in r.live] for r in requests}


def compare(work: Workload, rule: str) -> None:
    """Serve a workload with the engine's own functions and with the reader's."""
    engines = Engine(work)
    readers = Engine(work)
    settings = ", ".join(f"{name} {value}" for name, value in work.options.items())
    last_arrival = max(asked.arrival for asked in work.requests)
    running = engines.scheduler.running
    waiting = engines.scheduler.waiting
    while engines.num_steps <= last_arrival or running or waiting:
        where = (
            f"{rule} ({settings}). Step {engines.num_steps + 1}, with (tokens, computed tokens) before it: "
            f"running {counts_of(running)}, waiting {counts_of(waiting)}."
        )
        right = engines.step()
        found = readers.step()
        for _ in range(2):
            with engines_own():
                expected = next(right)
            try:
                facts = next(found)
            except AssertionError as error:
                message = str(error) or "An assertion of the engine fails."
                raise AssertionError(f"{where} {message}") from error
            check_facts(f"{where} With your functions", facts, expected)


def test_random_workloads() -> None:
    """Requests of every kind are served as the engine serves them.

    Judges 3 to 6 import this test.
    """
    for seed in range(30):
        compare(mixed(seed), f"Random workload {seed}")
        compare(forked(seed), f"Random workload {seed} with forked requests")


def asked(num_prompt: int, num_output: int = 4, arrival: int = 0, n: int = 1) -> Asked:
    params = SamplingParams(max_tokens=num_output, n=n, ignore_eos=True)
    return Asked([0] * num_prompt, params, arrival)


def small_workload(
    requests: list[Asked], budget: int = 100, chunked: bool = True, **options: Any
) -> Workload:
    """A workload by hand, in which everything has room as long as the options do not take it away."""
    room = {"block_size": 4, "num_blocks": 100, "num_host_blocks": 0, "max_num_seqs": 100, "watermark": 0.0}
    room |= {"max_num_batched_tokens": budget, "enable_chunked_prefill": chunked}
    room |= {"enable_prefix_caching": False, "preemption": "recompute"}
    return Workload(seed=0, options=room | options, requests=requests)
