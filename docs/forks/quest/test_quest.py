"""Sparse pages. The oracle is transformers, with an attention function that writes the chosen pages out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import test_random_runs
import torch
from conftest import Oracle, random_prompts, tokens
from random_workloads import LONGEST, tiny
from serving import serve
from test_random_runs import Run
from torch import Tensor
from transformers import AttentionInterface

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from nanopaged.attention.quest_backend import QuestAttention, with_bounds
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.sequence import ScheduledBatch, StepResult

BLOCK, ALL = 4, 40  # a model of 160 tokens has 40 pages of 4
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


def make_llm(oracle: Oracle, **options: object) -> LLM:
    """An engine whose bounds are checked in each step, if it has any."""
    defaults = {"num_pages_read": 3, "block_size": BLOCK, "num_blocks": 200, "preemption": "swap"}
    llm = LLM(oracle.folder, **defaults | options)
    if llm.engine.config.num_pages_read is not None:
        execute = llm.engine.runner.execute

        def execute_and_check(batch: ScheduledBatch) -> StepResult:
            result = execute(batch)
            check_bounds(llm, batch)
            return result

        llm.engine.runner.execute = execute_and_check
    return llm


def check_bounds(llm: LLM, batch: ScheduledBatch) -> None:
    """Each full block of the batch has the bounds of its keys, in all layers and KV heads."""
    attention, cache = llm.engine.runner.attention, llm.engine.runner.kv_cache
    for seq in batch.sequences:
        full = seq.block_table[: (seq.num_computed_tokens + seq.num_scheduled_tokens) // cache.block_size]
        for layer in range(attention.num_layers if full else 0):
            keys = cache.layer(layer)[0][full]
            low, high = attention.bounds(layer)[full].unbind(1)
            assert torch.equal(low, keys.amin(2))
            assert torch.equal(high, keys.amax(2))


def check_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for got, right in zip(one.outputs, other.outputs, strict=True):
            assert got.token_ids == right.token_ids
            assert got.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)


# ── against transformers ──────────────────────────────────────────────────────────────────────────


class SlowQuest:
    """The definition, one query and one KV head at a time. transformers calls it with K/V of all tokens."""

    num_prompt_tokens: int
    num_pages: int

    def __call__(
        self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: object, scaling: float, **kwargs: object
    ) -> tuple[Tensor, None]:
        q, k, v = q[0], k[0], v[0]  # [heads, tokens, head_dim]
        group, out = len(q) // len(k), torch.empty_like(q)
        for position in range(q.shape[1]):
            for head in range(len(k)):
                queries = q[head * group : (head + 1) * group, position]
                seen = list(range(position + 1))
                if position >= self.num_prompt_tokens:
                    seen = self.seen(queries, k[head], position)
                p = (queries @ k[head, seen].T * scaling).softmax(-1)
                out[head * group : (head + 1) * group, position] = p @ v[head, seen]
        return out.transpose(0, 1)[None], None

    def seen(self, queries: Tensor, keys: Tensor, position: int) -> list[int]:
        """The keys on the pages that a query's KV head reads."""
        last = position // BLOCK

        def bound(page: int) -> float:
            on_page = keys[page * BLOCK : (page + 1) * BLOCK]
            low, high = on_page.amin(0), on_page.amax(0)
            return max(torch.maximum(query * low, query * high).sum().item() for query in queries)

        best = sorted(range(last), key=bound, reverse=True)[: self.num_pages - 1]
        return [key for key in range(position + 1) if key // BLOCK in {*best, last}]


@torch.inference_mode()
def slow_logprobs(oracle: Oracle, prompt: list[int], generated: list[int], num_pages: int) -> Tensor:
    """[num generated, vocab_size], by one forward pass without a cache."""
    slow = SlowQuest()
    slow.num_prompt_tokens, slow.num_pages = len(prompt), num_pages
    AttentionInterface.register("slow quest", slow)
    oracle.model.set_attn_implementation("slow quest")
    try:
        logits = oracle.model(torch.tensor([prompt + generated])).logits[0]
    finally:
        oracle.model.set_attn_implementation("eager")
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_transformers_with_the_pages_written_out_says_the_same(oracle: Oracle, num_pages: int) -> None:
    """Tokens, and log-probabilities to 1e-4; several requests at once, in chunks of prompts."""
    prompts = [tokens(5, 41), tokens(6, 3), tokens(7, 20)]
    llm = make_llm(oracle, num_pages_read=num_pages, max_num_batched_tokens=13)
    for prompt, output in zip(prompts, serve(llm, prompts, GREEDY), strict=True):
        generated = output.outputs[0].token_ids
        right = slow_logprobs(oracle, prompt, generated, num_pages)
        assert right.argmax(-1).tolist() == generated
        for i, token_id in enumerate(generated):
            ours = output.outputs[0].logprobs[i][token_id].logprob
            assert ours == pytest.approx(right[i, token_id].item(), abs=1e-4)


def test_the_oracle_can_tell_how_many_pages_are_read(qwen3: Oracle) -> None:
    texts = [serve(make_llm(qwen3, num_pages_read=n), [tokens(5, 41)], GREEDY)[0] for n in (1, 3, 5, ALL)]
    assert len({tuple(text.outputs[0].token_ids) for text in texts}) == 4


def test_the_bound_is_at_least_every_product() -> None:
    """Random keys; 20 layers in blocks of 4 need five planes of bounds."""
    torch.manual_seed(0)
    shape = KVShape(20, 2, 8, torch.float32)
    cache = KVCache(with_bounds(shape, 4), 6, 4, torch.device("cpu"))
    assert cache.data.shape[1] == 25
    attention = QuestAttention(cache, 1.0, shape.num_layers, 1)
    attention.blocks, attention.offsets = torch.arange(24) // 4, torch.arange(24) % 4
    attention.full = torch.arange(6)
    k = torch.randn(20, 24, 2, 8)
    for layer in range(20):
        attention.store(layer, k[layer], k[layer])
    for layer in range(20):
        q = torch.randn(5, 2, 3, 8)
        products = torch.einsum("rhgd,phd->rhgp", q, k[layer]).unflatten(-1, (6, 4)).amax((2, -1))
        bounds = attention.upper_bounds(layer, q, torch.arange(6).expand(5, 6))
        assert (bounds >= products - 1e-5).all()
        one = attention.upper_bounds(layer, k[layer, :1, :, None], torch.arange(6)[None])
        low, high = k[layer].unflatten(0, (6, 4)).aminmax(dim=1)
        right = torch.maximum(k[layer, 0] * low, k[layer, 0] * high).sum(-1).T  # [heads, pages]
        torch.testing.assert_close(one[0], right)


# ── alone, batched, preempted, forked ─────────────────────────────────────────────────────────────

ASKED = {
    "greedy": GREEDY,
    "samples": SamplingParams(n=2, seed=1, max_tokens=24, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("num_pages", [3, ALL])
def test_batched_and_preempted_is_as_alone(qwen3: Oracle, asked: str, num_pages: int) -> None:
    """With all pages, alone is what the engine says without the option."""
    params, num_preemptions = ASKED[asked], Counter()
    prompts = [tokens(6, 9), tokens(5, 50), tokens(7, 30), tokens(8, 61)]
    whole = make_llm(qwen3, num_pages_read=num_pages if num_pages < ALL else None)
    alone = [serve(whole, [prompt], params)[0] for prompt in prompts]
    llm = make_llm(qwen3, num_pages_read=num_pages)
    check_same(serve(llm, prompts, params), alone)
    check_same(serve(llm, prompts, params), alone)  # the prompts are in the prefix cache now
    assert llm.engine.stats().prefix_cache_hits > 0
    for way in ("swap", "recompute"):
        options = {"preemption": way, "num_host_blocks": 80, "max_num_batched_tokens": 16}
        num_blocks = 17 + 7 * params.num_sequences  # the largest request fits, and no second one with it
        small = make_llm(qwen3, num_pages_read=num_pages, num_blocks=num_blocks, **options)
        check_same(serve(small, prompts, params), alone)
        num_preemptions[way] = getattr(small.engine.stats(), f"num_preemptions_{way}")
    assert all(num_preemptions.values()), num_preemptions


@pytest.mark.parametrize("num_more", [1, 0])
def test_a_prompt_never_finds_the_pages_of_generated_tokens(qwen3: Oracle, num_more: int) -> None:
    """A chat's second turn begins with the first answer, whose K/V would differ as a prompt."""
    first = serve(llm := make_llm(qwen3), [tokens(5, 41)], GREEDY)[0]
    second = tokens(5, 41) + first.outputs[0].token_ids + [3] * num_more
    (right,) = serve(make_llm(qwen3), [second], GREEDY)
    check_same(serve(llm, [second], GREEDY), [right])
    assert llm.engine.stats().prefix_cache_hits == 40  # all full blocks of the first prompt
    check_same(serve(llm, [tokens(5, 41)], GREEDY), [first])  # nor the other way round


@pytest.mark.parametrize("num_pages", [2, ALL])
def test_random_workloads(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model: each request says what it says alone. With all pages it says it without the option."""
    happened: Counter[str] = Counter()

    def make_engine(model: str, config: EngineConfig) -> LLMEngine:
        alone = config.block_size == LONGEST
        config = replace(config, dtype="float32", num_pages_read=num_pages if num_pages < ALL else LONGEST)
        if alone:
            config = replace(config, block_size=workload.block_size, num_blocks=64 * LONGEST)
            config = replace(config, num_pages_read=num_pages if num_pages < ALL else None)
        return LLMEngine(config)

    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    for seed in range(8):
        workload = tiny(seed)
        test_random_runs.large_engine.cache_clear()
        run = Run(workload)
        run.serve()
        happened += run.happened
    test_random_runs.large_engine.cache_clear()
    assert all(happened[event] for event in ("swap", "recompute", "copy on write", "finished")), happened


def test_random_batches_are_as_alone(qwen3: Oracle) -> None:
    """Prompts that begin alike, in tiny pools, with every kind of request together."""
    for seed in range(6):
        rng = random.Random(seed)
        starts = [tokens(5, 33), tokens(9, 17)]
        prompts = [
            rng.choice(starts)[: rng.randint(1, 33)] + more for more in random_prompts(6, seed, longest=30)
        ]
        params = [rng.choice(list(ASKED.values())) for _ in prompts]
        size, pages = rng.choice([1, 3, 4, 8]), rng.randint(1, 5)
        large = make_llm(qwen3, block_size=size, num_pages_read=pages, num_blocks=800)
        alone = [
            large.generate([p], [a], use_tqdm=False)[0]
            if isinstance(a, SamplingParams)
            else large.beam_search([p], a, use_tqdm=False)[0]
            for p, a in zip(prompts, params, strict=True)
        ]
        small = make_llm(
            qwen3,
            block_size=size,
            num_pages_read=pages,
            num_blocks=3 * 90 // size + 3,
            num_host_blocks=rng.choice([0, 100]),
            preemption=rng.choice(["swap", "recompute"]),
            max_num_batched_tokens=rng.choice([7, 64]),
        )
        for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            small.engine.add_request(str(i), prompt, asked)
        outputs = {}
        while small.engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in small.engine.step()}
            small.engine.check_invariants()
        check_same([outputs[str(i)] for i in range(len(prompts))], alone)


# ── mistakes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages_read": 0}, r"num_pages_read is 0, but must be at least 1 \(None reads all\)"),
        (
            {"attention_backend": "flash"},
            "attention_backend with num_pages_read is 'flash', but must be one of",
        ),
        ({"attention_backend": "cpp"}, "with num_pages_read is 'cpp'"),
        ({"attention_backend": "triton"}, "with num_pages_read is 'triton'"),
        ({"attention_backend": "reference"}, "with num_pages_read is 'reference'"),
        ({"tensor_parallel_size": 2}, "num_pages_read needs tensor_parallel_size=1"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    EngineConfig(num_pages_read=1)
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"num_pages_read": 4} | options)
