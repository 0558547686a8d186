"""`python -m nanopaged`: a conversation through a pipe, and what its commands show."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable
from itertools import count

import pytest

from nanopaged import LLM, SamplingParams
from nanopaged.__main__ import chat
from nanopaged.sequence import ScheduledBatch, StepResult

Talk = Callable[..., str]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=1, dtype="float32")


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """What `chat` prints for the lines that are typed."""

    def talk(llm: LLM, *lines: str, params: SamplingParams = GREEDY) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat(llm, params)
        return capsys.readouterr().out

    return talk


def answers_of(llm: LLM, *questions: str) -> list[str]:
    """The answers to questions of one conversation, through `LLM.chat`."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return [message["content"] for message in messages[1::2]]


def test_a_chat_remembers_the_conversation(llm: LLM, talk: Talk) -> None:
    """/reset and an empty line are no part of it; nothing is drawn for a pipe but the answers."""
    questions = ["What news?", "Who is dead?"]
    printed = talk(llm, questions[0], "", questions[1], "/reset", questions[1])
    expected = [*answers_of(llm, *questions), *answers_of(llm, questions[1])]
    assert expected[1] != expected[2], "the first question makes a difference"
    assert printed == "".join(f"{answer}\n" for answer in expected)


def test_the_blocks_of_the_answer_are_shown_while_it_runs(llm: LLM, talk: Talk) -> None:
    """When it has ended, they are free or cached. The prefix cache serves the next turn."""
    assert talk(llm, "/blocks") == "there is no answer yet\n"
    llm.reset_prefix_cache()
    before = llm.engine.stats()
    printed = talk(llm, "What news?", "Who is dead?", "/blocks", "/stats")
    assert len(re.findall(r"^llm-\d+, running: \d+ tokens", printed, flags=re.MULTILINE)) == 1
    (row,) = re.findall(r"^  # filled +(.+)$", printed, flags=re.MULTILINE)
    *full, last = map(int, row.split())
    (num_tokens,) = map(int, re.findall(r"(\d+) of them computed", printed))
    assert 16 * len(full) + last == num_tokens
    assert set(full) == {16}
    assert re.search(rf"^ +\d+  █{{{last}}}·{{{16 - last}}}  llm-\d+$", printed, flags=re.MULTILINE)
    stats = {name: int(count) for name, count in re.findall(r"^(num_\w+|prefix_\w+) +(\d+)$", printed, re.M)}
    assert stats["num_used_blocks"] == 0
    assert stats["prefix_cache_hits"] > before.prefix_cache_hits
    assert stats == {name: getattr(llm.engine.stats(), name) for name in stats}


def test_an_answer_of_one_step_has_no_blocks_to_show(llm: LLM, talk: Talk) -> None:
    """Not those of the answer before it."""
    short = SamplingParams(temperature=0, max_tokens=1)
    printed = talk(llm, "What news?", "/blocks", params=short)
    assert printed.endswith("\nthe last answer took less than two steps\n")


def test_a_conversation_that_is_too_long(talk: Talk) -> None:
    """The message says the limit and the way out, and the line that did not fit is forgotten."""
    llm = LLM(max_num_seqs=1, max_model_len=40, dtype="float32")
    answer = talk(llm, "What news?")
    refusal, rest = talk(llm, "What news? " * 20, "What news?").split("\n", maxsplit=1)
    assert "but max_model_len is 40" in refusal
    assert refusal.endswith("/reset forgets the conversation")
    assert rest == answer
    grown = talk(llm, "What news?", "What news, my lord?", "/reset", "What news?")
    assert grown.count("but max_model_len is 40") == 1, "question, answer and question are too long together"
    assert grown.startswith(answer)
    assert grown.endswith(answer)


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_ctrl_c_stops_an_answer(
    llm: LLM, talk: Talk, num_interrupts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was shown is remembered, nothing is left running, and the chat goes on.

    The step that is under way ends first. Past bug: it failed, and the prefix cache was emptied. A second
    Ctrl-C does not wait for the step.
    """
    (whole,) = answers_of(llm, "What news?")
    number, execute, handler = count(1), llm.engine.runner.execute, signal.getsignal(signal.SIGINT)

    def interrupted(batch: ScheduledBatch) -> StepResult:
        if next(number) == 5:
            for _ in range(num_interrupts):
                signal.raise_signal(signal.SIGINT)
            assert num_interrupts == 1, "the step goes on"
        return execute(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    num_cached = llm.engine.stats().num_cached_blocks
    assert num_cached > 0
    printed = talk(llm, "What news?", "/blocks", "Who is dead?")
    start = printed[: printed.index("\nafter step ")]
    assert 0 < len(start) < len(whole)
    assert whole.startswith(start)
    assert not llm.engine.has_unfinished_requests()
    assert num_interrupts == 2 or llm.engine.stats().num_cached_blocks >= num_cached
    assert signal.getsignal(signal.SIGINT) is handler
    turns = [("user", "What news?"), ("assistant", start), ("user", "Who is dead?")]
    conversation = [{"role": role, "content": content} for role, content in turns]
    (next_answer,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert printed.endswith(f"\n{next_answer.outputs[0].text}\n")


def test_ctrl_c_at_the_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one clears the line, and a second one in succession quits."""
    lines = iter([KeyboardInterrupt, "/blocks", KeyboardInterrupt, KeyboardInterrupt, "What news?"])

    def typed(prompt: str) -> str:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", typed)
    chat(llm, GREEDY)
    assert capsys.readouterr().out == "\nthere is no answer yet\n\n\n"
    assert list(lines) == ["What news?"]


def test_in_a_terminal_each_answer_says_what_it_took(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks are those that the drawing of /blocks has, and hold all tokens but the last one."""
    llm.reset_prefix_cache()
    lines = iter(["What news?", "/blocks", "Who is dead?", "/quit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat(llm, GREEDY)
    printed = capsys.readouterr().out
    pattern = r"^turn (\d+): (\d+) tokens, (\d+) from the cache, (\d+) blocks$"
    (_, num_tokens, cached, num_blocks), second = [
        tuple(map(int, turn)) for turn in re.findall(pattern, printed, flags=re.MULTILINE)
    ]
    (drawn,) = re.findall(r"^  physical block +(.+)$", printed, flags=re.MULTILINE)
    assert (cached, num_blocks) == (0, len(drawn.split()))
    assert second[2] == (num_tokens - 1) // 16 * 16, "the full blocks of the first turn"
