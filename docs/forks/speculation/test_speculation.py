"""Speculative decoding changes how many steps a text takes, and nothing else.

The proposer is replaced by ones that know the text: always right, always wrong, or right in part. So every
number of accepted drafts occurs, with any model.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import test_random_runs
import torch
from conftest import Oracle, random_prompts
from fake_runner import FakeRunner
from random_workloads import Workload, forked, mixed
from test_oracle import check_logprobs
from test_random_runs import Run

from nanopaged import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from nanopaged.checks.failures import NonFiniteLogits, NoTokenAllowed
from nanopaged.sampler import sample_next_tokens, verify
from nanopaged.scheduler import look_up
from nanopaged.sequence import Request, Sample, ScheduledBatch, Sequence, StepResult
from nanopaged.text.stopping import StopRules

Params = SamplingParams | BeamSearchParams
Proposer = Callable[[Sequence, int], list[int]]


def guess(texts: dict[str, list[int]], right: Callable[[int], bool]) -> Proposer:
    """Propose a request's known output; the token at output position i is another one unless `right(i)`."""

    def propose(seq: Sequence, num: int) -> list[int]:
        first = seq.num_output_tokens
        text = texts.get(seq.request.request_id, [])[first : first + num]
        return [token if right(i) else (token + 1) % 97 for i, token in enumerate(text, first)]

    return propose


RIGHT: dict[str, Callable[[int], bool]] = {
    "truth": lambda i: True,
    "garbage": lambda i: False,
    "half": lambda i: i % 4 != 2 and i % 7 != 0,  # 1 to 3 right ones in a row
}


def serve(engine: LLMEngine, asked: list[tuple[list[int] | str, Params]]) -> list[RequestOutput]:
    """Serve all requests together, and check everything that must hold between two steps."""
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), prompt, params)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_invariants()
        assert not any(seq.draft_ids for seq in engine.scheduler.running_sequences), (
            "a draft outlived its step"
        )
    assert engine.stats().num_used_blocks == 0
    return [finished[str(i)] for i in range(len(asked))]


# ── transformers ──────────────────────────────────────────────────────────────────────────────────


def test_greedy_is_what_transformers_says(oracle: Oracle) -> None:
    """Tokens and log-probabilities, for every proposer, with prompts in chunks or whole."""
    prompts = random_prompts(3, seed=5, longest=20) + [[5, 6, 7, 8] * 6]
    params = SamplingParams(temperature=0, max_tokens=18, logprobs=2)
    texts = {str(i): oracle.greedy(prompt, 18) for i, prompt in enumerate(prompts)}
    expected = [oracle.logprobs(prompt + texts[str(i)]) for i, prompt in enumerate(prompts)]
    num_steps: Counter[str] = Counter()
    for name, block_size, budget in (
        ("truth", 4, 64),
        ("half", 7, 9),
        ("garbage", 1, 64),
        ("look-up", 16, 9),
    ):
        config = {"block_size": block_size, "max_num_batched_tokens": budget, "num_blocks": 200}
        engine = LLM(oracle.folder, dtype="float32", num_speculative_tokens=4, **config).engine
        if name in RIGHT:
            engine.scheduler.propose = guess(texts, RIGHT[name])
        for output, logprobs in zip(serve(engine, [(p, params) for p in prompts]), expected, strict=True):
            (got,) = output.outputs
            assert got.token_ids == texts[output.request_id]
            rows = logprobs[len(output.prompt_token_ids) - 1 :]
            check_logprobs(got.logprobs, got.token_ids, rows, num_top=2)
        stats = engine.stats()
        num_steps[name] = stats.num_steps
        share = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
        assert {"truth": share == 1, "garbage": share == 0, "half": 0.2 < share < 0.9}.get(name, True)
    longest = max(map(len, texts.values()))
    assert num_steps["garbage"] >= longest
    assert num_steps["truth"] <= 2 + longest / 4


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_in_a_pool_barely_large_enough(qwen3: Oracle, preemption: str) -> None:
    """Requests are preempted beside others with drafts. The pool holds the longest one to the last slot."""
    prompts = random_prompts(5, seed=2, longest=30)
    num_blocks = -(-(max(map(len, prompts)) + 20 - 1) // 4)
    texts = {str(i): qwen3.greedy(prompt, 20, ignore_eos=True) for i, prompt in enumerate(prompts)}
    config = {"block_size": 4, "num_blocks": num_blocks, "preemption": preemption, "watermark": 0}
    for name in ("half",):
        engine = LLM(qwen3.folder, dtype="float32", num_speculative_tokens=5, **config).engine
        engine.scheduler.propose = guess(texts, RIGHT[name])
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for output in serve(engine, [(prompt, params) for prompt in prompts]):
            assert output.outputs[0].token_ids == texts[output.request_id]
        stats = engine.stats()
        assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
        assert stats.num_accepted_tokens > 0


# ── the engine without speculation ────────────────────────────────────────────────────────────────

LINES = "To be, or not to be.\nTo be, or not to be.\nTo be, or"
SAMPLED = {"temperature": 0.9, "max_tokens": 16, "seed": 1, "logprobs": 2}
ASKED: list[tuple[str, Params]] = [
    (LINES, SamplingParams(**SAMPLED)),
    (LINES, SamplingParams(**SAMPLED, frequency_penalty=0.9, presence_penalty=0.3)),
    (LINES, SamplingParams(**SAMPLED, repetition_penalty=1.6, top_k=20)),
    (LINES, SamplingParams(**SAMPLED | {"temperature": 0}, repetition_penalty=1.3, frequency_penalty=0.5)),
    ("KING:\nI am the", SamplingParams(**SAMPLED, top_p=0.8, stop=["e", " th"], min_tokens=6)),
    ("KING:\nI am the", SamplingParams(**SAMPLED | {"seed": 4}, stop="ou", min_p=0.05)),
    ("KING:\nI am", SamplingParams(**SAMPLED | {"seed": 2}, stop_token_ids=range(3, 500, 3), min_tokens=9)),
    (LINES, SamplingParams(**SAMPLED | {"temperature": 0}, prompt_logprobs=1)),
    (LINES, SamplingParams(**SAMPLED, n=3)),
    ("QUEEN:\n", BeamSearchParams(beam_width=2, max_tokens=12)),
]


def tiny_engine(**options: object) -> LLMEngine:
    return LLMEngine(EngineConfig(dtype="float32", max_model_len=128, **{"num_blocks": 200} | options))


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """The outputs without speculation."""
    return serve(tiny_engine(enable_prefix_caching=False), ASKED)


def check_same(got: CompletionOutput, want: CompletionOutput) -> None:
    assert (got.token_ids, got.text) == (want.token_ids, want.text)
    assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
    assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)
    for ours, theirs in zip(got.logprobs or [], want.logprobs or [], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "small"),
    [("truth", True), ("half", True), ("half", False), ("look-up", False)],
)
def test_sampled_is_what_the_engine_says_without_speculation(
    plain: list[RequestOutput], name: str, small: bool
) -> None:
    """Penalties, min_tokens, stop strings and tokens, log-probabilities, beside forks and beams."""
    options = {"block_size": 4, "num_blocks": 45, "max_num_batched_tokens": 12, "preemption": "swap"}
    engine = tiny_engine(num_speculative_tokens=6, **options if small else {})
    if name in RIGHT:
        texts = {str(i): output.outputs[0].token_ids for i, output in enumerate(plain)}
        engine.scheduler.propose = guess(texts, RIGHT[name])
    for output, alone in zip(serve(engine, ASKED), plain, strict=True):
        for got, want in zip(output.outputs, alone.outputs, strict=True):
            check_same(got, want)
    stats = engine.stats()
    assert (stats.num_preemptions_swap > 0) == small
    assert (stats.num_accepted_tokens > 0) == (name != "garbage")
    assert {output.outputs[0].finish_reason for output in plain[:-1]} == {"stop", "length"}


def test_accepted_tokens_are_found_in_the_prefix_cache() -> None:
    """A follow-up finds as many tokens as without speculation, and reads the right K/V in them."""
    found, answers = [], []
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for k in (0, 5):
        engine = tiny_engine(block_size=4, num_speculative_tokens=k)
        if k:
            texts = {"0": answers[0][0]}
            engine.scheduler.propose = guess(texts, RIGHT["half"])
        (first,) = serve(engine, [(LINES, params)])
        prompt = first.prompt_token_ids + first.outputs[0].token_ids
        (second,) = serve(engine, [(prompt, replace(params, max_tokens=9))])
        found.append(second.num_cached_tokens)
        answers.append((first.outputs[0].token_ids, second.outputs[0].token_ids))
    assert answers[0] == answers[1]
    assert found[0] == found[1] > len(prompt) - 8


# ── the fake model: room for drafts, and random workloads ─────────────────────────────────────────


class DraftingRunner(FakeRunner):
    """The fake runner, with drafts. Their K/V is written as any other, and must never be read later.

    Attributes:
        drafts: for each step, request id → drafts of its first sequence.
    """

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.drafts: list[dict[str, int]] = getattr(self, "drafts", [])
        self.drafts.append({seq.request.request_id: len(seq.draft_ids) for seq in batch.sequences})
        return super().execute(batch)

    def _numbers(self, seq: Sequence) -> list[int]:
        """Of known tokens and drafts. Drafts are not remembered."""
        numbers = super()._numbers(seq)[:]
        for token_id in seq.draft_ids:
            numbers.append(self.prefixes.extend(numbers[-1], token_id))
        return numbers

    def sample(self, seq: Sequence) -> list[Sample]:
        """Token by token: while it says what was guessed, it says one more."""
        if not seq.draft_ids:
            return super().sample(seq)
        samples: list[Sample] = []
        for longer, draft_id in zip(seq.with_drafts(), [*seq.draft_ids, None], strict=True):
            if longer is not seq:
                longer.num_computed_tokens = longer.num_tokens
            samples += super().sample(longer)
            if samples[-1].token_id != draft_id:
                break
        return samples


def serve_two(num_speculative_tokens: int = 5, **options: object) -> LLMEngine:
    """Two requests on the fake model, which never says the token 9 that is guessed."""
    config = {"block_size": 4, "num_blocks": 30, "max_model_len": 64, "watermark": 0, **options}
    made = EngineConfig(
        model=test_random_runs.fake_model(), num_speculative_tokens=num_speculative_tokens, **config
    )
    engine = LLMEngine(made, DraftingRunner(made.num_blocks, made.block_size, 0))
    engine.scheduler.propose = lambda seq, num: [9] * 100  # more than it is asked for
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    serve(engine, [([0, 1, 2, 0, 1], params), ([2] * 7, params)])
    return engine


def test_no_draft_beyond_the_last_token() -> None:
    """The last of 12 tokens is drawn after the eleventh: from the seventh on, fewer drafts have a use."""
    drafts = [step["0"] for step in serve_two().runner.drafts]
    assert drafts == [0, 5, 5, 5, 5, 5, 5, 4, 3, 2, 1, 0]


def test_drafts_take_what_is_left_of_the_budget() -> None:
    """Budget 8: the rest of a prompt comes before drafts, and the first request's drafts before others'."""
    engine = serve_two(max_num_batched_tokens=8)
    assert engine.runner.drafts[:4] == [
        {"0": 0, "1": 0},
        {"0": 3, "1": 0},
        {"0": 5, "1": 1},
        {"0": 5, "1": 1},
    ]
    assert engine.runner.most_tokens == 8


def test_a_guess_preempts_no_request() -> None:
    """In a pool of the fewest blocks, drafts use the free ones and give them back: nothing else happens."""
    small = {"num_blocks": 5, "preemption": "recompute", "enable_prefix_caching": False}
    engine, plain = serve_two(**small), serve_two(0, **small)
    assert engine.stats().num_draft_tokens > 0 == engine.stats().num_accepted_tokens
    assert plain.stats().num_preemptions_recompute > 0
    assert replace(engine.stats(), num_draft_tokens=0) == plain.stats()


@pytest.mark.parametrize("params", [SamplingParams(n=2), BeamSearchParams(beam_width=1, max_tokens=9)])
def test_forks_and_beams_have_no_drafts(params: Params) -> None:
    engine = serve_two(num_blocks=40)
    serve(engine, [([0, 1, 2], params), ([0, 1, 2, 0, 1, 2], params)])
    serve(engine, [([0, 1, 2, 0, 1], params)])  # its last prompt token is computed alone
    assert not any(any(step.values()) for step in engine.runner.drafts[12:])


def propose_at_random(run: Run, seed: int) -> Proposer:
    """The text that the request will have, its tokens replaced by others now and then; or a look-up."""
    rng, look_ups = random.Random(seed), random.Random(seed).random() < 0.2
    texts = {str(i): alone.outputs[0].token_ids for i, alone in enumerate(run.alone)}

    def propose(seq: Sequence, num: int) -> list[int]:
        wrong = rng.choice([0, 0.2, 1])
        guesses = guess(texts, lambda i: rng.random() >= wrong)(seq, rng.randint(0, num))
        return look_up(seq, num) if look_ups else guesses

    return propose


@pytest.mark.parametrize(("make_workload", "num"), [(mixed, 16), (forked, 10)])
def test_random_workloads(
    make_workload: Callable[[int], Workload], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request says what it says alone, in an engine without speculation; faults and aborts included."""
    config = Workload.config
    monkeypatch.setattr(test_random_runs, "FakeRunner", DraftingRunner)
    monkeypatch.setattr(
        Workload, "config", lambda self: replace(config(self), num_speculative_tokens=1 + self.seed % 6)
    )
    happened: Counter[str] = Counter()
    for seed in range(num):
        run = Run(make_workload(seed))
        run.engine.scheduler.propose = propose_at_random(run, seed)
        run.serve()
        stats = run.engine.stats()
        happened += run.happened
        happened["accepted"] += stats.num_accepted_tokens
        happened["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
    wanted = ["accepted", "rejected", "swap", "recompute", "cache hit", "copy on write", "stop by string"]
    missing = [event for event in wanted if happened[event] == 0]
    assert not missing, f"the workloads no longer cover everything: {missing}"


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────


def make_sequence(
    token_ids: list[int], draft_ids: list[int] = (), params: SamplingParams | None = None
) -> Sequence:
    params = params or SamplingParams()
    request = Request("me", None, token_ids, params, StopRules.of(params, len(token_ids), frozenset(), 99), 0)
    request.sequences[0].draft_ids = list(draft_ids)
    return request.sequences[0]


@pytest.mark.parametrize(
    ("token_ids", "num", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 1, 2, 3], 6, [4, 1, 2, 3, 4, 1]),  # the copy runs into itself
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1, [9]),  # the latest
        ([1, 2, 3, 8, 9, 2, 3, 7, 1, 2, 3], 1, [8]),  # three tokens before two
        ([0, 2, 3, 7, 1, 2, 3], 2, [7, 1]),
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
    ],
)
def test_look_up(token_ids: list[int], num: int, drafts: list[int]) -> None:
    assert look_up(make_sequence(token_ids), num) == drafts


@pytest.mark.parametrize(
    ("min_tokens", "drawn"), [(0, [3, 3, 4]), (2, [3, 3, 4]), (3, [3, 3, 5]), (4, [3, 3, 5])]
)
def test_each_row_knows_the_drafts_before_it(min_tokens: int, drawn: list[int]) -> None:
    """Token 3 leads by 1, but not after two of them; 4 ends the text, so it may be banned."""
    params = SamplingParams(
        temperature=0, frequency_penalty=0.6, stop_token_ids=[4], min_tokens=min_tokens, max_tokens=9
    )
    seq = make_sequence([1, 2], [3, 3], params)
    seq.num_scheduled_tokens = 4
    logits = torch.tensor([0.0, 0, 0, 10, 9, 8.9]).repeat(3, 1)
    (samples,) = sample_next_tokens(ScheduledBatch([seq]), logits)
    assert [sample.token_id for sample in samples] == drawn


def test_logits_that_are_not_finite() -> None:
    """After a wrong draft they belong to no text. After a right one the next step meets them."""

    def kept(draft_ids: list[int], logprobs: list[float]) -> list[int]:
        drawn = [Sample(token_id, x) for token_id, x in zip([3, 5, 6], logprobs, strict=True)]
        return [sample.token_id for sample in verify(draft_ids, drawn)]

    assert kept([3, 4], [-1.0, -1.0, math.nan]) == [3, 5]
    assert kept([3, 5], [-1.0, -1.0, math.nan]) == [3, 5]
    assert kept([3, 5], [-1.0, -1.0, -math.inf]) == [3, 5]
    assert kept([3, 5], [-1.0, -1.0, -1.0]) == [3, 5, 6]

    def draw(bad_row: int, **params: object) -> list[int]:
        """The tokens 3, 5 and 6 are the most likely ones; the logits of one row are not finite."""
        seq = make_sequence([1, 2], [3, 5], SamplingParams(temperature=0, max_tokens=9, **params))
        seq.num_scheduled_tokens = 4
        logits = torch.eye(7)[[3, 5, 6]]
        logits[bad_row] = math.nan
        (samples,) = sample_next_tokens(ScheduledBatch([seq]), logits)
        return [sample.token_id for sample in samples]

    assert draw(2) == [3, 5]
    assert draw(1) == [3]
    with pytest.raises(NonFiniteLogits, match="'me' at position 2"):
        draw(0)
    with pytest.raises(NoTokenAllowed, match="'me' at position 2"):
        draw(2, stop_token_ids=range(7), min_tokens=1)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_wrong_number_is_refused(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_speculative_tokens"):
        EngineConfig(num_speculative_tokens=value)


def test_a_trace_tells_accepted_drafts_from_a_chunk_of_a_prompt(tmp_path: Path) -> None:
    engine = tiny_engine(num_speculative_tokens=4, trace=tmp_path / "run.html")
    serve(engine, [(LINES, SamplingParams(temperature=0, max_tokens=20))])
    assert engine.stats().num_accepted_tokens > 0
    lines = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "computes 3 tokens, the last of its" in lines
    assert "left for later steps" not in lines
