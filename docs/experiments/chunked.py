"""How long running requests wait for their next token when a long prompt arrives: in chunks, and whole.

    python docs/experiments/chunked.py --plot docs/book/figures/chunked.svg

A prompt that is computed in one step delays every running request by the time of that step. In chunks that
fit into the token budget together with the decodes, the prompt takes more steps, and each delays the others
less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from common import add_model_arguments, add_plot_argument, at_least, machine, make_llm, make_parser, save_bars

from nanopaged.terminal import run_program


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser, shape="28m")
    budgets = [64, 128, 256, 512]
    parser.add_argument("--running", type=at_least(1), default=8, help="requests that decode")
    parser.add_argument("--prompt", type=at_least(1), default=1500, help="tokens of the prompt that arrives")
    parser.add_argument("--budget", type=at_least(2), nargs="+", default=budgets, help="tokens in a step")
    parser.add_argument("--repeat", type=at_least(1), default=5, help="prompts; the medians count")
    add_plot_argument(parser)
    args = parser.parse_args()
    if min(args.budget) <= args.running:
        parser.error(f"--budget {min(args.budget)} leaves no room for a prompt after {args.running} decodes")
    print(f"{args.running} requests decode, a prompt of {args.prompt} arrives; {machine()}")
    print("usual and longest time between two tokens of a running request; time to the prompt's first token")
    print(f"{'budget':>8} {'usual, ms':>10} {'longest, ms':>12} {'prompt done, ms':>16}")
    bars: dict[str, list[float]] = {"usual": [], "longest, while the prompt is computed": []}
    names = [*map(str, args.budget), "whole"]
    for name, budget in zip(names, [*args.budget, None], strict=True):
        usual, longest, done = (1e3 * seconds for seconds in serve(budget, args))
        for column, ms in zip(bars.values(), (usual, longest), strict=True):
            column.append(ms)
        print(f"{name:>8} {usual:10.1f} {longest:12.1f} {done:16.1f}", flush=True)
    if args.plot:
        save_bars(args.plot, names, bars, "time between two tokens (ms)", "tokens in a step")


def serve(budget: int | None, args: argparse.Namespace) -> tuple[float, ...]:
    """Medians of (a step without the prompt, the longest step with it, its time to its first token)."""
    from nanopaged import SamplingParams

    room = args.prompt + args.running + 8
    num_steps = 12 + args.prompt // max(1, (budget or room) - args.running)  # at most, for one prompt
    llm = make_llm(
        args,
        enable_prefix_caching=False,
        enable_chunked_prefill=budget is not None,
        max_num_batched_tokens=budget or room,
        max_model_len=max(room, 20 + 2 * num_steps),
    )
    engine, rng, rounds = llm.engine, random.Random(args.seed), []
    vocab = range(engine.vocab_size)

    def time_step() -> float:
        began = time.perf_counter()
        outputs.extend(engine.step())
        return time.perf_counter() - began

    outputs = []
    for i in range(args.repeat + 1):
        params = SamplingParams(temperature=0, max_tokens=2 * num_steps, ignore_eos=True)
        for j in range(args.running):
            engine.add_request(f"running {j}", rng.choices(vocab, k=20), params)
        for _ in range(2):
            engine.step()
        usual = [time_step() for _ in range(8)]
        engine.add_request("long", rng.choices(vocab, k=args.prompt), SamplingParams(max_tokens=1))
        outputs.clear()
        steps = []
        while not any(output.request_id == "long" for output in outputs):
            steps.append(time_step())
        if i > 0:  # the first round warms up
            rounds.append((statistics.median(usual), max(steps), sum(steps)))
        for j in range(args.running):
            engine.abort_request(f"running {j}")
    return tuple(map(statistics.median, zip(*rounds, strict=True)))


if __name__ == "__main__":
    run_program(main)
