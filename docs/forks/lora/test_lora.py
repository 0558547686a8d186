"""Several LoRA adapters in one batch. The oracle is transformers with W + s·B·A in place of each W."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_random_runs
import torch
from conftest import Oracle, random_prompts, tokens
from fake_runner import FakeRunner
from random_workloads import Asked, Workload, forked, mixed
from safetensors.torch import load_file, save_file
from test_random_runs import Run, fake_model, fake_tokenizer
from transformers import PreTrainedModel

from nanopaged import (
    LLM,
    BeamSearchParams,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from nanopaged.block_manager import BlockManager
from nanopaged.model import sizing
from nanopaged.model.lora import Adapters
from nanopaged.sequence import Sequence
from nanopaged.views.outputs import request_output

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
KINDS: dict[str, dict[str, Any]] = {  # three adapters: fields of adapter_config.json
    "all": {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]},
    "qv": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "rs": {"r": 5, "lora_alpha": 3.5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, prompt_logprobs=0)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make_adapter(folder: Path, model: PreTrainedModel, seed: int = 0, **fields: object) -> Path:
    """Random A and B, both not zero, in the files that PEFT writes."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}
    config["auto_mapping"] = {"base_model_class": "Qwen3ForCausalLM", "parent_library": "transformers"}
    config |= fields
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, linear in model.named_modules():
        if name.rpartition(".")[2] in config["target_modules"]:
            for half, shape in (
                ("A", (config["r"], linear.in_features)),
                ("B", (linear.out_features, config["r"])),
            ):
                weight = 0.3 * torch.randn(shape, generator=generator)
                weights[f"base_model.model.{name}.lora_{half}.weight"] = weight
    save_file(weights, folder / WEIGHTS)
    return folder


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model that needs no adapter."""
    config, weights = json.loads((folder / CONFIG).read_text(encoding="utf-8")), load_file(folder / WEIGHTS)
    r = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(r) if config.get("use_rslora") else r)
    merged = copy.deepcopy(model)
    for name, linear in merged.named_modules():
        stem = f"base_model.model.{name}.lora_"
        if f"{stem}A.weight" in weights:
            linear.weight.data += scaling * weights[f"{stem}B.weight"] @ weights[f"{stem}A.weight"]
    return merged


class Forms:
    """A base model with the adapters of KINDS, and the merged model of each; None is the base."""

    def __init__(self, oracle: Oracle, folder: Path) -> None:
        self.base = oracle.folder
        self.adapters: dict[str, str | Path] = {
            name: make_adapter(folder / name, oracle.model, seed, **fields)
            for seed, (name, fields) in enumerate(KINDS.items())
        }
        merged = {name: merge(oracle.model, folder / name) for name in self.adapters}
        self.models: dict[str | None, PreTrainedModel] = {None: oracle.model} | merged

    def llm(self, **options: Any) -> LLM:
        return LLM(self.base, adapters=self.adapters, **{"block_size": 4, "num_blocks": 200} | options)


@pytest.fixture(scope="module")
def forms(qwen3: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(qwen3, tmp_path_factory.mktemp("adapters"))


def with_adapter(prompt: list[int], adapter: str | None, salt: str | None = None) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "adapter": adapter, "cache_salt": salt}


def assert_close(ours: list[float], theirs: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)


def check_greedy(output: RequestOutput, model: PreTrainedModel) -> None:
    """Each token is the model's most likely one, and all log-probabilities are the model's."""
    prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt + generated])).logits[0].log_softmax(-1)
    assert generated == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
    ours = [row[t] for row, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    ours += [row[t] for row, t in zip(output.outputs[0].logprobs, generated, strict=True)]
    actual = (prompt + generated)[1:]
    assert_close([float(logprob) for logprob in ours], logprobs[range(len(actual)), actual].tolist())


# ── the same as merged models ─────────────────────────────────────────────────────────────────────


def test_three_adapters_and_the_base_in_one_batch(oracle: Oracle, tmp_path: Path) -> None:
    """The same prompts under each, all at once; and no two of the four say the same."""
    forms = Forms(oracle, tmp_path)
    asked = [(prompt, name) for prompt in random_prompts(3, seed=4) for name in forms.models]
    llm = forms.llm()
    outputs = llm.generate([with_adapter(*each) for each in asked], GREEDY, use_tqdm=False)
    assert llm.engine.num_steps == GREEDY.max_tokens, "not one batch"
    for (_, name), output in zip(asked, outputs, strict=True):
        check_greedy(output, forms.models[name])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(asked)


SMALL = {"num_blocks": 22, "max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"attention_backend": "reference"},
        SMALL | {"preemption": "swap", "num_host_blocks": 100},
        SMALL | {"preemption": "recompute"},
    ],
    ids=str,
)
def test_every_request_says_what_it_says_alone(
    forms: Forms, alone: dict[str | None, list[RequestOutput]], options: dict[str, Any]
) -> None:
    """Greedy, sampled and beams, in pieces, preempted and shared; alone they run on merged weights."""
    llm = forms.llm(**options)
    asked = [(i, name) for i in range(len(ASKED)) for name in forms.models]
    requests = [
        llm.engine.prompts.make_request(str(k), with_adapter(ASKED[i][0], name), ASKED[i][1])
        for k, (i, name) in enumerate(asked)
    ]
    for request in requests:
        llm.engine.queue(request)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        llm.engine.check_invariants()
    for (i, name), request in zip(asked, requests, strict=True):
        for ours, theirs in zip(request_output(request).outputs, alone[name][i].outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
    stats = llm.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    if "preemption" in options:
        assert getattr(stats, f"num_preemptions_{options['preemption']}") > 0
    assert (stats.prefix_cache_hits > 0) == (options.get("enable_prefix_caching", True))


ASKED = [
    (tokens(3, 21), replace(GREEDY, logprobs=None, prompt_logprobs=None)),
    (tokens(3, 23), SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True)),
    (tokens(4, 6), BeamSearchParams(beam_width=4, max_tokens=8)),
    (tokens(3, 27), SamplingParams(seed=2, max_tokens=12, ignore_eos=True)),
]


@pytest.fixture(scope="module")
def alone(forms: Forms, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[RequestOutput]]:
    """Of ASKED, one at a time, by an engine whose weights are merged."""
    outputs = {}
    for name, model in forms.models.items():
        folder = tmp_path_factory.mktemp("merged")
        model.save_pretrained(folder)
        llm = LLM(folder, num_blocks=100, enable_prefix_caching=False)
        outputs[name] = [llm.generate([p], params, use_tqdm=False)[0] for p, params in ASKED]
    return outputs


def test_an_adapter_of_one_layer(qwen3: Oracle, tmp_path: Path) -> None:
    """As with PEFT's layers_to_transform: the file says which layers are changed."""
    folder = make_adapter(tmp_path / "one", qwen3.model, target_modules=["q_proj", "down_proj"])
    weights = {name: w for name, w in load_file(folder / WEIGHTS).items() if ".layers.1." in name}
    assert len(weights) == 4
    save_file(weights, folder / WEIGHTS)
    llm = LLM(qwen3.folder, num_blocks=20, adapters={"one": folder})
    (output,) = llm.generate([with_adapter(tokens(5, 30), "one")], GREEDY, use_tqdm=False)
    check_greedy(output, merge(qwen3.model, folder))


# ── the prefix cache ──────────────────────────────────────────────────────────────────────────────


def test_blocks_are_shared_within_an_adapter_only(forms: Forms) -> None:
    """A salt of the user still separates, within an adapter too. The salt "all" is not the adapter "all"."""
    llm, prompt = forms.llm(), tokens(2, 40)
    choices = [
        (None, None),
        ("all", None),
        ("qv", None),
        (None, "all"),
        ("all", "x"),
        ("qv", "x"),
        (None, "x"),
    ]
    for expected in (0, 36):  # all but the block of the last token
        for choice in choices:
            (output,) = llm.generate([with_adapter(prompt, *choice)], SamplingParams(max_tokens=1), False)
            assert output.metrics.num_cached_tokens == expected, choice


def test_salt_and_adapter_are_never_mistaken_for_another_pair() -> None:
    """Not even by a user who knows what stands between the two."""
    names = ["a", "aa", "", "ÿ"]
    engine = make_engine("fake", EngineConfig(block_size=4, num_blocks=8, adapters=dict.fromkeys(names, "")))
    pairs = [(salt, name) for salt in (None, *filter(None, names)) for name in (None, *names)]
    pairs += [(f"a{chr(between)}a", None) for between in range(256)]
    salts = {
        engine.prompts.make_request("r", with_adapter([1], name, salt)).cache_salt for salt, name in pairs
    }
    assert len(salts) == len(pairs)


class AdapterRunner(FakeRunner):
    """A slot also remembers the adapter that wrote it: 3 times the prefix's number, plus the adapter's."""

    def _numbers(self, seq: Sequence) -> list[int]:
        adapter = NAMES.index(seq.request.adapter)
        return [3 * number + adapter for number in super()._numbers(seq)]

    def check_findable_blocks(self, manager: BlockManager) -> None:
        coded = self.slots
        self.slots = {slot: number // 3 for slot, number in coded.items()}
        super().check_findable_blocks(manager)
        self.slots = coded


NAMES = [None, "x", "y"]


def make_engine(model: str, config: EngineConfig) -> LLMEngine:
    """As that of test_random_runs, with adapters. The runner has no weights, so they need no files."""
    runner = AdapterRunner(config.num_blocks, config.block_size, config.num_host_blocks or 0)
    adapters = config.adapters or {"x": "", "y": ""}
    engine = LLMEngine(replace(config, model=fake_model(), adapters=adapters), runner)
    engine.prompts.tokenizer = fake_tokenizer()
    return engine


class AdapterRun(Run):
    """A third of the requests for each adapter and for none."""

    def add(self, i: int, asked: Asked) -> None:
        prompt = with_adapter(asked.prompt, NAMES[i % 3], asked.salt)
        while str(i) not in self.engine.requests:
            self.attempt(lambda: self.engine.add_request(str(i), prompt, asked.params))


@pytest.mark.parametrize(("make_workload", "num"), [(mixed, 24), (forked, 8)])
def test_random_workloads_read_the_kv_of_their_own_adapter(
    make_workload: Callable[[int], Workload], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_random_runs, "make_engine", make_engine)
    happened: Counter[str] = Counter()
    for seed in range(num):
        run = AdapterRun(make_workload(seed))
        try:
            run.serve()
        except Exception as error:
            raise AssertionError(f"{error}, in {run.workload}") from error
        happened += run.happened
    assert all(happened[event] > 0 for event in ("swap", "recompute", "cache hit", "copy on write")), happened


# ── the runner ────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_with_adapters_is_not_replayed_from_a_graph(forms: Forms) -> None:
    """Its decodes run eagerly; those of a batch without adapters do not. (The graphs are a stand-in.)"""
    llm = forms.llm()
    runner, replayed = llm.engine.runner, []

    def run(input_ids: object, positions: object, metadata: Any) -> torch.Tensor:
        replayed.append(metadata.num_decodes)
        return torch.zeros(metadata.num_decodes, runner.model.config.hidden_size)

    def can_run(metadata: Any) -> bool:
        return metadata.num_decodes == len(metadata.query_lens)

    runner.graphs = SimpleNamespace(run=run, can_run=can_run)
    prompts = [with_adapter(tokens(1, 9), "qv"), with_adapter(tokens(2, 9), None)]
    output, _ = llm.generate(prompts, GREEDY, use_tqdm=False)
    check_greedy(output, forms.models["qv"])
    assert replayed == []
    llm.generate(prompts[1:], GREEDY, use_tqdm=False)
    assert replayed == [1] * (GREEDY.max_tokens - 1)


def test_the_largest_step_has_each_adapter_on_all_tokens(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU measures its memory with this step. Afterwards no row belongs to an adapter."""
    added: list[tuple[int, int]] = []  # (tokens of the step, rows of an adapter)
    add = Adapters._add

    def spy(self: Adapters, by_adapter: Any, linear: Any, inputs: Any, out: Any) -> None:
        added.extend((len(inputs[0]), len(rows)) for rows in self.rows.values())
        add(self, by_adapter, linear, inputs, out)

    def measure(*args: Any) -> int:
        sizing.largest_step(*args)
        return 7

    monkeypatch.setattr(Adapters, "_add", spy)
    monkeypatch.setattr(sizing, "measure_num_blocks", measure)
    llm = forms.llm(num_blocks=None, max_num_batched_tokens=50)
    assert llm.engine.runner.num_blocks == 7
    assert set(added) == {(50, 50)}
    assert len(added) == 3 * 2 * 4  # adapters, layers, linears
    assert llm.engine.runner.adapters.rows == {}


def test_an_engine_without_adapters_has_no_hooks(qwen3: Oracle) -> None:
    model = LLM(qwen3.folder, num_blocks=8).engine.runner.model
    assert not any(module._forward_hooks for module in model.modules())


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adapter", ["no", "", 3, ["qv"]])
def test_an_unknown_adapter(forms: Forms, adapter: object) -> None:
    with pytest.raises(ValueError, match=r"no adapter is named .*: there are \['all', 'qv', 'rs'\]"):
        forms.llm().generate({"prompt_token_ids": [1], "adapter": adapter})


def test_a_name_added_to_the_dict_later_is_unknown(forms: Forms) -> None:
    adapters = dict(forms.adapters)
    llm = LLM(forms.base, num_blocks=8, adapters=adapters)
    adapters["late"] = forms.adapters["all"]
    with pytest.raises(ValueError, match="no adapter is named 'late'"):
        llm.generate(with_adapter([1], "late"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"adapters": ["a"]}, TypeError, "adapters must be a dict"),
        ({"adapters": {1: "a"}}, TypeError, "adapters must be a dict"),
        ({"adapters": {"a": "a"}, "tensor_parallel_size": 2}, ValueError, "need tensor_parallel_size 1"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora True, which is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern .* is not supported"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern .* is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save .* is not supported"),
        ({"bias": "all"}, "bias 'all', which is not supported"),
        ({"lora_bias": True}, "lora_bias True, which is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication .* is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens .* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which is not supported"),
        ({"use_rslora": "yes"}, "use_rslora 'yes', which is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3', which is not supported"),
        ({"peft_type": None}, "peft_type None, which is not supported"),
        ({"r": 0}, "r 0 and lora_alpha 8, but needs"),
        ({"r": 3}, r"lora_A.weight has shape \[4, 48\] in the checkpoint, but .* \[3, 48\]"),
        ({"lora_alpha": "8"}, "r 4 and lora_alpha '8', but needs"),
        ({"lora_alpha": math.nan}, "lora_alpha nan, but needs"),
    ],
)
def test_unsupported_configs(qwen3: Oracle, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = make_adapter(tmp_path / "a", qwen3.model)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps(config | fields), encoding="utf-8")
    with pytest.raises(ValueError, match=f"adapter 'poet' cannot be used: .*{message}"):
        LLM(qwen3.folder, num_blocks=8, adapters={"poet": folder})


A = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
LATER = A.replace("layers.0", "layers.2"), B.replace("layers.0", "layers.2")
HEAD = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(B), f"has only one of {A} and {B}"),
        (lambda w: w.pop(A), f"has only one of {A} and {B}"),
        (lambda w: w.update({A: w[A][:, :40].clone()}), r"lora_A.weight has shape \[4, 40\] .* \[4, 48\]"),
        (lambda w: w.update({B: torch.zeros(48, 4)}), r"lora_B.weight has shape \[48, 4\] .* \[32, 4\]"),
        (lambda w: w.update({LATER[0]: w[A].clone(), LATER[1]: w[B].clone()}), f"unexpected: {LATER[0]}"),
        (lambda w: w.update({HEAD: w[A].clone()}), f"unexpected: {HEAD}"),
        (lambda w: w.update({A: w[A] * math.nan}), "lora_A.weight has weights that are not finite"),
        (lambda w: w.clear(), "has no weights for this model"),
    ],
)
def test_weights_that_do_not_fit(
    qwen3: Oracle, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """Half a pair, another base, a layer that does not exist, a part that is not supported."""
    folder = make_adapter(tmp_path / "a", qwen3.model)
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"adapter 'poet' cannot be used: .*{message}"):
        LLM(qwen3.folder, num_blocks=8, adapters={"poet": folder})


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_or_broken_file(qwen3: Oracle, tmp_path: Path, name: str) -> None:
    folder = make_adapter(tmp_path / "a", qwen3.model)
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(
        ValueError, match=f"adapter 'poet' cannot be used: .*{name} (is broken|cannot be read)"
    ):
        LLM(qwen3.folder, num_blocks=8, adapters={"poet": folder})
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing: an adapter is a folder"):
        LLM(qwen3.folder, num_blocks=8, adapters={"poet": folder})
