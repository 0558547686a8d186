"""Six speakers answer in one batch. Then four samples, and four beams, share the blocks of their prompt.

python example.py                             the tiny model in the box: no GPU, no network
python example.py --prompt "To be, or not"    your own prompt; --prompt may be given several times
python example.py --model Qwen/Qwen3-0.6B     a real model: a folder or a hub id, with its chat template
python example.py --trace run.html            a page that shows every block of every step in a browser
python example.py --fork my_scheduler.py      the engine of a fork (docs/book/12-forks.md)
"""

from __future__ import annotations

import logging
from argparse import SUPPRESS, ArgumentParser, RawTextHelpFormatter
from collections import Counter
from dataclasses import replace
from textwrap import indent
from typing import Any

import nanopaged  # `nanopaged.LLM` imports PyTorch, which takes seconds, when it is first used
from nanopaged import BeamSearchParams, EngineConfig, EngineStats, RequestOutput, SamplingParams
from nanopaged.terminal import load_fork, one_line, run_program

OPENING = """\
HERALD:
The king comes here to-night; and all the court
Attend upon his pleasure in the hall.
Let every man that hath a word to say
Speak now, and plainly, as he loves the king.
"""  # all prompts begin with it, so its K/V is computed once
SPEAKERS = ["KING HENRY", "QUEEN MARGARET", "First Murderer", "Clown", "JULIET", "FALSTAFF"]
Outputs = dict[str, RequestOutput]


class Busiest:
    """The statistics of the step with the most blocks. The engine calls it before a batch is computed."""

    def __init__(self, engine: nanopaged.LLMEngine) -> None:
        self.engine, self.stats = engine, engine.stats()

    def batch_scheduled(self, batch: Any) -> None:
        stats, size = self.engine.stats(), self.engine.config.block_size
        filled: Counter[int] = Counter()  # block → its slots with K/V; `|` keeps the larger number
        if stats.num_used_blocks < max(1, self.stats.num_used_blocks):
            return
        ends = {seq: seq.num_computed_tokens for seq in self.engine.scheduler.running_sequences}
        ends |= {seq: ends[seq] + seq.num_scheduled_tokens for seq in batch.sequences}  # after this step
        for seq, end in ends.items():
            filled |= {block_id: min(size, end - i * size) for i, block_id in enumerate(seq.block_table)}
        share = sum(filled.values()) / (stats.num_used_blocks * size)
        self.stats = replace(stats, slot_utilization=share)

    def step_ended(self, batch: Any) -> None:
        """Requests that have ended have given their blocks back."""

    def step_failed(self, error: BaseException) -> None:
        """No request has blocks."""


def run(llm: nanopaged.LLM) -> tuple[Outputs, EngineStats]:
    """The loop of `llm.generate`, written out. Returns the outputs and the busiest step's statistics."""
    from tqdm import tqdm

    outputs, engine, busiest = {}, llm.engine, Busiest(llm.engine)
    engine.listeners.append(busiest)
    num_steps = max(request.params.max_tokens for request in engine.requests.values())
    with tqdm(total=num_steps, unit=" steps", leave=False) as bar:
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
            bar.update()
    engine.listeners.remove(busiest)
    return outputs, busiest.stats


def report(llm: nanopaged.LLM, outputs: Outputs, busiest: EngineStats) -> str:
    """The statistics of the run as text."""
    end, size, longest = llm.engine.stats(), llm.engine.config.block_size, llm.engine.max_model_len
    hits, queries, used = end.prefix_cache_hits, end.prefix_cache_queries, busiest.num_used_blocks
    metrics = [output.metrics for output in outputs.values()]
    seconds = max(each.finish_time for each in metrics) - min(each.arrival_time for each in metrics)
    return f"""What paging did
  steps           {end.num_steps}, with up to {len(outputs)} requests in each
  tokens          {end.num_prompt_tokens} of prompts, {end.num_generated_tokens} generated, in {seconds:.1f} s
  prefix cache    {hits} of {queries} prompt tokens reused ({hits / queries:.0%})
  blocks          {used}, of {size} slots each, in use at the busiest step
  slots           {used * size}, {busiest.slot_utilization:.1%} of them filled; without paging \
{len(outputs) * longest}: {longest} for each request
  afterwards      {end.num_used_blocks} blocks in use, {end.num_cached_blocks} kept in the prefix cache"""


def show_sharing(llm: nanopaged.LLM, name: str) -> None:
    """Run the request that is queued. Print its texts, and the blocks that they save by sharing."""
    before = llm.engine.stats().num_blocks_copied
    outputs, busiest = run(llm)
    for completion in outputs[name].outputs:
        print(f"  {' / '.join(completion.text.splitlines())[:96]}")
    used, saved = busiest.num_used_blocks, busiest.num_blocks_saved
    print(f"""  {used} blocks in use where {used + saved} would be without sharing (\
{saved / max(used + saved, 1):.0%} saved), {llm.engine.stats().num_blocks_copied - before} copied on write""")


def main() -> None:
    parser = ArgumentParser(usage=SUPPRESS, description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--model", help="a model folder or a hub id; default: the tiny one in the box")
    parser.add_argument("--prompt", action="append", help="default: a herald, and six speakers who answer")
    parser.add_argument("--max-tokens", type=int, default=70, help="default: 70; samples and beams: 40")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: 0.7; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", metavar="FILE", help="write a page, such as run.html")
    parser.add_argument("--fork", metavar="FILE", help="a fork, whose engine runs")
    args = parser.parse_args()
    if "" in (args.prompt or []):
        parser.error("a prompt is empty: it needs at least one token")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanopaged").setLevel(logging.INFO)  # shows the size of the KV cache, among others
    prompts = {f"{i}. {text}": text for i, text in enumerate(args.prompt or [], start=1)}
    prompts = prompts or {f"{speaker}:": f"{OPENING}\n{speaker}:\n" for speaker in SPEAKERS}
    task = "" if args.prompt else "Continue this play by one speech.\n\n"  # for a model that answers
    stop = () if args.prompt or args.model else "\n\n"  # an empty line ends a speech
    try:  # what can be checked without PyTorch comes first
        config = EngineConfig(args.model, seed=args.seed, trace=args.trace)
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, stop=stop)
        llm = (load_fork(args.fork) if args.fork else nanopaged.LLM)(**vars(config))
        for name, prompt in prompts.items():
            if args.model and getattr(llm.get_tokenizer(), "chat_template", None):
                chat = [{"role": "user", "content": task + prompt}]
                prompt = llm.chat_prompt(chat, {"enable_thinking": False})  # Qwen3 thinks if it may
            llm.engine.add_request(name, prompt, params)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    outputs, busiest = run(llm)
    print("" if args.prompt else OPENING)
    for speaker, output in outputs.items():
        print(f"{speaker}\n{indent(output.outputs[0].text.strip(), '  ')}\n")
    print(report(llm, outputs, busiest))
    if args.prompt:
        return
    samples = SamplingParams(n=4, temperature=0.8, max_tokens=min(args.max_tokens, 40))
    beams = BeamSearchParams(beam_width=4, max_tokens=samples.max_tokens)
    for what, params in (("four samples", samples), ("a beam search of width four", beams)):
        print(f"\n{name} {what}")
        llm.engine.add_request(name, prompt, params)
        show_sharing(llm, name)


if __name__ == "__main__":
    run_program(main)
