"""A chat in the terminal. Answers appear token by token.

python -m nanopaged                            the tiny model in the box, which answers as in a play
python -m nanopaged --model Qwen/Qwen3-0.6B    a real model: a folder or a hub id

Without a chat template, each line that you type is added to the text so far, and the model goes on
with it.

/blocks    the blocks of the last answer, before its last token; afterwards they are free
/stats     what the engine has counted
/reset     forget the conversation
/help      this text
/quit      or Ctrl-D
Ctrl-C     ends an answer after its current step, and a second one does not wait for the step;
           at the prompt the first clears the line, and a second one quits
"""

from __future__ import annotations

import signal
import sys
from argparse import SUPPRESS, ArgumentParser, RawTextHelpFormatter
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

import nanopaged  # `nanopaged.LLM` imports PyTorch, which takes seconds, when it is first used
from nanopaged import RequestOutput, SamplingParams
from nanopaged.terminal import one_line, run_program


def chat(llm: nanopaged.LLM, params: SamplingParams) -> None:
    """Answer the lines of the input. The prefix cache keeps the K/V of the turns before."""
    is_terminal = sys.stdin.isatty()
    turns = []
    blocks: object = "there is no answer yet"
    while (line := read_line("> " if is_terminal else "")) != "/quit":
        if line == "/blocks":
            print(blocks)
        elif line == "/stats":
            for name, value in asdict(llm.engine.stats()).items():
                print(f"{name:25} {value}")
        elif line == "/reset":
            turns.clear()
        elif line == "/help":
            print(__doc__)
        elif line.startswith("/"):
            print(f"there is no command {line}: /help lists them")
        elif line:
            turns.append({"role": "user", "content": line})
            text = ""
            blocks = "the last answer took less than two steps"
            output = None
            try:
                for output in until_interrupted(llm.stream(make_prompt(llm, turns), params)):
                    longer_text = output.outputs[0].text
                    print(longer_text[len(text) :], end="", flush=True)
                    text = longer_text
                    if not output.finished:
                        blocks = llm.engine.snapshot()
            except (ValueError, FloatingPointError) as error:  # too long, or logits are NaN
                print(f"{one_line(error)}; /reset forgets the conversation")
                turns.pop()
                continue
            print()
            turns.append({"role": "assistant", "content": text})
            if is_terminal and output is not None:
                print(f"turn {len(turns) // 2}: {describe(output, llm)}")


def read_line(prompt: str) -> str:
    """The next line, or "/quit" at the end of the input and after a second Ctrl-C."""
    for _ in range(2):
        try:
            return input(prompt)
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
    return "/quit"


def until_interrupted(stream: Generator[RequestOutput]) -> Iterator[RequestOutput]:
    """Go through a stream. A Ctrl-C ends it after the step, and a second one right then.

    KeyboardInterrupt in a step would lose the step's K/V, and with it the whole prefix cache.
    """
    signal.signal(signal.SIGINT, first_interrupt)
    try:
        with suppress(KeyboardInterrupt), closing(stream):
            for output in stream:
                yield output
                if signal.getsignal(signal.SIGINT) is not first_interrupt:
                    break
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def first_interrupt(*_: object) -> None:
    """Let a second Ctrl-C raise KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def describe(output: RequestOutput, llm: nanopaged.LLM) -> str:
    """The size of an answer: "148 tokens, 112 from the cache, 10 blocks"."""
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    # The K/V of the last token is not computed, so it has no slot.
    num_blocks = -(-(num_tokens - 1) // llm.engine.config.block_size)
    return f"{num_tokens} tokens, {output.num_cached_tokens} from the cache, {num_blocks} blocks"


def make_prompt(llm: nanopaged.LLM, turns: list[dict[str, str]]) -> str | dict[str, Any]:
    """The conversation in the model's chat template; without a template, the text so far."""
    template = getattr(llm.get_tokenizer(), "chat_template", None)
    if template is not None:
        # Qwen3's thinks by default.
        options = {"enable_thinking": False} if "enable_thinking" in template else None
        return llm.chat_prompt(turns, options)
    text = ""
    for turn in turns:
        text += turn["content"]
        if turn["role"] == "assistant":
            text += "\n"
    return text


def main() -> None:
    parser = ArgumentParser(
        prog="python -m nanopaged",
        usage=SUPPRESS,
        description=__doc__,
        formatter_class=RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="a model folder or a hub id; default: the tiny model in the box")
    add("--max-tokens", type=int, default=200, help="of an answer; default: 200")
    add("--temperature", type=float, default=0.7, help="default: 0.7; 0 is greedy")
    add("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        # With one sequence at most the pool is small enough to be drawn by /blocks.
        llm = nanopaged.LLM(args.model, seed=args.seed, max_num_seqs=1)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    if sys.stdin.isatty():
        with suppress(ImportError):  # on Windows
            import readline  # noqa: F401 (gives `input` arrow keys and a history)
        print(f"{args.model or 'the tiny model, which writes plays'}; /help lists the commands")
    chat(llm, params)


if __name__ == "__main__":
    run_program(main)
