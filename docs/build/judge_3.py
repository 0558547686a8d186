"""Stage 3: the one rule of the scheduler, and the two loops around it.

By hand first; then random cases against a simple loop, and random workloads against simple queues. No test
needs the reader's blocks, the prefix cache or a model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult
from nanopaged.text import StopRules

BLOCK_SIZE = 4


class Pool(BlockManager):
    """A simple pool without sharing, so that stage 3 does not depend on what you wrote in stage 2.

    It notes what `publish` is told, and `append_slots` may return copies.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        self.free_blocks = set(range(num_blocks))
        self.filled: list[int] = []  # the logical blocks that a step fills, as `publish` was told
        self.copies: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def find_prefix(self, seq: Sequence) -> list[int]:
        return []

    def allocate(self, sequences: list[Sequence], look_up: bool = True, num_reserved: int = 0) -> bool:
        if self.append_slots(sequences, num_reserved) is None:
            return False
        for seq in sequences:
            seq.num_computed_tokens = 0
        return True

    def append_slots(self, sequences: list[Sequence], num_reserved: int = 0) -> list[tuple[int, int]] | None:
        lacking = [-(-seq.num_tokens // self.block_size) - len(seq.block_table) for seq in sequences]
        if sum(lacking) > len(self.free_blocks) - num_reserved:
            return None
        for seq, num in zip(sequences, lacking, strict=True):
            seq.block_table += [self.free_blocks.pop() for _ in range(num)]
        return list(self.copies)

    def free(self, seq: Sequence) -> None:
        self.free_blocks.update(seq.block_table)
        seq.block_table, seq.num_computed_tokens = [], 0

    def publish(self, seq: Sequence) -> None:
        first = seq.num_computed_tokens // self.block_size
        end = (seq.num_computed_tokens + seq.num_scheduled_tokens) // self.block_size
        self.filled += range(first, end)


def make_scheduler(
    num_blocks: int = 100,
    budget: int = 100,
    chunked: bool = True,
    max_num_seqs: int = 100,
    watermark: float = 0.0,
    block_size: int = BLOCK_SIZE,
) -> Scheduler:
    pool = Pool(num_blocks, block_size)
    return Scheduler(pool, max_num_seqs, budget, chunked, watermark=watermark)


def make_request(name: str, num_prompt: int, max_tokens: int = 50, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    rules = StopRules.of(params, num_prompt, frozenset(), max_model_len=1 << 20)
    return Request(name, None, [0] * num_prompt, params, rules, seed=0)


def add(scheduler: Scheduler, *requests: tuple[str, int] | tuple[str, int, int]) -> list[Request]:
    """Requests (name, prompt tokens, tokens to generate) begin to wait, in this order."""
    made = [make_request(*request) for request in requests]
    for request in made:
        scheduler.add(request)
    return made


def computed_by(batch: ScheduledBatch) -> dict[str, int]:
    """How many tokens each request computes, its sequences together."""
    computed: dict[str, int] = {}
    for seq in batch.sequences:
        name = seq.request.request_id
        computed[name] = computed.get(name, 0) + seq.num_scheduled_tokens
    return computed


def finish_step(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    samples = [[Sample(0, -1.0)] if seq.needs_sample else [] for seq in batch.sequences]
    scheduler.update(batch, StepResult(samples))


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step. Returns how many tokens each request computes."""
    batch = scheduler.schedule()
    computed = computed_by(batch)
    finish_step(scheduler, batch)
    return computed


# ── _schedule_tokens ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Scheduled:
    """What one call of `_schedule_tokens` did."""

    num_tokens: list[int]  # of each sequence: what it got, 0 if it is not in the batch
    rest: int  # of the budget
    decodes: list[int]  # the positions of the sequences among their siblings
    prefills: list[int]
    filled: list[int]


def schedule_tokens(siblings: list[tuple[int, int]], budget: int, chunked: bool = True) -> Scheduled:
    """Call `_schedule_tokens` for a request with these sequences: (known tokens, computed tokens)."""
    scheduler = make_scheduler(chunked=chunked)
    request = make_request("a", 1)
    request.live = [
        Sequence(request, [0] * known, num_computed_tokens=computed, block_table=list(range(-(-known // 4))))
        for known, computed in siblings
    ]
    batch = ScheduledBatch()
    rest = scheduler._schedule_tokens(request, budget, batch)
    decodes, prefills = batch.sequences[: batch.num_decodes], batch.sequences[batch.num_decodes :]
    return Scheduled(
        [seq.num_scheduled_tokens if seq in batch.sequences else 0 for seq in request.live],
        rest,
        [request.live.index(seq) for seq in decodes],
        [request.live.index(seq) for seq in prefills],
        scheduler.block_manager.filled,
    )


@pytest.mark.parametrize(
    ("known", "computed", "budget", "expected"),
    [
        (10, 6, 20, 4),
        (20, 0, 8, 8),
        (20, 8, 8, 8),
        (20, 16, 8, 4),
        (21, 20, 8, 1),
        (27, 0, 8, 8),
        (8, 0, 8, 8),
        (9, 0, 8, 8),
        (2, 0, 1, 1),
    ],
)
def test_a_sequence_catches_up(known: int, computed: int, budget: int, expected: int) -> None:
    got = schedule_tokens([(known, computed)], budget)
    case = f"A sequence has {known} tokens, {computed} of them computed. With a budget of {budget}"
    assert got.num_tokens == [expected], (
        f"{case} `_schedule_tokens` gives it {got.num_tokens[0]} tokens, and not {expected}."
    )
    assert got.rest == budget - expected, (
        f"{case} {expected} tokens are scheduled, and `_schedule_tokens` must return the rest, "
        f"{budget - expected}, but returns {got.rest}."
    )


@pytest.mark.parametrize(("known", "computed", "where"), [(7, 6, "decodes"), (7, 5, "prefills"), (7, 7, "")])
def test_one_token_is_a_decode(known: int, computed: int, where: str) -> None:
    got = schedule_tokens([(known, computed)], 10)
    lists = [name for name, found in (("decodes", got.decodes), ("prefills", got.prefills)) if found]
    assert lists == ([where] if where else []), (
        f"A sequence with {known} tokens, {computed} of them computed, belongs to the batch's "
        f"{where or 'sequences not at all'}; `_schedule_tokens` puts it in {' and '.join(lists) or 'none'}."
    )


def test_without_chunks_all_or_none() -> None:
    for budget in (9, 1):
        got = schedule_tokens([(10, 0)], budget, chunked=False)
        assert (got.num_tokens, got.rest) == ([0], budget), (
            f"Without chunked prefill a prompt of 10 tokens must wait with a budget of {budget}, which "
            f"stays {budget}. `_schedule_tokens` schedules {got.num_tokens[0]} tokens and returns {got.rest}."
        )
    got = schedule_tokens([(10, 0)], 10, chunked=False)
    assert (got.num_tokens, got.rest) == ([10], 0), (
        f"Without chunked prefill a prompt of 10 tokens fits in a budget of 10, but `_schedule_tokens` "
        f"schedules {got.num_tokens[0]} tokens and returns {got.rest}."
    )


def test_siblings_of_one_that_waits() -> None:
    siblings = [(10, 6), (12, 6), (7, 6)]
    for chunked, budget, expected in ((True, 8, [4, 4, 0]), (False, 8, [4, 0, 0]), (True, 100, [4, 6, 1])):
        got = schedule_tokens(siblings, budget, chunked)
        assert got.num_tokens == expected, (
            f"Three sequences of a request, (tokens, computed tokens) {siblings}, share a budget of {budget} "
            f"{'with' if chunked else 'without'} chunked prefill. They get {got.num_tokens} tokens, and not "
            f"{expected}."
        )
        assert got.rest == budget - sum(expected), (
            f"Three sequences get {expected} tokens of a budget of {budget}, but `_schedule_tokens` returns "
            f"{got.rest} as the rest."
        )


def test_a_beam_that_waits_gets_nothing() -> None:
    got = schedule_tokens([(10, 10), (10, 9)], 8)
    assert (got.num_tokens, got.decodes, got.prefills) == ([0, 1], [1], []), (
        "Of two sequences with 10 tokens the first has computed 10 and the second 9, so only the second is "
        f"in the batch, with 1 token. They get {got.num_tokens}; decodes has the sequences {got.decodes}, "
        f"prefills {got.prefills}."
    )


@pytest.mark.parametrize(
    ("known", "computed", "budget", "filled"),
    [(13, 6, 100, [1, 2]), (13, 6, 2, [1]), (13, 6, 1, []), (4, 3, 9, [0]), (4, 0, 9, [0]), (8, 4, 9, [1])]
    + [(3, 0, 9, []), (7, 4, 9, [])],
)
def test_full_blocks_are_published(known: int, computed: int, budget: int, filled: list[int]) -> None:
    got = schedule_tokens([(known, computed)], budget)
    assert got.filled == filled, (
        f"A sequence has {known} tokens, {computed} computed, and blocks of 4; with a budget of {budget} the "
        f"step fills its blocks {filled}. `publish` must be called for it after num_scheduled_tokens is set, "
        f"but so far `publish` would publish the blocks {got.filled}."
    )


def test_random_siblings() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        siblings = []
        for _ in range(rng.randint(1, 4)):
            known = rng.randint(1, 12)
            siblings.append((known, rng.choice([known, known - 1, rng.randint(0, known)])))
        budget, chunked = rng.randint(1, 20), rng.random() < 0.5
        expected, rest, filled = [0] * len(siblings), budget, []
        for i, (known, computed) in enumerate(siblings):
            here = min(known - computed, rest) if chunked or known - computed <= rest else 0
            expected[i], rest = here, rest - here
            filled += [p // BLOCK_SIZE for p in range(computed, computed + here) if p % BLOCK_SIZE == 3]
            if here < known - computed:
                break
        got = schedule_tokens(siblings, budget, chunked)
        assert (got.num_tokens, got.rest, got.filled) == (expected, rest, filled), (
            f"Sequences of a request with (tokens, computed tokens) {siblings}, a budget of {budget}, "
            f"{'with' if chunked else 'without'} chunked prefill: they get {got.num_tokens} tokens, the "
            f"rest is {got.rest}, and `publish` would publish {got.filled}. Expected are {expected}, {rest} "
            f"and {filled}."
        )
        lists = [
            [i for i, num in enumerate(expected) if num == 1],
            [i for i, n in enumerate(expected) if n > 1],
        ]
        assert [sorted(got.decodes), sorted(got.prefills)] == lists, (
            f"Sequences get {expected} tokens, so decodes has the sequences {lists[0]} and prefills "
            f"{lists[1]}. They have {got.decodes} and {got.prefills}."
        )


# ── schedule ──────────────────────────────────────────────────────────────────────────────────────


def test_nothing_to_do() -> None:
    batch = make_scheduler().schedule()
    assert batch == ScheduledBatch(), f"Without requests `schedule` must return an empty batch, not {batch}."


def test_the_table_of_the_page() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, ("A", 4, 6))
    got = [step(scheduler)]
    add(scheduler, ("B", 20, 2), ("C", 3, 2))
    got += [step(scheduler) for _ in range(5)]
    table = [{"A": 4}, {"A": 1, "B": 7}, {"A": 1, "B": 7}, {"A": 1, "B": 6, "C": 1}]
    table += [{"A": 1, "B": 1, "C": 2}, {"A": 1, "C": 1}]
    for number, (here, expected) in enumerate(zip(got, table, strict=True), start=1):
        assert here == expected, (
            "A has 4 prompt tokens and generates 6; B (20 and 2) and C (3 and 2) come before step 2; the "
            f"budget is 8. Step {number} computes {here}, and not {expected}."
        )
    assert not scheduler.running, f"After step 6 nothing is left, but {len(scheduler.running)} requests run."


def test_decodes_come_first() -> None:
    scheduler = make_scheduler()
    add(scheduler, ("long", 5), ("one", 1), ("two", 2))
    batch = scheduler.schedule()
    names = [seq.request.request_id for seq in batch.sequences]
    assert (names[:1], sorted(names)) == (["one"], ["long", "one", "two"]), (
        "Prompts of 5 tokens (long), 1 (one) and 2 (two) come in this order. All are in batch.sequences, and "
        f"the one with a single token stands first, but `schedule` gives {names}."
    )
    assert batch.num_decodes == 1, (
        f"One of three sequences computes a single token, but num_decodes is {batch.num_decodes}."
    )


def test_ranks() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.rank = lambda request: request.num_prompt_tokens
    add(scheduler, ("12", 12), ("4", 4), ("8", 8))
    got = step(scheduler)
    assert got == {"4": 4, "8": 6}, (
        "With the rank num_prompt_tokens, prompts of 12, 4 and 8 tokens wait; with a budget of 10 the "
        f"shortest is served first, then 6 tokens of the second. `schedule` computes {got}."
    )
    got = [request.request_id for request in scheduler.waiting]
    assert got == ["12"], f"Of prompts of 12, 4 and 8 tokens the last two were admitted; {got} still wait."
    step(scheduler)
    scheduler.max_num_batched_tokens = 1
    got = step(scheduler)
    assert got == {"4": 1}, (
        "Requests with 4, 8 and 12 prompt tokens run in order of rank, which is num_prompt_tokens, and the "
        f"budget is 1: request 4 comes first. `schedule` computes {got}."
    )


def test_new_prompts_get_what_running_requests_leave() -> None:
    scheduler = make_scheduler(budget=3)
    add(scheduler, ("a", 1), ("b", 1), ("c", 1))
    step(scheduler)
    (late,) = add(scheduler, ("late", 2))
    got = step(scheduler)
    assert got == {"a": 1, "b": 1, "c": 1}, (
        f"Three requests decode with a budget of 3, and a prompt waits: the step computes {got}, and not one "
        "token of each of the three."
    )
    assert not late.live[0].block_table, (
        "No budget is left for a waiting prompt, so it is not admitted, but it was given blocks."
    )
    scheduler.max_num_batched_tokens = 4
    got = step(scheduler)
    assert got == {"a": 1, "b": 1, "c": 1, "late": 1}, (
        f"Three requests decode with a budget of 4, and a prompt of 2 tokens waits: it gets the token that "
        f"is left. The step computes {got}."
    )


def test_the_limit_of_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    for request in (make_request("a", 3), make_request("b", 3), make_request("two", 3, n=2)):
        scheduler.add(request)
    add(scheduler, ("late", 3))
    got = sorted(computed_by(scheduler.schedule()))  # the order of prefills in a batch is free
    assert got == ["a", "b", "two"], (
        "Requests with 1, 1, 2 and 1 outputs wait, and max_num_seqs is 4: a request for 2 outputs counts 2 "
        f"from the start, so the first three are admitted. `schedule` admits {got}."
    )
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, ("a", 3))
    step(scheduler)
    for request in (make_request("b", 3, n=3), make_request("c", 3)):
        scheduler.add(request)
    got = list(computed_by(scheduler.schedule()))
    assert got == ["a"], (
        "One request runs, and max_num_seqs is 3. The first one waiting is for 3 outputs, so it waits, and "
        f"the one behind it does not overtake. The step computes {got}, and not only ['a']."
    )


def test_a_running_request_counts_all_its_outputs() -> None:
    scheduler = make_scheduler(budget=3, max_num_seqs=2)
    scheduler.add(make_request("two", 6, n=2))
    step(scheduler)
    scheduler.max_num_batched_tokens = 100
    add(scheduler, ("late", 3))
    got = computed_by(scheduler.schedule())
    assert got == {"two": 3}, (
        "A request for 2 outputs runs, with 3 of its 6 prompt tokens computed, and max_num_seqs is 2: it "
        f"counts 2, so another one waits. The step computes {got}, and not {{'two': 3}}."
    )


def test_a_preempted_request_does_not_count() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=2)
    a, b, c = (make_request(*request) for request in (("A", 2), ("B", 6), ("C", 2)))
    for rank, request in enumerate((a, c, b)):
        request.arrival_time = rank
    for request in (a, b):
        scheduler.add(request)
    step(scheduler)
    scheduler.add(c)
    got = computed_by(scheduler.schedule())
    assert got == {"A": 1, "C": 2}, (
        "A and B run, max_num_seqs is 2, and C, which comes before B in the order, waits. B is preempted, so "
        f"it counts no more, and C is admitted. The step computes {got}, and not {{'A': 1, 'C': 2}}."
    )


def test_no_request_overtakes() -> None:
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, ("running", 15))
    step(scheduler)
    add(scheduler, ("large", 24), ("small", 2))
    got = step(scheduler)
    assert got == {"running": 1}, (
        "Of 8 blocks 4 are free. The first request waiting needs 6, the second would fit, but does not "
        f"overtake. The step computes {got}, and not {{'running': 1}}."
    )


def test_the_last_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6)
    requests = add(scheduler, ("A", 7), ("B", 7), ("C", 7))
    for _ in range(2):
        step(scheduler)
    batch = scheduler.schedule()
    preempted, got = [request.request_id for request, _ in batch.preempted], computed_by(batch)
    assert preempted == ["C"], (
        "A, B and C fill a pool of 6 blocks with 8 tokens each, and A needs a block for its ninth token: the "
        f"last one, C, is preempted, and its 2 blocks are enough for A and B. Preempted are {preempted}."
    )
    assert got == {"A": 1, "B": 1}, f"When C has been preempted, A and B compute one token each, not {got}."
    tables = [len(request.live[0].block_table) for request in requests]
    assert tables == [3, 3, 0], (
        f"When C has been preempted for A and B, they have tables of [3, 3, 0] blocks, and not {tables}."
    )


def test_the_one_that_needs_a_block_may_be_the_last() -> None:
    scheduler = make_scheduler(num_blocks=3)
    add(scheduler, ("A", 2), ("B", 8))
    step(scheduler)
    batch = scheduler.schedule()
    preempted, got = [request.request_id for request, _ in batch.preempted], computed_by(batch)
    assert (preempted, got) == (["B"], {"A": 1}), (
        "A has room in its block, B needs a third block, and the pool has none: B is the last, so it is "
        f"preempted itself, and A computes a token. Preempted are {preempted}, and the step computes {got}."
    )


def test_several_are_preempted_for_one() -> None:
    scheduler = make_scheduler(num_blocks=6)
    group, *others = make_request("group", 5, n=3), *(make_request(name, 3) for name in "BCD")
    group.live = [Sequence(group, [0] * 5, index=i, num_computed_tokens=4) for i in range(3)]
    group.sequences = list(group.live)
    for rank, request in enumerate((group, *others)):
        request.rank = rank
        for seq in request.live:
            seq.block_table.append(scheduler.block_manager.free_blocks.pop())
            seq.num_computed_tokens = seq.num_tokens - 1
        scheduler.running.append(request)
    batch = scheduler.schedule()
    preempted, got = [request.request_id for request, _ in batch.preempted], computed_by(batch)
    assert (preempted, got) == (["D", "C", "B"], {"group": 3}), (
        "A request with three sequences needs a block for each of them; B, C and D, after it, have one block "
        "each, and none is free: first D, then C and B are preempted, and all three compute a token. "
        f"Preempted are {preempted}, and the step computes {got}."
    )


def test_none_is_preempted_without_need() -> None:
    scheduler = make_scheduler(num_blocks=3)
    requests = add(scheduler, ("A", 4), ("B", 4))
    step(scheduler)
    scheduler.max_num_batched_tokens = 1
    batch = scheduler.schedule()
    preempted, got = [request.request_id for request, _ in batch.preempted], computed_by(batch)
    tables = [len(request.live[0].block_table) for request in requests]
    assert (preempted, got, tables) == ([], {"A": 1}, [2, 1]), (
        "A and B need a block each, one is free, and the budget of 1 is spent on A. B computes nothing in "
        f"this step, so it needs no block and keeps its own. Preempted are {preempted}, the step computes "
        f"{got}, and the tables have {tables} blocks, and not [2, 1]."
    )


def test_many_requests() -> None:
    scheduler = make_scheduler(num_blocks=300, budget=400, max_num_seqs=150)
    add(scheduler, *((str(i), 2) for i in range(151)))
    for _ in range(2):
        got = step(scheduler)
        assert len(got) == 150, (
            f"151 short prompts come, max_num_seqs is 150, budget and blocks are enough for all: {len(got)} "
            "requests are served in a step, and not 150."
        )


def test_copies_are_passed_on() -> None:
    scheduler = make_scheduler()
    add(scheduler, ("A", 3), ("B", 3))
    step(scheduler)
    scheduler.block_manager.copies = [(7, 9)]
    batch = scheduler.schedule()
    assert batch.moves.copies == [(7, 9), (7, 9)], (
        "`append_slots` returned the copies [(7, 9)] for each of two requests, and all of them belong in "
        f"batch.moves.copies, which is {batch.moves.copies}."
    )


# ── random workloads ──────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Plain:
    """A request of the simple queues."""

    name: str
    rank: int
    known: int
    to_generate: int
    computed: int = 0
    blocks: int = 0


def settings_of(scheduler: Scheduler) -> dict[str, object]:
    """What no step changes: the numbers and words of the configuration, and the names of all attributes."""
    plain = {name: value for name, value in vars(scheduler).items() if isinstance(value, int | str | float)}
    return plain | {"attributes": sorted(vars(scheduler))}


class Queues:
    """A simple scheduler for requests with one output, which only counts blocks."""

    def __init__(self, scheduler: Scheduler, num_blocks: int, reserve: int) -> None:
        self.budget, self.max_num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        self.chunked, self.size = scheduler.enable_chunked_prefill, scheduler.block_size
        self.num_blocks, self.reserve = num_blocks, reserve
        self.running: list[Plain] = []
        self.waiting: list[Plain] = []

    def lacks(self, plain: Plain) -> int:
        """Blocks that it needs beyond those that it has."""
        return max(0, -(-plain.known // self.size) - plain.blocks)

    def num_free(self) -> int:
        return self.num_blocks - sum(plain.blocks for plain in self.running)

    def schedule(self) -> tuple[dict[str, int], list[str]]:
        """What each request computes, and which requests are preempted."""
        computed, preempted, budget = {}, [], self.budget
        self.running.sort(key=lambda plain: plain.rank)
        for plain in list(self.running):
            while budget > 0 and plain in self.running and self.lacks(plain) > self.num_free():
                victim = self.running.pop()
                victim.blocks = victim.computed = 0
                self.waiting.append(victim)
                preempted.append(victim.name)
            if budget > 0 and plain in self.running:
                plain.blocks += self.lacks(plain)
                computed[plain.name] = min(plain.known - plain.computed, budget)
                budget -= computed[plain.name]
        for plain in sorted(self.waiting, key=lambda plain: plain.rank):
            reserve = self.reserve if self.running else 0
            has_room = (
                self.lacks(plain) <= self.num_free() - reserve and len(self.running) < self.max_num_seqs
            )
            if budget == 0 or not has_room or (not self.chunked and plain.known > budget):
                break
            self.waiting.remove(plain)
            self.running.append(plain)
            plain.blocks += self.lacks(plain)
            computed[plain.name] = min(plain.known, budget)
            budget -= computed[plain.name]
        return computed, preempted

    def update(self, computed: dict[str, int]) -> None:
        for plain in list(self.running):
            plain.computed += computed.get(plain.name, 0)
            if plain.name in computed and plain.computed == plain.known:
                plain.known, plain.to_generate = plain.known + 1, plain.to_generate - 1
                if plain.to_generate == 0:
                    self.running.remove(plain)

    def __str__(self) -> str:
        return "; ".join(
            f"{name} " + (", ".join(f"{p.name} ({p.known}, {p.computed})" for p in plains) or "none")
            for name, plains in (("running", self.running), ("waiting", self.waiting))
        )


def test_random_workloads() -> None:
    """Wherever the scheduler and the simple queues differ, the sentence has the state before that step."""
    num_preempted = 0
    for seed in range(250):
        rng = random.Random(seed)
        size = rng.randint(1, 4)
        lengths = [(rng.randint(1, 14), rng.randint(1, 12)) for _ in range(rng.randint(2, 7))]
        longest = max(prompt + output for prompt, output in lengths)
        num_blocks = -(-longest // size) + rng.choice([0, 1, 2, 5, 20])
        chunked, watermark = rng.random() < 0.6, rng.choice([0.0, 0.0, 0.2])
        budget = rng.choice([1, rng.randint(2, 8), 20]) if chunked else longest + rng.choice([0, 2, 30])
        max_num_seqs = rng.choice([1, 3, 10])
        scheduler = make_scheduler(num_blocks, budget, chunked, max_num_seqs, watermark, size)
        queues = Queues(scheduler, num_blocks, int(watermark * num_blocks))
        ranks = rng.sample(range(len(lengths)), len(lengths)) if rng.random() < 0.5 else range(len(lengths))
        scheduler.rank = lambda request, ranks=ranks: ranks[int(request.request_id)]
        arrivals = [rng.choice([0, 0, rng.randint(0, 12)]) for _ in lengths]
        options = (
            f"blocks of {size}, {num_blocks} in the pool, budget {budget}, max_num_seqs {max_num_seqs}, "
        )
        options += f"{'chunks' if chunked else 'no chunks'}, {int(watermark * num_blocks)} blocks in reserve"
        number, settings = 0, settings_of(scheduler)
        while number <= max(arrivals) or queues.running or queues.waiting:
            for i, (num_prompt, num_output) in enumerate(lengths):
                if arrivals[i] == number:
                    add(scheduler, (str(i), num_prompt, num_output))
                    queues.waiting.append(Plain(str(i), ranks[i], num_prompt, num_output))
            before, number = str(queues), number + 1
            expected, expected_preempted = queues.schedule()
            where = f"Workload {seed}, step {number} ({options}), requests as (tokens, computed): {before}."
            try:
                batch = scheduler.schedule()
            except Exception as error:
                raise AssertionError(f"{where} `schedule` raises {type(error).__name__}: {error}") from error
            preempted = [request.request_id for request, _ in batch.preempted]
            got = computed_by(batch)
            assert preempted == expected_preempted, (
                f"{where} Preempted are {preempted}, and not {expected_preempted}."
            )
            assert got == expected, f"{where} The step computes {got}, and not {expected}."
            num_decodes = sum(num == 1 for num in expected.values())
            ones = list(got.values())[: batch.num_decodes]
            assert (batch.num_decodes, ones) == (num_decodes, [1] * num_decodes), (
                f"{where} Sequences with one token come first, here {num_decodes}, but num_decodes is "
                f"{batch.num_decodes}, and the batch is {got}."
            )
            num_preempted += len(preempted)
            finish_step(scheduler, batch)
            queues.update(expected)
            now = settings_of(scheduler)
            assert now == settings, (
                f"{where} The step has changed attributes of the scheduler that must stay: they were "
                f"{settings}, and are {now}."
            )
    assert num_preempted > 100, f"The workloads have {num_preempted} preemptions, too few to judge them."
