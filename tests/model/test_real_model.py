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
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanopaged import LLM, RequestOutput, SamplingParams

real_model = load_file(ROOT / "docs" / "experiments" / "real_model.py")
try:
    FOLDER: Path = real_model.find_real_model(KERNELS)
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

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


class RealOracle:
    """transformers, with its plain (eager) attention."""

    def __init__(self) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(FOLDER, **options).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: row p is for the token at p + 1."""
        return self.model(torch.tensor([token_ids])).logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": max_tokens}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def real() -> RealOracle:
    return RealOracle()


@pytest.fixture(scope="module", params=["torch", "cpp"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOPAGED_CACHE", str(KERNELS))  # of the C++ kernels
        patch.delenv("NANOPAGED_BUILD")
        options = {"dtype": "float32", "num_blocks": 400, "max_model_len": 2048}
        yield LLM(FOLDER, attention_backend=request.param, **options)


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
def test_greedy_tokens_and_all_logprobs(real: RealOracle, outputs: list[RequestOutput], index: int) -> None:
    """Each token is the most likely one after those before it: so the text is transformers' greedy one."""
    output = outputs[index]
    (completion,) = output.outputs
    prompt = real.tokenizer(TEXTS[index]).input_ids
    assert output.prompt_token_ids == prompt
    assert real.tokenizer.decode(prompt) == TEXTS[index]
    expected = real.logits(prompt + completion.token_ids).log_softmax(-1)
    first = len(prompt) - 1
    assert completion.token_ids == expected[first:-1].argmax(-1).tolist()
    check_logprobs(completion.logprobs, completion.token_ids, expected[first:-1], num_top=3)
    check_logprobs(output.prompt_logprobs[1:], prompt[1:], expected[:first], num_top=2)


def test_the_readme_shows_the_answer() -> None:
    readme = ROOT / "README.md"
    command = "python docs/experiments/real_model.py"
    outputs = dict(pair for block in blocks_of(readme) for pair in commands_of(block))
    done = run_program(command.split()[1:], ROOT, environment(NANOPAGED_CACHE=str(KERNELS)))
    assert done.returncode == 0, done.stderr
    check_output(outputs[command], done.stdout, "README.md")
