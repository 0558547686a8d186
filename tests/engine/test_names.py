"""Names of options, and options as values."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch
from conftest import Oracle
from serving import tokens_of

from nanopaged import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams

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
    ("options", "name"),
    [
        (EngineConfig, "gpu_memory_utilization"),
        (EngineConfig, "blok_size"),
        (SamplingParams, "max_new_tokens"),
        (SamplingParams, "best_of"),
        (BeamSearchParams, "num_beams"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_it(options: type, name: str) -> None:
    needed = {"beam_width": 2} if options is BeamSearchParams else {}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        options(**needed | {name: 1})


def test_an_unknown_keyword_of_a_call_is_an_error_that_names_it(llm: LLM) -> None:
    with pytest.raises(TypeError, match="'tp_size'"):
        LLM(tp_size=2, block_size=16)
    for call, option in (
        (llm.generate, {"max_tokens": 5}),
        (llm.stream, {"params": GREEDY}),
        (llm.beam_search, {"num_beams": 2}),
        (llm.chat, {"tools": []}),
    ):
        (name,) = option
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call("ROMEO:", **option)
    for params in ({"top_k": 0}, [{"top_k": 0}]):
        with pytest.raises(TypeError, match="params must be SamplingParams or BeamSearchParams, got dict"):
            llm.generate("ROMEO:", params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_outputs_can_be_copied(llm: LLM) -> None:
    (output,) = llm.generate("ROMEO:", GREEDY, use_tqdm=False)
    for copied in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert copied == output


def test_arguments_of_the_engine(llm: LLM) -> None:
    with pytest.raises(TypeError, match="config must be an EngineConfig, got 'some/model'"):
        LLMEngine("some/model")
    with pytest.raises(ValueError, match=r"no unfinished request has the id \['a', 'b'\]"):
        llm.engine.abort_request(["a", "b"])
    assert repr(llm) == "LLM(model='tiny', dtype=torch.bfloat16, device=cpu, 200 blocks of 16 tokens)"


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
