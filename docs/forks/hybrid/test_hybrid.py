"""A KV cache for full and sliding layers. The oracle is transformers; blocks are tested without a model."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_random_runs
import transformers
from conftest import EOS, FAMILIES, SHAPE, Oracle, make_checkpoint, tokens
from fake_runner import GARBAGE, FakeRunner
from random_workloads import LONGEST, Workload, forked, mixed
from serving import serve
from test_random_runs import SCRATCH, Run, fake_model, fake_tokenizer
from test_sharing import check_beams, transformers_beams

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.attention.grouped import GroupedAttention
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.block_manager import BlockManager, group_key
from nanopaged.config import NO_BLOCK, LayerGroups
from nanopaged.model.model_config import read_model_config
from nanopaged.model_runner import prepare
from nanopaged.sequence import ScheduledBatch, Sequence, StepResult
from nanopaged.views.invariants import check_blocks

WINDOW, BLOCK = 12, 4
S, F = "sliding_attention", "full_attention"
MIX = {"sliding_window": WINDOW, "num_hidden_layers": 5, "layer_types": [S, F, S, S, F]}
FAMILIES["gemma3"] = lambda **changes: transformers.Gemma3ForCausalLM(
    transformers.Gemma3TextConfig(**SHAPE | {"head_dim": 16, "query_pre_attn_scalar": 20} | changes)
)
MODELS = {  # name → family, changes to its config
    "qwen2": ("qwen2", MIX | {"use_sliding_window": True}),
    "qwen3": ("qwen3", MIX | {"use_sliding_window": True, "layer_types": [F, S, F, F, S]}),
    "all sliding": ("qwen3", MIX | {"use_sliding_window": True, "layer_types": [S] * 5}),
    "gemma3": ("gemma3", MIX),
}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)
ASKED = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.0, n=3, seed=1, max_tokens=24),
    "beams": BeamSearchParams(beam_width=3, max_tokens=24),
}


@pytest.fixture(scope="module", params=list(MODELS))
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_mixture(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """For tests that do not depend on the family."""
    return make_mixture("gemma3", tmp_path_factory.mktemp("gemma3-alone"))


def make_mixture(name: str, folder: Path) -> Oracle:
    family, changes = MODELS[name]
    oracle = Oracle.__new__(Oracle)
    oracle.folder, oracle.model = folder, make_checkpoint(family, folder, **changes)
    return oracle


def make_llm(oracle: Oracle, **options: object) -> LLM:
    return LLM(oracle.folder, **{"dtype": "float32", "block_size": BLOCK, "num_blocks": 300} | options)


def check_views(engine: LLMEngine) -> None:
    """Statistics count no block twice, and the drawing has a row of blocks for each logical block."""
    stats, manager = engine.stats(), engine.block_manager
    held = [b for seq in engine.scheduler.running_sequences for b in seq.block_table if b != NO_BLOCK]
    assert stats.num_blocks_saved == len(held) - len(set(held))
    assert stats.num_shared_blocks == sum(held.count(b) > 1 for b in set(held))
    assert 0 <= stats.slot_utilization <= 1
    snapshot, num = engine.snapshot(), manager.groups.num
    for request in snapshot.requests:
        for seq in request.sequences:
            cells = ["_" if b == NO_BLOCK else str(b) for b in seq.block_table[:num]]
            assert "/".join(cells) in str(snapshot)


def check_window(llm: LLM) -> None:
    """The views are right, and no sequence holds blocks far behind the window."""
    engine = llm.engine
    groups = engine.block_manager.groups
    check_views(engine)
    for request in engine.scheduler.running:
        for seq in request.live:
            held = [block_id != NO_BLOCK for block_id in seq.block_table]
            rows = (groups.window + engine.config.max_num_batched_tokens - 3 + BLOCK) // BLOCK + 1
            assert all(sum(held[g :: groups.num]) <= rows for g in range(groups.num_full, groups.num))


def check_scored(oracle: Oracle, prompt: list[int], output: RequestOutput) -> None:
    """The log-probabilities of transformers, which computes all tokens at once with a mask."""
    for completion in output.outputs:
        expected = oracle.logprobs(prompt + completion.token_ids)
        scores = [
            expected[len(prompt) - 1 + i, token_id].item() for i, token_id in enumerate(completion.token_ids)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(scores), abs=1e-4 * len(scores))
        for i, logprobs in enumerate(completion.logprobs or []):
            assert logprobs[completion.token_ids[i]].logprob == pytest.approx(scores[i], abs=1e-4)
    for i, logprobs in enumerate(output.prompt_logprobs or []):
        if logprobs is not None:
            right = oracle.logprobs(prompt)[i - 1, prompt[i]].item()
            assert logprobs[prompt[i]].logprob == pytest.approx(right, abs=1e-4)


def check_right(oracle: Oracle, prompts: list[list[int]], outputs: list[RequestOutput], asked: str) -> None:
    """Greedy texts and beams are transformers', and all texts have its log-probabilities."""
    for prompt, output in zip(prompts, outputs, strict=True):
        texts = [completion.token_ids for completion in output.outputs]
        if asked == "greedy":
            assert texts == [oracle.greedy(prompt, ASKED[asked].max_tokens, ignore_eos=True)]
        elif asked == "beams":
            check_beams(output, transformers_beams(oracle, prompt, ASKED[asked], EOS), length_penalty=1.0)
        check_scored(oracle, prompt, output)


# ── against transformers ──────────────────────────────────────────────────────────────────────────

PROMPTS = [tokens(3, 50), tokens(5, 9), tokens(9, 31)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("budget", [2048, 7])
def test_texts_that_cross_the_window(mixture: Oracle, budget: int, backend: str) -> None:
    """In one chunk, or in chunks of 7; the window is 12."""
    llm = make_llm(mixture, max_num_batched_tokens=budget, attention_backend=backend)
    params = replace(GREEDY, prompt_logprobs=0, max_tokens=30 if backend == "torch" else 5)
    outputs = serve(llm, PROMPTS, params, check_window)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == mixture.greedy(prompt, 30, ignore_eos=True)[: params.max_tokens]
        check_scored(mixture, prompt, output)


def test_the_oracle_can_tell_the_window(gemma3: Oracle) -> None:
    """With another window transformers says something else."""
    (right,) = serve(make_llm(gemma3), PROMPTS[:1], GREEDY, check_window)
    for layer in gemma3.model.model.layers:
        assert layer.self_attn.sliding_window in (None, WINDOW)
    gemma3.model.config.sliding_window = WINDOW + 1
    other = gemma3._generate(tuple(PROMPTS[0]), 30, True)
    gemma3.model.config.sliding_window = WINDOW
    assert other != right.outputs[0].token_ids


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted(mixture: Oracle, asked: str, way: str, caching: bool) -> None:
    """Three requests in a pool that is large enough for one: what they say is what transformers says."""
    params, chunk = ASKED[asked], 7
    config = EngineConfig(block_size=BLOCK, max_num_batched_tokens=chunk)
    groups = read_model_config(mixture.folder).groups
    most = [
        groups.most_blocks(config, len(prompt), len(prompt) + params.max_tokens - 1, params.num_sequences)
        for prompt in PROMPTS
    ]
    options = {"num_blocks": max(most), "num_host_blocks": 400, "preemption": way}
    llm = make_llm(mixture, max_num_batched_tokens=chunk, enable_prefix_caching=caching, **options)
    outputs = serve(llm, PROMPTS, params, check_window)
    check_right(mixture, PROMPTS, outputs, asked)
    stats = llm.engine.stats()
    happened = {"swap": stats.num_preemptions_swap, "recompute": stats.num_preemptions_recompute}
    assert happened[way] > 0
    assert asked == "greedy" or stats.num_blocks_copied > 0


@pytest.mark.parametrize("asked", ASKED)
def test_prompts_from_the_prefix_cache(mixture: Oracle, asked: str) -> None:
    """A second request finds 40 of its 44 tokens; its window was computed by the first one."""
    llm = make_llm(mixture, max_num_batched_tokens=16)
    first = tokens(3, 44)
    serve(llm, [first], GREEDY, check_window)
    prompts = [first[:41] + [1, 2, 3], first[:20] + [4], [*first, 8]]
    outputs = [serve(llm, [prompt], ASKED[asked], check_window)[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [40, 20, 44]
    check_right(mixture, prompts, outputs, asked)


def test_a_prompt_longer_than_a_pool_without_groups(gemma3: Oracle) -> None:
    """150 tokens are 38 rows: 114 blocks if nothing were given back. Chunks of 8 and the window need 60."""
    llm = make_llm(gemma3, num_blocks=38 + 2 * 6, max_num_batched_tokens=8)
    prompt = tokens(3, 120)
    (output,) = serve(llm, [prompt], GREEDY, check_window)
    check_right(gemma3, [prompt], [output], "greedy")


def test_whole_prompts_only(gemma3: Oracle) -> None:
    llm = make_llm(gemma3, enable_chunked_prefill=False, max_num_batched_tokens=160, num_blocks=130)
    outputs = serve(llm, PROMPTS, GREEDY, check_window)
    check_right(gemma3, PROMPTS, outputs, "greedy")


def test_a_whole_prompt_waits_for_a_step_with_room(gemma3: Oracle) -> None:
    """20 of its 80 tokens are found, in 15 blocks. The other 60 do not fit beside 130 of 160."""
    llm = make_llm(gemma3, enable_chunked_prefill=False, max_num_batched_tokens=160)
    serve(llm, [tokens(3, 21)], replace(GREEDY, max_tokens=1), check_window)
    for prompt in (tokens(9, 130), tokens(3, 80)):
        llm.engine.add_request(str(len(prompt)), prompt, GREEDY)
    llm.engine.step()
    assert [request.request_id for request in llm.engine.scheduler.running] == ["130"]


# ── blocks, without a model ───────────────────────────────────────────────────────────────────────

TWO = LayerGroups.of((False, True), 6)


def make_manager(chunk: int = 1000, num_blocks: int = 40) -> BlockManager:
    manager = BlockManager(num_blocks, 4)
    manager.groups, manager.chunk = TWO, chunk
    return manager


def sequence(num_tokens: int) -> Sequence:
    request = type("Request", (), {"cache_salt": b""})()  # it can be hashed
    return Sequence(request, list(range(num_tokens)))


def compute(manager: BlockManager, seq: Sequence, num_tokens: int) -> None:
    seq.num_scheduled_tokens = num_tokens
    manager.publish(seq)
    seq.num_computed_tokens += num_tokens
    manager.slide(seq)
    check_blocks(manager, [seq])


@pytest.mark.parametrize(
    ("kinds", "places", "num", "num_full"),
    [
        ("SSFSSF", [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1)], 3, 1),
        ("SSSF", [(1, 0), (2, 0), (3, 0), (0, 0)], 4, 1),
        ("FFFSSF", [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (1, 1)], 3, 2),
        ("SFSSF", [(1, 0), (0, 0), (1, 1), (2, 0), (0, 1)], 3, 1),  # an empty place
        ("SSS", [(0, 0), (0, 1), (0, 2)], 1, 0),
    ],
)
def test_groups_of_layers(kinds: str, places: list[tuple[int, int]], num: int, num_full: int) -> None:
    groups = LayerGroups.of(tuple(kind == "S" for kind in kinds), 6)
    assert (groups.num, groups.num_full, groups.size) == (
        num,
        num_full,
        1 + max(place for _, place in places),
    )
    assert [groups.place(layer) for layer in range(len(kinds))] == places


def test_blocks_behind_the_window_are_given_back() -> None:
    """Window 6, blocks of 4, chunks of 8: after 8 tokens, token 8 sees tokens 3 to 8, and 15 is in row 3."""
    manager = make_manager(chunk=8)
    seq = sequence(30)
    assert manager.allocate([seq])
    assert manager.num_blocks - manager.num_free_blocks == 8 + 2
    compute(manager, seq, 8)
    assert manager.append_slots([seq]) == []
    assert manager.num_blocks - manager.num_free_blocks == 8 + 4
    compute(manager, seq, 8)  # token 16 sees tokens 11 to 16, from row 2 on
    assert [block_id == NO_BLOCK for block_id in seq.block_table[1::2]] == [True] * 2 + [False] * 2 + [
        True
    ] * 4
    assert NO_BLOCK not in seq.block_table[::2]


@pytest.mark.parametrize(
    ("full", "sliding", "found"),
    [
        (6, "012345", 6),
        (6, "45", 6),  # the window before token 24: tokens 19 to 23, in rows 4 and 5
        (6, "34", 5),
        (6, "014", 2),
        (6, "0", 1),
        (6, "", 0),
        (6, "5", 0),
        (5, "45", 0),
        (5, "0345", 5),
        (3, "012345", 3),
        (0, "012345", 0),
    ],
)
def test_a_prefix_counts_as_far_as_every_kind_has_it(full: int, sliding: str, found: int) -> None:
    manager = make_manager()
    seq = sequence(25)
    keys = manager.keys_of(seq, 6)
    block_ids = {}
    for group, rows in ((0, range(full)), (1, map(int, sliding))):
        for row in rows:
            block = manager.blocks[len(block_ids)]
            block_ids[row, group] = block.block_id
            manager.index[group_key(keys[row], group)] = block
    table = manager.find_prefix(seq)
    assert len(table) == found * 2
    for row in range(found):
        assert table[2 * row] == block_ids[row, 0]
        assert row < max(0, found * 4 - 5) // 4 or table[2 * row + 1] == block_ids[row, 1]


def test_siblings_that_find_different_prefixes_fit_nevertheless() -> None:
    """Tokens 0 to 15 are the prompt. Sliding rows 0 to 2 are evicted, so only the second sibling has a hit.

    With it they would hold the prompt twice: 12 blocks, and 9. Without it they need 16, as is promised.
    """
    manager = make_manager(chunk=4, num_blocks=16)
    second = sequence(24)
    assert manager.allocate([second])
    for _ in range(6):
        compute(manager, second, 4)
        assert manager.append_slots([second]) == []
    manager.free(second)
    taken = [manager.take() for _ in range(4 + 3)]  # the free blocks, and the three least recently used
    for block_id in taken:
        manager.release(block_id)
    first = sequence(16)
    first.request, first.token_ids = second.request, [*range(16), *range(50, 58)]
    assert (manager.find_prefix(first), len(manager.find_prefix(second))) == ([], 5 * 2)
    manager.chunk = 1000
    assert manager.allocate([first, second])
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 16)
    assert manager.num_free_blocks == 0
    check_blocks(manager, [first, second])


# ── random workloads, over slots that remember their tokens and their group ───────────────────────


class HybridRunner(FakeRunner):
    """A slot remembers its prefix and its group. Tables and slots are those that the backends get."""

    groups: LayerGroups
    metadata: list[AttentionMetadata]  # of each group

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.seqs, self.metadata = batch.sequences, []
        backend = SimpleNamespace(begin_step=self.metadata.append, fused={})
        attention = GroupedAttention(self.groups, self.block_size, lambda score_mod: backend)
        attention.begin_step(prepare(batch, self.block_size)[0].metadata)
        return super().execute(batch)

    def store(self, seq: Sequence, values: list[int]) -> None:
        start = seq.num_computed_tokens
        row = sum(other.num_scheduled_tokens for other in self.seqs[: self.seqs.index(seq)])
        for g, metadata in enumerate(self.metadata):
            for i in range(seq.num_scheduled_tokens):
                slot = divmod(int(metadata.slot_mapping[row + i]), self.block_size)
                value = values[start + i]
                self.slots[slot] = value * 100 + g if value != GARBAGE else GARBAGE

    def _read(self, seq: Sequence) -> None:
        """Each query finds all keys that it sees, and the table begins with the first of them."""
        numbers, i = self._numbers(seq), self.seqs.index(seq)
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens
        for g, metadata in enumerate(self.metadata):
            shift, table = end - int(metadata.context_lens[i]), metadata.block_tables[i]
            first_seen = 0 if g < self.groups.num_full else max(0, start - self.groups.window + 1)
            assert shift == first_seen // self.block_size * self.block_size, "reads behind the window"
            for key in range(first_seen, end):
                row, offset = divmod(key - shift, self.block_size)
                found = self.slots.get((table[row], offset), GARBAGE)
                assert found == numbers[key] * 100 + g, f"position {key} of group {g} reads a wrong slot"

    def check_findable_blocks(self, manager: BlockManager) -> None:
        for key, block in manager.index.items():
            stored = [self.slots.get((block.block_id, i), GARBAGE) for i in range(self.block_size)]
            assert GARBAGE not in stored, f"block {block.block_id} can be found, but was never computed"
            prefix, group = divmod(stored[-1], 100)
            salt, token_ids, right = self.prefixes.path(prefix)
            assert stored == [number * 100 + group for number in right[-self.block_size :]]
            seq = Sequence(SimpleNamespace(cache_salt=salt), token_ids)
            right_key = manager.keys_of(seq, len(token_ids) // self.block_size)[-1]
            assert key == group_key(right_key, group), "found under other tokens, or by another group"


@cache
def fake_hybrid(kinds: str, window: int) -> Path:
    folder = Path(SCRATCH.name) / f"{kinds}-{window}"
    folder.mkdir()
    config = json.loads((fake_model() / "config.json").read_text(encoding="utf-8"))
    layers = [S if kind == "S" else F for kind in kinds]
    config |= {"num_hidden_layers": len(kinds), "layer_types": layers, "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": True}), encoding="utf-8")
    return folder


def make_hybrid_engine(kinds: str, window: int) -> Callable[[str, EngineConfig], LLMEngine]:
    """The `make_engine` of the random runs, with sliding layers."""
    make_engine = test_random_runs.make_engine

    def make(model: str, config: EngineConfig) -> LLMEngine:
        if config.block_size == LONGEST:  # it serves each request alone; the fake tokens need no window
            return make_engine(model, config)
        runner = HybridRunner(config.num_blocks, config.block_size, config.num_host_blocks)
        engine = LLMEngine(replace(config, model=fake_hybrid(kinds, window)), runner)
        runner.groups = engine.block_manager.groups
        engine.prompts.tokenizer = fake_tokenizer()
        return engine

    return make


def with_groups(workload: Workload, groups: LayerGroups) -> Workload:
    """The same requests in a pool that is just large enough for the largest."""
    config, most = workload.config(), 0
    for asked in workload.requests:
        num_tokens = len(asked.prompt) + asked.params.max_tokens - 1
        needed = groups.most_blocks(config, len(asked.prompt), num_tokens, asked.params.num_sequences)
        most = max(most, needed)
    return replace(
        workload, num_blocks=most + workload.seed % 4, num_host_blocks=workload.num_host_blocks * 3
    )


@pytest.mark.parametrize("make_workload", [mixed, forked])
def test_random_workloads(
    make_workload: Callable[[int], Workload],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    first, num = pytestconfig.getoption("first_seed"), pytestconfig.getoption("random_runs")
    happened: Counter[str] = Counter()
    for seed in range(first, first + num):
        rng, workload = random.Random(seed), make_workload(seed)
        kinds, window = rng.choice(["FS", "SSF", "FFS", "S", "SSSFF"]), rng.choice([1, 2, 3, 5, 8, 13])
        groups = LayerGroups.of(tuple(kind == "S" for kind in kinds), window)
        with monkeypatch.context() as patch:
            patch.setattr(test_random_runs, "make_engine", make_hybrid_engine(kinds, window))
            try:
                run = Run(with_groups(workload, groups))
                run.serve()
            except Exception as error:
                raise AssertionError(f"seed {seed}, {kinds}, window {window}: {error}") from error
        happened += run.happened
    events = ("swap", "recompute", "copy on write", "cache hit", "finished")
    assert all(happened[event] for event in events), happened


# ── limits and mistakes ───────────────────────────────────────────────────────────────────────────


def test_gemma_as_published(gemma3: Oracle, tmp_path: Path) -> None:
    """The config of gemma-3-1b-it has the names of transformers 4, which this reads as well."""
    for file in gemma3.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["rope_parameters"], config["layer_types"]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    config |= {"sliding_window_pattern": 3}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = read_model_config(tmp_path)
    assert (read.rope_theta, read.local_rope_theta) == (1e6, 1e4)
    assert read.groups == LayerGroups.of((True, True, False, True, True), WINDOW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trace": "run.html"}, "a model with sliding layers cannot have trace="),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but must be 1"),
        ({"attention_backend": "triton"}, "no place for a score_mod"),
        ({"num_blocks": 30}, "may need 50 blocks of 4 slots, but the whole pool has 30"),
    ],
)
def test_bad_options(
    gemma3: Oracle, options: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_llm(gemma3, max_num_batched_tokens=8, **options).generate([tokens(1, 120)], GREEDY)
