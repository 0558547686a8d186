"""The scheduler: queues, token budget, preemption, prefix hits, failed steps. With the fake runner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import pytest
from conftest import tokens, tokens_of
from fake_runner import fake_engine, next_token, proposals
from harness import FailAtLine

from nanopaged import BeamSearchParams, LLMEngine, RequestOutput, SamplingParams
from nanopaged.scheduler import Scheduler

make = partial(fake_engine, preemption="recompute")


def params(max_tokens: int, **extra: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **extra)


def run(engine: LLMEngine) -> dict[str, list[list[int]]]:
    """To the end; request id → tokens of its outputs, in the order in which the requests finished.

    Those that finish in one step come in order of arrival: a batch may have any order.
    """
    done = {}
    while engine.has_unfinished_requests():
        for output in sorted(engine.step(), key=lambda output: output.metrics.arrival_time):
            assert (output.metrics.finish_time is not None) == output.finished
            if output.finished:
                done[output.request_id] = tokens_of([output])
        engine.check_invariants()
    return done


def said(prompt: list[int], num: int, noise: int = 0) -> list[int]:
    """What the fake model says after a prompt."""
    text = list(prompt)
    for _ in range(num):
        text.append(next_token(text, noise))
    return text[len(prompt) :]


def test_decodes_and_prompt_chunks_share_a_step() -> None:
    """Budget 8: a decode takes 1, and the 20-token prompt goes through in pieces of 7, 7 and 6."""
    engine = make(max_num_batched_tokens=8)
    engine.add_request("a", tokens(1, 4), params(10))
    engine.step()
    engine.add_request("b", tokens(2, 20), params(2))
    for _ in range(4):
        engine.step()
    assert engine.runner.steps == [{"a": 4}, *({"a": 1, "b": num} for num in (7, 7, 6, 1))]


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    """The head of the queue does not fit now; the small one behind it must not overtake."""
    engine = make(num_blocks=8, max_num_seqs=8)
    engine.add_request("running", tokens(1, 16), params(4))
    engine.step()
    engine.add_request("large", tokens(2, 24), params(2))
    engine.add_request("small", tokens(3, 4), params(2))
    engine.step()
    assert engine.runner.steps[-1] == {"running": 1}
    assert list(run(engine)) == ["running", "large", "small"]


def test_the_watermark_leaves_room_to_grow() -> None:
    """Ten blocks, two of them to be left free: a prompt of three blocks waits while one of six is running."""
    engine = make(num_blocks=10, watermark=0.2)
    engine.add_request("large", tokens(1, 23), params(6))
    engine.add_request("waits", tokens(2, 11), params(2))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    assert list(run(engine)) == ["large", "waits"]
    assert engine.stats().num_preemptions_recompute == 0


def test_an_empty_engine_admits_a_request_that_needs_every_block() -> None:
    engine = make(num_blocks=10, watermark=0.9)
    engine.add_request("a", tokens(1, 37), params(4))
    engine.step()
    assert engine.stats().num_used_blocks == 10
    assert list(run(engine)) == ["a"]


def test_the_latest_is_preempted_and_says_the_same_in_the_end() -> None:
    """Two requests outgrow the pool: the later gives its blocks back, and the earlier never waits."""
    engine = make(num_blocks=8, enable_prefix_caching=False)
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    while not engine.stats().num_preemptions_recompute:
        engine.step()
    preempted_at = len(engine.runner.steps)
    assert [request.num_preemptions for request in engine.requests.values()] == [0, 1]
    assert run(engine) == {"early": [said(tokens(1, 8), 20)], "late": [said(tokens(2, 8), 20)]}
    assert sum("early" in step for step in engine.runner.steps) == 20
    back = next(step for step in engine.runner.steps[preempted_at:] if "late" in step)
    assert back["late"] > 8, "it computes its prompt and what it had generated again"


def test_max_num_seqs_is_the_only_limit_of_running_sequences() -> None:
    """With memory and budget enough, 130 requests run in one step, and the next one waits."""
    engine = make(num_blocks=400, max_num_seqs=130, max_num_batched_tokens=2048)
    for i in range(131):
        engine.add_request(str(i), tokens(i % 90, 3), params(3))
    for _ in range(2):
        assert len(engine.step()) == 130
        assert (engine.stats().num_running, engine.stats().num_waiting) == (130, 1)
    assert list(run(engine)) == [str(i) for i in range(131)]


@pytest.mark.parametrize(("budget", "num_prompt"), [(2048, 7), (4, 9), (3, 8)])
def test_a_block_that_a_step_fills_exactly_is_found(budget: int, num_prompt: int) -> None:
    """By a decode (7 + 1 tokens), or by a chunk of a prompt that ends with a block or within one."""
    engine = make(max_num_batched_tokens=budget)
    engine.add_request("first", tokens(1, num_prompt), params(3))
    first = tokens(1, num_prompt) + run(engine)["first"][0]
    engine.add_request("again", first[:9], params(1))
    (output,) = engine.step()
    assert output.metrics.num_cached_tokens == 8


def test_a_preempted_prompt_finds_its_blocks_again() -> None:
    """With the prefix cache a victim's blocks often survive; coming back then costs only the rest.

    What it finds of itself is no prefix hit: `num_cached_tokens` speaks of the first admission.
    """
    engine = make(num_blocks=8)
    engine.add_request("early", tokens(1, 8), params(12))
    engine.add_request("late", tokens(2, 8), params(12))
    late = engine.requests["late"]
    run(engine)
    assert late.num_preemptions > 0
    assert late.num_cached_tokens == 0
    assert (engine.stats().prefix_cache_hits, engine.stats().prefix_cache_queries) == (0, 16)


def test_a_prompt_preempted_in_its_middle_is_no_prefix_hit() -> None:
    """When it comes back, it finds the blocks that it has filled. They do not count as cached."""
    engine = make(num_blocks=8, max_num_batched_tokens=4)
    engine.add_request("early", tokens(1, 4), params(8))
    engine.step()
    engine.add_request("late", tokens(2, 24), params(1))
    late = engine.requests["late"]
    while late.num_preemptions == 0:
        engine.step()
    assert late.first_token_time is None
    run(engine)
    assert sum(step.get("late", 0) for step in engine.runner.steps) == 24, "and computes only the rest"
    assert late.num_cached_tokens == 0


def test_twins_arriving_in_the_same_step_share_their_prompt() -> None:
    """Three equal prompts of 10 tokens in one step: the first computes 10, the others 2 each."""
    engine = make()
    for name in "abc":
        engine.add_request(name, tokens(1, 10), params(3))
    engine.step()
    assert engine.runner.steps[0] == {"a": 10, "b": 2, "c": 2}
    assert engine.stats().num_used_blocks == 2 + 3
    assert (engine.stats().prefix_cache_hits, engine.stats().num_prompt_tokens) == (16, 30)
    assert run(engine) == dict.fromkeys("abc", [said(tokens(1, 10), 3)])


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    engine = make()
    engine.add_request("a", tokens(1, 8), params(3))
    run(engine)
    engine.add_request("b", tokens(1, 8), params(3))
    (output,) = engine.step()
    assert engine.runner.steps[-1] == {"b": 4}
    assert output.metrics.num_cached_tokens == 4
    assert engine.stats().num_used_blocks == 2, "one shared block, and a private one that is computed again"
    again = engine.requests["b"]
    engine.runner.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    run(engine)
    assert again.num_cached_tokens == 4, "at the first admission"


def test_a_prompt_with_logprobs_is_neither_looked_up_nor_counted() -> None:
    """Every token of it is computed, though the cache has its first block."""
    engine = make()
    engine.add_request("a", tokens(1, 8), params(3))
    run(engine)
    engine.add_request("b", tokens(1, 8), SamplingParams(max_tokens=1, prompt_logprobs=0))
    (output,) = engine.step()
    assert engine.runner.steps[-1] == {"b": 8}
    assert output.metrics.num_cached_tokens == 0
    assert engine.stats().prefix_cache_queries == 8, "those of the first prompt"


def test_without_chunks_a_prompt_waits_until_a_step_has_room_for_it() -> None:
    """Budget 40: beside a prompt of 30 tokens one of 20 must wait, and one of 10 fits. It takes no block."""
    engine = make(max_model_len=40, max_num_batched_tokens=40, enable_chunked_prefill=False)
    engine.add_request("a", tokens(1, 30), params(3))
    engine.add_request("b", tokens(2, 20), params(3))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_used_blocks) == (1, 8)
    engine.step()
    engine.add_request("c", tokens(3, 30), params(3))
    engine.add_request("d", tokens(4, 8), params(3))
    engine.step()
    assert engine.runner.steps == [{"a": 30}, {"a": 1, "b": 20}, {"a": 1, "b": 1, "c": 30, "d": 8}]


def test_a_failed_step_loses_nothing() -> None:
    """All requests wait again with their tokens, also one that shared blocks published in that step."""
    engine = make()
    engine.add_request("old", tokens(5, 6), params(6))
    engine.step()
    for name in "abcd":
        engine.add_request(name, tokens(1, 10), params(3))
    engine.runner.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    engine.check_invariants()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.prefix_cache_hits) == (0, 5, 0)
    assert stats.num_cached_blocks == 0, "nothing that was never computed can be found"
    texts = run(engine)
    assert list(texts) == [*"abcd", "old"]
    assert texts == dict.fromkeys("abcd", [said(tokens(1, 10), 3)]) | {"old": [said(tokens(5, 6), 6)]}


LIKELY = proposals(tokens(3, 3), k=1)[0].token_id


@pytest.mark.parametrize(
    "asked",
    [
        params(1),
        params(2, n=2, temperature=1),
        BeamSearchParams(beam_width=2, max_tokens=2, stop_token_ids=[LIKELY], early_stopping=False),
    ],
)
def test_an_update_may_be_interrupted_at_any_line(asked: SamplingParams | BeamSearchParams) -> None:
    """The output is the same, and has its times.

    Past bugs: a hypothesis was found twice, and a request had ended without a `finish_time`.
    """

    def output(fault: FailAtLine) -> RequestOutput:
        engine = make(num_blocks=8)
        engine.add_request("a", tokens(3, 3), asked)
        while engine.has_unfinished_requests():
            with suppress(KeyboardInterrupt), fault:
                (output,) = engine.step()
            engine.check_invariants()
        return output

    undisturbed = output(FailAtLine(0, [], Scheduler, KeyboardInterrupt))
    for number in count(1):
        fault = FailAtLine(number, [Scheduler.update], Scheduler, KeyboardInterrupt)
        found = output(fault)
        assert found.outputs == undisturbed.outputs, fault.raised
        assert found.metrics.arrival_time <= found.metrics.first_token_time <= found.metrics.finish_time
        if fault.raised is None:
            break
    assert number > 30


@pytest.mark.parametrize(
    ("rank", "lengths", "expected"),
    [
        (lambda request: request.num_prompt_tokens, (12, 4, 8), ["b", "c", "a"]),
        (lambda request: -request.arrival_time, (12, 12, 12), ["c", "b", "a"]),
    ],
)
def test_another_rank_is_another_policy(
    rank: Callable, lengths: tuple[int, ...], expected: list[str]
) -> None:
    """The shortest prompt first, or the last one. The last in rank is preempted, also if it arrived first."""
    engine = make(num_blocks=8, watermark=0)
    engine.scheduler.rank = rank
    for i, name in enumerate("abc"):
        engine.add_request(name, tokens(30 * i, lengths[i]), params(12))
        engine.step()
    assert list(run(engine)) == expected
    assert engine.stats().num_preemptions_recompute > 0


def test_a_rank_that_raises_leaves_nothing_queued() -> None:
    """Past bugs: the request was in no queue, or others were in none, and the engine waited forever."""
    engine = make(num_blocks=8)
    for name in "ab":
        engine.add_request(name, tokens(4, 4), params(4))
    engine.scheduler.rank = lambda request: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.add_request("c", tokens(4, 4), params(4))
    assert sorted(run(engine)) == ["a", "b"]
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_equal_ranks_are_served_in_order_of_arrival(preemption: str) -> None:
    """Preempted requests before new ones: their prompts have been computed."""
    engine = make(num_blocks=20, watermark=0, preemption=preemption, num_host_blocks=100)
    engine.scheduler.rank = lambda request: 0
    for i in range(12):
        engine.add_request(str(i), tokens(i, 12), params(30))
    assert list(run(engine)) == [str(i) for i in range(12)]
    stats = engine.stats()
    assert stats.num_preemptions_recompute + stats.num_preemptions_swap > 3


def test_a_long_queue_costs_a_step_nothing() -> None:
    """If none is admitted, a step asks for no ranks, however many requests wait."""
    engine, calls = make(num_blocks=8, watermark=0), []
    engine.scheduler.rank = lambda request: calls.append(request) or request.num_prompt_tokens
    engine.add_request("first", tokens(1, 4), params(28))
    for i in range(1000):
        engine.add_request(f"waits {i}", tokens(2, 29 + i % 2), params(2))
    assert len(calls) == 1001
    for _ in range(5):
        engine.step()
    assert len(calls) == 1001
    assert engine.stats().num_waiting == 1000
