"""Random workloads with the fake runner, in pools too small for all requests: sharing, eviction, preemption.

A workload is a function of its seed. The suite runs 800 of each kind; a long run is

    python -m pytest tests/test_random_runs.py --random-runs 20000

and `--first-seed 1234 --random-runs 1` runs one of them again.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import EOS, Oracle
from fake_runner import FakeRunner, next_token
from faults import interrupt_at_line

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.block_manager import blocks_needed


@dataclass
class Asked:
    """One request of a workload, and when it comes and goes (in steps)."""

    prompt: list[int]
    kind: str  # one | several | beams
    width: int  # sequences
    max_tokens: int
    arrival: int
    aborted_after: int | None
    scored: bool  # with prompt log-probabilities, so its prompt must not come from the prefix cache

    @property
    def params(self) -> SamplingParams | BeamSearchParams:
        if self.kind == "beams":
            return BeamSearchParams(beam_width=self.width, max_tokens=self.max_tokens, ignore_eos=True)
        scored = 0 if self.scored else None
        return SamplingParams(
            n=self.width, max_tokens=self.max_tokens, prompt_logprobs=scored, ignore_eos=True
        )

    def most_blocks(self, block_size: int) -> int:
        """The most blocks that it can need: full blocks of the prompt are shared, other blocks are not."""
        shared = len(self.prompt) // block_size if self.width > 1 else 0
        longest = blocks_needed(len(self.prompt) + self.max_tokens - 1, block_size)
        return shared + self.width * (longest - shared)


@dataclass
class Workload:
    """Everything that one run consists of."""

    seed: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    budget: int
    chunked: bool
    caching: bool
    preemption: str  # as in EngineConfig, or "directed": see `forked`
    watermark: float
    max_num_seqs: int
    # step → 0: the runner fails; n: Ctrl-C at the n-th line that the step executes; -n: both
    faults: dict[int, int]
    requests: list[Asked] = field(repr=False)


def draw_faults(rng: random.Random, num_steps: int) -> dict[int, int]:
    """A few steps that fail, in the runner or at any line of the bookkeeping."""
    steps = [rng.randint(0, num_steps) for _ in range(rng.randint(0, 4))]
    return {step: rng.choice([0, 1, 1, -3]) * int(rng.expovariate(1 / 80)) for step in steps}


def general(seed: int) -> Workload:
    """Requests of every kind, prompts that often begin alike, aborts and failing steps."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 5)
    stems = [rng.choices(range(3), k=rng.randint(4, 14)) for _ in range(rng.randint(1, 2))]
    requests = []
    for _ in range(rng.randint(1, 8)):
        kind = rng.choice(["one", "one", "several", "beams"])
        requests.append(
            Asked(
                prompt=rng.choice(stems) + rng.choices(range(3), k=rng.randint(0, 6)),
                kind=kind,
                width=1 if kind == "one" else rng.randint(2, 4),
                max_tokens=rng.randint(1, 14),
                arrival=rng.randint(0, 8),
                aborted_after=rng.choice([None, rng.randint(1, 12)]),
                scored=kind != "beams" and rng.random() < 0.2,
            )
        )
    return Workload(
        seed=seed,
        block_size=block_size,
        num_blocks=max(r.most_blocks(block_size) for r in requests) + rng.randint(0, 4),
        num_host_blocks=rng.choice([40, 40, 8, 3, 0]),
        budget=rng.randint(1, 40),
        chunked=rng.random() < 0.5,
        caching=rng.random() < 0.5,
        preemption=rng.choice(["swap", "recompute", "auto"]),
        watermark=rng.choice([0.0, 0.05, 0.3]),
        max_num_seqs=rng.randint(4, 10),
        faults=draw_faults(rng, 30),
        requests=requests,
    )


def forked(seed: int) -> Workload:
    """Forked requests that are recomputed, swapped before they have caught up, and aborted in between.

    Long requests that arrived first preempt families of two or three sequences. Usually a family is
    recomputed if all its K/V is computed, and swapped if it is not; with a small budget that takes many
    steps. The last requests have the same prompts again, and so read the blocks that the others left in the
    prefix cache.
    """
    rng = random.Random(seed)
    block_size = rng.randint(1, 3)
    stem = rng.choices(range(3), k=rng.randint(2, 8))
    requests = []
    for _ in range(rng.randint(2, 4)):
        prompt = rng.choices(range(3), k=rng.randint(1, 6))
        requests.append(Asked(prompt, "one", 1, rng.randint(20, 50), rng.randint(0, 6), None, False))
    for _ in range(rng.randint(1, 3)):
        requests.append(
            Asked(
                prompt=stem[: rng.randint(1, len(stem))] + rng.choices(range(3), k=rng.randint(0, 8)),
                kind=rng.choice(["several", "several", "beams"]),
                width=rng.choice([2, 2, 3]),
                max_tokens=rng.randint(6, 20),
                arrival=rng.randint(0, 4),
                aborted_after=rng.choice([None, rng.randint(4, 40)]),
                scored=False,
            )
        )
    for asked in requests[:]:
        late = rng.randint(10, 60)
        requests.append(Asked([*asked.prompt, rng.randint(0, 2)], "one", 1, 2, late, None, False))
    most = max(r.most_blocks(block_size) for r in requests)
    return Workload(
        seed=seed,
        block_size=block_size,
        num_blocks=most + rng.randint(0, 3),
        num_host_blocks=rng.choice([most * 4, rng.randint(2, most + 4)]),
        budget=rng.randint(3, 6),
        chunked=True,
        caching=True,
        preemption="directed",
        watermark=0.0,
        max_num_seqs=12,
        faults=draw_faults(rng, 60) if rng.random() < 0.5 else {},
        requests=requests,
    )


def expected_outputs(asked: Asked, folder: Path) -> list[list[int]]:
    """The output of the request alone; of beams, in an engine with a large pool and no preemption."""
    if asked.kind == "beams":
        config = EngineConfig(model=folder, block_size=64, enable_prefix_caching=False)
        engine = LLMEngine(config, FakeRunner(64, 64))
        engine.add_request("alone", asked.prompt, asked.params)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        return [completion.token_ids for completion in output.outputs]
    outputs = []
    for index in range(asked.width):
        token_ids = list(asked.prompt)
        while len(token_ids) < len(asked.prompt) + asked.max_tokens:
            token_ids.append(next_token(token_ids, index))
        outputs.append(token_ids[len(asked.prompt) :])
    return outputs


class Run:
    """An engine over the fake model that serves one workload."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload, self.folder = workload, folder
        self.runner = FakeRunner(workload.num_blocks, workload.block_size, workload.num_host_blocks)
        longest = max(len(r.prompt) + r.max_tokens for r in workload.requests)
        config = EngineConfig(
            model=folder,
            max_model_len=longest,
            block_size=workload.block_size,
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget if workload.chunked else max(workload.budget, longest),
            enable_chunked_prefill=workload.chunked,
            enable_prefix_caching=workload.caching,
            preemption=workload.preemption.replace("directed", "swap"),
            watermark=workload.watermark,
        )
        self.rng = random.Random(workload.seed)
        self.engine = LLMEngine(config, self.runner)
        self.outputs: dict[str, list[list[int]]] = {}
        self.num_failed = 0

    def serve(self) -> None:
        pending = dict(enumerate(self.workload.requests))
        aborts: dict[int, list[str]] = {}
        step = 0
        while pending or self.engine.has_unfinished_requests():
            for i in [i for i, r in pending.items() if r.arrival <= step]:
                asked = pending.pop(i)
                self.engine.add_request(str(i), asked.prompt, asked.params)
                if asked.aborted_after is not None:
                    aborts.setdefault(step + asked.aborted_after, []).append(str(i))
            for request_id in aborts.pop(step, []):
                self.abort(request_id)
            self.step(self.workload.faults.get(step))
            step += 1
            assert step < 3000, "the engine makes no progress"
        self.check_outputs()
        self.check_drained()

    def abort(self, request_id: str) -> None:
        if request_id in self.engine.requests:
            had_finished = self.engine.requests[request_id].finished  # in a step that failed
            partial = self.engine.abort_request(request_id)
            assert partial.finished
            aborted = [completion.finish_reason == "abort" for completion in partial.outputs]
            assert any(aborted) != had_finished
            self.outputs[request_id] = [completion.token_ids for completion in partial.outputs]
            self.check()

    def step(self, fault: int | None) -> None:
        """One step, which may fail; either way everything is consistent after it."""
        if self.workload.preemption == "directed" and self.engine.scheduler.running:
            seq = self.engine.scheduler.running[-1].live[0]  # of the request that would be preempted
            behind = seq.num_tokens - seq.num_computed_tokens > 1
            way = "swap" if behind == (self.rng.random() < 0.9) else "recompute"
            self.engine.scheduler.preemption = way
        if fault is None or not self.engine.has_unfinished_requests():
            self.note(self.engine.step())
        else:
            self.failing_step(fault)
        self.check()

    def failing_step(self, fault: int) -> None:
        """The step raises, unless it ends before the fault, and takes no token away."""
        self.runner.fail_next = fault <= 0
        sampled = [r for r in self.engine.requests.values() if not r.is_beam_search]
        before = {r: [list(seq.token_ids) for seq in r.sequences] for r in sampled}
        try:
            with interrupt_at_line(abs(fault) or 10**9):
                self.note(self.engine.step())
        except (RuntimeError, KeyboardInterrupt):
            self.num_failed += 1
        self.runner.fail_next = False
        for request, token_ids in before.items():
            for old, seq in zip(token_ids, request.sequences, strict=False):
                assert seq.token_ids[: len(old)] == old, "a failed step took tokens away"

    def note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.outputs, "reported twice"
                self.outputs[output.request_id] = [c.token_ids for c in output.outputs]
                assert all(completion.finish_reason == "length" for completion in output.outputs)

    def check(self) -> None:
        self.engine.check_invariants()
        self.runner.check_findable_blocks(self.engine.block_manager)
        stats, workload = self.engine.stats(), self.workload
        assert stats.num_free_blocks + stats.num_used_blocks == workload.num_blocks
        assert sum(r.num_seqs for r in self.engine.scheduler.running) <= workload.max_num_seqs

    def check_outputs(self) -> None:
        """Whole outputs, or beginnings of them where a request was aborted (unfinished beams may change)."""
        assert self.outputs.keys() == {str(i) for i in range(len(self.workload.requests))}
        for i, asked in enumerate(self.workload.requests):
            got, expected = self.outputs[str(i)], expected_outputs(asked, self.folder)
            if asked.aborted_after is None:
                assert got == expected
            elif asked.kind != "beams":
                assert got == [whole[: len(part)] for whole, part in zip(expected, got, strict=False)]

    def check_drained(self) -> None:
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
        assert self.runner.most_tokens <= self.engine.scheduler.max_num_batched_tokens
        if not self.workload.caching:
            assert stats.num_cached_blocks == stats.prefix_cache_hits == 0


@pytest.mark.parametrize("make_workload", [general, forked])
def test_every_request_reads_its_own_kv_and_says_what_it_would_say_alone(
    make_workload: object, qwen3: Oracle, pytestconfig: pytest.Config
) -> None:
    first, num = pytestconfig.getoption("first_seed"), pytestconfig.getoption("random_runs")
    happened: Counter[str] = Counter()
    for seed in range(first, first + num):
        workload = make_workload(seed)
        run = Run(workload, qwen3.folder)
        try:
            run.serve()
        except Exception as error:
            again = f"python -m pytest {Path(__file__).name} -k {make_workload.__name__} --random-runs 1"
            raise AssertionError(f"{error}\n{workload}\n{again} --first-seed {seed}") from error
        stats = run.engine.stats()
        happened["recomputed"] += stats.num_preemptions_recompute > 0
        happened["swapped"] += stats.num_preemptions_swap > 0
        happened["both"] += stats.num_preemptions_recompute > 0 and stats.num_preemptions_swap > 0
        happened["hits"] += stats.prefix_cache_hits > 0
        happened["failed steps"] += run.num_failed
        happened["copies"] += stats.num_blocks_copied > 0
    print(f"{make_workload.__name__}: {num} runs, {dict(happened)}")
    if num >= 500:
        assert min(happened.values()) > 0, f"the workloads no longer cover everything: {happened}"


def test_the_fake_model_notices_a_wrong_block(qwen3: Oracle) -> None:
    """The tests above rely on it: the fake runner must notice if a sequence reads a wrong block."""
    asked = Asked([1, 2, 0, 1], "one", 1, 8, 0, None, False)
    workload = Workload(0, 2, 20, 0, 8, True, True, "recompute", 0.0, 4, {}, [asked])
    run = Run(workload, qwen3.folder)
    run.engine.add_request("a", asked.prompt, SamplingParams(max_tokens=8, stop_token_ids=[EOS]))
    run.engine.step()
    run.check()
    table = run.engine.scheduler.running[0].sequences[0].block_table
    run.runner.slots[table[0], 1] = -1
    with pytest.raises(AssertionError, match="never computed"):
        run.check()
    table[0], table[1] = table[1], table[0]
    with pytest.raises(AssertionError, match="reads a wrong slot"):
        run.engine.step()
