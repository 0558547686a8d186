"""Names: keywords, attributes and imports, ours and those that users of other engines write out of habit."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest
import torch
from conftest import Oracle
from serving import tokens_of

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.config import foreign_names

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def test_keywords(llm: LLM) -> None:
    expected = tokens_of(llm.generate(["ROMEO:\n"], GREEDY, use_tqdm=False))
    assert tokens_of(llm.generate(prompts=["ROMEO:\n"], sampling_params=GREEDY, use_tqdm=False)) == expected
    *_, last = llm.stream("ROMEO:\n", sampling_params=GREEDY)
    assert tokens_of([last]) == expected
    llm.chat([{"role": "user", "content": "Hi"}], sampling_params=GREEDY, use_tqdm=False)
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    llm.beam_search(prompts=[{"prompt": "ROMEO:\n"}], params=params, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "name", "hint"),
    [
        (EngineConfig, "gpu_memory_utilization", "did you mean 'memory_utilization'"),
        (EngineConfig, "num_cpu_blocks", "did you mean 'num_host_blocks'"),
        (EngineConfig, "blok_size", "did you mean 'block_size'"),
        (SamplingParams, "max_new_tokens", "did you mean 'max_tokens'"),
        (SamplingParams, "best_of", "did you mean 'n'"),
        (BeamSearchParams, "num_beams", "did you mean 'beam_width'"),
        (SamplingParams, "allowed_tokens", "its options are"),  # the opposite of stop_token_ids
        (SamplingParams, "penalty_alpha", "its options are"),
        (EngineConfig, "cache_implementation", "its options are"),
    ],
)
def test_an_unknown_keyword_says_what_was_meant(options: type, name: str, hint: str) -> None:
    """And is taken for no other option."""
    with pytest.raises(TypeError, match=f"{options.__name__} has no option '{name}': {hint}"):
        options(**{name: 1})


def test_an_unknown_keyword_of_llm() -> None:
    with pytest.raises(TypeError, match="'trust_remote_code': leave it out.*; 'tp_size': did you mean 'ten"):
        LLM(trust_remote_code=True, tp_size=2, block_size=16)


def test_every_hint_names_something_of_ours() -> None:
    """An option of ours, or a sentence; so a renamed option cannot leave a hint behind."""
    ours = {f.name for options in (EngineConfig, SamplingParams, BeamSearchParams) for f in fields(options)}
    ours |= {name for call in (LLM.generate, LLM.stream) for name in inspect.signature(call).parameters}
    for theirs, hint in (foreign_names("options") | foreign_names("beam_options")).items():
        assert " " in hint or hint in ours, theirs
        quoted = re.match(r"did you mean '(\w+)'", hint)
        assert quoted is None or quoted[1] in ours
        for name in re.findall(r"\b(\w+)=", hint):
            assert name in ours | {theirs, "chat_template_kwargs"}, hint


def test_keywords_of_a_call_say_where_they_belong(llm: LLM) -> None:
    for call, options, sentence in (
        (llm.generate, {"max_tokens": 5}, "generate(…, SamplingParams(max_tokens=…))"),
        (llm.generate, {"do_sample": False}, "'do_sample': did you mean 'temperature'? It is 0"),
        (llm.generate, {"stream": True}, "use llm.stream(prompt, params)"),
        (llm.generate, {"lora_request": None}, "merge the adapter into the model first"),
        (llm.generate, {"use_tqm": True}, "did you mean 'use_tqdm'?"),
        (llm.generate, {"nonsense": 1}, "its options are prompts, sampling_params, use_tqdm"),
        (llm.generate, {"sampling_params": {"top_k": 0}}, "SamplingParams(**{'top_k': 0})"),
        (llm.generate, {"sampling_params": [{"top_k": 0}]}, "SamplingParams(**{'top_k': 0})"),
        (llm.stream, {"sampling_params": {"top_k": 0}}, "SamplingParams(**{'top_k': 0})"),
        (llm.stream, {"max_tokens": 5}, "put it into the params: stream(…, SamplingParams(max_tokens=…))"),
        (llm.stream, {"params": GREEDY}, "did you mean 'sampling_params'?"),
        (llm.beam_search, {"num_beams": 2}, "beam_search(…, BeamSearchParams(beam_width=…))"),
        (llm.chat, {"chat_template": "{{ messages }}"}, "chat_template_kwargs={'chat_template': …}"),
    ):
        with pytest.raises(TypeError, match=re.escape(sentence)):
            call([{"role": "user", "content": "Hi"}] if call == llm.chat else "ROMEO:", **options)
    with pytest.raises(TypeError, match="merge the adapter"):
        llm.engine.add_request("a", "ROMEO:", GREEDY, lora_request=None)
    assert not llm.engine.has_unfinished_requests()


def test_attributes_of_other_engines(llm: LLM) -> None:
    (output,) = llm.generate("ROMEO:", GREEDY, use_tqdm=False)
    for thing, name, sentence in (
        (llm, "llm_engine", "use llm.engine"),
        (llm, "embed", "generates text only"),
        (output, "text", "use output.outputs[0].text"),
        (output, "sequences", "use output.outputs: their text is the continuation"),
        (output.outputs[0], "tokens", "use token_ids"),
    ):
        with pytest.raises(AttributeError, match=re.escape(sentence)):
            getattr(thing, name)
        assert not hasattr(thing, "nonsense")
    with pytest.raises(TypeError, match=re.escape("use output.outputs[0].text")):
        output["text"]
    for copied in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert copied == output


def test_imports_and_arguments_of_other_engines(llm: LLM) -> None:
    with pytest.raises(ImportError, match="cannot import 'EngineArgs' from 'nanopaged': use EngineConfig"):
        from nanopaged import EngineArgs  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from nanopaged import Nonsense  # noqa: F401
    with pytest.raises(TypeError, match="config must be an EngineConfig, got 'some/model'"):
        LLMEngine("some/model")
    with pytest.raises(ValueError, match=r"no unfinished request has the id \['a', 'b'\]"):
        llm.engine.abort_request(["a", "b"])
    assert repr(llm) == "LLM(model='tiny', dtype='bfloat16', device='cpu', 200 blocks of 16 tokens)"


def test_options_do_not_change() -> None:
    """But they can be copied."""
    for options in (EngineConfig(), SamplingParams(stop="x"), BeamSearchParams(beam_width=2)):
        with pytest.raises(FrozenInstanceError, match="max_tokens"):
            options.max_tokens = 5
        for other in (copy.deepcopy(options), pickle.loads(pickle.dumps(options)), replace(options)):
            assert other == options
    assert hash(SamplingParams(n=2)) == hash(replace(SamplingParams(), n=2))


@dataclass(frozen=True, kw_only=True)
class WithTenant(SamplingParams):
    """Params of a fork, with a plain field."""

    tenant: str = ""


def test_a_field_of_a_fork_needs_no_rule(llm: LLM) -> None:
    params = WithTenant(max_tokens=2, tenant="a")
    llm.engine.add_request("0", [1, 2], params)
    assert llm.engine.requests["0"].params.tenant == "a"
    llm.engine.abort_request("0")
    with pytest.raises(ValueError, match="max_tokens"):  # the others keep theirs
        WithTenant(max_tokens=0)


def test_a_dtype_of_torch(qwen3: Oracle) -> None:
    for dtype, name in ((torch.bfloat16, "bfloat16"), ("half", "float16"), ("float", "float32")):
        llm = LLM(qwen3.folder, num_blocks=8, dtype=dtype, device=torch.device("cpu"))
        assert (llm.engine.config.dtype, llm.engine.config.device) == (name, "cpu")
        assert llm.engine.runner.dtype == getattr(torch, name)
    with pytest.raises(ValueError, match="dtype is 'int8', but must be one of auto, float32"):
        EngineConfig(dtype=torch.int8)
