"""How fast it is, beside a peer in the same run, and what sharing saves.

python bench.py                          throughput on random requests; ends in a minute or two on a CPU
python bench.py --baseline hf            the same requests and weights in transformers, and the ratio
python bench.py sharing                  blocks saved by parallel sampling and beam search, without a model
python bench.py preemption               swapping against recomputing, over block sizes, in both layouts
python bench.py overhead                 time to schedule a step, over pool sizes and numbers of sequences

Lengths, counts, types and seeds are flags: `python bench.py throughput --help`.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from nanopaged import LLM, BeamSearchParams, SamplingParams, audit
from nanopaged.batch import ScheduledBatch, StepResult
from nanopaged.beam_search import BeamSearch
from nanopaged.block_manager import BlockManager
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model_runner import pick_device
from nanopaged.outputs import Sample
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, Sequence
from nanopaged.stopping import StopRules

# name → (layers, hidden, inner, query heads, KV heads, head dim, vocabulary)
SHAPES = {
    "test": (2, 64, 96, 4, 2, 16, 12000),
    "28m": (6, 384, 1024, 6, 2, 64, 32000),
    "100m": (12, 768, 2048, 12, 4, 64, 32000),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
}


@dataclass
class Workload:
    """Requests of random lengths; token ids stay low, so that any vocabulary has them."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def draw(cls, args: argparse.Namespace) -> Workload:
        rng = random.Random(args.seed)
        lengths = [rng.randint(args.min_input, args.max_input) for _ in range(args.requests)]
        prompts = [[rng.randint(0, 10000) for _ in range(n)] for n in lengths]
        return cls(prompts, [rng.randint(args.min_output, args.max_output) for _ in prompts])


# ── throughput ────────────────────────────────────────────────────────────────────────────────────


def throughput(args: argparse.Namespace) -> None:
    """Output tokens per second on one batch of requests, and the same in transformers if asked."""
    workload = Workload.draw(args)
    print(
        f"{args.requests} requests, {sum(map(len, workload.prompts))} prompt and "
        f"{sum(workload.max_tokens)} output tokens; shape {args.shape}, {args.dtype}; {machine()}"
    )
    rates: dict[str, list[float]] = {}
    with checkpoint(args) as folder:
        sides = {"nanopaged": lambda: run_ours(folder, workload, args)}
        if args.baseline == "hf":
            for size in dict.fromkeys((8, 16, args.requests)):
                name = f"transformers, static batches of {size}"
                sides[name] = lambda size=size: run_static(folder, workload, args, size)
            sides["transformers, continuous"] = lambda: run_continuous(folder, workload, args)
        for _ in range(args.repeat):  # in turns, so that a slow minute of the machine meets all of them
            for name, run in sides.items():
                rates.setdefault(name, []).append(run())
    report_rates(rates)


def report_rates(rates: dict[str, list[float]]) -> None:
    """Output tokens per second of each side, and the ratio to the best peer, round by round."""
    print(f"{'output tokens/s':40} {'median':>8} {'least':>8} {'most':>8}")
    for name, runs in rates.items():
        print(f"{name:40} {statistics.median(runs):8.1f} {min(runs):8.1f} {max(runs):8.1f}")
    ours, *peers = rates
    if peers:
        best = max(peers, key=lambda name: statistics.median(rates[name]))
        ratios = [mine / other for mine, other in zip(rates[ours], rates[best], strict=True)]
        rounds = f"; rounds: {', '.join(f'{r:.2f}' for r in ratios)}" if len(ratios) > 1 else ""
        print(f"nanopaged is {statistics.median(ratios):.2f} times the best of them ({best}{rounds})")


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {device}, {torch.get_num_threads()} threads"
    )


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[Path]:
    """The model to run: the one named, or random weights of a shape, in a folder that all sides can load."""
    if args.model is not None:
        yield Path(args.model)
        return
    layers, hidden, inner, heads, kv_heads, head_dim, vocab = SHAPES[args.shape]
    config = transformers.Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(args.seed)
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, args.dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        yield Path(folder)


def run_ours(folder: Path, workload: Workload, args: argparse.Namespace) -> float:
    """Output tokens per second of `LLM.generate`, prefill included."""
    llm = LLM(folder, dtype=args.dtype, block_size=args.block_size, max_num_batched_tokens=args.budget)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    began = time.perf_counter()
    llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - began
    stats = llm.engine.stats()
    print(f"{stats.num_steps} steps, {seconds:.1f} s, {stats.num_preemptions_recompute} preemptions")
    return sum(workload.max_tokens) / seconds


def load_hf(folder: Path, args: argparse.Namespace) -> transformers.PreTrainedModel:
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.inference_mode()
def run_static(folder: Path, workload: Workload, args: argparse.Namespace, size: int) -> float:
    """`generate` on left-padded batches in order of arrival; each runs until its longest output is done."""
    model = load_hf(folder, args)
    began = time.perf_counter()
    for i in tqdm(range(0, len(workload.prompts), size), desc=f"static {size}"):
        prompts, max_tokens = workload.prompts[i : i + size], workload.max_tokens[i : i + size]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(max_tokens),
            do_sample=False,
            pad_token_id=0,
        )
    return sum(workload.max_tokens) / (time.perf_counter() - began)


def run_continuous(folder: Path, workload: Workload, args: argparse.Namespace) -> float:
    """transformers' own continuous batching, with a pool and a budget that hold all requests at once."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = load_hf(folder, args)
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(workload.max_tokens))
    settings = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=args.budget, page_size=32)
    began = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=n)
        done = 0
        while done < len(workload.prompts):
            result = manager.get_result(timeout=1)
            done += result is not None and result.is_finished()
    return sum(workload.max_tokens) / (time.perf_counter() - began)


# ── without a model ───────────────────────────────────────────────────────────────────────────────


class NoModel:
    """A runner that answers at once with random tokens: what remains is scheduling and bookkeeping."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return StepResult([self._samples(seq) if seq.catches_up else [] for seq in batch.sequences])

    def _samples(self, seq: Sequence) -> list[Sample]:
        request = seq.request
        if request.beam_search is None:
            num = request.params.num_sequences if request.unforked else 1
            return [Sample(self.rng.randrange(32000), -1.0) for _ in range(num)]
        # Beams propose tokens whose probabilities fall off as in text: a few likely ones, a long tail.
        draws = [-self.rng.expovariate(0.5) for _ in range(request.beam_search.num_candidates)]
        return [Sample(self.rng.randrange(32000), logprob) for logprob in draws]


def make_request(name: str, prompt: list[int], params: SamplingParams | BeamSearchParams) -> Request:
    rules = StopRules.of(params, len(prompt), frozenset(), max_model_len=1 << 20)
    search = BeamSearch(params, rules, len(prompt)) if isinstance(params, BeamSearchParams) else None
    seq = Sequence(list(prompt), len(prompt))
    return Request(name, None, prompt, params, rules, seed=0, sequences=[seq], beam_search=search)


# The paper's traces (its Fig. 11): mean tokens of input and output.
TRACES = {"Alpaca-like": (19, 58), "ShareGPT-like": (161, 338)}
PAPER = {
    ("Alpaca-like", "parallel"): "6.1 to 9.8 %",
    ("Alpaca-like", "beam"): "37.6 to 55.2 %",
    ("ShareGPT-like", "parallel"): "16.2 to 30.5 %",
    ("ShareGPT-like", "beam"): "44.3 to 66.3 %",
}


def sharing(args: argparse.Namespace) -> None:
    """Share of the blocks saved, over all steps: 1 - blocks in use / entries of the block tables (§6.3).

    Requests of exponentially distributed lengths go through the real scheduler and block manager; the prefix
    cache is off, so that requests share nothing with each other.
    """
    print(f"{args.requests} requests a row, blocks of {args.block_size}; widths 2, 4, 6")
    print(f"{'trace':15} {'sharing':9} {'n = 2':>7} {'n = 4':>7} {'n = 6':>7}   paper, 2 to 6")
    for trace, means in TRACES.items():
        for kind in ("parallel", "beam"):
            saved = [replay(kind, width, means, args) for width in (2, 4, 6)]
            columns = " ".join(f"{share:7.1%}" for share in saved)
            print(f"{trace:15} {kind:9} {columns}   {PAPER[trace, kind]}")


def replay(kind: str, width: int, means: tuple[int, int], args: argparse.Namespace) -> float:
    rng = random.Random(args.seed)
    manager = BlockManager(100_000, args.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(manager, max_num_seqs=64 * width, max_num_batched_tokens=8192)
    for i in range(args.requests):
        num_input, num_output = (min(2048, 1 + int(rng.expovariate(1 / mean))) for mean in means)
        if kind == "beam":
            params = BeamSearchParams(beam_width=width, max_tokens=num_output)
        else:
            params = SamplingParams(n=width, max_tokens=num_output)
        scheduler.add(make_request(str(i), [rng.randrange(32000) for _ in range(num_input)], params))
    runner, saved, entries = NoModel(args.seed), 0, 0
    with tqdm(total=args.requests, desc=f"{kind} {width}", leave=False) as bar:
        while scheduler.has_unfinished:
            batch = scheduler.schedule()
            for request in scheduler.update(batch, runner.execute(batch)):
                bar.update(request.finished)
            saved += audit.num_blocks_saved(manager, scheduler.sequences)
            entries += sum(len(seq.block_table) for seq in scheduler.sequences)
    return saved / entries


def overhead(args: argparse.Namespace) -> None:
    """Microseconds to schedule a step of decodes and book its results, per step and per sequence."""
    print(f"blocks of {args.block_size}, prompts of 100 tokens; median of {args.steps} steps; {machine()}")
    print(f"{'blocks':>9} {'sequences':>9} {'us a step':>10} {'us a sequence':>14}")
    for num_blocks in (1000, 10_000, 100_000, 1_000_000):
        for num_seqs in (1, 16, 64, 256, 1024, 4096):
            if num_seqs * ((100 + args.steps) // args.block_size + 2) <= num_blocks:
                seconds = time_steps(num_blocks, num_seqs, args)
                us = 1e6 * seconds
                print(f"{num_blocks:9,} {num_seqs:9,} {us:10.1f} {us / num_seqs:14.3f}")


def time_steps(num_blocks: int, num_seqs: int, args: argparse.Namespace) -> float:
    rng = random.Random(args.seed)
    scheduler = Scheduler(BlockManager(num_blocks, args.block_size), num_seqs, 1 << 20)
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True)
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), [rng.randrange(32000) for _ in range(100)], params))
    runner, seconds = NoModel(args.seed), []
    while scheduler.has_unfinished:
        began = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = runner.execute(batch)
        answered = time.perf_counter()
        scheduler.update(batch, result)
        seconds.append(scheduled - began + time.perf_counter() - answered)
    return statistics.median(seconds[1:-1])  # without the prefill and the end


# ── swapping against recomputing ──────────────────────────────────────────────────────────────────


def preemption(args: argparse.Namespace) -> None:
    """Microseconds a token to swap K/V out and in again, and to compute it again (paper, §7.3, Fig. 19).

    The paper's engine kept each layer's blocks apart, so a block was 2 · layers small copies, and small
    blocks swapped badly. Here a block is one run of memory; the other layout is measured beside it.
    """
    layers, hidden, inner, heads, kv_heads, head_dim, vocab = SHAPES[args.shape]
    device = pick_device("auto")
    shape = KVShape(layers, kv_heads, head_dim, getattr(torch, args.dtype))
    recompute = 1e6 * time_prefill(args)
    print(f"shape {args.shape}, {args.dtype}: {shape.block_bytes(1):,} bytes a token; {machine()}")
    print(f"{'block size':>10} {'block-major':>12} {'layer-major':>12} {'recompute':>10}   us a token")
    rows = []
    for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        swaps = [1e6 * time_swap(shape, block_size, device, major, args.seed) for major in (True, False)]
        rows.append((block_size, *swaps, recompute))
        print(f"{block_size:10} {swaps[0]:12.2f} {swaps[1]:12.2f} {recompute:10.2f}")
    if args.plot:
        plot_preemption(rows, args.plot)


def time_swap(
    shape: KVShape,
    block_size: int,
    device: torch.device,
    block_major: bool,
    seed: int,
    num_tokens: int = 2048,
) -> float:
    """Seconds a token for the way out and in of scattered blocks; the median of seven rounds."""
    num_tokens = 2048
    num_blocks = num_tokens // block_size
    cache = KVCache(shape, 2 * num_blocks, block_size, device, num_blocks, block_major)
    cache.data.normal_()
    rng, rounds = random.Random(seed), []
    for _ in range(7):
        device_blocks = rng.sample(range(2 * num_blocks), num_blocks)
        host_blocks = rng.sample(range(num_blocks), num_blocks)
        began = time.perf_counter()
        cache.swap_out(list(zip(device_blocks, host_blocks, strict=True)))
        cache.swap_in(list(zip(host_blocks, device_blocks, strict=True)))
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / num_tokens


def time_prefill(args: argparse.Namespace, num_tokens: int = 512) -> float:
    """Seconds a token to compute a prompt, attention included; the median of five."""
    with checkpoint(args) as folder:
        llm = LLM(folder, dtype=args.dtype, max_model_len=2048, enable_prefix_caching=False)
    rng, rounds = random.Random(args.seed), []
    for _ in range(5):
        prompt = [rng.randrange(10000) for _ in range(num_tokens)]
        began = time.perf_counter()
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / num_tokens


def plot_preemption(rows: list[tuple[float, ...]], path: str) -> None:
    import matplotlib.pyplot as plt

    sizes, *columns = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for column, label in zip(columns, ("swap, block-major", "swap, layer-major", "recompute"), strict=True):
        axes.plot(sizes, column, marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="block size (tokens)", ylabel="microseconds a token")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


# ── the command line ──────────────────────────────────────────────────────────────────────────────

EXPERIMENTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "throughput": throughput,
    "sharing": sharing,
    "preemption": preemption,
    "overhead": overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment", nargs="?", default="throughput", choices=EXPERIMENTS)
    parser.add_argument("--baseline", choices=["hf"], help="also run transformers on the same requests")
    parser.add_argument("--repeat", type=int, default=1, help="rounds of throughput; the median counts")
    parser.add_argument("--model", help="a model folder instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default="100m", help="of the random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, help="default: 32, or 500 for sharing")
    parser.add_argument("--min-input", type=int, default=16)
    parser.add_argument("--max-input", type=int, default=256)
    parser.add_argument("--min-output", type=int, default=16)
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step")
    parser.add_argument("--steps", type=int, default=100, help="of overhead")
    parser.add_argument("--plot", metavar="FILE", help="save preemption's picture, e.g. as .svg")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.requests is None:
        args.requests = 500 if args.experiment == "sharing" else 32
    EXPERIMENTS[args.experiment](args)


if __name__ == "__main__":
    main()
