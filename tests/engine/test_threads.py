"""An `LLM` serves one thread at a time; the garbage collector may come in the middle of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from unittest.mock import Mock

import pytest
from conftest import tokens_of

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanopaged.sequence import ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def generate(llm: LLM, prompt: str) -> list[int]:
    return tokens_of(llm.generate(prompt, GREEDY, use_tqdm=False))[0]


def in_thread(work: Callable[[], object]) -> object:
    """What a call in another thread returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_a_second_thread_gets_an_error_and_the_first_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step of `generate`, and between two outputs of a stream; afterwards it may."""
    expected = generate(llm, "JULIET:\n")
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
    assert generate(llm, "JULIET:\n") == expected
    monkeypatch.setattr(llm.engine.runner, "execute", execute)
    stream = llm.stream("JULIET:\n", GREEDY)
    for last in stream:
        if not last.finished:
            enter()
    assert tokens_of([last]) == [expected]
    assert len(errors) == len(calls) * (8 + 7)
    assert not llm.engine.has_unfinished_requests()
    assert in_thread(lambda: generate(llm, "JULIET:\n")) == expected


def test_a_refused_thread_never_counts_as_the_user(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past bug: until it had its error, it could be taken for the user, whose next call was refused then."""
    counted = []

    class Threads(list):
        def append(self, thread: int) -> None:
            counted.append(thread)
            super().append(thread)

    monkeypatch.setattr(llm, "_callers", Threads())
    late = in_thread(lambda: llm.stream("ROMEO:\n", GREEDY))
    stream = llm.stream("JULIET:\n", GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="another thread is using this LLM"):
        in_thread(lambda: next(late))
    stream.close()
    assert counted == [get_ident()]
    assert not llm._callers


@pytest.mark.parametrize("run", [lambda work: work(), in_thread])
def test_a_stream_is_garbage_in_the_middle_of_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, run: Callable[[Callable[[], object]], None]
) -> None:
    """Past bug: its request was aborted at once, also if a step of the same thread was under way."""
    expected = generate(llm, "JULIET:\n")
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
    assert generate(llm, "JULIET:\n") == expected
    assert num_sequences == [2] + [1] * 7  # it leaves with the end of that step
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("num_tokens", [2, 8])
def test_a_stream_is_closed_in_a_step_of_the_engine(
    llm: LLM, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may have ended in that step. Past bug: a KeyError, by which all requests lost their K/V."""
    stream = llm.stream("ROMEO:\n", SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    next(stream)
    listener = Mock()
    listener.step_ended.side_effect = lambda batch: stream.close()  # as the garbage collector may do
    monkeypatch.setattr(llm.engine, "listeners", [listener])
    llm.engine.step()
    listener.step_failed.assert_not_called()
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_invariants()
