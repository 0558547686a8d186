"""Several LoRA adapters in one batch. The oracle is transformers with W + scale · B A in place of each W."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from adapters import make_adapter, merge
from harness import GREEDY, Asked, Oracle, Run, check_refused, serve, tokens
from lora import LLM, MARK, LoraConfig, LoraEngine
from safetensors.torch import load_file, save_file

from nanopaged import RequestOutput, SamplingParams

WEIGHTS = "adapter_model.safetensors"
A = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
KINDS: dict[str, dict[str, Any]] = {  # adapters: fields of adapter_config.json
    "all": {"r": 8, "lora_alpha": 16},
    "qv": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "rs": {"r": 5, "lora_alpha": 3.5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
}
NAMES = [None, *KINDS]
SCORED = replace(GREEDY, max_tokens=10, prompt_logprobs=0)


class Forms:
    """A base model with the adapters of KINDS, and an oracle for each: the merged model; None is the base."""

    def __init__(self, base: Oracle, folder: Path) -> None:
        self.base, self.folders = base, dict[str, Path]()
        self.oracles: dict[str | None, Oracle] = {None: base}
        for name, fields in KINDS.items():
            self.folders[name] = make_adapter(folder / name, base.model, len(name), 0.15, **fields)
        one_layer = {k: w for k, w in load_file(self.folders["rs"] / WEIGHTS).items() if ".layers.1." in k}
        save_file(one_layer, self.folders["rs"] / WEIGHTS)  # as by PEFT's layers_to_transform
        for name, adapter in self.folders.items():
            self.oracles[name] = Oracle(merge(base.model, adapter), folder / f"merged-{name}")

    def llm(self, **options: Any) -> LLM:
        options = {"block_size": 4, "num_blocks": 200} | options
        return LLM(self.base.folder, lora_modules=self.folders, **options)


@pytest.fixture(scope="module")
def forms(qwen3: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(qwen3, tmp_path_factory.mktemp("adapters"))


def ask(prompt: list[int], adapter: str | None, salt: str | None = None) -> Any:
    return {"prompt_token_ids": prompt, "adapter": adapter, "cache_salt": salt}


def test_three_adapters_and_the_base_in_one_batch(oracle: Oracle, tmp_path: Path) -> None:
    """The same prompts under each, all at once; and no two of the four say the same."""
    llm = (forms := Forms(oracle, tmp_path)).llm()
    asked = [ask(prompt, name) for prompt in harness.random_prompts(3, seed=4) for name in NAMES]
    outputs = serve(llm, asked, SCORED)
    assert llm.engine.num_steps == SCORED.max_tokens, "not one batch"
    for prompt, output in zip(asked, outputs, strict=True):
        forms.oracles[prompt["adapter"]].check([output])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(asked)


class LoraRun(Run):
    """Requests with adapters. Alone, each is served by a plain engine with merged weights."""

    engine_class = LoraEngine
    forms: Forms

    def prompt_of(self, asked: Asked) -> dict[str, Any]:
        name = random.Random(repr((asked.prompt, asked.salt))).choice(NAMES)
        return super().prompt_of(asked) | {"adapter": name}

    def say_alone(self, asked: Asked) -> RequestOutput:
        adapter = self.prompt_of(asked)["adapter"]
        self.alone_options = {"model": self.forms.oracles[adapter].folder}
        return super().say_alone(asked)


def test_random_workloads(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraRun, "forms", forms, raising=False)
    monkeypatch.setattr(LoraRun, "options", {"lora_modules": forms.folders})
    events = ["swap", "recompute", "cache hit", "copy on write", "fault: schedule", "fault: execute"]
    harness.random_runs(LoraRun, forms.base.folder, 20, events)


def test_blocks_are_shared_within_an_adapter_only(forms: Forms) -> None:
    """A user's salt still separates, within an adapter too; the salt "all" is not the adapter "all"."""
    llm, prompt, params = forms.llm(), tokens(2, 40), SamplingParams(max_tokens=1)
    for expected in (0, 36):  # all but the block of the last token
        for choice in [(None, None), ("all", None), ("qv", None), (None, "all"), ("all", "x"), ("qv", "x")]:
            (output,) = serve(llm, [ask(prompt, *choice)], params)
            assert output.metrics.num_cached_tokens == expected, choice
    assert not any(MARK in chr(i).encode() for i in range(0xD800)), "a salt may have this byte"


def test_a_batch_with_adapters_is_not_replayed_from_a_graph(forms: Forms) -> None:
    """Decodes without adapters are; the graphs are a stand-in."""
    llm, replayed, zeros = forms.llm(), [], torch.zeros(2, 48)
    llm.engine.runner.graphs = SimpleNamespace(run=lambda *inputs: replayed.append(inputs) or zeros)
    for name, num in (("qv", 0), (None, 9), ("all", 9)):
        outputs = llm.generate([ask(tokens(i, 9), name) for i in (1, 2)], SCORED, use_tqdm=False)
        assert len(replayed) == num
        if name is not None:
            forms.oracles[name].check(outputs)


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
def test_bad_adapters(qwen3: Oracle, tmp_path: Path, fields: dict, change: dict, message: str) -> None:
    folder = make_adapter(tmp_path, qwen3.model, 0, 0.15, **fields)
    weights = load_file(folder / WEIGHTS) | change
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / WEIGHTS)
    options = {"model": qwen3.folder, "num_blocks": 8, "lora_modules": {"poet": folder}}
    check_refused(LLM, [(options, f"adapter 'poet' in .* cannot be used: .*{message}")])


def test_other_mistakes(forms: Forms) -> None:
    wrong = [
        ({"lora_modules": ["a"]}, "lora_modules must be a dict of names and folders"),
        (
            {"lora_modules": {"a": "."}, "tensor_parallel_size": 2},
            "tensor_parallel_size is 2, but lora_modules needs 1: lower it",
        ),
    ]
    check_refused(LoraConfig, wrong)
    says = r"is named '': there are \['all', 'qv', 'rs'\]; name one"
    check_refused(forms.llm().generate, [({"prompts": ask([1], "")}, says)])
