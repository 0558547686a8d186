"""Random workloads in pools too small for all requests: sharing, eviction, preemption, aborts, faults.

Each finished request says what it says alone. The fake model checks every read of K/V; the tiny model has the
real sampler. The suite runs a hundred workloads of each kind, and goes on until all that they should meet has
happened; a long run is

    python -m pytest tests/engine/test_random_runs.py -s --random-runs 20000

and `--first-seed 1234 --random-runs 1` runs one of them again. `-k tiny --random-backend cpp` takes the C++
kernels.
"""

from __future__ import annotations

import builtins
import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import pytest
from conftest import KERNELS, RANDOM_RUNS
from fake_runner import SCRATCH, VOCAB_SIZE, FakeRunner, fake_model  # noqa: F401  (SCRATCH for forks)
from faults import STAGES, FailAtLine
from random_workloads import FAKE_TOKEN_TEXTS, LONGEST, Asked, Fault, Workload, forked, mixed, siblings, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams, sampler
from nanopaged.outputs import CompletionOutput, Logprobs
from nanopaged.sequence import Request

TOLERANCE = {"fake": 0.0, "tiny": 1e-4}  # of log-probabilities
uniform = sampler.uniform


@cache
def fake_tokenizer() -> PreTrainedTokenizerFast:
    names = [*FAKE_TOKEN_TEXTS, *(f"<{i}>" for i in range(len(FAKE_TOKEN_TEXTS), VOCAB_SIZE))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_engine(model: str, config: EngineConfig) -> LLMEngine:
    """An engine over the fake or the tiny model, with tokens that make text."""
    if model == "tiny":
        gc.collect()  # the weights of the last run's engine: `Run` makes a circle with it
        return LLMEngine(replace(config, dtype="float32"))
    runner = FakeRunner(config.num_blocks, config.block_size, config.num_host_blocks)
    engine = LLMEngine(replace(config, model=fake_model()), runner)
    engine.prompts.tokenizer = fake_tokenizer()
    return engine


@cache
def large_engine(model: str) -> LLMEngine:
    """One request at a time has all that it needs in it: one block for each sequence, and no cache."""
    options = {"block_size": LONGEST, "num_blocks": 64, "num_host_blocks": 0, "attention_backend": "torch"}
    return make_engine(model, EngineConfig(enable_prefix_caching=False, **options))


def run_alone(model: str, prompt: list[int], params: SamplingParams | BeamSearchParams) -> RequestOutput:
    engine = large_engine(model)
    engine.add_request("alone", prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    if model == "fake":
        engine.runner.forget()  # or its memory would grow from run to run
    return outputs[0]


def shifted_uniform(shift: float, *draw: int) -> float:
    return min(max(uniform(*draw) + shift, 0.0), 1.0)


class Run:
    """An engine that serves one workload, and the output of each request so far.

    Attributes:
        happened: counts of operations, faults and events.
    """

    def __init__(self, workload: Workload, backend: str = "torch") -> None:
        self.workload, self.model = workload, workload.model
        self.rng = random.Random(workload.seed)
        self.engine = make_engine(self.model, replace(workload.config(), attention_backend=backend))
        if workload.order == "random":
            ranks = random.Random(workload.seed)
            self.engine.scheduler.rank = lambda request: ranks.random()
        if self.model == "fake":
            self.forget_when_it_starts_over()
        self.alone = [run_alone(self.model, asked.prompt, asked.params) for asked in workload.requests]
        self.outputs: dict[int, RequestOutput | None] = {}  # None: a fault in `abort_request` lost it
        self.happened: Counter[str] = Counter()
        self.num_steps = 0
        self.faults = list(workload.faults)
        self.next_fault()

    def serve(self) -> None:
        pending = dict(enumerate(self.workload.requests))
        aborts: dict[int, list[int]] = {}
        while pending or aborts or self.engine.has_unfinished_requests():
            for i in [i for i, asked in pending.items() if asked.arrival <= self.num_steps]:
                asked = pending.pop(i)
                self.add(i, asked)
                if asked.aborted_after is not None:
                    aborts.setdefault(self.num_steps + asked.aborted_after, []).append(i)
            for i in aborts.pop(self.num_steps, []):
                self.abort(i)
            self.step()
            self.num_steps += 1
            assert self.num_steps < 3000, "the engine makes no progress"
        assert self.outputs.keys() == set(range(len(self.alone))), "a request was not reported"
        self.check_drained()

    def add(self, i: int, asked: Asked) -> None:
        self.happened["add"] += 1
        prompt = {"prompt_token_ids": asked.prompt, "cache_salt": asked.salt}
        while str(i) not in self.engine.requests:  # a fault may come before or after it is queued
            self.attempt(lambda: self.engine.add_request(str(i), prompt, asked.params))

    def abort(self, i: int) -> None:
        has_ended = str(i) in self.engine.requests and self.engine.requests[str(i)].finished
        while str(i) in self.engine.requests:  # a fault may come before or after it is aborted
            request = self.engine.requests[str(i)]
            state = "waiting" if request in self.engine.scheduler.waiting else "running"
            if request.is_swapped:
                state = "swapped"
            if request.finished:
                state = "ended"
            output = self.attempt(lambda: self.engine.abort_request(str(i)))
            if str(i) not in self.engine.requests:
                self.happened["abort"] += 1
                self.happened[f"abort while {state}"] += 1
                self.outputs[i] = output
                if output is not None:
                    assert output.finished
                    aborted = any(completion.finish_reason == "abort" for completion in output.outputs)
                    assert aborted != has_ended
                    self.check_output(output)

    def step(self) -> None:
        if self.workload.preemption == "directed" and self.engine.scheduler.running:
            seq = self.engine.scheduler.running[-1].live[0]  # of the request likely to be preempted
            is_behind = seq.num_tokens - seq.num_computed_tokens > 1
            mode = "swap" if is_behind == (self.rng.random() < 0.9) else "recompute"
            self.engine.scheduler.preemption = mode
        self.happened["step"] += 1
        sampled = [r for r in self.engine.requests.values() if not r.is_beam_search]
        before = {r: [list(seq.token_ids) for seq in r.sequences] for r in sampled}
        outputs = self.attempt(self.engine.step)
        if outputs is None:
            for request, token_ids in before.items():
                for old, seq in zip(token_ids, request.sequences, strict=False):
                    assert seq.token_ids[: len(old)] == old, "a failed step took tokens away"
            left = sorted(self.engine.requests.values(), key=lambda request: not request.finished)
            if left and (left[0].finished or self.rng.random() < 0.3):
                self.abort(int(left[0].request_id))
        for output in outputs or []:
            if output.finished:
                assert int(output.request_id) not in self.outputs, "reported twice"
                self.outputs[int(output.request_id)] = output
            self.check_output(output)

    def attempt(self, operation: Callable[[], object]) -> object:
        """The result, or None if a fault was thrown. Either way everything is consistent afterwards."""
        thrower, result = self.thrower, None
        is_armed = bool(self.faults) and self.faults[0].step <= self.num_steps
        try:
            with thrower if is_armed else nullcontext():
                result = operation()
        except (RuntimeError, MemoryError, KeyboardInterrupt) as error:
            if error is not thrower.raised:
                raise
        if thrower.raised is not None:
            self.happened[f"fault: {self.faults.pop(0).stage}"] += 1
            self.happened[f"fault: {thrower.error.__name__}"] += 1
            self.next_fault()
        self.engine.check_invariants()
        self.check()
        return result

    def next_fault(self) -> None:
        """Arm the first of the faults that are left."""
        fault = self.faults[0] if self.faults else Fault(0, "add", 0, "RuntimeError")
        self.thrower = FailAtLine(fault.line, getattr(builtins, fault.error), STAGES[fault.stage])

    def forget_when_it_starts_over(self) -> None:
        """No block is read after a failed step that was written before it."""
        start_over, forget = self.engine.scheduler.start_over, self.engine.runner.forget

        def forget_and_start_over(requests: Iterable[Request]) -> None:
            forget()
            start_over(requests)

        self.engine.scheduler.start_over = forget_and_start_over

    def check(self) -> None:
        """What holds after each operation, beside the invariants."""
        if self.model == "fake":
            self.engine.runner.check_findable_blocks(self.engine.block_manager)
        running = self.engine.scheduler.running
        assert sum(request.num_seqs for request in running) <= self.workload.max_num_seqs

    def check_output(self, output: RequestOutput) -> None:
        """Each completion is what it is alone, or a beginning of it; unfinished beams may change."""
        i = int(output.request_id)
        asked, alone = self.workload.requests[i], self.alone[i]
        partial = not output.finished or any(c.finish_reason == "abort" for c in output.outputs)
        if not partial:
            assert len(output.outputs) == len(alone.outputs)
            self.happened["finished"] += 1
        if not (partial and isinstance(asked.params, BeamSearchParams)):
            for got in output.outputs:
                self.check_completion(asked, got, alone.outputs[got.index])
        if output.prompt_logprobs is not None:
            assert partial or len(output.prompt_logprobs) == len(asked.prompt), "one for each prompt token"
            self.happened["prompt scored"] += not partial
            self.check_logprobs(output.prompt_logprobs[1:], alone.prompt_logprobs[1:])

    def check_completion(self, asked: Asked, got: CompletionOutput, whole: CompletionOutput) -> None:
        if self.model == "tiny" and self.is_close_call(asked, got, whole):
            self.happened["close call"] += 1
            return
        tolerance = TOLERANCE[self.model]
        length = len(got.token_ids)
        assert got.token_ids == whole.token_ids[:length]
        if got.finish_reason is None:
            assert whole.text.startswith(got.text)
        elif got.finish_reason == "abort":
            assert got.text == self.engine.prompts.tokenizer.decode(got.token_ids)
        else:
            assert length == len(whole.token_ids)
            assert got.text == whole.text
            assert (got.finish_reason, got.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert math.isclose(got.cumulative_logprob, whole.cumulative_logprob, abs_tol=tolerance)
            assert math.isclose(got.score or 0.0, whole.score or 0.0, abs_tol=tolerance)
            self.happened["stop by string"] += isinstance(got.stop_reason, str)
            self.happened["stop by token"] += isinstance(got.stop_reason, int)
            self.happened["stop by end-of-sequence"] += (got.finish_reason, got.stop_reason) == ("stop", None)
        if got.logprobs is not None:
            assert len(got.logprobs) == length, "one for each token"
            self.check_logprobs(got.logprobs, whole.logprobs)

    def is_close_call(self, asked: Asked, got: CompletionOutput, whole: CompletionOutput) -> bool:
        """Whether a rounding error decides the first token that differs, so that both are right.

        The tiny model computes a batch and a single sequence not bit for bit alike. A greedy choice is close
        if both tokens are almost equally likely; a draw, if a random number almost the same gives our token.
        """
        same = [a == b for a, b in zip(got.token_ids, whole.token_ids, strict=False)]
        if all(same) or isinstance(asked.params, BeamSearchParams):
            return False
        i, tolerance = same.index(False), TOLERANCE["tiny"]
        ours, theirs = got.token_ids[i], whole.token_ids[i]
        params = replace(
            asked.params,
            n=got.index + 1,
            max_tokens=1,
            min_tokens=min(1, max(0, asked.params.min_tokens - i)),
            logprobs=large_engine("tiny").vocab_size,
            prompt_logprobs=None,
        )
        tokens = []
        for shift in (-tolerance, tolerance):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampler, "uniform", partial(shifted_uniform, shift))
                output = run_alone("tiny", asked.prompt + whole.token_ids[:i], params).outputs[-1]
            tokens += output.token_ids
        if params.temperature > 0:
            return min(tokens) <= ours <= max(tokens)  # larger numbers draw larger ids
        return abs(output.logprobs[0][ours] - output.logprobs[0][theirs]) < tolerance

    def check_logprobs(self, got: list[Logprobs], whole: list[Logprobs]) -> None:
        """Equal tokens, and equal log-probabilities as far as the model allows it; `got` may be shorter."""
        for ours, theirs in zip(got, whole, strict=False):
            assert ours.keys() == theirs.keys()
            for token_id, logprob in ours.items():
                assert math.isclose(logprob, theirs[token_id], abs_tol=TOLERANCE[self.model])

    def check_drained(self) -> None:
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
        if self.model == "fake":
            assert self.engine.runner.most_tokens <= self.engine.scheduler.max_num_batched_tokens
        if not self.workload.caching:
            assert stats.num_cached_blocks == stats.prefix_cache_hits == 0
        self.happened["request"] += len(self.alone)
        self.happened["token"] += stats.num_generated_tokens
        self.happened["recompute"] += stats.num_preemptions_recompute
        self.happened["swap"] += stats.num_preemptions_swap
        self.happened["cache hit"] += stats.prefix_cache_hits
        self.happened["copy on write"] += stats.num_blocks_copied


EVENTS = [f"fault: {stage}" for stage in STAGES]
EVENTS += [f"fault: {error}" for error in ("RuntimeError", "MemoryError", "KeyboardInterrupt")]
EVENTS += [f"abort while {state}" for state in ("waiting", "running", "swapped")]
EVENTS += ["recompute", "swap", "cache hit", "copy on write", "stop by string"]
MIXED_EVENTS = ["abort while ended", "stop by token", "stop by end-of-sequence", "prompt scored"]


def serve_random(
    make_workload: Callable[[int], Workload],
    num: int,
    events: Iterable[str] = (),
    make_run: Callable[[Workload], Run] = Run,
    first: int = 0,
) -> Counter[str]:
    """Serve `num` random workloads, and as many more as it takes until all the events have happened.

    The forks' tests use it, too: after each step, also one that fails, the engine's invariants hold.

    Args:
        first: the seed of the first one.

    Returns:
        counts of what has happened.
    """
    happened: Counter[str] = Counter()
    for seed in range(first, first + 10 * num):
        if seed >= first + num and all(happened[event] for event in events):
            break
        workload = make_workload(seed)
        try:
            run = make_run(workload)
            run.serve()
        except Exception as error:
            raise AssertionError(f"{make_workload.__name__}({seed}): {error}\n{workload}") from error
        happened += run.happened
        happened["workload"] += 1
    missing = [event for event in events if not happened[event]]
    assert not missing, f"the workloads no longer cover everything: {missing}"
    return happened


@pytest.mark.parametrize("make_workload", [mixed, forked, siblings, tiny])
def test_every_request_reads_its_own_kv_and_says_what_it_would_say_alone(
    make_workload: Callable[[int], Workload], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOPAGED_CACHE", str(KERNELS))  # for backend = "cpp"
    make_run = partial(Run, backend=pytestconfig.getoption("random_backend"))
    first, num = pytestconfig.getoption("first_seed"), pytestconfig.getoption("random_runs")
    events: list[str] = []  # that must happen
    if make_workload is tiny:
        num = -(-num // 12)
    elif num >= RANDOM_RUNS:
        events = EVENTS + (MIXED_EVENTS if make_workload is mixed else [])
    happened = serve_random(make_workload, num, events, make_run, first)
    print(f"{make_workload.__name__}: {dict(sorted(happened.items()))}")
