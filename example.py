"""Six speakers answer in one batch. Then four samples and four beams share the blocks of their
prompt.

python example.py                             the tiny model in the box: no GPU, no network
python example.py --prompt "To be, or not"    your own prompt; --prompt may be given several times
python example.py --model Qwen/Qwen3-0.6B     a real model: a folder or a hub id
python example.py --trace run.html            a page that shows every block of every step in a browser
python example.py --fork my_scheduler.py      the engine of a fork (docs/book/12-forks.md)
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from nanopaged import LLM, BeamSearchParams, EngineStats, LLMEngine, RequestOutput, SamplingParams
from nanopaged.terminal import load_fork, one_line, run_program

# All prompts begin with it, so its K/V is computed once.
OPENING = """HERALD:
The king comes here to-night; and all the court
Attend upon his pleasure in the hall.
Let every man that hath a word to say
Speak now, and plainly, as he loves the king."""
SPEAKERS = ["KING HENRY", "QUEEN MARGARET", "First Murderer", "Clown", "JULIET", "FALSTAFF"]


def answer_all(engine: LLMEngine, prompts: list[str], max_tokens: int) -> None:
    """Generate for all prompts in one batch, and print the texts and what paging did."""
    params = SamplingParams(temperature=0.7, max_tokens=max_tokens, stop="\n\n")  # the end of a speech
    for number, prompt in enumerate(prompts, start=1):
        engine.add_request(f"prompt {number}", prompt, params)  # each request has an id of its own
    outputs, busiest = run(engine)
    for output in outputs.values():
        question = str(output.prompt).removeprefix(OPENING).strip()
        print(f"\n{question}\n  {output.outputs[0].text.strip()}")
    stats = engine.stats()
    print(f"\nWhat paging did\n  steps           {stats.num_steps}, up to {len(outputs)} requests in each")
    print(f"  tokens          {stats.num_prompt_tokens} of prompts, {stats.num_generated_tokens} generated")
    print(f"  prefix cache    {stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens reused")
    print(f"  busiest step    {busiest.num_used_blocks} blocks, {busiest.slot_utilization:.1%} full")
    blocks_each = -(-engine.config.max_model_len // engine.config.block_size)  # rounded up
    print(f"  without paging  {len(outputs) * blocks_each} blocks, {blocks_each} for each request")
    print(f"  afterwards      {stats.num_used_blocks} blocks in use, {stats.num_cached_blocks} cached")


def share_blocks(engine: LLMEngine, prompt: str) -> None:
    """Go on with one prompt in several ways, which share its blocks."""
    samples = SamplingParams(n=4, temperature=0.8, max_tokens=40)
    beams = BeamSearchParams(beam_width=4, max_tokens=40)
    for title, params in [("four samples", samples), ("a beam search of width four", beams)]:
        engine.add_request(title, prompt, params)
        outputs, busiest = run(engine)
        print(f"\nThe last prompt again, {title}")
        for completion in outputs[title].outputs:
            print("  " + " / ".join(completion.text.splitlines())[:96])
        print(f"  {busiest.num_used_blocks} blocks in use; sharing saves {busiest.num_blocks_saved} more")


def run(engine: LLMEngine) -> tuple[dict[str, RequestOutput], EngineStats]:
    """The loop of `LLM.generate`, written out to look at every step. Also returns the busiest step's
    statistics."""
    outputs = {}
    busiest = engine.stats()
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        busiest = max(engine.stats(), busiest, key=lambda stats: stats.num_used_blocks)
    return outputs, busiest


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or a hub id; default: the tiny model in the box")
    parser.add_argument("--prompt", action="append", help="default: a herald, and six speakers who answer")
    parser.add_argument("--max-tokens", type=int, default=70, help="of each of these answers; default: 70")
    parser.add_argument("--trace", metavar="FILE", help="write a page, such as run.html")
    parser.add_argument("--fork", metavar="FILE", help="a fork, whose engine runs")
    args = parser.parse_args()
    prompts = args.prompt or [f"{OPENING}\n\n{speaker}:\n" for speaker in SPEAKERS]
    try:
        make_llm = load_fork(args.fork) if args.fork else LLM
        llm = make_llm(args.model, trace=args.trace)
        print("" if args.prompt else OPENING)
        answer_all(llm.engine, prompts, args.max_tokens)
        share_blocks(llm.engine, prompts[-1])
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    if args.trace:
        print(f"\n{args.trace} shows every step: open it in a browser")


if __name__ == "__main__":
    run_program(main)
