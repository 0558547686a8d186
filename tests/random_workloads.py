"""Random workloads of docs/forks/harness.py, for the fake model and the tiny one."""

from __future__ import annotations

import random

from harness import Asked, Params, Vocabulary, Workload, draw_faults, draw_workload

from nanopaged import BeamSearchParams, SamplingParams

__all__ = ["Asked", "Params", "Workload", "forked", "mixed", "tiny"]

# What the fake model says, see fake_runner.py. Token 2 ends an output.
FAKE = Vocabulary(
    tokens=range(3),
    last_tokens=range(3),
    letters=("a", "b"),
    stops=((), (), ("b",), ("éa", "aa"), ("ab",), ("éabé", "béab")),
    stop_token_ids=((), (), (), (0,), (1,)),
    beam_ends=((), range(5, 97, 12)),
)
TINY = Vocabulary(
    tokens=range(3, 1024),
    last_tokens=range(3, 6),
    letters=("e", "o", "t", " "),
    stops=((), (), ("e",), ("ou", "\n"), ("th", ", ")),
    stop_token_ids=((), (), range(3, 40)),
    beam_ends=((), range(3, 99)),
)


def mixed(seed: int) -> Workload:
    """Requests of every kind and size, for the fake model."""
    return draw_workload(seed, FAKE)


def tiny(seed: int) -> Workload:
    """The same with the tiny model: the real sampler, the real K/V and the real tokenizer."""
    return draw_workload(seed, TINY)


def forked(seed: int) -> Workload:
    """Forked requests that are recomputed, swapped before they have caught up, and aborted in between.

    Long requests that arrived first preempt families of two to four sequences. With a small budget it takes
    them many steps to catch up. Without chunked prefill the budget is larger, and the families are longer, so
    that they exceed it. The last requests have the same prompts again, and so read the blocks that the others
    left in the prefix cache.
    """
    rng = random.Random(seed)
    chunked = rng.random() < 0.7
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
    options = {
        "num_host_blocks": rng.choice([400, rng.randint(2, 40)]),
        "max_num_batched_tokens": rng.randint(3, 6),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": True,
        "preemption": "swap",
        "watermark": 0.0,
        "max_num_seqs": 12,
    }
    faults = draw_faults(rng, 60) if rng.random() < 0.5 else []
    workload = Workload(seed, options, requests, rng.random() < 0.3, mixes_preemption=True, faults=faults)
    return workload.with_pool(block_size=rng.randint(1, 3), spare_blocks=rng.randint(0, 3))
