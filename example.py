"""Continue a few prompts with the same beginning in one continuous batch, and report the use of the blocks.

Then four samples and four beams of one prompt: sequences that share the blocks of their common prefix.

python example.py                             the tiny model in the box: no GPU, no network
python example.py --model Qwen/Qwen3-0.6B     a real one: a folder or a hub id, with its chat template
python example.py --trace run.html            a page that shows every block of every step in a browser
python example.py --watch                     the blocks live in the terminal
"""

import argparse
import logging
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanopaged import LLM, BeamSearchParams, EngineStats, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from nanopaged.trace.watch import Watch

Prompt = str | dict[str, Any]

# The tiny model continues plays. All prompts share the beginning, so its K/V is computed once.
OPENING = """\
HERALD:
The king comes here to-night; and all the court
Attend upon his pleasure in the hall.
Let every man that hath a word to say
Speak now, and plainly, as he loves the king.

"""
SPEAKERS = ["KING HENRY", "QUEEN MARGARET", "First Murderer", "Clown", "JULIET", "FALSTAFF"]

# A real model answers questions.
SYSTEM = "You are a patient teacher. Answer in two or three plain sentences."
QUESTIONS = [
    "What is virtual memory?",
    "Why is a page table useful?",
    "What does an operating system do when memory runs out?",
    "What is copy-on-write?",
]


def make_prompts(llm: LLM, is_tiny: bool) -> dict[str, Prompt]:
    """Name → prompt: text for the tiny model, a conversation for a real one (Qwen3 thinks if it may)."""
    if is_tiny:
        return {f"{speaker}:": f"{OPENING}{speaker}:\n" for speaker in SPEAKERS}
    system = {"role": "system", "content": SYSTEM}
    return {
        q: llm.chat_prompt([system, {"role": "user", "content": q}], {"enable_thinking": False})
        for q in QUESTIONS
    }


def run(
    llm: LLM,
    prompts: dict[str, Prompt],
    params: SamplingParams | BeamSearchParams,
    watch: "Watch | None" = None,
) -> tuple[dict[str, RequestOutput], EngineStats]:
    """The loop of `llm.generate`, written out. Returns the outputs and the busiest step's statistics."""
    engine = llm.engine
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    outputs: dict[str, RequestOutput] = {}
    busiest = engine.stats()
    bar = tqdm(total=params.max_tokens, unit=" steps", leave=False, disable=watch is not None)
    with bar, watch.shown() if watch else nullcontext():
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
            bar.update()
            if watch is not None:
                watch.show(engine.snapshot())
            stats = engine.stats()
            if stats.num_used_blocks >= busiest.num_used_blocks:
                busiest = stats
    return outputs, busiest


def report(llm: LLM, outputs: dict[str, RequestOutput], busiest: EngineStats) -> str:
    """The statistics of the run as text."""
    engine, end = llm.engine, llm.engine.stats()
    size, num_requests = engine.config.block_size, len(outputs)
    arrival = min(output.metrics.arrival_time for output in outputs.values())
    seconds = max(output.metrics.finish_time for output in outputs.values()) - arrival
    hits, queries = end.prefix_cache_hits, end.prefix_cache_queries
    slots = busiest.num_used_blocks * size
    contiguous = num_requests * engine.max_model_len
    return "\n  ".join(
        [
            "What paging did",
            f"steps           {end.num_steps}, with up to {num_requests} requests in each",
            f"tokens          {end.num_prompt_tokens} of prompts, {end.num_generated_tokens} generated, "
            f"in {seconds:.1f} s",
            f"prefix cache    {hits} of {queries} prompt tokens reused ({hits / queries:.0%})",
            f"blocks          {busiest.num_used_blocks}, of {size} slots each, in use at the busiest step",
            f"slots           {slots}, {busiest.slot_utilization:.1%} of them filled; without paging "
            f"{contiguous}: {engine.max_model_len} for each request",
            f"afterwards      {end.num_used_blocks} blocks in use, {end.num_cached_blocks} kept in the "
            "prefix cache",
        ]
    )


def show_sharing(
    llm: LLM, name: str, prompt: Prompt, max_tokens: int, seed: int, watch: "Watch | None"
) -> None:
    """Print four samples and four beams of one prompt, and the blocks that they save by sharing."""
    sampling = SamplingParams(n=4, temperature=0.8, max_tokens=max_tokens, seed=seed)
    beams = BeamSearchParams(beam_width=4, max_tokens=max_tokens)
    for what, params in (("four samples", sampling), ("a beam search of width four", beams)):
        copied = llm.engine.stats().num_blocks_copied
        outputs, busiest = run(llm, {name: prompt}, params, watch)
        copied = llm.engine.stats().num_blocks_copied - copied
        print(f"\n{name} {what}")
        for completion in outputs[name].outputs:
            print(f"  {' / '.join(completion.text.split(chr(10)))[:96]}")
        used, saved = busiest.num_used_blocks, busiest.num_blocks_saved
        print(
            f"  {used} blocks in use where {used + saved} would be without sharing "
            f"({saved / (used + saved):.0%} saved), {copied} copied on write"
        )


def positive(text: str) -> int:
    """A type for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small: at least 1 token must be generated")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a model folder or a hub id; default: the tiny one in the box")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        help="per answer, sample and beam; default: 70 (200 with --model) per answer, 40 per sample and beam",
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a page, such as run.html")
    parser.add_argument(
        "--watch", action="store_true", help="show the blocks, a tenth of a second for each step"
    )
    args = parser.parse_args()
    if args.trace is not None and not args.trace.absolute().parent.is_dir():
        parser.error(f"there is no folder {args.trace.parent}")
    if args.watch and find_spec("rich") is None:
        parser.error('--watch needs rich: pip install -e ".[watch]"')
    watch = None
    if args.watch:
        from nanopaged.trace.watch import Watch

        watch = Watch()

    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanopaged").setLevel(logging.INFO)  # shows the size of the KV cache, among others
    is_tiny = args.model is None
    llm = LLM(args.model, seed=args.seed, trace=args.trace)
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_tokens or (70 if is_tiny else 200),  # None if it was not given, never 0
        stop="\n\n" if is_tiny else (),
    )
    prompts = make_prompts(llm, is_tiny)
    outputs, busiest = run(llm, prompts, params, watch)
    if is_tiny:
        print(OPENING.rstrip() + "\n")
    for name, output in outputs.items():
        print(f"{name}\n{indent(output.outputs[0].text.strip(), '  ')}\n")
    print(report(llm, outputs, busiest))
    name, prompt = list(prompts.items())[-1]
    show_sharing(llm, name, prompt, max_tokens=args.max_tokens or 40, seed=args.seed, watch=watch)


if __name__ == "__main__":
    main()
