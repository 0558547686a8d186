"""K/V memory that holds real tokens, how the rest is wasted, and requests at once: contiguous against pages.

    python docs/experiments/memory.py --plot docs/book/figures/memory.svg

Requests queue for a pool of K/V slots (15,700 in the paper: OPT-13B on an A100). Contiguous allocation
reserves one range of slots for a whole request when it is admitted, first come, first served, first fit:

    max       2,048 slots, the longest request possible
    pow2      the prompt, and the output's length rounded up to a power of two
    oracle    the prompt and the output exactly, as if the output's length were known in advance

"paging" is the real scheduler and block manager, without a model. Every slot of the pool is one of these:

    real       it holds the K/V of a token
    reserved   empty; its request will fill it later
    internal   empty; its request holds it and never fills it (internal fragmentation)
    external   free; there are enough free slots for the next request, but not in one range
    too few    free; all free slots together are too few for the next request

All figures are averages over the steps in which the queue is not empty (PagedAttention, Fig. 2 and Fig. 13;
its "external & others" is the last two). Lengths are exponentially distributed around the means of the
paper's traces; the traces themselves are not.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import islice

from common import add_plot_argument, at_least, make_parser, save_stacks
from no_model import TRACES, NoModel, make_request, make_scheduler
from tqdm import tqdm

from nanopaged import SamplingParams
from nanopaged.block_manager import blocks_needed
from nanopaged.scheduler import Scheduler
from nanopaged.terminal import run_program

MAX_LEN = 2048  # tokens of the longest request
MAX_QUEUE = 64  # requests that wait at a time
PAPER = {"max": "20.4 %", "pow2": "26.8 %", "oracle": "38.2 %", "paging": "96.3 %"}
KINDS = {  # of slots → their colours in a figure
    "real": "#0b5cad",
    "reserved": "#8ec1f0",
    "internal": "#e8a33d",
    "external": "#a01c61",
    "too few": "#d1d9e0",
}

Lengths = list[tuple[int, int]]  # (input, output) tokens of each request
Reserve = Callable[[int, int], int]  # (input, output) tokens → slots to reserve


class Usage:
    """What the slots of a pool are, summed over the steps in which a request waits."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.steps = self.requests = 0
        self.total_steps = 0  # until all requests have ended, also those in which none waits
        self.slots = dict.fromkeys(KINDS, 0)

    def add(
        self, steps: int, requests: int, real: int, filled_in_the_end: int, held: int, next_size: int
    ) -> None:
        """Count `steps` in which the same requests run and the same one waits.

        Args:
            real: slots with a token, summed over the steps; the others are slots in each of them.
            filled_in_the_end: slots in which a token is, or will be before the request ends.
            held: slots that running requests hold.
            next_size: slots that the next request needs.
        """
        free = self.num_slots - held
        self.steps += steps
        self.requests += steps * requests
        self.slots["real"] += real
        self.slots["reserved"] += steps * filled_in_the_end - real
        self.slots["internal"] += steps * (held - filled_in_the_end)
        self.slots["external" if free >= next_size else "too few"] += steps * free

    @property
    def shares(self) -> dict[str, float]:
        """Kind of slot → its average share of the pool. They add up to 1."""
        return {kind: slots / (self.steps * self.num_slots) for kind, slots in self.slots.items()}

    @property
    def at_once(self) -> float:
        """Average number of running requests."""
        return self.requests / self.steps


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=at_least(1), default=2000, help="of each trace, up to a million")
    parser.add_argument(
        "--slots", type=at_least(MAX_LEN), default=15700, help="tokens for which there is memory"
    )
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens in a block")
    parser.add_argument("--trace", choices=TRACES, nargs="+", default=list(TRACES), help="lengths")
    add_plot_argument(parser)
    args = parser.parse_args()
    print(f"{args.requests} requests a row, {args.slots} slots, blocks of {args.block_size}")
    kinds = "".join(f"{kind:>10}" for kind in list(KINDS)[1:])
    print(f"{'trace':15} {'allocation':11}{'real':>7} {'at once':>8}{kinds}   paper's real")
    bars: dict[str, dict[str, dict[str, float]]] = {}
    rules = reserve_rules(MAX_LEN)
    for trace in args.trace:
        lengths = draw_lengths(TRACES[trace], args.requests, args.seed)
        for policy in (*rules, "paging"):
            if policy == "paging":
                usage = run_paged(lengths, args.slots, args.block_size, args.seed)
            else:
                usage = run_contiguous(lengths, args.slots, rules[policy])
            print_row(f"{trace:15} {policy:11}", usage, PAPER[policy])
            shares = usage.shares if usage.steps > 0 else {}
            bars.setdefault(trace, {})[policy] = {kind: 100 * share for kind, share in shares.items()}
    if args.plot:
        save_stacks(args.plot, bars, KINDS, "K/V memory (%)", why_empty="no request waits")


def print_row(name: str, usage: Usage, paper: str) -> None:
    if usage.steps == 0:
        print(f"{name} all requests fit at once, no request waits: raise --requests or lower --slots")
    else:
        real, *rest = usage.shares.values()
        wasted = "".join(f"{share:10.1%}" for share in rest)
        print(f"{name}{real:7.1%} {usage.at_once:8.1f}{wasted}   {paper}", flush=True)


def reserve_rules(longest: int) -> dict[str, Reserve]:
    """The three rules by name, if no request has more than `longest` tokens."""
    return {
        "max": lambda num_input, num_output: longest,
        "pow2": lambda num_input, num_output: min(longest, num_input + (1 << (num_output - 1).bit_length())),
        "oracle": lambda num_input, num_output: num_input + num_output,
    }


def draw_lengths(means: tuple[int, int], num: int, seed: int, longest: int = MAX_LEN) -> Lengths:
    """Exponential around the means; input and output together have at most `longest` tokens."""
    rng, lengths = random.Random(seed), []
    for _ in range(num):
        num_input, num_output = (1 + int(rng.expovariate(1 / mean)) for mean in means)
        num_input = min(num_input, longest - 1)
        lengths.append((num_input, min(num_output, longest - num_input)))
    return lengths


# ── contiguous allocation ─────────────────────────────────────────────────────────────────────────


def run_contiguous(lengths: Lengths, num_slots: int, reserve: Callable[[int, int], int]) -> Usage:
    """Allocate a range for each request, and count the steps in which one waits.

    Only the steps in which a request ends are visited. Between two of them each of the n running requests
    grows by a token a step, so the tokens in memory over p steps add up to p·tokens + n·(1 + 2 + … + p).
    """
    usage = Usage(num_slots)
    holes = [(0, num_slots)]  # (start, length) of the free ranges, in order
    running: list[tuple[int, int, int, int]] = []  # heap of (step of its end, start, reserved, tokens then)
    now = tokens = filled_in_the_end = held = 0
    for num_input, num_output in tqdm(lengths, leave=False):
        size, final = reserve(num_input, num_output), num_input + num_output
        while (start := take(holes, size)) is None:  # it waits until enough requests have ended
            end = running[0][0]
            passed, n = end - now, len(running)
            real = passed * tokens + n * passed * (passed + 1) // 2
            usage.add(passed, n, real, filled_in_the_end, held, size)
            _, its_start, its_size, its_tokens = heapq.heappop(running)
            give_back(holes, its_start, its_size)
            tokens += n * passed - its_tokens
            filled_in_the_end -= its_tokens
            held -= its_size
            now = end
        heapq.heappush(running, (now + num_output, start, size, final))
        tokens += num_input
        filled_in_the_end += final
        held += size
    usage.total_steps = max(end for end, *_ in running)
    return usage


def take(holes: list[tuple[int, int]], size: int) -> int | None:
    """Take `size` slots from the first free range that has them; return where they start, or None."""
    for i, (start, length) in enumerate(holes):
        if length >= size:
            holes[i : i + 1] = [(start + size, length - size)] if length > size else []
            return start
    return None


def give_back(holes: list[tuple[int, int]], start: int, length: int) -> None:
    """Free a range, and join it with its neighbours."""
    merged: list[tuple[int, int]] = []
    for hole in sorted([*holes, (start, length)]):
        if merged and sum(merged[-1]) == hole[0]:
            merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
        else:
            merged.append(hole)
    holes[:] = merged


# ── paging ────────────────────────────────────────────────────────────────────────────────────────


def run_paged(lengths: Lengths, num_slots: int, block_size: int, seed: int = 0) -> Usage:
    """The same count for the real scheduler and block manager."""
    usage = Usage(num_slots)
    scheduler = make_scheduler(num_slots // block_size, block_size, enable_prefix_caching=False)
    runner, num_finished = NoModel(seed), 0
    coming = enumerate(lengths)
    with tqdm(total=len(lengths), leave=False) as bar:
        while num_finished < len(lengths):
            # A short queue is as good as a long one, and a million requests need not exist at the same time.
            for i, (num_input, num_output) in islice(coming, max(0, MAX_QUEUE - len(scheduler.waiting))):
                params = SamplingParams(max_tokens=num_output)
                scheduler.add(make_request(str(i), [0] * num_input, params))
            batch = scheduler.schedule()
            usage.total_steps += 1
            if scheduler.waiting:
                count_blocks(usage, scheduler)
            finished = sum(request.finished for request in scheduler.update(batch, runner.execute(batch)))
            num_finished += finished
            bar.update(finished)
    return usage


def count_blocks(usage: Usage, scheduler: Scheduler) -> None:
    """Count one step. Only the slots at the end of each sequence's last block are held without a token."""
    size, num_running = scheduler.block_size, len(scheduler.running)
    real = held = filled_in_the_end = 0
    for seq in scheduler.running_sequences:
        room = len(seq.block_table) * size
        final = seq.request.num_prompt_tokens + seq.request.params.max_tokens - 1  # the last needs no K/V
        real += seq.num_computed_tokens + seq.num_scheduled_tokens
        held += room
        filled_in_the_end += min(room, final)
    assert held - real <= num_running * (size - 1), "more is empty than the end of a block for each request"
    following = scheduler.waiting[0]
    next_size = blocks_needed(following.live[0].num_tokens, size) * size
    usage.add(1, num_running, real, filled_in_the_end, held, next_size)


if __name__ == "__main__":
    run_program(main)
