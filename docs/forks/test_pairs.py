"""Two forks at a time, both in use: each text is what its request gets alone.

This file belongs into the folder tests of a tree with all forks; tests/test_forks.py makes one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import SHAPE, make_checkpoint, random_prompts
from overlap import OverlappedLLM
from test_families import EXPERTS
from test_lora import ATTENTION, MLP, make_adapter
from torch.nn import Linear

from nanopaged import LLM, BeamSearchParams, EngineConfig, RequestOutput, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.sequence import Sequence

sys.path.append(str(Path(__file__).parents[1] / "docs" / "forks" / "server"))
from server import EngineThread, make_app  # noqa: E402

FORKS = ("families", "int8kv", "lora", "priority", "sinks", "speculation", "tier")
REFUSED = {("sinks", "speculation")}
REFUSED_BY_TIER = {("lora", "tier"): "adapters", ("sinks", "tier"): "enable_prefix_caching"}
SOUND = [pair for pair in combinations(FORKS, 2) if pair not in REFUSED | REFUSED_BY_TIER.keys()]
OPTIONS: dict[str, dict[str, Any]] = {  # how a fork is switched on; families by its model, lora by adapters
    "int8kv": {"kv_cache_dtype": "int8"},
    "priority": {"scheduling_policy": "priority"},
    "sinks": {"num_sink_tokens": 4, "window": 28, "enable_prefix_caching": False},
    "speculation": {"num_speculative_tokens": 3},
    "tier": {"tier_bytes": 1 << 24},
}
UNCHANGED = ("priority", "speculation", "tier")  # the texts are those without the fork

PROMPTS = random_prompts(8, seed=3, longest=50)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PARAMS = [
    *[GREEDY] * 3,
    SamplingParams(seed=1, temperature=0.8, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=2, n=2, temperature=0.8, max_tokens=12, ignore_eos=True),
    BeamSearchParams(beam_width=2, max_tokens=10),
    *[GREEDY] * 2,
]


class Pair:
    """A model for two forks, and the options that switch them on."""

    def __init__(self, forks: tuple[str, ...], folder: Path) -> None:
        self.forks = forks
        family = "qwen3_moe" if "families" in forks else "qwen3"
        self.folder, self.model = folder / family, make_checkpoint(family, folder / family)
        self.adapters: dict[str, Path] = {}
        if "lora" in forks:
            modules = ATTENTION if "families" in forks else (*ATTENTION, *MLP)
            self.adapters = {
                name: make_adapter(folder / name, self.model, seed, target_modules=modules)
                for seed, name in enumerate("ab")
            }

    def llm(self, *left_out: str, **options: Any) -> LLM:
        """An engine with the forks but `left_out`."""
        for fork in self.forks:
            options |= OPTIONS.get(fork, {}) if fork not in left_out else {}
        if self.adapters and "lora" not in left_out:
            options["adapters"] = self.adapters
        return LLM(self.folder, block_size=4, **options)

    def prompt(self, i: int) -> dict[str, Any]:
        """Prompts with the adapters a and b, and without one, in turns."""
        names = [*self.adapters, None]
        chosen = {"adapter": names[i % len(names)]} if self.adapters else {}
        return {"prompt_token_ids": PROMPTS[i], **chosen}


def texts_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def serve(pair: Pair, texts: list[list[list[int]]], **options: Any) -> tuple[LLM, list[RequestOutput]]:
    """All requests together. The last one comes later, and is the most urgent if there are priorities."""

    def propose(seq: Sequence, num: int) -> list[int]:
        """The text that follows; every fourth token of it is wrong."""
        first = seq.num_output_tokens
        text = texts[int(seq.request.request_id)][0]
        return [(token + (i % 4 == 3)) % 97 for i, token in enumerate(text[first : first + num], first)]

    llm = pair.llm(**options)
    engine, last = llm.engine, len(PROMPTS) - 1
    engine.scheduler.propose = propose
    loaded: list[Any] = []
    count = SimpleNamespace(batch_scheduled=lambda batch: loaded.extend(batch.loaded))
    count.step_ended = count.step_failed = lambda argument: None
    engine.listeners.append(count)
    priority = {"priority": -1} if "priority" in pair.forks else {}
    finished: dict[str, RequestOutput] = {}
    for step in range(500):
        for i in range(last) if step == 0 else [last] if step == 4 else []:
            engine.add_request(str(i), pair.prompt(i), PARAMS[i], **priority if i == last else {})
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_invariants()
        if not engine.has_unfinished_requests():
            break
    assert engine.stats().num_used_blocks == 0
    llm.loaded = loaded
    return llm, [finished[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("forks", SOUND, ids="+".join)
def test_both_at_once(forks: tuple[str, str], tmp_path: Path) -> None:
    """In a pool so small that requests are preempted, and a budget so small that prompts are cut."""
    pair = Pair(forks, tmp_path)
    plain = pair.llm(*UNCHANGED, num_blocks=400)
    alone = [plain.generate(pair.prompt(i), PARAMS[i], use_tqdm=False)[0] for i in range(len(PROMPTS))]
    texts = list(map(texts_of, alone))
    small = {"num_blocks": 20, "max_num_batched_tokens": 20, "watermark": 0}
    for preemption in ("swap", "recompute"):
        llm, outputs = serve(pair, texts, preemption=preemption, **small)
        assert list(map(texts_of, outputs)) == texts
        check_in_use(pair, llm, outputs)


def check_in_use(pair: Pair, llm: LLM, outputs: list[RequestOutput]) -> None:
    """Requests were preempted, and each of the forks did something."""
    engine, stats = llm.engine, llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    if "families" in pair.forks:
        assert engine.runner.model.config.sparse_layers
    if "int8kv" in pair.forks:
        assert not engine.runner.kv_cache.data.is_floating_point()
    if "tier" in pair.forks:  # one after the other they evict each other, and come back
        for i in [*range(len(PROMPTS))] * 2:
            engine.add_request(str(i), pair.prompt(i), PARAMS[i])
            while engine.has_unfinished_requests():
                results = engine.step()
            assert texts_of(results[0]) == texts_of(outputs[i])
        assert llm.loaded
    if "speculation" in pair.forks:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if "priority" in pair.forks:  # the last to come is not the last to be served
        times = [output.metrics.first_token_time for output in outputs]
        assert times[-1] < max(times)
    for fork in {"lora", "sinks"} & set(pair.forks):
        without = pair.llm(fork, *UNCHANGED, num_blocks=400)
        others = without.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
        assert list(map(texts_of, others)) != list(map(texts_of, outputs[:3]))


@pytest.mark.parametrize("forks", sorted(REFUSED), ids="+".join)
def test_a_pair_that_would_be_wrong_is_refused_at_start(forks: tuple[str, str]) -> None:
    """With a sentence that names both and says why; each alone is allowed."""
    for fork in forks:
        EngineConfig(**OPTIONS[fork])
    with pytest.raises(ValueError, match=r"\(the forks \w+ and \w+\) exclude each other: .*") as caught:
        EngineConfig(**OPTIONS[forks[0]] | OPTIONS[forks[1]])
    assert all(fork in str(caught.value) for fork in forks)


@pytest.mark.parametrize("forks", REFUSED_BY_TIER, ids="+".join)
def test_a_tier_is_refused_with_what_it_cannot_tell_apart(forks: tuple[str, str], tmp_path: Path) -> None:
    """Adapters, which may change behind their name; a ring of blocks, which is never cached."""
    options = OPTIONS.get(forks[0], {"adapters": {"a": tmp_path}})
    EngineConfig(**options)
    with pytest.raises(ValueError, match=f"{REFUSED_BY_TIER[forks]} is .*, but tier_bytes needs"):
        EngineConfig(**options | OPTIONS["tier"])


def test_an_adapter_of_an_expert_is_refused_at_start(tmp_path: Path) -> None:
    """An expert computes some rows of a batch, and an adapter's rows are those of the whole batch."""
    make_checkpoint("qwen3_moe", tmp_path / "model")
    linear = Linear(SHAPE["hidden_size"], EXPERTS["moe_intermediate_size"])
    expert = SimpleNamespace(named_modules=lambda: [("model.layers.1.mlp.experts.2.up_proj", linear)])
    adapter = make_adapter(tmp_path / "adapter", expert, target_modules=["up_proj"])
    with pytest.raises(ValueError, match="adapter 'a' cannot be used: .*experts.2.gate_up_proj is an expert"):
        LLM(tmp_path / "model", num_blocks=8, adapters={"a": adapter})


# ── the overlapped engine ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fork", FORKS)
def test_the_overlapped_engine_with_each_fork(
    fork: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a small pool; the plain engine has said what each request gets alone."""
    pair = Pair((fork,), tmp_path)
    plain = pair.llm(*UNCHANGED, num_blocks=400)
    alone = [plain.generate(pair.prompt(i), PARAMS[i], use_tqdm=False)[0] for i in range(len(PROMPTS))]
    texts = list(map(texts_of, alone))
    monkeypatch.setattr(sys.modules[__name__], "LLM", OverlappedLLM)
    small = {"num_blocks": 20, "max_num_batched_tokens": 20, "watermark": 0}
    if fork == "speculation":
        with pytest.raises(ValueError, match="num_speculative_tokens=3: .* use 0, or LLMEngine"):
            pair.llm(**small)
        return
    for preemption in ("swap", "recompute"):
        llm, outputs = serve(pair, texts, preemption=preemption, **small)
        assert list(map(texts_of, outputs)) == texts
        check_in_use(pair, llm, outputs)


# ── the server ────────────────────────────────────────────────────────────────────────────────────


def tiny_mixture(folder: Path) -> Path:
    """The tiny model's tokenizer and sizes, with experts."""
    shutil.copytree(TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    config |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 160}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("fork", [*FORKS, "overlap"])
def test_the_server_with_each_fork(fork: str, tmp_path: Path) -> None:
    """Calls at once are answered as without a server. (No call names an adapter or a priority.)"""
    options = OPTIONS.get(fork, {}) | {"dtype": "float32", "num_blocks": 100}
    if fork == "families":
        options |= {"model": tiny_mixture(tmp_path / "model"), "load_format": "dummy"}
    if fork == "lora":
        tiny = SimpleNamespace(named_modules=lambda: [("model.layers.0.self_attn.q_proj", Linear(256, 256))])
        options["adapters"] = {"a": make_adapter(tmp_path / "a", tiny, target_modules=["q_proj"])}
    prompts = ["ROMEO:", "To be, or not to be, or not to", "First Citizen:\nBefore we"]
    kind = OverlappedLLM if fork == "overlap" else LLM
    app = make_app(EngineThread(kind(**options)), "tiny")

    async def call(client: httpx.AsyncClient, prompt: str) -> str:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 24}
        answer = await client.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"]

    async def call_all() -> list[str]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(call(client, prompt) for prompt in prompts))

    params = SamplingParams(temperature=0, max_tokens=24)
    expected = LLM(**options).generate(prompts, params, use_tqdm=False)
    assert asyncio.run(call_all()) == [output.outputs[0].text for output in expected]
