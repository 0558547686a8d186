"""Several LoRA adapters in one batch. The oracle is transformers with W + scale · B A in place of each W."""

import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_random_runs
import torch
from conftest import FAMILIES, Oracle, memory_that_was_never_written, random_prompts, tokens  # noqa: F401
from fake_runner import FakeRunner
from lora import LLM, LoraConfig, LoraEngine
from measure import make_adapter, merge
from random_workloads import Asked, forked, mixed, siblings
from safetensors.torch import load_file, save_file
from serving import serve, tokens_of
from test_random_runs import Run, fake_model, serve_random

import nanopaged
from nanopaged import BeamSearchParams, RequestOutput, SamplingParams, memory

WEIGHTS = "adapter_model.safetensors"
A = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
KINDS: dict[str, dict[str, Any]] = {  # adapters: fields of adapter_config.json
    "all": {"r": 8, "lora_alpha": 16},
    "qv": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "rs": {"r": 5, "lora_alpha": 3.5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
}
NAMES = [None, *KINDS]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, prompt_logprobs=0)
ALL = [GREEDY, SamplingParams(n=3, seed=1, max_tokens=9), BeamSearchParams(beam_width=3, max_tokens=8)]


class Forms:
    """A base model with the adapters of KINDS, and the merged model of each; None is the base."""

    def __init__(self, family: str, folder: Path) -> None:
        self.base, model = folder / "base", Oracle(family, folder / "base").model
        self.folders = {k: make_adapter(folder / k, model, len(k), 0.15, **v) for k, v in KINDS.items()}
        one_layer = {k: w for k, w in load_file(self.folders["rs"] / WEIGHTS).items() if ".layers.1." in k}
        save_file(one_layer, self.folders["rs"] / WEIGHTS)  # as by PEFT's layers_to_transform
        self.models = {None: model} | {name: merge(model, self.folders[name]) for name in KINDS}
        for name in NAMES:
            self.models[name].save_pretrained(folder / f"merged-{name}")
        self.plain = {name: nanopaged.LLM(folder / f"merged-{name}", num_blocks=90) for name in NAMES}

    def llm(self, **options: Any) -> LLM:
        return LLM(self.base, lora_modules=self.folders, **{"block_size": 4, "num_blocks": 200} | options)

    def check(self, name: str | None, output: RequestOutput, params: Any) -> None:
        """The tokens of an engine with merged weights; the log-probabilities of transformers with them."""
        prompt = output.prompt_token_ids
        assert tokens_of([output]) == tokens_of(self.plain[name].generate([prompt], params, use_tqdm=False))
        for each in output.outputs:
            text = prompt + each.token_ids
            right = self.models[name](torch.tensor([text])).logits[0].log_softmax(-1)
            scores = right[range(len(text) - 1), text[1:]].tolist()
            assert each.cumulative_logprob == pytest.approx(sum(scores[len(prompt) - 1 :]), abs=1e-4)
            if params is GREEDY:
                assert each.token_ids == right[len(prompt) - 1 : -1].argmax(-1).tolist()
                rows = [*output.prompt_logprobs[1:], *each.logprobs]
                ours = [row[token].logprob for row, token in zip(rows, text[1:], strict=True)]
                assert ours == pytest.approx(scores, abs=1e-4)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms("qwen3", tmp_path_factory.mktemp("alone"))


def ask(prompt: list[int], adapter: str | None, salt: str | None = None) -> Any:
    return {"prompt_token_ids": prompt, "adapter": adapter, "cache_salt": salt}


@pytest.mark.parametrize("family", FAMILIES)
def test_three_adapters_and_the_base_in_one_batch(family: str, tmp_path: Path) -> None:
    """The same prompts under each, all at once; and no two of the four say the same."""
    llm = (forms := Forms(family, tmp_path)).llm()
    asked = [(prompt, name) for prompt in random_prompts(3, seed=4) for name in NAMES]
    outputs = serve(llm, [ask(*each) for each in asked], GREEDY)
    assert llm.engine.num_steps == GREEDY.max_tokens, "not one batch"
    for (_, name), output in zip(asked, outputs, strict=True):
        forms.check(name, output, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(asked)


@pytest.mark.parametrize("seed", range(6))
def test_every_request_says_what_it_says_alone(forms: Forms, seed: int) -> None:
    """Any adapter and kind of request: in pieces, preempted, shared, one aborted, after a failed step."""
    rng, way, caching = random.Random(seed), ("swap", "recompute")[seed % 2], seed != 3
    options = {"preemption": way, "num_host_blocks": 99, "watermark": 0, "enable_prefix_caching": caching}
    engine = forms.llm(num_blocks=26, max_num_batched_tokens=16, **options).engine
    starts, ends = [tokens(3, 21), tokens(4, 6)], random_prompts(14, seed, longest=9)
    asked = [(rng.choice(starts) + end, rng.choice(NAMES), rng.choice(ALL)) for end in ends]
    requests = [engine.prompts.make_request(str(i), ask(*each[:2]), each[2]) for i, each in enumerate(asked)]
    for request in requests:
        engine.queue(request)
    norm, works = engine.runner.model.norm, engine.runner.model.norm.add_norm
    while engine.has_unfinished_requests():
        if engine.num_steps == 5 and not requests[-2].finished:
            engine.abort_request(requests[-2].request_id)
        norm.add_norm = None if engine.num_steps == 9 and norm.add_norm else works  # the tenth fails once
        with nullcontext() if norm.add_norm else pytest.raises(TypeError):
            engine.step()
        engine.check_invariants()
    for (_, name, params), request in zip(asked, requests, strict=True):
        if request.sequences[0].finish_reason != "abort":
            forms.check(name, request.output(), params)
    assert ((stats := engine.stats()).num_used_blocks, stats.prefix_cache_hits > 0) == (0, caching)
    assert getattr(stats, f"num_preemptions_{way}") > 0


def test_blocks_are_shared_within_an_adapter_only(forms: Forms) -> None:
    """A user's salt still separates, within an adapter too; the salt "all" is not the adapter "all"."""
    llm, prompt, params = forms.llm(), tokens(2, 40), SamplingParams(max_tokens=1)
    for expected in (0, 36):  # all but the block of the last token
        for choice in [(None, None), ("all", None), ("qv", None), (None, "all"), ("all", "x"), ("qv", "x")]:
            (output,) = serve(llm, [ask(prompt, *choice)], params)
            assert output.metrics.num_cached_tokens == expected, choice
    names, salts = [None, "a", "aa", "ÿ", "ÿa"], [None, "a", "aa", *(f"a{chr(i)}a" for i in range(256))]
    config = LoraConfig(model=fake_model(), lora_modules=dict.fromkeys(names[1:], "."))
    make = LoraEngine(config, FakeRunner(num_blocks=9, block_size=16)).prompts.make_request
    ours = {make("r", ask([1], name, salt)).cache_salt for name in names for salt in salts}
    assert len(ours) == len(names) * len(salts)


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request reads its own K/V and says what it says alone, with swaps, faults and aborts."""

    def make_engine(config: Any, runner: Any) -> LoraEngine:
        return LoraEngine(LoraConfig(**vars(config) | {"lora_modules": dict.fromkeys(KINDS, ".")}), runner)

    class LoraRun(Run):
        def add(self, i: int, asked: Asked) -> None:
            add_request = partial(LoraEngine.add_request, self.engine)

            def add_with_adapter(name: str, prompt: dict, params: Any) -> None:
                add_request(name, prompt | {"adapter": NAMES[i % 4]}, params)

            self.engine.add_request = add_with_adapter
            super().add(i, asked)

    monkeypatch.setattr(test_random_runs, "LLMEngine", make_engine)
    for make_workload in (mixed, forked, siblings):
        serve_random(make_workload, 20, ["swap", "cache hit", "copy on write", "fault: schedule"], LoraRun)


def test_a_batch_with_adapters_is_not_replayed_from_a_graph(forms: Forms) -> None:
    """Decodes without adapters are; the graphs are a stand-in."""
    llm, replayed, zeros = forms.llm(), [], torch.zeros(2, 48)
    llm.engine.runner.graphs = SimpleNamespace(run=lambda *inputs: replayed.append(inputs) or zeros)
    for name, num in (("qv", 0), (None, 9), ("all", 9)):
        outputs = llm.generate([ask(tokens(i, 9), name) for i in (1, 2)], GREEDY, use_tqdm=False)
        assert len(replayed) == num
        if name is not None:
            forms.check(name, outputs[1], GREEDY)


def test_a_gpu_measures_a_step_with_each_adapter(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(config: Any, model: Any, shape: Any, max_model_len: int, max_num_batched_tokens: int) -> int:
        (hook,) = model.layers[1].self_attn.qkv_proj._forward_hooks.values()
        assert [len(rows) for rows in hook.func.__self__.rows.values()] == [50] * 3
        memory.largest_step(config, model, shape, max_model_len, max_num_batched_tokens)
        return 7

    monkeypatch.setattr(memory, "measure_num_blocks", measure)
    assert forms.llm(num_blocks=None, max_num_batched_tokens=50).engine.runner.rows == {}


BAD = [  # fields of adapter_config.json, changed weights, and what the error says
    ({"use_dora": True}, {}, "use_dora=True .* is not supported"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa' .* is not supported"),
    ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not 'LORA'"),
    ({}, {A: torch.zeros(3, 48)}, r"have the shapes \[\[3, 48\], .* need \[\[8, 48\]"),
    ({}, {A: None}, "lora_B.weight'] have the shapes .*0.*, but r and the model need"),
    ({}, {A: torch.eye(8, 48).log()}, "lora_A.*are not finite in torch.float32"),
    ({}, {A.replace("v_proj", "b"): torch.zeros(8)}, "b.lora_A.* are no projections of this model's layers"),
]


@pytest.mark.parametrize(("fields", "change", "message"), BAD)
def test_bad_adapters(forms: Forms, tmp_path: Path, fields: dict, change: dict, message: str) -> None:
    folder = make_adapter(tmp_path, forms.models[None], 0, 0.15, **fields)
    weights = load_file(folder / WEIGHTS) | change
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"adapter 'poet' in .* cannot be used: .*{message}"):
        LLM(forms.base, num_blocks=8, lora_modules={"poet": folder})


def test_other_mistakes(forms: Forms) -> None:
    llm, two = forms.llm(), {"lora_modules": {"a": "."}, "tensor_parallel_size": 2}
    for ask_for, message in [
        (lambda: LoraConfig(lora_modules=["a"]), "lora_modules must be a dict of names and folders"),
        (lambda: LoraConfig(lora_modules={"a": None}), "has 'a': None, but must map str to str or Path"),
        (lambda: LoraConfig(**two), "tensor_parallel_size is 2, but lora_modules needs 1: lower it"),
        (lambda: llm.generate(ask([1], "")), r"is named '': there are \['all', 'qv', 'rs'\]; name one"),
        (lambda: llm.generate({"input_ids": [[1]], "adapter": "qv"}), "'qv' is beside 'input_ids': give"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            ask_for()
