"""A chat in the terminal. Answers appear token by token.

python -m nanopaged                            the tiny model in the box, which answers as in a play
python -m nanopaged --model Qwen/Qwen3-0.6B    a real model: a folder or a hub id

Without a chat template, each line that you type is added to the text so far, and the model goes on with it.

/blocks    the blocks of the last answer, before its last token: after it they are freed
/stats     what the engine has counted
/reset     forget the conversation
/help      this text
/quit      or Ctrl-D, or Ctrl-C, which stops an answer first
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, RawTextHelpFormatter
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import cycle
from typing import Any

import nanopaged  # `nanopaged.LLM` imports PyTorch, which takes seconds, when it is first used
from nanopaged import EngineConfig, SamplingParams
from nanopaged.terminal import one_line, run_program


def chat(llm: nanopaged.LLM, params: SamplingParams) -> None:
    """Answer the lines of the input. The prefix cache keeps the K/V of the conversation from turn to turn."""
    turns: list[str] = []  # a typed line, its answer, the next line, its answer, …
    blocks: object = "there is no answer yet"
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line == "/blocks":
            print(blocks)
        elif line == "/stats":
            print(
                "\n".join(
                    f"{name:25} {value}" for name, value in asdict(llm.engine.stats()).items()
                )
            )
        elif line == "/reset":
            turns.clear()
        elif line.startswith("/"):
            print(__doc__ if line == "/help" else f"there is no command {line}: /help lists them")
        elif line:
            try:
                stream = llm.stream(make_prompt(llm, [*turns, line]), params)
            except ValueError as error:  # such as a conversation that has grown too long
                print(f"{one_line(error)}; /reset forgets the conversation")
                continue
            turns += [line, ""]
            with suppress(KeyboardInterrupt), closing(stream):
                for output in stream:
                    text = output.outputs[0].text
                    print(text[len(turns[-1]) :], end="", flush=True)
                    turns[-1] = text
                    if not output.finished:
                        blocks = llm.engine.snapshot()
            print()


def make_prompt(llm: nanopaged.LLM, turns: list[str]) -> str | dict[str, Any]:
    """The conversation in the model's chat template; without one, the text so far."""
    if getattr(llm.get_tokenizer(), "chat_template", None) is None:
        return "\n".join("".join(turns[i : i + 2]) for i in range(0, len(turns), 2))
    messages = [
        {"role": role, "content": text} for role, text in zip(cycle(["user", "assistant"]), turns)
    ]
    return llm.chat_prompt(messages, {"enable_thinking": False})  # Qwen3 thinks if it may


def main() -> None:
    parser = ArgumentParser(
        usage=SUPPRESS, description=__doc__, formatter_class=RawTextHelpFormatter
    )
    parser.prog = "python -m nanopaged"
    parser.add_argument(
        "--model", help="a model folder or a hub id; default: the tiny one in the box"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer; default: 200")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: 0.7; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:  # what can be checked without PyTorch comes first
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        config = EngineConfig(
            args.model, seed=args.seed, max_num_seqs=1
        )  # so the pool is small, to be drawn
        llm = nanopaged.LLM(**vars(config))
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    if sys.stdin.isatty():
        with suppress(ImportError):  # on Windows
            import readline  # noqa: F401 (gives `input` arrow keys and a history)
        print("/help lists the commands")
    chat(llm, params)


if __name__ == "__main__":
    run_program(main)
