"""Random workloads: an engine, requests that come and go, and faults. Each is a function of its seed.

A workload prints as Python code that makes it again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from nanopaged import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.block_manager import blocks_needed

Params = SamplingParams | BeamSearchParams

# The fake model says tokens 0, 1 and 2. Their texts are "a", "b" with the first byte of "é", and its second
# byte with "a": characters and stop strings begin in one token and end in another.
FAKE_TOKEN_TEXTS = ("a", "bÃ", "©a")  # in the byte alphabet of GPT-2's tokenizer
LONGEST = 160  # tokens, of prompt and output together


@dataclass(frozen=True)
class Vocabulary:
    """What prompts and params of a model are drawn from. Token 2 of both models is end-of-sequence."""

    prompt_tokens: range
    stop_strings: tuple[str, ...]
    stop_tokens: range
    end_beams: range  # the stop tokens of beam searches


FAKE = Vocabulary(range(3), ("b", "éa", "aa", "ab", "éabé", "béab"), range(2), range(97))
TINY = Vocabulary(range(3, 1024), ("e", "ou", "\n", "th", ", ", "I"), range(3, 1024), range(3, 1024))


@dataclass
class Asked:
    """One request of a workload, and when it comes and goes (in steps)."""

    prompt: list[int]
    params: Params
    arrival: int
    aborted_after: int | None = None
    salt: str | None = None

    def most_blocks(self, block_size: int) -> int:
        """The most blocks that it can need: full blocks of the prompt are shared, other blocks are not."""
        width = self.params.width
        shared = len(self.prompt) // block_size if width > 1 else 0
        longest = blocks_needed(len(self.prompt) + self.params.max_tokens - 1, block_size)
        return shared + width * (longest - shared)


@dataclass
class Fault:
    """From `step` on, `error` is raised at the `line`-th line executed in `stage` (see `faults.STAGES`)."""

    step: int
    stage: str
    line: int
    error: str


@dataclass
class Workload:
    """Everything that one run consists of."""

    seed: int
    model: str  # "fake" | "tiny"
    block_size: int
    num_blocks: int
    num_host_blocks: int
    budget: int
    chunked: bool
    caching: bool
    preemption: str  # as in EngineConfig, or "directed": see `forked`
    watermark: float
    max_num_seqs: int
    order: str  # "arrival" | "random": each request has another rank in each step
    faults: list[Fault]
    requests: list[Asked]

    def config(self, trace: Path | None = None) -> EngineConfig:
        """Of the engine that serves it."""
        longest = max(len(asked.prompt) + asked.params.max_tokens for asked in self.requests)
        return EngineConfig(
            max_model_len=longest,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget if self.chunked else max(self.budget, longest),
            enable_chunked_prefill=self.chunked,
            enable_prefix_caching=self.caching,
            preemption=self.preemption.replace("directed", "swap"),
            watermark=self.watermark,
            trace=trace,
        )


# Stage → lines that it executes in a step, roughly.
STAGE_LINES = {"schedule": 60, "swap": 4, "copy": 3, "forward": 20, "sample": 20, "update": 60}
STAGE_LINES |= {"detokenise": 30, "add": 4, "abort": 15}


def draw_faults(rng: random.Random, num_steps: int) -> list[Fault]:
    """Up to four. The stage is drawn first, so that short stages fail as often as long ones."""
    faults = []
    for _ in range(rng.randint(0, 4)):
        stage = rng.choice(list(STAGE_LINES))
        fault = Fault(
            step=rng.randint(0, num_steps),
            stage=stage,
            line=1 + int(rng.expovariate(1 / STAGE_LINES[stage])),
            error=rng.choice(["RuntimeError", "MemoryError", "KeyboardInterrupt"]),
        )
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.step)


def draw_params(rng: random.Random, kind: str, max_tokens: int, vocabulary: Vocabulary) -> Params:
    """Params that mostly go on until `max_tokens`."""
    rules = {"max_tokens": max_tokens, "min_tokens": rng.choice([0, 0, rng.randint(0, max_tokens)])}
    rules["ignore_eos"] = rng.random() < 0.9
    if kind == "beams":
        return BeamSearchParams(
            beam_width=rng.randint(1, 4),
            length_penalty=rng.choice([0.0, 1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            stop_token_ids=rng.choice([(), (), rng.sample(vocabulary.end_beams, k=8)]),
            **rules,
        )
    return SamplingParams(
        n=1 if kind != "several" else rng.randint(2, 4),
        temperature=float(kind != "greedy" and rng.random() < 0.9),
        seed=rng.randint(0, 2),
        stop=rng.choice([(), (), (), rng.sample(vocabulary.stop_strings, k=rng.randint(1, 2))]),
        stop_token_ids=rng.choice([()] * 5 + [[rng.choice(vocabulary.stop_tokens)]]),
        logprobs=rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),  # such a prompt must not come from the cache
        **rules,
    )


def mixed(seed: int, model: str = "fake") -> Workload:
    """Requests of every kind and size, prompts that often begin alike, aborts and faults."""
    rng = random.Random(seed)
    vocabulary = FAKE if model == "fake" else TINY
    block_size = rng.choice([1, 2, 2, 3, 4, 5, 8, rng.randint(1, 32)])
    stems = [rng.choices(vocabulary.prompt_tokens, k=rng.randint(4, 12 + block_size)) for _ in range(2)]
    kinds = rng.choice([["greedy", "sampled"], ["greedy", "sampled", "several", "beams"]])
    longest_output = rng.choice([10, 20, 40] if model == "fake" else [5, 10, 20])
    requests: list[Asked] = []
    for _ in range(rng.randint(2, 10 if model == "fake" else 6)):
        prompt = rng.choice(stems) + rng.choices(vocabulary.prompt_tokens, k=rng.randint(0, 6))
        max_tokens = rng.choice([longest_output, rng.randint(1, longest_output)])
        params = draw_params(rng, rng.choice(kinds), max_tokens, vocabulary)
        size = rng.random()
        if size < 0.1:
            prompt = prompt[:1]
        elif size < 0.12:  # a huge prompt, that fills its blocks to the last slot
            longest = rng.randint(60, LONGEST) // block_size * block_size - params.max_tokens + 1
            prompt += rng.choices(vocabulary.prompt_tokens, k=max(0, longest - len(prompt)))
        asked = Asked(prompt, params, rng.randint(0, 8), rng.choice([None, None, rng.randint(0, 30)]))
        requests.append(asked)
        if rng.random() < 0.2:  # a twin, sometimes with a salt
            aborted_after = rng.choice([None, asked.aborted_after])
            twin = replace(asked, aborted_after=aborted_after, salt=rng.choice([None, "x", "y"]))
            requests.append(twin)
    most = max(asked.most_blocks(block_size) for asked in requests)
    return Workload(
        seed=seed,
        model=model,
        block_size=block_size,
        num_blocks=most + rng.choice([0, 0, rng.randint(0, 4), rng.randint(0, 30)]),
        num_host_blocks=rng.choice([200, 200, 40, 8, 3, 0]),
        budget=rng.choice([rng.randint(1, 10), rng.randint(1, 40), 200]),
        chunked=rng.random() < 0.5,
        caching=rng.random() < 0.6,
        preemption=rng.choice(["swap", "swap", "recompute", "auto", "directed"]),
        watermark=rng.choice([0.0, 0.05, 0.3]),
        max_num_seqs=rng.randint(4, 12),
        order=rng.choice(["arrival", "arrival", "random"]),
        faults=draw_faults(rng, 12),
        requests=requests,
    )


def tiny(seed: int) -> Workload:
    """The same with the tiny model: the real sampler, the real K/V and the real tokenizer."""
    return mixed(seed, "tiny")


def siblings(seed: int) -> Workload:
    """Requests whose outputs all end in one step, in a pool so small that they are swapped.

    Every token of the fake model has an "a" or a "b". So each output ends with its first token that may end
    it, the one that makes `min_tokens`, and no one knows that step before it.
    """
    rng = random.Random(seed)
    stem = rng.choices(range(3), k=rng.randint(1, 8))
    rules = {"stop": ("a", "b"), "max_tokens": 12, "ignore_eos": True}
    requests = []
    for _ in range(rng.randint(6, 14)):
        prompt = stem[: rng.randint(1, len(stem))] + rng.choices(range(3), k=rng.randint(0, 4))
        n, min_tokens = rng.choice([1, 2, 2, 3]), rng.randint(1, 12)
        params = SamplingParams(n=n, seed=rng.randint(0, 2), min_tokens=min_tokens, **rules)
        aborted_after = rng.choice([None, None, rng.randint(0, 20)])
        requests.append(Asked(prompt, params, rng.randint(0, 12), aborted_after))
    block_size = rng.randint(1, 3)
    return replace(
        mixed(seed),
        block_size=block_size,
        num_blocks=max(asked.most_blocks(block_size) for asked in requests),
        num_host_blocks=rng.choice([200, 40, 6]),
        preemption="swap",
        watermark=0.0,
        max_num_seqs=20,
        requests=requests,
    )


def forked(seed: int) -> Workload:
    """Forked requests that are recomputed, swapped before they have caught up, and aborted in between.

    Long requests that arrived first preempt families of two to four sequences. Usually a family is
    recomputed if all its K/V is computed, and swapped if it is not; with a small budget that takes many
    steps. Without chunked prefill the budget is larger, and the families are longer, so that they exceed it.
    The last requests have the same prompts again, and so read the blocks that the others left in the prefix
    cache.
    """
    rng = random.Random(seed)
    chunked = rng.random() < 0.7
    block_size = rng.randint(1, 3)
    stem = rng.choices(range(3), k=rng.randint(2, 8))
    requests = []
    for _ in range(rng.randint(2, 4)):
        prompt = rng.choices(range(3), k=rng.randint(1, 6))
        params = SamplingParams(max_tokens=rng.randint(20, 50 if chunked else 30), ignore_eos=True)
        requests.append(Asked(prompt, params, rng.randint(0, 6)))
    for _ in range(rng.randint(1, 3)):
        prompt = stem[: rng.randint(1, len(stem))] + rng.choices(range(3), k=rng.randint(0, 8))
        width = rng.choice([2, 2, 3]) if chunked else rng.choice([3, 4])
        rules = {"max_tokens": rng.randint(6, 20) if chunked else rng.randint(20, 40), "ignore_eos": True}
        if rng.random() < (0.4 if chunked else 0.8):
            params = BeamSearchParams(beam_width=width, **rules)
        else:
            params = SamplingParams(n=width, stop=rng.choice([(), "éabé"]), **rules)
        requests.append(Asked(prompt, params, rng.randint(0, 4), rng.choice([None, rng.randint(4, 40)])))
    for asked in requests[:]:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        requests.append(Asked([*asked.prompt, rng.randint(0, 2)], params, rng.randint(10, 60)))
    most = max(asked.most_blocks(block_size) for asked in requests)
    return replace(
        mixed(seed),
        block_size=block_size,
        num_blocks=most + rng.randint(0, 3),
        num_host_blocks=rng.choice([most * 4, rng.randint(2, most + 4)]),
        budget=rng.randint(3, 6),
        chunked=chunked,
        caching=True,
        preemption="directed",
        watermark=0.0,
        max_num_seqs=12,
        faults=draw_faults(rng, 60) if rng.random() < 0.5 else [],
        requests=requests,
    )
