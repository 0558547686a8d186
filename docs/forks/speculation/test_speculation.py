"""Speculative decoding changes how many steps a text takes, and nothing else.

Most proposers here know the text, and make mistakes on purpose: so every number of accepted drafts occurs.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import pytest
import speculation
import test_random_runs
from conftest import FAMILIES, Oracle, memory_that_was_never_written, random_prompts
from fake_runner import FakeRunner
from faults import STAGES
from random_workloads import Workload, forked, mixed, siblings, tiny
from serving import KINDS, serve, tokens_of
from speculation import LLM, SpeculatingEngine, SpeculatingScheduler, SpeculationConfig, look_up, with_drafts
from test_oracle import check_logprobs
from test_random_runs import Run, fake_model, large_engine, serve_random

import nanopaged
from nanopaged import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.sequence import NonFiniteLogits, Request, ScheduledBatch, Sequence, StepResult

assert memory_that_was_never_written  # a fixture: small KV caches begin full of NaN
WRONG = {"truth": 0.0, "half": 0.3, "garbage": 1.0}  # the share of wrong tokens among a proposer's
GREEDY = SamplingParams(temperature=0, max_tokens=18, logprobs=2, ignore_eos=True)


def guess(texts: list[list[list[int]]], wrong: float) -> Callable[[Sequence, int], list[int]]:
    """Propose the known output of each request and sequence, with this share of other tokens."""
    rng = random.Random(0)

    def propose(seq: Sequence, num: int) -> list[int]:
        text = texts[int(seq.request.request_id)][seq.index][seq.num_output_tokens :][:num]
        return [(token + 1) % 97 if rng.random() < wrong else token for token in text]

    return propose


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("preemption", ["", "swap", "recompute"])
@pytest.mark.parametrize("case", [("truth", 4, 99), ("half", 7, 9), ("garbage", 1, 99), ("look-up", 16, 9)])
def test_greedy_is_what_transformers_says(oracle: Oracle, case: tuple, preemption: str) -> None:
    """Tokens and log-probabilities; the smallest pool holds the longest request to the last slot."""
    proposer, size, budget = case
    prompts = [*random_prompts(4, seed=5, longest=20), [5, 6, 7, 8] * 6]
    texts = [oracle.greedy(prompt, 18, ignore_eos=True) for prompt in prompts]
    options: dict[str, Any] = {"block_size": size, "max_num_batched_tokens": budget, "watermark": 0.0}
    small = {"num_blocks": math.ceil((24 + 18 - 1) / size), "preemption": preemption}
    llm = LLM(oracle.folder, dtype="float32", **options, **small if preemption else {"num_blocks": 200})
    engine: Any = llm.engine
    if proposer in WRONG:
        engine.scheduler.propose = guess([[text] for text in texts], WRONG[proposer])
    outputs = serve(llm, prompts, GREEDY)
    assert tokens_of(outputs) == texts
    for output, prompt, text in zip(outputs, prompts, texts, strict=True):
        rows = oracle.logprobs(prompt + text)[len(prompt) - 1 :]
        check_logprobs(output.outputs[0].logprobs, text, rows, num_top=2)
    share = engine.scheduler.num_accepted_tokens / max(1, engine.scheduler.num_draft_tokens)
    assert {"truth": share == 1, "garbage": share == 0, "half": 0 < share < 1}.get(proposer, True)
    assert not preemption or getattr(engine.stats(), f"num_preemptions_{preemption}") > 0
    if proposer == "truth" and not preemption:  # in the first step the prompts, then five tokens in each
        assert engine.stats().num_steps == 1 + math.ceil(17 / 5)


@pytest.mark.parametrize("oracle", ["llama"], indirect=True)
def test_logits_that_are_not_finite(oracle: Oracle) -> None:
    """A token makes all NaN: a wrong draft of it changes nothing, a prompt with it fails as before."""
    prompts = random_prompts(3, seed=8, longest=9)
    texts = [oracle.greedy(prompt, 18, ignore_eos=True) for prompt in prompts]
    bad = min(set(range(97)) - set(chain(*prompts, *texts)))
    engine: Any = (llm := LLM(oracle.folder, dtype="float32", num_blocks=40, block_size=4)).engine
    truth = guess([[text] for text in texts], 0.0)
    engine.scheduler.propose = lambda seq, num: [*truth(seq, num)[:1], bad, bad][:num]
    engine.runner.model.embed_tokens.weight.data[bad] = math.nan
    assert tokens_of(serve(llm, prompts, GREEDY)) == texts
    assert engine.scheduler.num_draft_tokens > 0
    engine.add_request("0", prompts[0], GREEDY)
    engine.step()
    engine.add_request("bad", [1, bad], GREEDY)
    with pytest.raises(NonFiniteLogits, match="'bad' at position 2"):
        engine.step()


LINES = "To be, or not to be.\nTo be, or not to be.\nTo be, or"
ENDS = SamplingParams(stop=["e", " th"], min_tokens=6, top_p=0.8, seed=1, logprobs=0)
ASKED = [*KINDS.values(), ENDS, replace(ENDS, stop_token_ids=range(3, 500, 3), stop="ou", prompt_logprobs=1)]


SMALL = {"block_size": 4, "num_blocks": 50, "max_num_batched_tokens": 12}


@pytest.mark.parametrize(("proposer", "small"), [("half", {}), ("half", SMALL), ("truth", SMALL), ("", {})])
def test_sampled_is_what_the_engine_says_without_drafts(proposer: str, small: dict[str, Any]) -> None:
    """Filters, penalties, bans, stop strings and tokens, log-probabilities, n = 3 and beams."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_blocks": 300}
    plain, llm = nanopaged.LLM(**options), LLM(**options | small, preemption="swap", num_speculative_tokens=6)
    expected, engine = serve(plain, [LINES] * len(ASKED), ASKED), llm.engine
    if proposer:  # else tokens are looked up
        texts = [tokens_of([output]) for output in expected]
        engine.scheduler.propose = guess(texts, WRONG[proposer])
    for got, want in zip(serve(llm, [LINES] * len(ASKED), ASKED), expected, strict=True):
        for ours, theirs in zip(got.outputs, want.outputs, strict=True):
            rounded = [pytest.approx(row, abs=1e-4) for row in theirs.logprobs or ()] or None
            logprob = pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            assert ours == replace(theirs, logprobs=rounded, cumulative_logprob=logprob, score=ours.score)
    assert 0 < engine.scheduler.num_accepted_tokens < engine.scheduler.num_draft_tokens
    assert (engine.stats().num_preemptions_swap > 0) == bool(small)
    if not small:  # nothing is evicted: a later prompt finds the same blocks
        assert engine.block_manager.index.keys() == plain.engine.block_manager.index.keys()


class DraftingRunner(FakeRunner):
    """The fake runner, with drafts. Their K/V is written as any other, and must never be read later."""

    def execute(self, batch: Any) -> StepResult:
        drafts: dict[Sequence, list[int]] = batch.drafts
        self.drafts: list[dict[str, int]] = getattr(self, "drafts", [])  # of each step, by request
        self.drafts.append({seq.request.request_id: len(drafts.get(seq, ())) for seq in batch.sequences})
        longer = {seq: with_drafts(seq, drafts[seq]) if seq in drafts else seq for seq in batch.sequences}
        order = sorted(longer, key=lambda seq: longer[seq].num_scheduled_tokens > 1)
        num_decodes = batch.num_decodes - len(drafts)
        result = super().execute(ScheduledBatch([longer[seq] for seq in order], num_decodes, batch.moves))
        samples = dict(zip(order, result.samples, strict=True))
        for seq, its in drafts.items():
            samples[seq] = [self.sample(with_drafts(seq, its[:i]))[0] for i in range(len(its) + 1)]
        return StepResult([samples[seq] for seq in batch.sequences], result.prompt_logprobs)


def serve_two(num_drafts: int = 5, params: Any = None, **options: Any) -> tuple[Any, list[dict[str, int]]]:
    """Two requests on the fake model, which never says the token 9 that is guessed; and the drafts."""
    options = {"num_blocks": 30, "max_model_len": 64, "watermark": 0.0, "block_size": 4} | options
    config = SpeculationConfig(fake_model(), num_speculative_tokens=num_drafts, **options)
    engine: Any = SpeculatingEngine(config, DraftingRunner(options["num_blocks"], 4))
    engine.scheduler.propose = lambda seq, num: [9] * 100  # more than it is asked for
    params = params or SamplingParams(max_tokens=12, ignore_eos=True)
    serve(cast(LLM, SimpleNamespace(engine=engine)), [[0, 1, 2, 0, 1], [2] * 7], params)
    return engine, engine.runner.drafts


def test_drafts_take_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of max_tokens, the budget, rows of logits, and blocks; nothing is preempted for them."""
    # The last of 12 tokens is drawn after the eleventh: from the seventh on, fewer drafts have a use.
    assert [step["0"] for step in serve_two()[1]] == [0, 5, 5, 5, 5, 5, 5, 4, 3, 2, 1, 0]
    # Budget 8: the rest of a prompt comes before drafts, and the first request's drafts before others'.
    engine, drafts = serve_two(max_num_batched_tokens=8)
    assert drafts[1:4] == [{"0": 3, "1": 0}, {"0": 5, "1": 1}, {"0": 5, "1": 1}]
    assert engine.runner.most_tokens == 8
    with monkeypatch.context() as patch:  # memory for seven rows, two of which are the requests' own
        patch.setattr(speculation, "LOGITS_TILE", 1)
        assert serve_two(max_num_seqs=7)[1][1:3] == [{"0": 5, "1": 0}] * 2
    small: dict[str, Any] = {"num_blocks": 5, "preemption": "recompute", "enable_prefix_caching": False}
    (engine, drafts), (plain, _) = serve_two(**small), serve_two(0, **small)
    assert engine.scheduler.num_draft_tokens == sum(sum(step.values()) for step in drafts) > 0
    assert engine.stats() == plain.stats()
    assert plain.stats().num_preemptions_recompute > 0
    # The last token of a prompt, alone in a step, has drafts, but not before a fork or a beam search.
    for params, num in (SamplingParams(), 3), (SamplingParams(n=2), 0), (BeamSearchParams(beam_width=1), 0):
        assert serve_two(5, params, max_num_batched_tokens=4, max_num_seqs=params.width)[1][1]["0"] == num


@pytest.mark.parametrize(("make_workload", "num"), [(mixed, 30), (forked, 20), (siblings, 20), (tiny, 6)])
def test_random_workloads(make_workload: Any, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request says what it says alone, without drafts. They are right, wrong or looked up by chance."""
    large_engine("tiny" if make_workload is tiny else "fake")  # which is kept, and has no drafts
    config = Workload.config

    def with_options(workload: Workload) -> SpeculationConfig:
        return SpeculationConfig(**vars(config(workload)), num_speculative_tokens=1 + workload.seed % 6)

    monkeypatch.setattr(Workload, "config", with_options)
    monkeypatch.setattr(test_random_runs, "FakeRunner", DraftingRunner)
    monkeypatch.setattr(test_random_runs, "LLMEngine", SpeculatingEngine)
    monkeypatch.setitem(STAGES, "update", (*STAGES["update"], SpeculatingScheduler.update))

    class DraftingRun(Run):
        def serve(self) -> None:
            scheduler, seed = self.engine.scheduler, self.workload.seed
            if seed % 5:  # else they are looked up
                texts = [tokens_of([output]) for output in self.alone]
                scheduler.propose = guess(texts, (0.0, 0.2, 0.5, 1.0)[seed % 4])
            super().serve()
            self.happened["accepted"] += scheduler.num_accepted_tokens
            self.happened["draft"] += scheduler.num_draft_tokens

    events = ["swap", "recompute", "cache hit", "copy on write", "fault: update"]
    happened = serve_random(make_workload, num, [] if make_workload is tiny else events, DraftingRun)
    assert 0 < happened["accepted"] < happened["draft"]


def test_look_up_and_what_is_refused() -> None:
    for text, drafts in (
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3, 4]),  # the copy runs into itself
        ([1, 2, 3, 8, 1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3], [9, 8, 7, 6, 5]),  # the latest
        ([7, 2, 3, 8, 1, 2, 3], []),  # two tokens are not three
        ([5, 5, 5, 5], [5, 5, 5, 5, 5]),
        ([5, 5, 5], []),
    ):
        assert look_up(3, Sequence(cast(Request, None), text), 5) == drafts
    for options in {"tensor_parallel_size": 2}, {"trace": "run.html"}, {"ngram_size": 0}:
        with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
            LLM(**options)
    with pytest.raises(TypeError, match="drafts need a SpeculationConfig"):
        SpeculatingEngine(EngineConfig(num_blocks=8))
