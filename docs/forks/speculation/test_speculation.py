"""Speculative decoding changes how many steps a text takes, and nothing else.

Most proposers here know the text, and make mistakes on purpose: so every number of accepted drafts occurs.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import harness
import pytest
import speculation
from harness import GREEDY, SMALL, Oracle, Run, Workload, num_preempted, serve, tokens_of
from speculation import LLM, SpeculatingEngine, look_up

import nanopaged
from nanopaged import SamplingParams
from nanopaged.sequence import Request, Sequence, StepResult

WRONG = {"truth": 0.0, "half": 0.3, "garbage": 1.0}  # the share of wrong tokens among a proposer's
POOL = {"num_blocks": 40, "block_size": 4}
TOP = replace(GREEDY, logprobs=2)


def guess(texts: list[list[list[int]]], wrong: float) -> Callable[[Sequence, int], list[int]]:
    """Propose the known output of each request and sequence, with this share of other tokens."""
    rng = random.Random(0)

    def propose(seq: Sequence, num: int) -> list[int]:
        text = texts[int(seq.request.request_id)][seq.index][seq.num_output_tokens :][:num]
        return [(token + 1) % 97 if rng.random() < wrong else token for token in text]

    return propose


def say(llm: nanopaged.LLM, prompts: list[list[int]], params: Any) -> list[list[list[int]]]:
    """The outputs of each request."""
    return [tokens_of([output]) for output in serve(llm, prompts, params)]


@pytest.mark.parametrize("preemption", ["", "swap", "recompute"])
@pytest.mark.parametrize("case", [("truth", 4, 99), ("half", 7, 9), ("garbage", 1, 99), ("look-up", 16, 9)])
def test_greedy_is_what_transformers_says(oracle: Oracle, case: tuple, preemption: str) -> None:
    """Tokens and log-probabilities; the smallest pool holds the longest request to the last slot."""
    proposer, size, budget = case
    prompts = [*harness.random_prompts(4, seed=5, longest=20), [5, 6, 7, 8] * 6]
    options: dict[str, Any] = SMALL | {"block_size": size, "max_num_batched_tokens": budget}
    options |= {"num_blocks": math.ceil((24 + 16 - 1) / size) if preemption else 200}
    llm = LLM(oracle.folder, preemption=preemption or "swap", **options)
    plain = nanopaged.LLM(oracle.folder, **options | {"num_blocks": 200})
    texts = say(plain, prompts, TOP)
    scheduler: Any = llm.engine.scheduler
    if proposer in WRONG:
        scheduler.propose = guess(texts, WRONG[proposer])
    oracle.check(serve(llm, prompts, TOP))
    share = scheduler.num_accepted_tokens / max(1, scheduler.num_draft_tokens)
    assert {"truth": share == 1, "garbage": share == 0, "half": 0 < share < 1}.get(proposer, True)
    assert (num_preempted(llm) > 0) == bool(preemption)
    if not preemption:  # nothing was evicted: a later prompt finds the same blocks
        assert llm.engine.block_manager.prefix_index.keys() == plain.engine.block_manager.prefix_index.keys()
    if proposer == "truth" and not preemption:  # in the first step the prompts, then five tokens in each
        assert llm.engine.stats().num_steps == 1 + math.ceil(15 / 5)


def serve_two(qwen3: Oracle, num_drafts: int = 5, **options: Any) -> tuple[Any, list[dict[str, int]]]:
    """Two requests, for which a token is guessed that neither says; and the drafts of each step."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    prompts = [[0, 1, 2, 0, 1], [2] * 7]
    said = chain(*chain(*say(nanopaged.LLM(qwen3.folder, **POOL), prompts, params)))
    unsaid = min(set(range(97)) - set(said))
    options = {"num_blocks": 30, "max_model_len": 64, "watermark": 0.0, "block_size": 4} | options
    llm, drafts = LLM(qwen3.folder, num_speculative_tokens=num_drafts, **options), list[dict[str, int]]()
    engine: Any = llm.engine
    engine.scheduler.propose = lambda seq, num: [unsaid] * 100  # more than it is asked for
    execute = engine.runner.execute

    def note_and_execute(batch: Any) -> StepResult:
        found = {seq.request.request_id: len(batch.drafts.get(seq, ())) for seq in batch.sequences}
        drafts.append(found)
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch.sequences) + sum(found.values())
        assert num_tokens <= engine.config.max_num_batched_tokens
        return execute(batch)

    engine.runner.execute = note_and_execute
    serve(llm, prompts, params)
    return engine, drafts


def test_drafts_take_what_is_left(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of max_tokens, the budget, rows of logits, and blocks; nothing is preempted for them."""
    # The last of 12 tokens is drawn after the eleventh: from the seventh on, fewer drafts have a use.
    assert [step["0"] for step in serve_two(qwen3)[1]] == [0, 5, 5, 5, 5, 5, 5, 4, 3, 2, 1, 0]
    # Budget 8: the rest of a prompt comes before drafts, and the first request's drafts before others'.
    _, drafts = serve_two(qwen3, max_num_batched_tokens=8)
    assert drafts[1:4] == [{"0": 3, "1": 0}, {"0": 5, "1": 1}, {"0": 5, "1": 1}]
    with monkeypatch.context() as patch:  # memory for seven rows, two of which are the requests' own
        patch.setattr(speculation, "LOGITS_TILE", 1)
        assert serve_two(qwen3, max_num_seqs=7)[1][1:3] == [{"0": 5, "1": 0}] * 2
    small: dict[str, Any] = {"num_blocks": 5, "preemption": "recompute", "enable_prefix_caching": False}
    (engine, drafts), (plain, _) = serve_two(qwen3, **small), serve_two(qwen3, 0, **small)
    assert engine.scheduler.num_draft_tokens == sum(sum(step.values()) for step in drafts) > 0
    assert engine.stats() == plain.stats()
    assert plain.stats().num_preemptions_recompute > 0


class DraftingRun(Run):
    """Drafts are right, wrong, or looked up. What a request says alone has none."""

    engine_class = SpeculatingEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.options = {"num_speculative_tokens": 1 + workload.seed % 6}
        super().__init__(folder, workload)
        if workload.seed % 5:
            texts = [tokens_of([output]) for output in self.alone]
            self.engine.scheduler.propose = guess(texts, (0.0, 0.2, 0.5, 1.0)[workload.seed % 4])

    def serve(self) -> None:
        super().serve()
        self.happened["accepted"] += self.engine.scheduler.num_accepted_tokens
        self.happened["draft"] += self.engine.scheduler.num_draft_tokens


def test_random_workloads(qwen3: Oracle) -> None:
    events = ["swap", "recompute", "cache hit", "copy on write", "fault: update", "fault: execute"]
    happened = harness.random_runs(DraftingRun, qwen3.folder, 30, events)
    assert 0 < happened["accepted"] < happened["draft"]


LOOKED_UP = [
    ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3, 4]),  # the copy runs into itself
    ([1, 2, 3, 8, 1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3], [9, 8, 7, 6, 5]),  # the latest
    ([7, 2, 3, 8, 1, 2, 3], []),  # two tokens are not three
    ([5, 5, 5], []),
]


@pytest.mark.parametrize(("text", "drafts"), LOOKED_UP)
def test_look_up(text: list[int], drafts: list[int]) -> None:
    assert look_up(3, Sequence(cast(Request, None), text), 5) == drafts


def test_what_is_refused() -> None:
    options = {"tensor_parallel_size": 2, "trace": "run.html", "ngram_size": 0}
    harness.check_refused(LLM, [({name: value}, f"{name} is ") for name, value in options.items()])
