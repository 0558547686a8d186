"""The reader's functions and the engine's own do the same work, step by step; the first difference is told.

Both sides use the classes of the reader's copy. `engines_own` exchanges the bodies of the stage's functions
for the source's, so whatever differs comes from what the reader wrote. A solution may choose block ids
freely: tables are compared as numbers in the order in which the blocks appear, so [7, 2] [7, 5] is 0 1 and
0 2.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fake_runner import FakeRunner
from random_workloads import Asked, Params, Workload

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch, StepResult
from nanopaged.snapshot import check_blocks, check_host_blocks
from nanopaged.text import StopRules

ROOT = Path(__file__).parents[2]
EOS = 2  # as in the random workloads
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "preemption")
LIMITS += ("num_host_blocks", "watermark")


@dataclass
class Exchanged:
    """A function of the stage, and the code that the source has for it."""

    name: str
    function: FunctionType
    code: CodeType


FUNCTIONS: list[Exchanged] = []  # of the stage that is judged


def find_functions(functions: Iterable[tuple[str, str]]) -> None:
    """Fill `FUNCTIONS`. A Triton kernel is no Python function, and cannot be exchanged."""
    for file, name in functions:
        module = import_module(file.removesuffix(".py").replace("/", "."))
        function = reduce(getattr, name.split("."), module)
        if isinstance(function, FunctionType):
            code = compile((ROOT / file).read_text(encoding="utf-8"), str(ROOT / file), "exec")
            for part in name.split("."):
                inner = [const for const in code.co_consts if isinstance(const, CodeType)]
                code = next(const for const in inner if const.co_name == part)
            FUNCTIONS.append(Exchanged(name.split(".")[-1], function, code))


@contextmanager
def engines_own(except_for: str | None = None) -> Iterator[None]:
    """In this block the functions of the stage do what the source's do, except for one of them."""
    codes = [exchanged.function.__code__ for exchanged in FUNCTIONS]
    for exchanged in FUNCTIONS:
        if exchanged.name != except_for:
            exchanged.function.__code__ = exchanged.code
    try:
        yield
    finally:
        for exchanged, code in zip(FUNCTIONS, codes, strict=True):
            exchanged.function.__code__ = code


def make_request(name: str, prompt: list[int], params: Params, salt: bytes = b"") -> Request:
    rules = StopRules.of(params, len(prompt), frozenset({EOS}), max_model_len=1 << 20)
    seed = getattr(params, "seed", None) or 0
    return Request(name, None, list(prompt), params, rules, seed=seed, cache_salt=salt)


def renumbered(tables: Iterable[list[int]]) -> list[list[int]]:
    """Tables with blocks numbered as they appear: which entries are the same block, not which block it is."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(block_id, len(numbers)) for block_id in table] for table in tables]


def difference(found: Any, expected: Any) -> str:
    """What is found and not expected; of dictionaries, only what differs."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [name for name in expected | found if found.get(name) != expected.get(name)]
        found = {name: found.get(name) for name in names[:4]}
        expected = {name: expected.get(name) for name in names[:4]}
    return f"{found}, and not {expected}"


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

    def settings(self) -> dict[str, Any]:
        """What no step changes."""
        attributes = vars(self.scheduler).items()
        return {name: value for name, value in attributes if isinstance(value, int | float | str)}

    def step(self) -> dict[str, Any]:
        """Requests come and go, and one step is served. Returns all that two right engines have in common."""
        for index, asked in enumerate(self.work.requests):
            name = str(index)
            if asked.arrival == self.num_steps:
                self.requests[name] = make_request(
                    name, asked.prompt, asked.params, (asked.salt or "").encode()
                )
                self.scheduler.add(self.requests[name])
            elif asked.aborted_after == self.num_steps - asked.arrival and not self.requests[name].finished:
                self.scheduler.abort(self.requests[name])
        if self.work.mixes_preemption:
            self.scheduler.preemption = self.modes.choice(["swap", "recompute"])
        self.num_steps += 1
        batch = self.scheduler.schedule()
        facts = self.facts(batch)
        # A solution may order decodes and prefills freely. From here on both sides have one order.
        batch.sequences.sort(key=lambda s: (s.num_scheduled_tokens > 1, s.request.request_id, s.index))
        try:
            result = self.runner.execute(batch) if batch.sequences else StepResult([])
        except LookupError as error:
            raise AssertionError(
                "A sequence of the batch has no block for a token that it computes."
            ) from error
        self.scheduler.update(batch, result)
        check_blocks(self.manager, self.scheduler.running_sequences)
        check_host_blocks(self.scheduler.swapper, self.requests.values())
        self.runner.check_findable_blocks(self.manager)
        facts["the scheduler's settings are"] = self.settings()
        outputs = {
            name: [seq.token_ids for seq in request.sequences] for name, request in self.requests.items()
        }
        facts["the tokens of the requests after the step are"] = outputs
        facts["free and cached blocks after the step are"] = [
            len(self.manager.free_ids),
            len(self.manager.cached),
        ]
        return facts

    def facts(self, batch: ScheduledBatch) -> dict[str, Any]:
        """What the scheduler has decided."""
        computed: dict[str, list[int]] = {}
        for seq in sorted(batch.sequences, key=lambda seq: seq.index):
            computed.setdefault(seq.request.request_id, []).append(seq.num_scheduled_tokens)
        moves = batch.moves
        requests = self.requests.values()
        return {
            "preempted are": [(request.request_id, mode) for request, mode in batch.preempted],
            "the tokens that it computes are": dict(sorted(computed.items())),
            "running are": [request.request_id for request in self.scheduler.running],
            "waiting are": [request.request_id for request in self.scheduler.waiting],
            "which sequences of the batch have one token is": [
                s.num_scheduled_tokens == 1 for s in batch.sequences
            ],
            "num_decodes is": batch.num_decodes,
            "the running sequences' blocks are": renumbered(
                s.block_table for s in self.scheduler.running_sequences
            ),
            "the swapped sequences' blocks are": renumbered(s.host_table for r in requests for s in r.live),
            "blocks swapped out, in, and copied are": [
                len(moves.swap_out),
                len(moves.swap_in),
                len(moves.copies),
            ],
            "num_preemptions are": [request.num_preemptions for request in requests],
            "ranks are": [request.rank for request in requests],
            "who has candidates is": [seq.candidates is not None for r in requests for seq in r.live],
        }

    def __str__(self) -> str:
        """The queues, with (tokens, computed tokens) of each sequence."""
        queues = []
        for name in ("running", "waiting"):
            requests = getattr(self.scheduler, name)
            shown = [
                f"{r.request_id} {[(s.num_tokens, s.num_computed_tokens) for s in r.live]}" for r in requests
            ]
            queues.append(f"{name} {', '.join(shown) or 'none'}")
        return "; ".join(queues)


def compare(work: Workload, rule: str) -> int:
    """Serve a workload with the engine's own functions and with the reader's. Returns the preemptions."""
    engines = Engine(work)
    readers = Engine(work)
    options = work.options
    chunks = "chunks" if options["enable_chunked_prefill"] else "no chunks"
    settings = (
        f"blocks of {options['block_size']}, {options['num_blocks']} in the pool, budget "
        f"{options['max_num_batched_tokens']}, max_num_seqs {options['max_num_seqs']}, {chunks}, "
        f"watermark {options['watermark']}"
    )
    last_arrival = max(asked.arrival for asked in work.requests)
    while engines.num_steps <= last_arrival or engines.scheduler.running or engines.scheduler.waiting:
        where = f"{rule} ({settings}). Step {engines.num_steps + 1}, (tokens, computed) before it: {engines}."
        with engines_own():
            expected = engines.step()
        try:
            found = readers.step()
        except AssertionError as error:
            raise AssertionError(f"{where} {str(error) or 'An assertion of the engine fails.'}") from error
        for fact, value in expected.items():
            assert found[fact] == value, (
                f"{where} With your functions {fact} {difference(found[fact], value)}."
            )
    return sum(request.num_preemptions for request in engines.requests.values())


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
