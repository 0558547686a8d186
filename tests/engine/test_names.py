"""Names: keywords, attributes and imports, ours and those that users of other engines write out of habit."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from conftest import Oracle
from serving import tokens_of

import nanopaged
from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.checks import foreign_names
from nanopaged.checks.engine_options import EngineOptions

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
    llm.beam_search(
        prompts=[{"prompt": "ROMEO:\n"}], params=BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False
    )


@pytest.mark.parametrize(
    ("options", "name", "meant"),
    [
        (EngineConfig, "gpu_memory_utilization", "memory_utilization"),
        (EngineConfig, "num_gpu_blocks_override", "num_blocks"),
        (EngineConfig, "num_cpu_blocks", "num_host_blocks"),
        (EngineConfig, "page_size", "block_size"),
        (EngineConfig, "blok_size", "block_size"),
        (SamplingParams, "max_new_tokens", "max_tokens"),
        (BeamSearchParams, "num_beams", "beam_width"),
    ],
)
def test_an_unknown_keyword_says_what_was_meant(options: type, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{options.__name__} has no option '{name}': did you mean '{meant}'"):
        options(**{name: 1})


def test_an_unknown_keyword_is_taken_for_no_other_option() -> None:
    for options, name in (
        (SamplingParams, "allowed_tokens"),  # the opposite of stop_token_ids
        (SamplingParams, "penalty_alpha"),
        (EngineConfig, "cache_implementation"),
    ):
        with pytest.raises(TypeError, match=f"{options.__name__} has no option '{name}': its options are"):
            options(**{name: 1})


def test_an_unknown_keyword_of_llm() -> None:
    with pytest.raises(TypeError, match="EngineConfig has no option 'gpu_memory_utilization'"):
        LLM(gpu_memory_utilization=0.5)
    with pytest.raises(TypeError, match="has no option 'compilation_config': its options are model, dtype"):
        LLM(compilation_config=3)
    with pytest.raises(TypeError, match="'trust_remote_code': leave it out.*; 'tp_size': did you mean 'ten"):
        LLM(trust_remote_code=True, tp_size=2, block_size=16)


def test_every_hint_names_something_of_ours() -> None:
    """An option of ours, or a sentence; so a renamed option cannot leave a hint behind."""
    ours = {f.name for options in (EngineConfig, SamplingParams, BeamSearchParams) for f in fields(options)}
    ours |= {name for call in (LLM.generate, LLM.stream) for name in inspect.signature(call).parameters}
    for theirs, hint in (foreign_names.OPTIONS | foreign_names.BEAM_OPTIONS).items():
        assert " " in hint or hint in ours, theirs
        quoted = re.match(r"did you mean '(\w+)'", hint)
        assert quoted is None or quoted[1] in ours
        for name in re.findall(r"\b(\w+)=", hint):
            assert name in ours | {theirs, "chat_template_kwargs"}, hint


def test_keywords_of_a_call_say_where_they_belong(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for call, options, sentence in (
        (llm.generate, {"max_tokens": 5}, r"generate has no option 'max_tokens': put it into .*max_tokens=…"),
        (llm.generate, {"max_new_tokens": 5}, "generate(…, SamplingParams(max_tokens=…))"),
        (llm.generate, {"do_sample": False}, "'do_sample': did you mean 'temperature'? It is 0"),
        (llm.generate, {"stream": True}, "use llm.stream(prompt, params)"),
        (llm.generate, {"streamer": None}, "use llm.stream(prompt, params)"),
        (llm.generate, {"prompt_token_ids": [[1]]}, "token ids are prompts"),
        (llm.generate, {"lora_request": None}, "merge the adapter into the model first"),
        (llm.generate, {"use_tqm": True}, "did you mean 'use_tqdm'?"),
        (llm.generate, {"nonsense": 1}, "its options are prompts, sampling_params, use_tqdm"),
        (llm.stream, {"max_tokens": 5}, "put it into the params: stream(…, SamplingParams(max_tokens=…))"),
        (llm.stream, {"params": GREEDY}, "did you mean 'sampling_params'?"),
        (llm.beam_search, {"beam_width": 2}, "beam_search(…, BeamSearchParams(beam_width=…))"),
        (llm.beam_search, {"num_beams": 2}, "beam_search(…, BeamSearchParams(beam_width=…))"),
    ):
        with pytest.raises(TypeError, match=sentence if "*" in sentence else re.escape(sentence)):
            call("ROMEO:", **options)
    with pytest.raises(TypeError, match=re.escape("chat_template_kwargs={'chat_template': …}")):
        llm.chat(messages, chat_template="{{ messages }}")
    with pytest.raises(TypeError, match="merge the adapter"):
        llm.engine.add_request("a", "ROMEO:", GREEDY, lora_request=None)
    assert not llm.engine.has_unfinished_requests()


def test_a_dict_of_params_is_answered_with_the_class(llm: LLM) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match=re.escape("SamplingParams(**{'temperature': 0})")):
            call("ROMEO:", {"temperature": 0})
    with pytest.raises(TypeError, match=re.escape("SamplingParams(**{'temperature': 0})")):
        llm.generate(["ROMEO:"], [{"temperature": 0}])


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


def test_imports_of_other_engines() -> None:
    with pytest.raises(ImportError, match="cannot import 'EngineArgs' from 'nanopaged': use EngineConfig"):
        from nanopaged import EngineArgs  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from nanopaged import Nonsense  # noqa: F401


def test_options_do_not_change() -> None:
    for options in (EngineConfig(), SamplingParams(), BeamSearchParams(beam_width=2)):
        with pytest.raises(FrozenInstanceError, match=r"dataclasses.replace\(params, max_tokens=5\)"):
            options.max_tokens = 5
    assert hash(SamplingParams(n=2)) == hash(replace(SamplingParams(), n=2))


def test_an_editor_knows_the_keywords_of_llm() -> None:
    """`LLM(…)` takes what `EngineConfig` takes, and the names that editors complete are these."""
    theirs = {f.name: f.type for f in fields(EngineConfig) if f.name != "model"}
    assert get_type_hints(EngineOptions, localns={"Path": Path}) == {
        name: get_type_hints(EngineConfig)[name] for name in theirs
    }


def test_what_an_llm_is(llm: LLM) -> None:
    assert repr(llm) == "LLM(model='tiny', dtype='bfloat16', device='cpu', 200 blocks of 16 tokens)"
    assert re.fullmatch(r"\d+\.\d+\.\d+", nanopaged.__version__)


def test_params_can_be_copied() -> None:
    params = SamplingParams(temperature=0.5, stop="x")
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), replace(params)):
        assert other == params
    assert replace(params, n=2).n == 2


def test_engine_arguments_of_other_engines(llm: LLM) -> None:
    with pytest.raises(TypeError, match="config must be an EngineConfig, got 'some/model'"):
        LLMEngine("some/model")
    with pytest.raises(ValueError, match=r"no unfinished request has the id \['a', 'b'\]"):
        llm.engine.abort_request(["a", "b"])


def test_a_dtype_of_torch(qwen3: Oracle) -> None:
    for dtype, name in (
        (torch.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("half", "float16"),
        (torch.half, "float16"),
        ("float", "float32"),
    ):
        llm = LLM(qwen3.folder, num_blocks=8, dtype=dtype, device=torch.device("cpu"))
        assert (llm.engine.config.dtype, llm.engine.config.device) == (name, "cpu")
        assert llm.engine.runner.dtype == getattr(torch, name)
    with pytest.raises(ValueError, match="dtype is 'int8', but must be one of auto, float32"):
        EngineConfig(dtype=torch.int8)
