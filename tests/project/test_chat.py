"""`python -m nanopaged`: a conversation through a pipe, and what its commands show."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanopaged
from nanopaged import LLM, SamplingParams
from nanopaged.terminal.chat import chat, main

TINY = Path(__file__).parents[1] / "nanopaged" / "tiny"
COMMAND = [sys.executable, "-m", "nanopaged"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=1, dtype="float32")


class Talk:
    """What `chat` prints for the lines that are typed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, llm: LLM, *lines: str, params: SamplingParams = GREEDY) -> str:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat(llm, params)
        return self.capsys.readouterr().out


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    return Talk(monkeypatch, capsys)


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


def test_every_command_is_answered(llm: LLM, talk: Talk) -> None:
    commands = set(re.findall(r"^(/\w+)", talk(llm, "/help"), flags=re.MULTILINE))
    assert commands == {"/blocks", "/stats", "/reset", "/help", "/quit"}
    for command in commands:
        assert "no command" not in talk(llm, command)
    assert talk(llm, "/block") == "there is no command /block: /help lists them\n"
    assert talk(llm, "/quit", "What news?") == ""


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


def test_without_a_template_the_text_goes_on(talk: Talk, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").unlink()
    llm, params = LLM(tmp_path, max_num_seqs=1), SamplingParams(temperature=0, max_tokens=9)
    printed = talk(llm, "To be, or", "ROMEO:", params=params)

    def continued(text: str) -> str:
        return llm.generate(text, params, use_tqdm=False)[0].outputs[0].text

    first = continued("To be, or")
    second = continued(f"To be, or{first}\nROMEO:")
    assert printed == f"{first}\n{second}\n"


def test_ctrl_c_stops_an_answer(llm: LLM, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was shown is remembered, nothing is left running, and the chat goes on."""
    whole = answers_of(llm, "What news?")[0]
    steps, step = [], llm.engine.step

    def interrupted(*args: object, **options: object) -> object:
        steps.append(None)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(*args, **options)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    printed = talk(llm, "What news?", "/blocks", "Who is dead?")
    start = printed[: printed.index("\nafter step ")]
    assert 0 < len(start) < len(whole)
    assert whole.startswith(start)
    assert not llm.engine.has_unfinished_requests()
    messages = [("user", "What news?"), ("assistant", start), ("user", "Who is dead?")]
    chat = [{"role": role, "content": content} for role, content in messages]
    (next_answer,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert printed.endswith(f"\n{next_answer.outputs[0].text}\n")


def test_an_answer_appears_token_by_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            seen.append((self.getvalue(), llm.engine.stats().num_generated_tokens))

    monkeypatch.setattr(sys, "stdin", io.StringIO("What news?\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    before = llm.engine.stats().num_generated_tokens
    chat(llm, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert {count - before for _, count in seen} >= set(range(1, 11)), "after each token"
    assert len({text for text, _ in seen}) > 5, "not each token adds a character"


def test_a_pipe() -> None:
    """No prompt is drawn, and /quit ends the chat before the rest."""
    talk = "What news?\n/quit\nWho is dead?\n"
    options = ["--temperature", "0", "--max-tokens", "20"]
    done = subprocess.run(
        [*COMMAND, *options], input=talk, capture_output=True, encoding="utf-8", env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    chat = [{"role": "user", "content": "What news?"}]
    (output,) = LLM(max_num_seqs=1).chat(chat, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert done.stdout == f"{output.outputs[0].text}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--temperature", "-1"], "temperature is -1.0, but must lie in [0.0, 1000000.0]"),
        (["--max-tokens", "0"], "max_tokens is 0, but must be at least 1"),
        (["--model", "./typo"], "typo is not a folder: name the one that holds config.json, or a hub id"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], complaint: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m nanopaged: error: ")
    assert complaint in line


def test_streams_of_another_program(llm: LLM, talk: Talk) -> None:
    """A program that runs the chat may have streams of its own, which have no encoding to change."""
    talk.monkeypatch.setattr(nanopaged, "LLM", lambda **_: llm)
    talk.monkeypatch.setattr(sys, "argv", ["nanopaged", "--temperature", "0", "--max-tokens", "60"])
    talk.monkeypatch.setattr(sys, "stdin", io.StringIO("What news?\n"))
    main()
    assert talk.capsys.readouterr().out == f"{answers_of(llm, 'What news?')[0]}\n"
