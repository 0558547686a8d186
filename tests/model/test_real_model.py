"""A real chat model against transformers: what random weights and small vocabularies cannot show.

Its texts have several bytes a token, its answers end by themselves, and its vocabulary has 49,152 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import KERNELS, serve
from doc_pages import ROOT, blocks_of, check_output, commands_of
from programs import environment, load_file, run_program
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from nanopaged import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow

TOLERANCE = 3e-4  # of a log-probability; float32's rounding alone makes 2e-4
TEXTS = [
    "a",
    "\n\n1. ",
    "three:\n\n1. one\n\n12  345",
    "To be, or not to be, that is the question:",
    "def fibonacci(n):\n    ",
    "中国的首都是",
    "Все счастливые семьи похожи друг на друга,",
    "في البدء كان",
    "I love 🍕 and 👩‍👩‍👧‍👦 and",
    "ha " * 40,
    " ".join(f"Item {i} costs {i * i} crowns." for i in range(130)),  # 1,400 tokens
]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return load_file(ROOT / "docs" / "experiments" / "real_model.py").find_real_model(KERNELS)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """transformers, with its plain (eager) attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["torch", "cpp"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOPAGED_CACHE", str(KERNELS))  # of the C++ kernels
        patch.delenv("NANOPAGED_BUILD")
        options = {"dtype": "float32", "num_blocks": 400, "max_model_len": 2048}
        yield LLM(folder, attention_backend=request.param, **options)


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    """All texts, greedy, in one batch."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    return serve(llm, TEXTS, params)


def check_logprobs(rows: list, token_ids: list[int], expected: torch.Tensor, num_top: int) -> None:
    """Every given log-probability is transformers', and the most likely tokens are among them."""
    for row, token_id, reference in zip(rows, token_ids, expected, strict=True):
        assert token_id in row
        assert row == {other: pytest.approx(reference[other].item(), abs=TOLERANCE) for other in row}
        smallest = reference.topk(num_top).values[-1].item()
        assert len([logprob for logprob in row.values() if logprob > smallest - TOLERANCE]) >= num_top


@pytest.mark.parametrize("index", range(len(TEXTS)))
@torch.inference_mode()
def test_greedy_tokens_and_all_logprobs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, outputs: list[RequestOutput], index: int
) -> None:
    """Each token is the most likely one after those before it: so the text is transformers' greedy one."""
    output = outputs[index]
    (completion,) = output.outputs
    prompt = tokenizer(TEXTS[index]).input_ids
    assert output.prompt_token_ids == prompt
    assert tokenizer.decode(prompt) == TEXTS[index]
    expected = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
    first = len(prompt) - 1
    assert completion.token_ids == expected[first:-1].argmax(-1).tolist()
    check_logprobs(completion.logprobs, completion.token_ids, expected[first:-1], num_top=3)
    check_logprobs(output.prompt_logprobs[1:], prompt[1:], expected[:first], num_top=2)


def test_the_readme_shows_the_answer(folder: Path) -> None:
    readme = ROOT / "README.md"
    command = "python docs/experiments/real_model.py"
    outputs = dict(pair for block in blocks_of(readme) for pair in commands_of(block))
    done = run_program(command.split()[1:], ROOT, environment(NANOPAGED_CACHE=str(KERNELS)))
    assert done.returncode == 0, done.stderr
    check_output(outputs[command], done.stdout, "README.md")
