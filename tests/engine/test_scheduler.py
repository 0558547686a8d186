"""The scheduler: queues, token budget, preemption, prefix hits, failed steps. With the fake runner."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import fake_runner
import pytest
from conftest import tokens
from fake_runner import FakeRunner, next_token

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.sequence import Sample, ScheduledBatch, Sequence, StepResult

MakeEngine = Callable[..., LLMEngine]


class RecordingRunner(FakeRunner):
    """Keeps what each step computed: {request_id: number of tokens}."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.steps: list[dict[str, int]] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.steps.append({seq.request.request_id: seq.num_scheduled_tokens for seq in batch.sequences})
        return super().execute(batch)


@pytest.fixture
def make(config_only: Path) -> MakeEngine:
    def make_engine(num_blocks: int = 64, block_size: int = 4, **config: object) -> LLMEngine:
        options = {"preemption": "recompute"}
        runner = RecordingRunner(num_blocks, block_size, config.pop("num_host_blocks", 0))
        return LLMEngine(EngineConfig(model=config_only, block_size=block_size, **options | config), runner)

    return make_engine


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """To the end; request id → its output, in the order in which they finished."""
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert (output.metrics.finish_time is not None) == output.finished
            if output.finished:
                done[output.request_id] = output
        engine.check_invariants()
    return done


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_decodes_and_prompt_chunks_share_a_step(make: MakeEngine) -> None:
    """Budget 8: a decode takes 1, and the 20-token prompt goes through in pieces of 7, 7 and 6."""
    engine = make(max_num_batched_tokens=8)
    engine.add_request("a", tokens(1, 4), params(10))
    engine.step()
    engine.add_request("b", tokens(2, 20), params(2))
    for _ in range(4):
        engine.step()
    assert engine.runner.steps == [{"a": 4}, *({"a": 1, "b": num} for num in (7, 7, 6, 1))]


def test_a_stream_of_arrivals_does_not_starve_a_decode(make: MakeEngine) -> None:
    """A new prompt arrives at every step; the first request still gets a token in each step."""
    engine = make(num_blocks=2000, max_num_batched_tokens=32, max_num_seqs=1000)
    engine.add_request("first", tokens(1, 4), params(20))
    for i in range(20):
        engine.add_request(f"late-{i}", tokens(2 + i, 40), params(30))
        engine.step()
    assert all("first" in step for step in engine.runner.steps[:20])
    assert "first" not in engine.requests, "20 steps, 20 tokens"


def test_first_come_first_served_even_if_a_later_one_would_fit(make: MakeEngine) -> None:
    """The head of the queue does not fit now; the small one behind it must not overtake."""
    engine = make(num_blocks=8, max_num_seqs=8)
    engine.add_request("running", tokens(1, 16), params(4))
    engine.step()
    engine.add_request("large", tokens(2, 24), params(2))
    engine.add_request("small", tokens(3, 4), params(2))
    engine.step()
    assert engine.runner.steps[-1] == {"running": 1}
    assert list(run(engine)) == ["running", "large", "small"]


def test_the_watermark_leaves_room_to_grow(make: MakeEngine) -> None:
    """Ten blocks, two of them to be left free: a prompt of three blocks waits while one of six is running."""
    engine = make(num_blocks=10, watermark=0.2)
    engine.add_request("large", tokens(1, 23), params(6))
    engine.add_request("waits", tokens(2, 11), params(2))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    assert list(run(engine)) == ["large", "waits"]
    assert engine.stats().num_preemptions_recompute == 0


def test_an_empty_engine_admits_a_request_that_needs_every_block(make: MakeEngine) -> None:
    engine = make(num_blocks=10, watermark=0.9)
    engine.add_request("a", tokens(1, 37), params(4))
    engine.step()
    assert engine.stats().num_used_blocks == 10
    assert list(run(engine)) == ["a"]


def test_the_latest_is_preempted_and_says_the_same_in_the_end(make: MakeEngine) -> None:
    """Two requests outgrow the pool: the later gives its blocks back, and the earlier never waits."""
    engine = make(num_blocks=8, enable_prefix_caching=False)
    engine.add_request("early", tokens(1, 8), params(20))
    engine.add_request("late", tokens(2, 8), params(20))
    while not engine.stats().num_preemptions_recompute:
        engine.step()
    preempted_at = len(engine.runner.steps)
    outputs = run(engine)
    assert sum("early" in step for step in engine.runner.steps) == 20
    assert [outputs[name].metrics.num_preemptions for name in ("early", "late")] == [0, 1]
    back = next(step for step in engine.runner.steps[preempted_at:] if "late" in step)
    assert back["late"] > 8, "it computes its prompt and what it had generated again"
    for first, request_id in ((1, "early"), (2, "late")):
        expected = tokens(first, 8)
        for _ in range(20):
            expected.append(next_token(expected))
        assert tokens_of(outputs[request_id]) == expected[8:]


def test_a_sibling_waits_for_the_one_whose_blocks_it_shares(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three outputs, of which the last two say the same, are recomputed without chunks.

    Beside the first one (25 tokens) the budget has no room for the second (21 tokens). The last one would
    have room, since it shares all blocks of the second but one; these blocks are not computed yet, and the
    runner fails if a block is read that was not written.
    """
    monkeypatch.setattr(fake_runner, "next_token", lambda token_ids, noise, _: int(noise > 0))
    off = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    engine = make(num_blocks=25, max_model_len=34, max_num_batched_tokens=34, **off)
    engine.add_request("early", tokens(1, 8), params(26))
    engine.add_request("family", tokens(2, 4), SamplingParams(n=3, max_tokens=30, ignore_eos=True))
    output = run(engine)["family"]
    assert output.metrics.num_preemptions > 0
    assert [c.token_ids for c in output.outputs] == [[0] * 30, [1] * 30, [1] * 30]


def test_preempted_beams_propose_anew(make: MakeEngine) -> None:
    """The nine outputs leave one token of the budget: one of two beams has proposed when both are preempted.

    Later both come back in one step, and the other beam has a single token to compute. Single tokens come
    first in a batch, so the search would advance before the first beam is computed.
    """
    engine = make(num_blocks=20, max_num_batched_tokens=10)
    engine.add_request("early", tokens(1, 4), SamplingParams(n=9, max_tokens=6, ignore_eos=True))
    engine.add_request("beams", tokens(2, 7), BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True))
    output = run(engine)["beams"]
    assert output.metrics.num_preemptions > 0
    assert [len(completion.token_ids) for completion in output.outputs] == [8, 8]


def test_several_victims_resume_in_order_of_arrival(make: MakeEngine) -> None:
    engine = make(num_blocks=12, block_size=2, enable_prefix_caching=False)
    for i in range(4):
        engine.add_request(str(i), tokens(10 * i + 1, 6), params(12))
    assert list(run(engine)) == ["0", "1", "2", "3"]
    assert engine.stats().num_preemptions_recompute >= 2


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_preempts_as_many_as_it_needs(make: MakeEngine, preemption: str) -> None:
    """In the step after their fork, four outputs need a block each, and each of four victims has one."""
    engine = make(num_blocks=5, watermark=0, preemption=preemption, num_host_blocks=9)
    engine.add_request("early", tokens(1, 4), SamplingParams(n=4, max_tokens=2, ignore_eos=True))
    for i in range(4):
        engine.add_request(str(i), tokens(10 + i, 3), params(2))
    engine.step()
    assert engine.runner.steps[-1].keys() == {"early", "0", "1", "2", "3"}
    (output,) = engine.step()
    assert (output.request_id, output.finished) == ("early", True)
    assert getattr(engine.stats(), f"num_preemptions_{preemption}") == 4
    assert list(run(engine)) == ["0", "1", "2", "3"]


def test_max_num_seqs_is_the_only_limit_of_running_sequences(make: MakeEngine) -> None:
    """With memory and budget enough, 130 requests run in one step, and the next one waits."""
    engine = make(num_blocks=400, max_num_seqs=130, max_num_batched_tokens=2048)
    for i in range(131):
        engine.add_request(str(i), tokens(i % 90, 3), params(3))
    for _ in range(2):
        assert len(engine.step()) == 130
        assert (engine.stats().num_running, engine.stats().num_waiting) == (130, 1)
    assert list(run(engine)) == [str(i) for i in range(131)]


@pytest.mark.parametrize(("budget", "num_prompt"), [(2048, 7), (4, 9), (3, 8)])
def test_a_block_that_a_step_fills_exactly_is_found(make: MakeEngine, budget: int, num_prompt: int) -> None:
    """By a decode (7 + 1 tokens), or by a chunk of a prompt that ends with a block or within one."""
    engine = make(max_num_batched_tokens=budget)
    engine.add_request("first", tokens(1, num_prompt), params(3))
    first = tokens(1, num_prompt) + tokens_of(run(engine)["first"])
    engine.add_request("again", first[:9], params(1))
    assert run(engine)["again"].metrics.num_cached_tokens == 8


def test_a_preempted_prompt_finds_its_blocks_again(make: MakeEngine) -> None:
    """With the prefix cache a victim's blocks often survive; coming back then costs only the rest.

    What it finds of itself is no prefix hit: `num_cached_tokens` speaks of the first admission.
    """
    engine = make(num_blocks=8)
    engine.add_request("early", tokens(1, 8), params(12))
    engine.add_request("late", tokens(2, 8), params(12))
    metrics, stats = run(engine)["late"].metrics, engine.stats()
    assert metrics.num_preemptions > 0
    assert metrics.num_cached_tokens == 0
    assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (0, 16)


def test_twins_arriving_in_the_same_step_share_their_prompt(make: MakeEngine) -> None:
    """Three equal prompts of 10 tokens in one step: the first computes 10, the others 2 each."""
    engine = make()
    for name in "abc":
        engine.add_request(name, tokens(1, 10), params(3))
    engine.step()
    assert engine.runner.steps[0] == {"a": 10, "b": 2, "c": 2}
    assert engine.stats().num_used_blocks == 2 + 3
    assert (engine.stats().prefix_cache_hits, engine.stats().num_prompt_tokens) == (16, 30)
    a, b, c = map(tokens_of, run(engine).values())
    assert a == b == c


def test_a_twin_arriving_while_the_first_is_half_prefilled(make: MakeEngine) -> None:
    """Budget 8, a prompt of 20 tokens; an equal prompt arrives when 8 are computed, and shares 16."""
    engine = make(max_num_batched_tokens=8)
    engine.add_request("a", tokens(1, 20), params(3))
    engine.step()
    engine.add_request("b", tokens(1, 20), params(3))
    a, b = map(tokens_of, run(engine).values())
    assert engine.runner.steps[:3] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 4}]
    assert a == b


def test_a_fully_cached_prompt_computes_its_last_block_again(make: MakeEngine) -> None:
    engine = make()
    engine.add_request("a", tokens(1, 8), params(3))
    run(engine)
    engine.add_request("b", tokens(1, 8), params(3))
    (output,) = engine.step()
    assert engine.runner.steps[-1] == {"b": 4}
    assert output.metrics.num_cached_tokens == 4
    assert engine.stats().num_used_blocks == 2, "one shared block, and a private one that is computed again"
    run(engine)


def test_a_prompt_with_logprobs_is_neither_looked_up_nor_counted(make: MakeEngine) -> None:
    """Every token of it is computed, though the cache has its first block."""
    engine = make()
    engine.add_request("a", tokens(1, 8), params(3))
    run(engine)
    engine.add_request("b", tokens(1, 8), SamplingParams(max_tokens=1, prompt_logprobs=0))
    (output,) = engine.step()
    assert engine.runner.steps[-1] == {"b": 8}
    assert output.metrics.num_cached_tokens == 0
    assert engine.stats().prefix_cache_queries == 8, "those of the first prompt"


def test_without_chunks_a_prompt_waits_until_a_step_has_room_for_it(make: MakeEngine) -> None:
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


def test_a_failed_step_loses_nothing(make: MakeEngine) -> None:
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
    outputs = run(engine)
    assert list(outputs) == [*"abcd", "old"], "in order of arrival"
    assert len(tokens_of(outputs["old"])) == 6
    assert len({tuple(tokens_of(outputs[name])) for name in "abcd"}) == 1


def test_another_rank_is_another_policy(make: MakeEngine) -> None:
    """Shortest prompt first: the others wait for it, and the longest is the one that is preempted."""
    engine = make(num_blocks=8, enable_chunked_prefill=False, max_num_batched_tokens=160, watermark=0)
    engine.scheduler.rank = lambda request: request.num_prompt_tokens
    for length in (12, 4, 8):
        engine.add_request(str(length), tokens(length, length), params(12))
    assert [output.request_id for output in engine.step()] == ["4", "8", "12"]
    assert list(run(engine)) == ["4", "8", "12"]
    assert engine.requests == {}
    assert engine.stats().num_preemptions_recompute > 0


def test_a_rank_that_raises_leaves_nothing_queued(make: MakeEngine) -> None:
    """Past bug: the request was in no queue, and the engine waited for it for ever."""
    engine = make(num_blocks=8)
    engine.scheduler.rank = lambda request: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.add_request("a", tokens(4, 4), params(4))
    assert not engine.has_unfinished_requests()


def test_the_last_in_rank_is_preempted(make: MakeEngine) -> None:
    """Also if it arrived first and runs already."""
    engine = make(num_blocks=8, watermark=0)
    engine.scheduler.rank = lambda request: -request.arrival_time
    engine.add_request("early", tokens(1, 12), params(12))
    engine.step()
    engine.add_request("late", tokens(50, 12), params(12))
    assert list(run(engine)) == ["late", "early"]
    assert engine.stats().num_preemptions_recompute == 1


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_equal_ranks_are_served_in_order_of_arrival(make: MakeEngine, preemption: str) -> None:
    """Preempted requests before new ones: their prompts have been computed."""
    engine = make(num_blocks=20, watermark=0, preemption=preemption, num_host_blocks=100)
    engine.scheduler.rank = lambda request: 0
    for i in range(12):
        engine.add_request(str(i), tokens(i, 12), params(30))
    assert list(run(engine)) == [str(i) for i in range(12)]
    stats = engine.stats()
    assert stats.num_preemptions_recompute + stats.num_preemptions_swap > 3


def test_a_long_queue_costs_a_step_nothing(make: MakeEngine) -> None:
    """With a thousand waiting requests a step asks for as many ranks as with ten, if none is admitted."""
    asked = {}
    for length in (10, 1000):
        engine, calls = make(num_blocks=8, watermark=0), count()
        engine.scheduler.rank = lambda request, calls=calls: (next(calls), request.num_prompt_tokens)[1]
        engine.add_request("first", tokens(1, 4), params(28))
        for i in range(length):
            engine.add_request(f"waits {i}", tokens(2, 28 + i % 2), params(2))
        before = engine.step() and next(calls)  # the first step ranks them all
        for _ in range(4):
            engine.step()
        asked[length] = next(calls) - before
        assert engine.stats().num_waiting == length
    assert asked[10] == asked[1000]


def test_aborted_requests_are_neither_served_nor_kept(make: MakeEngine) -> None:
    """Also behind one that waits: they leave the queue at once; their ids may be used again."""
    engine = make(num_blocks=8, watermark=0)
    engine.add_request("runs", tokens(1, 4), params(28))
    engine.add_request("waits", tokens(2, 30), params(2))
    for turn in range(20):
        for i in range(10):
            engine.add_request(str(i), tokens(i, 28), params(2))
        engine.step()
        assert engine.stats().num_waiting == 11
        for i in range(10 if turn < 19 else 0):
            engine.abort_request(str(i))
    assert list(run(engine)) == ["runs", "waits", *map(str, range(10))]


def test_an_interrupted_fork_still_fits(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three outputs of one token need the prompt's blocks only, in a pool that has no others.

    Had the fork been made without its tokens, each output would compute the prompt's last block for itself.
    """
    engine = make(num_blocks=2)
    engine.add_request("a", tokens(1, 8), SamplingParams(n=3, max_tokens=1, ignore_eos=True))
    append, number = Sequence.append, count(1)

    def interrupted(seq: Sequence, sample: Sample) -> bool:
        if next(number) == 2:
            raise KeyboardInterrupt
        return append(seq, sample)

    monkeypatch.setattr(Sequence, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_invariants()
    (output,) = engine.step()
    assert output.finished
    assert [c.token_ids for c in output.outputs] == [[next_token(tokens(1, 8), i)] for i in range(3)]
