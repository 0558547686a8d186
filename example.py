"""Six speakers answer in one batch. Then four samples and four beams share the blocks of their prompt.

python example.py                             the tiny model in the box: no GPU, no network
python example.py --prompt "To be, or not"    your own prompt; --prompt may be given several times
python example.py --model Qwen/Qwen3-0.6B     a real model: a folder or a hub id, with its chat template
python example.py --trace run.html            a page that shows every block of every step in a browser
python example.py --fork my_scheduler.py      the engine of a fork (docs/book/12-forks.md)
"""

from __future__ import annotations

import logging
from argparse import SUPPRESS, ArgumentParser, RawTextHelpFormatter
from textwrap import indent

import nanopaged  # `nanopaged.LLM` imports PyTorch, which takes seconds, when it is first used
from nanopaged import BeamSearchParams, EngineStats, RequestOutput, SamplingParams
from nanopaged.terminal import load_fork, one_line, run_program

OPENING = """\
HERALD:
The king comes here to-night; and all the court
Attend upon his pleasure in the hall.
Let every man that hath a word to say
Speak now, and plainly, as he loves the king.
"""  # all prompts begin with it, so its K/V is computed once
SPEAKERS = ["KING HENRY", "QUEEN MARGARET", "First Murderer", "Clown", "JULIET", "FALSTAFF"]


def main() -> None:
    parser = ArgumentParser(usage=SUPPRESS, description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--model", help="a model folder or a hub id; default: the tiny model in the box")
    parser.add_argument("--prompt", action="append", help="default: a herald, and six speakers who answer")
    parser.add_argument("--max-tokens", type=int, default=70, help="default: 70; samples and beams: 40")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: 0.7; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--trace", metavar="FILE", help="write a page, such as run.html")
    parser.add_argument("--fork", metavar="FILE", help="a fork, whose engine runs")
    args = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")  # shows the size of the KV cache

    prompts = {f"{speaker}:": f"{OPENING}\n{speaker}:\n" for speaker in SPEAKERS}
    if args.prompt:
        prompts = {f"{i}. {prompt}": prompt for i, prompt in enumerate(args.prompt, start=1)}
    stop = () if args.prompt or args.model else "\n\n"  # an empty line ends a speech
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, stop=stop)
        make_llm = load_fork(args.fork) if args.fork else nanopaged.LLM
        llm = make_llm(args.model, seed=args.seed, trace=args.trace)
        for name, prompt in prompts.items():
            if args.model and getattr(llm.get_tokenizer(), "chat_template", None):
                chat = [{"role": "user", "content": prompt}]
                prompts[name] = llm.chat_prompt(chat, {"enable_thinking": False})  # Qwen3 thinks by default
            llm.engine.add_request(name, prompts[name], params)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))

    outputs, busiest = run(llm.engine)
    print("" if args.prompt else OPENING)
    for name, output in outputs.items():
        print(f"{name}\n{indent(output.outputs[0].text.strip(), '  ')}\n")

    end = llm.engine.stats()
    size = llm.engine.config.block_size
    longest = llm.engine.max_model_len
    used = busiest.num_used_blocks
    seconds = max(output.metrics.finish_time - output.metrics.arrival_time for output in outputs.values())
    print(f"""What paging did
  steps           {end.num_steps}, with up to {len(outputs)} requests in each
  tokens          {end.num_prompt_tokens} of prompts, {end.num_generated_tokens} generated, in {seconds:.1f} s
  prefix cache    {end.prefix_cache_hits} of {end.prefix_cache_queries} prompt tokens reused \
({end.prefix_cache_hits / end.prefix_cache_queries:.0%})
  blocks          {used}, of {size} slots each, in use at the busiest step
  slots           {used * size}, {busiest.slot_utilization:.1%} of them filled; without paging \
{len(outputs) * longest}: {longest} for each request
  afterwards      {end.num_used_blocks} blocks in use, {end.num_cached_blocks} kept in the prefix cache""")

    if not args.prompt:
        samples = SamplingParams(n=4, temperature=0.8, max_tokens=min(args.max_tokens, 40))
        show_sharing(llm.engine, "FALSTAFF: four samples", prompts["FALSTAFF:"], samples)
        beams = BeamSearchParams(beam_width=4, max_tokens=min(args.max_tokens, 40))
        show_sharing(llm.engine, "FALSTAFF: a beam search of width four", prompts["FALSTAFF:"], beams)
    if args.trace:
        print(f"\n{args.trace} shows every step: open it in a browser")


def run(engine: nanopaged.LLMEngine) -> tuple[dict[str, RequestOutput], EngineStats]:
    """The loop of `LLM.generate`, written out. Returns the outputs and the busiest statistics."""
    outputs = {}
    busiest = engine.stats()
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        busiest = max(engine.stats(), busiest, key=lambda stats: stats.num_used_blocks)
    return outputs, busiest


def show_sharing(engine: nanopaged.LLMEngine, title: str, prompt: object, params: object) -> None:
    """Print the texts that continue one prompt, and how many blocks they save because they share them."""
    num_copied = engine.stats().num_blocks_copied
    engine.add_request(title, prompt, params)
    outputs, busiest = run(engine)
    print(f"\n{title}")
    for completion in outputs[title].outputs:
        print("  " + " / ".join(completion.text.splitlines())[:96])
    used = busiest.num_used_blocks
    unshared = used + busiest.num_blocks_saved
    saved = busiest.num_blocks_saved / max(unshared, 1)
    num_copied = engine.stats().num_blocks_copied - num_copied
    print(f"  {used} blocks in use where {unshared} would be without sharing ", end="")
    print(f"({saved:.0%} saved), {num_copied} copied on write")


if __name__ == "__main__":
    run_program(main)
