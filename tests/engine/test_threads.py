"""An `LLM` serves one thread at a time; the garbage collector may come in the middle of a step."""

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


def in_thread(work: Callable[[], object]) -> object:
    """What a call in another thread returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_threads_take_turns(llm: LLM) -> None:
    """The engine belongs to no thread while no call is unfinished."""
    (expected,) = llm.generate("ROMEO:\n", GREEDY, use_tqdm=False)
    for _ in range(3):
        (output,) = in_thread(lambda: llm.generate("ROMEO:\n", GREEDY, use_tqdm=False))
        assert tokens_of([output]) == tokens_of([expected])
        *_, last = llm.stream("ROMEO:\n", GREEDY)
        assert tokens_of([last]) == tokens_of([expected])


def test_a_second_thread_gets_an_error_and_the_first_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step of `generate`, and between two outputs of a stream."""
    (expected,) = llm.generate("JULIET:\n", GREEDY, use_tqdm=False)
    execute, errors = llm.engine.runner.execute, []
    calls = [
        lambda: llm.generate("ROMEO:\n", GREEDY, use_tqdm=False),
        lambda: llm.stream("ROMEO:\n", GREEDY),
        lambda: llm.beam_search("ROMEO:\n", BeamSearchParams(beam_width=2), use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False),
        llm.reset_prefix_cache,
    ]

    def enter() -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="another thread is using this LLM") as error:
                in_thread(call)
            errors.append(error)

    def enter_and_execute(batch: ScheduledBatch) -> StepResult:
        enter()
        return execute(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", enter_and_execute)
    (output,) = llm.generate("JULIET:\n", GREEDY, use_tqdm=False)
    monkeypatch.setattr(llm.engine.runner, "execute", execute)
    stream = llm.stream("JULIET:\n", GREEDY)
    for last in stream:
        if not last.finished:
            enter()
    assert tokens_of([output]) == tokens_of([last]) == tokens_of([expected])
    assert len(errors) == len(calls) * (8 + 7)
    assert not llm.engine.has_unfinished_requests()
    assert in_thread(lambda: llm.generate("ROMEO:\n", GREEDY, use_tqdm=False))


def test_one_of_many_threads_at_the_door_enters(llm: LLM) -> None:
    """All begin together. Those that enter say what they say alone, and the others get the error."""
    params, door = SamplingParams(temperature=0, max_tokens=20), Barrier(8)
    (expected,) = tokens_of(llm.generate("ROMEO:\n", params, use_tqdm=False))

    def call() -> list[int] | None:
        door.wait(60)
        try:
            return tokens_of(llm.generate("ROMEO:\n", params, use_tqdm=False))[0]
        except RuntimeError as error:
            assert "another thread is using this LLM" in str(error)  # noqa: PT017

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            texts = [future.result(60) for future in [pool.submit(call) for _ in range(8)]]
            assert expected in texts
            assert set(map(type, texts)) == {list, type(None)}
            assert all(text in (expected, None) for text in texts)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_invariants()


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
