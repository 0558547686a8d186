"""A real chat model against transformers: what random weights and small vocabularies cannot show.

Its texts have several bytes a token, its answers end by themselves, and its vocabulary has 49,152 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KERNELS
from doc_pages import ROOT, blocks_of, check_output, commands_of
from programs import environment, load_file, run_program
from serving import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams

real_model = load_file(ROOT / "docs" / "experiments" / "real_model.py")
try:
    FOLDER: Path = real_model.find_real_model(KERNELS)
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow

TOLERANCE = 3e-4  # of a log-probability; float32's rounding alone makes 2e-4
END = 2  # <|im_end|>
QUESTIONS = ["What is the capital of France?", "Who wrote Hamlet?", "Name three fruits.", "What is 2 + 3?"]
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
        self.model = self.load(torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    def load(self, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: row p is for the token at p + 1."""
        return self.model(torch.tensor([token_ids])).logits[0].float()

    @torch.inference_mode()
    def generate(self, prompt: list[int], **options: Any) -> Any:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 0} | options
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.fixture(scope="module")
def real() -> RealOracle:
    return RealOracle()


def make_llm(**options: Any) -> LLM:
    return LLM(FOLDER, **{"dtype": "float32", "num_blocks": 400, "max_model_len": 2048} | options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """For tests that do not depend on options."""
    return make_llm()


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


def test_digits_and_line_breaks_are_tokens_of_their_own(real: RealOracle) -> None:
    """As the model was trained."""
    tokens = real.tokenizer.convert_ids_to_tokens(real.tokenizer(TEXTS[2]).input_ids)
    assert tokens.count("ĊĊ") == 2
    assert [token for token in tokens if token in set("12345")] == list("112345")


def test_bfloat16_differs_only_where_two_tokens_are_almost_equally_likely() -> None:
    real = RealOracle()
    real.model = real.load(torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for output in make_llm(dtype="bfloat16").generate(TEXTS[:-1], params, use_tqdm=False):
        prompt = output.prompt_token_ids
        token_ids = output.outputs[0].token_ids
        logits = real.logits(prompt + token_ids[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        # A logit of 16 to 32 has a rounding of 1/8 in bfloat16.
        assert (logits.amax(-1) - chosen).max() <= 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "torch"},
        {"attention_backend": "cpp"},
        {"enable_prefix_caching": False, "block_size": 7},
        {"block_size": 1, "num_blocks": 6000},
        {"max_num_batched_tokens": 19},
        {"max_num_seqs": 2, "enable_chunked_prefill": False},
        {"num_blocks": 14, "preemption": "swap"},
        {"num_blocks": 14, "preemption": "recompute"},
        {"tensor_parallel_size": 3},
    ],
    ids=str,
)
def test_options_change_no_token(
    monkeypatch: pytest.MonkeyPatch, outputs: list[RequestOutput], options: dict[str, Any]
) -> None:
    monkeypatch.setenv("NANOPAGED_CACHE", str(KERNELS))  # of the C++ kernels
    monkeypatch.delenv("NANOPAGED_BUILD")
    other = make_llm(**options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    texts = TEXTS[:-1] if "preemption" in options else TEXTS  # the last one needs 90 blocks
    for output, expected in zip(serve(other, texts, params), outputs, strict=False):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].text == expected.outputs[0].text
    if "preemption" in options:
        assert getattr(other.engine.stats(), f"num_preemptions_{options['preemption']}") > 0


def test_beams(real: RealOracle, llm: LLM) -> None:
    for output in serve(llm, TEXTS[2:8], BeamSearchParams(beam_width=4, max_tokens=12)):
        prompt = output.prompt_token_ids
        beams = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12}
        expected = real.generate(prompt, **beams, return_dict_in_generate=True, output_scores=True)
        scores = expected.sequences_scores.tolist()
        assert [beam.score for beam in output.outputs] == pytest.approx(scores, abs=TOLERANCE)
        for beam, sequence in zip(output.outputs, expected.sequences.tolist(), strict=True):
            assert beam.token_ids == sequence[len(prompt) : len(prompt) + len(beam.token_ids)]


def test_answers_end_where_those_of_transformers_end(real: RealOracle, llm: LLM) -> None:
    reasons = set()
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        (answer,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        (completion,) = answer.outputs
        prompt = answer.prompt_token_ids
        text = real.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert prompt == real.tokenizer(text, add_special_tokens=False).input_ids
        assert completion.token_ids == real.generate(prompt, max_new_tokens=60)[0, len(prompt) :].tolist()
        assert completion.text == real.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == END)
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}, "the questions no longer cover both"


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_streams_take_nothing_back_and_stop_strings_cut(real: RealOracle, llm: LLM, text: str) -> None:
    shown = ""
    for output in llm.stream(text, SamplingParams(temperature=0, max_tokens=16)):
        (completion,) = output.outputs
        assert completion.text.startswith(shown)
        shown = completion.text
    assert shown == real.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    stop = shown[len(shown) // 2 :][:3]  # it may begin and end within tokens
    params = SamplingParams(temperature=0, max_tokens=16, stop=[stop, "never seen"])
    (output,) = llm.generate([text], params, use_tqdm=False)
    assert output.outputs[0].text == shown[: shown.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_the_readme_shows_the_answer() -> None:
    readme = ROOT / "README.md"
    command = "python docs/experiments/real_model.py"
    outputs = dict(pair for block in blocks_of(readme) for pair in commands_of(block))
    done = run_program(command.split()[1:], ROOT, environment(NANOPAGED_CACHE=str(KERNELS)))
    assert done.returncode == 0, done.stderr
    check_output(outputs[command], done.stdout, "README.md")
