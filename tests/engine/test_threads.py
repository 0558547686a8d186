"""`LLM` used by several threads, and by the garbage collector in the middle of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread

import pytest
from serving import tokens_of

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def test_threads_share_steps(llm: LLM) -> None:
    prompts = [f"{name}:\n" for name in ("ROMEO", "JULIET", "HAMLET", "OPHELIA")]
    params = SamplingParams(temperature=0, max_tokens=20)

    def by_stream(prompt: str) -> list[int]:
        *_, last = llm.stream(prompt, params)
        return last.outputs[0].token_ids

    def by_generate(prompt: str) -> list[int]:
        return tokens_of(llm.generate(prompt, params, use_tqdm=False))[0]

    expected = [by_generate(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            streamed, generated = pool.map(by_stream, prompts), pool.map(by_generate, prompts)
            assert [*streamed] == expected
            assert [*generated] == expected
    assert llm.engine.stats().num_used_blocks == 0


def test_threads_in_a_pool_that_is_too_small() -> None:
    """Samples, beams and streams are swapped out and in for each other; some are left in the middle."""
    llm = LLM(num_blocks=24, num_host_blocks=60, block_size=4, preemption="swap", dtype="float32")
    params = [SamplingParams(n=2, seed=3, max_tokens=24, ignore_eos=True), GREEDY]
    params += [BeamSearchParams(beam_width=3, max_tokens=16), SamplingParams(seed=5, max_tokens=40)]
    work = [(f"{name}:\n", each) for name in ("ROMEO", "JULIET") for each in params]

    def call(prompt: str, params: SamplingParams | BeamSearchParams) -> list[list[int]]:
        *_, last = [output for _, output in zip(range(5), llm.stream(prompt, params), strict=False)]
        assert tokens_of([last])
        return tokens_of(llm.generate(prompt, params, use_tqdm=False))

    expected = [call(*each) for each in work]
    assert llm.engine.stats().num_preemptions_swap == 0, "one request has room"
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert [*pool.map(call, *zip(*work, strict=True))] == expected
    stats = llm.engine.stats()
    assert min(stats.num_preemptions_swap, stats.num_blocks_swapped_in) > 0
    assert stats.num_used_blocks == 0
    llm.engine.check_invariants()


def test_generate_calls_of_two_threads_share_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has the lock for a step at a time, so the other one's requests come in between."""
    execute, batches, both = llm.engine.runner.execute, [], Barrier(2)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    def watched(batch: ScheduledBatch) -> StepResult:
        batches.append({seq.request.prompt for seq in batch.sequences})
        return execute(batch)

    def call(prompt: str) -> list[list[int]]:
        both.wait(60)
        return tokens_of(llm.generate(prompt, params, use_tqdm=False))

    prompts = ["ROMEO:\n", "JULIET:\n"]
    expected = [tokens_of(llm.generate(prompt, params, use_tqdm=False)) for prompt in prompts]
    monkeypatch.setattr(llm.engine.runner, "execute", watched)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(call, prompts)] == expected
    assert set(prompts) in batches
    assert len(batches) < 400, "the steps of one call are those of the other, too"


def in_another_thread(work: Callable[[], object]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for the step that waits for it"


@pytest.mark.parametrize("run", [lambda work: work(), in_another_thread])
def test_a_stream_is_garbage_in_the_middle_of_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, run: Callable[[Callable[[], object]], None]
) -> None:
    """Past bug: its request was aborted at once, also if a step of the same thread was under way."""
    (expected,) = llm.generate("JULIET:\n", GREEDY, use_tqdm=False)
    execute, streams, num_sequences = llm.engine.runner.execute, [], []

    def collect(batch: ScheduledBatch) -> StepResult:
        num_sequences.append(len(batch.sequences))
        if streams:
            streams.clear()
            run(gc.collect)
        return execute(batch)

    def started() -> Iterator[RequestOutput]:
        stream = llm.stream("ROMEO:\n", SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        return stream

    streams.append([started()])
    streams[0].append(streams[0])  # a cycle, which the garbage collector alone can free
    monkeypatch.setattr(llm.engine.runner, "execute", collect)
    (output,) = llm.generate("JULIET:\n", GREEDY, use_tqdm=False)
    assert tokens_of([output]) == tokens_of([expected])
    assert num_sequences == [2] + [1] * 7  # it leaves with the end of that step
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
