"""A tree as the prefix cache: the tokens of transformers and of the plain engine, and what is found."""

import gc
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_random_runs
from conftest import Oracle, memory_that_was_never_written, qwen3  # noqa: F401  (fixtures)
from faults import STAGES
from radix import LLM, Key, RadixBlockManager, RadixConfig, RadixEngine, RadixScheduler
from random_workloads import FAKE, Asked, Workload, draw_params, forked, mixed, siblings, tiny
from serving import serve, tokens_of
from test_block_manager import family, schedule
from test_random_runs import Run, large_engine, serve_random
from traces import read_trace, states_of

import nanopaged
from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.sequence import ScheduledBatch
from nanopaged.snapshot import check_blocks, short_key

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def num_nodes(manager: RadixBlockManager) -> int:
    """All nodes of the tree, with its roots."""
    gc.collect()  # a request and its sequences are a circle
    nodes = list(manager.roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return len(nodes)


class RadixRun(Run):
    """A run on an engine with a tree. What a request says alone is still computed by a plain engine."""

    def __init__(self, workload: Workload) -> None:
        large_engine(workload.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_random_runs, "LLMEngine", RadixEngine)
            super().__init__(workload)
        self.manager: Any = self.engine.block_manager
        self.manager.min_partial, self.parts = (1, 1, 2, 0)[workload.seed % 4], list[tuple[int, int]]()
        plan, execute = self.manager.end_schedule, self.engine.runner.execute
        self.manager.end_schedule = lambda: setattr(self, "parts", plan()) or self.parts
        self.engine.runner.execute = lambda batch: self.count(batch) or execute(batch)

    def count(self, batch: ScheduledBatch) -> None:
        """Count what may go wrong beside copies of parts."""
        sources, targets = ({pair[i] for pair in self.parts} for i in (0, 1))
        happened, out = self.happened, {block for block, _ in batch.moves.swap_out}
        happened["part"] += len(self.parts)
        happened["one source of several"] += len(self.parts) - len(sources)
        happened["beside copy on write"] += bool(self.parts) and len(batch.moves.copies) > len(self.parts)
        happened["source was swapped out"] += len(sources & out)
        happened["target was swapped out"] += len(targets & out)
        happened["beside swap in"] += bool(self.parts and batch.moves.swap_in)
        happened["for a family"] += sum(len(r.live) > 1 for r in batch.admitted) * bool(self.parts)

    def check(self) -> None:
        if self.model == "fake":
            self.engine.runner.full_blocks.clear()  # else it keeps all keys, and no node is forgotten
        super().check()
        assert not self.manager.copies and not self.manager.being_computed  # noqa: PT018
        assert self.manager.min_partial > 0 or not self.happened["part"]


def similar(seed: int) -> Workload:
    """Prompts that leave one text at any token, in a pool so small that requests are preempted."""
    rng, stem, requests = random.Random(seed), random.Random(seed).choices(range(3), k=24), list[Asked]()
    block_size = rng.randint(2, 8)
    for _ in range(rng.randint(6, 14)):
        prompt = stem[: rng.randint(1, 24)] + rng.choices(range(3), k=rng.randint(1, 6))
        kind = rng.choice(["greedy", "greedy", "several", "beams"])
        params = draw_params(rng, kind, rng.randint(1, 20), FAKE)
        requests.append(Asked(prompt, params, rng.randint(0, 20), salt=rng.choice([None, None, "x"])))
    num_blocks = max(asked.most_blocks(block_size) for asked in requests) + rng.randint(0, 3)
    pool = {"block_size": block_size, "num_blocks": num_blocks, "num_host_blocks": rng.choice([200, 200, 4])}
    pool |= {"caching": True, "preemption": "swap", "watermark": 0.0, "requests": requests}
    return replace(mixed(seed), order=rng.choice(["arrival", "random", "random"]), **pool)


MINE = ["part", "one source of several", "beside copy on write", "source was swapped out", "recompute"]
MINE += ["target was swapped out", "beside swap in", "for a family", "swap"]


WORKLOADS = [(similar, 90), (mixed, 30), (forked, 20), (siblings, 20), (tiny, 4)]


@pytest.mark.parametrize(("make_workload", "num"), WORKLOADS)
def test_random_workloads(
    make_workload: Callable[[int], Workload], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request says what it says alone in a plain engine, also when steps fail."""
    manager = RadixBlockManager
    mine = RadixScheduler.schedule, manager.allocate, manager.copy_part, manager.keys_of, manager.publish
    monkeypatch.setitem(STAGES, "schedule", STAGES["schedule"] + mine)
    serve_random(make_workload, num, MINE if make_workload is similar else [], RadixRun)


def equal_tokens(some: list[int], other: list[int], block_size: int) -> int:
    """Tokens that `some` (without its last one) and the full blocks of `other` both begin with."""
    most = min(len(some) - 1, len(other) // block_size * block_size)
    return max(n for n in range(most + 1) if some[:n] == other[:n])


@pytest.mark.parametrize("min_partial", [0, 1, 2, 3])
def test_all_equal_tokens_are_found(min_partial: int) -> None:
    """Of texts of earlier steps all, if enough of a block; of those of this step only full blocks."""
    rng, size = random.Random(min_partial), 4
    for _ in range(60):
        manager, computed = RadixBlockManager(400, size), list[list[int]]()
        manager.min_partial = min_partial
        for _ in range(8):
            ends, prompts = {}, [rng.choices((1, 2), k=rng.randint(1, 16)) for _ in range(3)]
            sequences, together = family(*prompts), rng.random() < 0.5  # of one preempted request, or three
            for group in [sequences] if together else [[seq] for seq in sequences]:
                assert manager.allocate(group)
                for seq in group:
                    found = max((equal_tokens(seq.token_ids, text, size) for text in computed), default=0)
                    found -= found % size if not 0 < min_partial <= found % size else 0
                    others = [other.token_ids[: -1 if together else None] for other in ends]
                    of_step = max((equal_tokens(seq.token_ids, text, size) for text in others), default=0)
                    assert seq.num_computed_tokens == max(found, of_step // size * size)
                    ends[seq] = schedule(manager, seq)
            copies = manager.end_schedule()
            assert not {source for source, _ in copies} & {target for _, target in copies}
            for seq, end in ends.items():
                seq.num_computed_tokens = end
            check_blocks(manager, ends)
            for seq in ends:
                manager.free(seq)
            computed += prompts
        assert manager.num_free_blocks == 400


def prompts_that_leave(stem: list[int], num: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    ends = [rng.choices(range(8, 90), k=rng.randint(1, 12)) for _ in range(num)]
    return [stem[: rng.randint(1, len(stem))] + end for end in ends]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_tokens_are_those_of_transformers(qwen3: Oracle, preemption: str) -> None:  # noqa: F811
    """In chunks, in a small pool; samples and beams are those of the plain engine, and less is computed."""
    pool: dict[str, Any] = {
        "block_size": 8,
        "num_blocks": 24,
        "num_host_blocks": 99,
        "preemption": preemption,
    }
    pool |= {"max_num_batched_tokens": 24, "attention_backend": "torch", "watermark": 0}
    prompts, found, tokens = prompts_that_leave(list(range(20, 60)), 24, seed=1), [], []
    several = [SamplingParams(n=3, seed=5, max_tokens=9), BeamSearchParams(beam_width=3, max_tokens=9)] * 5
    plain, *ours = (
        nanopaged.LLM(qwen3.folder, **pool),
        *(LLM(qwen3.folder, min_partial=n, **pool) for n in (0, 2)),
    )
    for llm in (plain, *ours):
        said = tokens_of(serve(llm, prompts, GREEDY))
        assert said == [qwen3.greedy(prompt, 8, ignore_eos=True) for prompt in prompts]
        stats = llm.engine.stats()
        assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
        found.append(stats.prefix_cache_hits)
        tokens.append(tokens_of(serve(llm, prompts[:10], several)))
    assert tokens[0] == tokens[1] == tokens[2]
    assert found[0] == found[1] < found[2]


def test_a_step_that_fails_leaves_no_copies(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It fails when a copy has been planned. All K/V is lost, so the next steps compute everything again."""
    llm, prompts = LLM(qwen3.folder, block_size=4, num_blocks=30), [list(range(20, 39)), list(range(20, 34))]
    serve(llm, prompts[:1], GREEDY)
    manager: Any = llm.engine.block_manager
    llm.engine.add_request("0", prompts[1], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "end_schedule", lambda: 1 / 0 if manager.copies else [])
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    llm.engine.check_invariants()
    (output,) = llm.generate([prompts[0]], GREEDY, use_tqdm=False)
    llm.engine.check_invariants()
    assert output.outputs[0].token_ids == qwen3.greedy(prompts[0], 8, ignore_eos=True)
    assert llm.engine.stats().num_blocks_copied == 0


def test_the_tree_forgets_and_a_trace_shows_its_keys(qwen3: Oracle, tmp_path: Path) -> None:  # noqa: F811
    """Without block and sequence a prefix has no node: at most 12 blocks, a prefix of 4 each, and a root."""
    llm = LLM(qwen3.folder, block_size=4, num_blocks=12, trace=tmp_path / "run.html")
    manager: Any = llm.engine.block_manager
    for seed in range(6):
        serve(llm, prompts_that_leave([seed] * 12, 4, seed), GREEDY)
        assert len(manager.index) <= num_nodes(manager) <= 12 * 4 + 1
    shown = states_of(read_trace(tmp_path / "run.html"))[-1]["updated"].keys
    assert shown == {block.block_id: short_key(key) for key, block in manager.index.items()}
    assert len(set(shown.values())) == len(shown) > 5
    keys = [block.key for block in deepcopy(llm.engine.snapshot()).blocks if block.key is not None]
    assert set(keys) == manager.index.keys()
    assert not any(isinstance(key, Key) for key in keys), "a copy of a snapshot has the tree"
    llm.reset_prefix_cache()
    llm.engine.listeners.clear()  # the trace has the keys of its last line
    assert num_nodes(manager) == 0


@pytest.mark.parametrize("value", [17, -1, 2.5, True])
def test_what_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"min_partial (is|must be).*{value}"):
        RadixConfig(min_partial=value)
    assert RadixConfig(block_size=1).min_partial == 1
