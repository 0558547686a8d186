"""A tree as the prefix cache: the tokens of transformers and of the plain engine, and what is found."""

import random
from collections.abc import Iterable
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import GREEDY, SMALL, Asked, Oracle, Run, Workload, serve, tokens
from radix import LLM, RadixBlockManager, RadixConfig, RadixEngine

import nanopaged
from nanopaged.sequence import ScheduledBatch, Sequence, StepResult
from nanopaged.snapshot import check_blocks


class RadixRun(Run):
    """A run on an engine with a tree. What a request says alone is still computed by a plain engine."""

    engine_class = RadixEngine

    def __init__(self, folder: Path, workload: Workload) -> None:
        size = workload.options["block_size"]
        self.options = {"min_partial": min((1, 1, 2, 0)[workload.seed % 4], size)}
        super().__init__(folder, workload)
        self.manager, self.parts = self.engine.block_manager, list[tuple[int, int]]()
        self.plan, self.manager.end_schedule = self.manager.end_schedule, self.keep_and_plan
        self.execute, self.engine.runner.execute = self.engine.runner.execute, self.count_and_execute

    def keep_and_plan(self) -> list[tuple[int, int]]:
        self.parts = self.plan()
        return self.parts

    def count_and_execute(self, batch: ScheduledBatch) -> StepResult:
        """Count what may go wrong beside copies of parts."""
        sources = {source for source, _ in self.parts}
        self.happened["part"] += len(self.parts)
        self.happened["one source of several"] += len(self.parts) - len(sources)
        self.happened["beside copy on write"] += 0 < len(self.parts) < len(batch.moves.copies)
        self.happened["source was swapped out"] += len(sources & {block for block, _ in batch.moves.swap_out})
        self.happened["beside swap in"] += bool(self.parts and batch.moves.swap_in)
        return self.execute(batch)

    def check(self) -> None:
        super().check()
        tree = self.manager.prefix_index
        assert all(tree.children.values()), "a prefix without blocks is kept"
        keys = [prefix + tokens for prefix, blocks in tree.children.items() for tokens in blocks]
        assert set(keys) == tree.keys()
        assert not self.manager.copies
        assert not self.manager.being_computed
        assert self.manager.min_partial > 0 or not self.happened["part"]


def similar(seed: int) -> Workload:
    """Prompts that leave one text at any token, in a pool so small that requests are preempted."""
    rng, workload = random.Random(seed), harness.draw_workload(3 * seed + seed % 2)
    stem, requests = rng.choices(range(8, 11), k=24), list[Asked]()
    for asked in workload.requests * 2:
        prompt = stem[: rng.randint(1, 24)] + rng.choices(range(8, 11), k=rng.randint(1, 6))
        requests.append(replace(asked, prompt=prompt, salt=None, arrival=rng.choice([0, 6, 12])))
    options = {"enable_prefix_caching": True, "num_host_blocks": 200, "watermark": 0.0, "max_num_seqs": 40}
    options |= {"max_num_batched_tokens": 160, "preemption": rng.choice(["swap", "swap", "recompute"])}
    workload = replace(workload, requests=requests, is_shuffled=rng.random() < 0.5)
    return workload.with_pool(rng.randint(2, 8), **options)


EVENTS = ["recompute", "part", "one source of several"]
EVENTS += ["beside copy on write", "source was swapped out", "beside swap in"]


@pytest.mark.parametrize(("draw", "num", "events"), [(similar, 20, EVENTS), (harness.draw_workload, 20, [])])
def test_random_workloads(qwen3: Oracle, draw: Any, num: int, events: list[str]) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    harness.random_runs(RadixRun, qwen3.folder, num, events, draw)


def equal_tokens(some: list[int], others: Iterable[list[int]], size: int) -> int:
    """The most tokens that `some` (without its last one) and full blocks of another one both begin with."""
    common = [commonprefix([some[:-1], other[: len(other) // size * size]]) for other in others]
    return max(map(len, common), default=0)


class Asker:
    """All that a block manager reads of a request."""

    cache_salt = b""
    wants_prompt_logprobs = False


@pytest.mark.parametrize("min_partial", [0, 1, 2, 3])
def test_all_equal_tokens_are_found(min_partial: int) -> None:
    """Of earlier texts with this salt all, if enough of a block; of those of this step only full blocks."""
    rng, size = random.Random(min_partial), 4
    for _ in range(60):
        manager = RadixBlockManager(min_partial, num_blocks=400, block_size=size)
        texts_of = {b"": list[list[int]](), b"x": list[list[int]]()}
        for _ in range(8):
            asker = Asker()
            asker.cache_salt = rng.choice((b"", b"x"))
            computed = texts_of[asker.cache_salt]
            prompts = [rng.choices((1, 2), k=rng.randint(1, 16)) for _ in range(3)]
            sequences = [Sequence(asker, prompt) for prompt in prompts]
            for i, seq in enumerate(sequences):
                assert manager.allocate([seq])
                found, in_step = (
                    equal_tokens(seq.token_ids, texts, size) for texts in (computed, prompts[:i])
                )
                if not 0 < min_partial <= found % size:
                    found -= found % size
                assert seq.num_computed_tokens == max(found, in_step // size * size)
                seq.num_scheduled_tokens = seq.num_tokens - seq.num_computed_tokens
                manager.publish(seq)
            copies = manager.end_schedule()
            assert not {source for source, _ in copies} & {target for _, target in copies}
            for seq in sequences:
                seq.num_computed_tokens = seq.num_tokens
            check_blocks(manager, sequences)
            for seq in sequences:
                manager.free(seq)
            computed += prompts
        assert manager.num_free_blocks == 400


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_tokens_are_those_of_transformers(qwen3: Oracle, preemption: str) -> None:
    """In chunks, in a small pool; and less is computed than by the plain engine."""
    options = SMALL | {"block_size": 8, "preemption": preemption}
    rng, stem, found = random.Random(1), tokens(20, 40), []
    ends = harness.random_prompts(24, seed=1, longest=12)
    prompts = [stem[: rng.randint(1, 40)] + end for end in ends]
    for llm in (nanopaged.LLM(qwen3.folder, **options), LLM(qwen3.folder, min_partial=2, **options)):
        qwen3.check(serve(llm, prompts, GREEDY))
        assert harness.num_preempted(llm) > 0
        found.append(llm.engine.stats().prefix_cache_hits)
    assert found[0] < found[1]


def test_what_is_refused() -> None:
    wrong = [({"min_partial": value}, f"min_partial is {value}") for value in (17, -1)]
    harness.check_refused(RadixConfig, wrong)
