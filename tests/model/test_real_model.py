"""A real chat model against transformers: what random weights and small vocabularies cannot show.

Its texts have several bytes a token, its answers end by themselves, and its vocabulary has 49,152 tokens.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KERNELS
from doc_pages import ROOT, blocks_of, check_output, commands_of
from programs import environment, load_file, run_program
from serving import serve

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams

real_model = load_file(ROOT / "docs" / "experiments" / "real_model.py")
try:
    FOLDER: Path = real_model.find_real_model(KERNELS)
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow

TOLERANCE = 3e-4  # of a log-probability; float32's rounding alone makes 2e-4
END = 2  # <|im_end|>
QUESTIONS = [
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "How many legs does a spider have?",
    "Name three fruits.",
    "What is 2 + 3?",
]
TEXTS = [
    "a",
    "\n\n1. ",
    "To be, or not to be, that is the question:",
    "def fibonacci(n):\n    ",
    "SELECT name, age FROM users WHERE",
    "中国的首都是",
    "吾輩は猫である。名前は",
    "Все счастливые семьи похожи друг на друга,",
    "대한민국의 수도는",
    "في البدء كان",
    "I love 🍕 and 👩‍👩‍👧‍👦 and",
    "π ≈ 3.14159, e ≈ 2.71828, √2 ≈",
    "ha " * 40,
    " ".join(f"Item {i} costs {i * i} crowns." for i in range(130)),  # 1,400 tokens
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=2)


class RealOracle:
    """transformers, with its plain (eager) attention."""

    @cache  # noqa: B019 (there is one oracle, which lives as long as the tests)
    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        from transformers import AutoModelForCausalLM

        options = {"dtype": dtype, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(FOLDER, **options).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[len(token_ids), vocab_size]: row p is for the token at p + 1."""
        return self.model(dtype)(torch.tensor([token_ids])).logits[0].float()

    @torch.inference_mode()
    def generate(self, prompt: list[int], **options: Any) -> Any:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 0} | options
        return self.model().generate(ids, attention_mask=torch.ones_like(ids), **options)

    def greedy(self, prompt: list[int], **options: Any) -> list[int]:
        return self.generate(prompt, **options)[0, len(prompt) :].tolist()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(FOLDER)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def ask(self, question: str) -> list[int]:
        """The tokens of a conversation with one question."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids


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
    return serve(llm, TEXTS, GREEDY)


def check_logprobs(rows: list, token_ids: list[int], expected: torch.Tensor, num_top: int) -> None:
    """Every given log-probability is transformers', and the most likely tokens are among them."""
    assert len(rows) == len(token_ids) == len(expected)
    for row, token_id, reference in zip(rows, token_ids, expected, strict=True):
        assert token_id in row
        assert row == {other: pytest.approx(reference[other].item(), abs=TOLERANCE) for other in row}
        if num_top > 0:
            smallest = reference.topk(num_top).values[-1].item()
            assert len([logprob for logprob in row.values() if logprob > smallest - TOLERANCE]) >= num_top


# ── tokens and log-probabilities ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_greedy_tokens_and_all_logprobs(real: RealOracle, outputs: list[RequestOutput], index: int) -> None:
    """Each token is the most likely one after those before it: so the text is transformers' greedy one."""
    output = outputs[index]
    (completion,) = output.outputs
    prompt = real.encode(TEXTS[index])
    assert output.prompt_token_ids == prompt
    expected = real.logits(prompt + completion.token_ids).log_softmax(-1)
    first = len(prompt) - 1
    assert completion.token_ids == expected[first:-1].argmax(-1).tolist()
    check_logprobs(completion.logprobs, completion.token_ids, expected[first:-1], num_top=3)
    check_logprobs(output.prompt_logprobs[1:], prompt[1:], expected[:first], num_top=2)


def test_perplexity_of_a_long_text(real: RealOracle, llm: LLM) -> None:
    prompt = real.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))[:512]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    total = 0.0
    for row, token_id in zip(output.prompt_logprobs[1:], prompt[1:], strict=True):
        total += row[token_id]
    expected = real.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None]).sum()
    assert total == pytest.approx(expected.item(), rel=1e-5)


def test_bfloat16_differs_only_where_two_tokens_are_almost_equally_likely(real: RealOracle) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for output in make_llm(dtype="bfloat16").generate(TEXTS[:12], params, use_tqdm=False):
        prompt = output.prompt_token_ids
        token_ids = output.outputs[0].token_ids
        logits = real.logits(prompt + token_ids[:-1], torch.bfloat16)[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        # A logit of 16 to 32 has a rounding of 1/8 in bfloat16.
        assert (logits.amax(-1) - chosen).max() <= 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "torch"},
        {"attention_backend": "cpp"},
        {"enable_prefix_caching": False},
        {"block_size": 1, "num_blocks": 6000},
        {"block_size": 7},
        {"max_num_batched_tokens": 19},
        {"enable_chunked_prefill": False},
        {"max_num_seqs": 2},
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
    found = serve(other, texts, params)
    for output, expected in zip(found, outputs, strict=False):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].text == expected.outputs[0].text
    stats = other.engine.stats()
    if "preemption" in options:
        assert getattr(stats, f"num_preemptions_{options['preemption']}") > 0


def test_the_loop_over_blocks_gives_the_same_tokens(outputs: list[RequestOutput]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = serve(make_llm(attention_backend="reference"), TEXTS[:4], params)
    for output, expected in zip(found, outputs, strict=False):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids[:4]


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [2, 4])
def test_beams(real: RealOracle, llm: LLM, width: int) -> None:
    prompts = [real.encode(text) for text in TEXTS[2:8]] + [real.ask(QUESTIONS[0])]
    for output in serve(llm, prompts, BeamSearchParams(beam_width=width, max_tokens=12)):
        prompt = output.prompt_token_ids
        expected = real.generate(
            prompt,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = expected.sequences_scores.tolist()
        assert [beam.score for beam in output.outputs] == pytest.approx(scores, abs=TOLERANCE)
        for beam, sequence in zip(output.outputs, expected.sequences.tolist(), strict=True):
            assert beam.token_ids == sequence[len(prompt) : len(prompt) + len(beam.token_ids)]


def test_repetition_penalty(real: RealOracle, llm: LLM) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=16)
    for output in serve(llm, TEXTS[2:13], params):
        options = {"repetition_penalty": 1.3, "max_new_tokens": 16}
        assert output.outputs[0].token_ids == real.greedy(output.prompt_token_ids, **options)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 5}, ("TopKLogitsWarper", 5)),
        ({"top_p": 0.6}, ("TopPLogitsWarper", 0.6)),
        ({"min_p": 0.2}, ("MinPLogitsWarper", 0.2)),
    ],
    ids=str,
)
def test_samples_are_among_the_tokens_that_transformers_keeps(
    real: RealOracle, llm: LLM, params: dict[str, Any], warper: tuple[str, float]
) -> None:
    from transformers.generation import logits_process

    sampling = SamplingParams(n=4, seed=1, max_tokens=12, ignore_eos=True, logprobs=0, **params)
    name, value = warper
    keep = getattr(logits_process, name)(value)
    for output in serve(llm, TEXTS[:6], sampling):
        prompt = output.prompt_token_ids
        different = {tuple(completion.token_ids) for completion in output.outputs}
        assert len(different) > 1
        for completion in output.outputs:
            logits = real.logits(prompt + completion.token_ids[:-1])[len(prompt) - 1 :]
            kept = keep(None, logits.clone())
            token_ids = torch.tensor(completion.token_ids)[:, None]
            assert kept.gather(1, token_ids).isfinite().all()
            check_logprobs(completion.logprobs, completion.token_ids, logits.log_softmax(-1), num_top=0)


def test_a_seed_gives_the_same_text_alone_and_in_a_small_pool(llm: LLM) -> None:
    kinds = []
    for seed in range(len(TEXTS)):
        kinds.append(SamplingParams(temperature=0.8, top_p=0.9, n=2, seed=seed, max_tokens=12))
    together = serve(make_llm(num_blocks=110, max_num_batched_tokens=64), TEXTS, kinds)
    for text, params, output in zip(TEXTS, kinds, together, strict=True):
        (alone,) = serve(llm, [text], [params])
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in output.outputs]


# ── conversations ─────────────────────────────────────────────────────────────────────────────────


def test_answers_end_where_those_of_transformers_end(real: RealOracle, llm: LLM) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        (completion,) = answer.outputs
        assert answer.prompt_token_ids == real.ask(question)
        assert completion.token_ids == real.greedy(answer.prompt_token_ids, max_new_tokens=60)
        assert completion.text == real.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == END)
    reasons = {answer.outputs[0].finish_reason for answer in answers}
    assert reasons == {"stop", "length"}, "the questions no longer cover both"
    assert "Paris" in answers[0].outputs[0].text


def test_the_next_turn_finds_all_full_blocks_of_the_turns_before(llm: LLM) -> None:
    llm.reset_prefix_cache()
    messages = []
    num_computed = 0
    for question in QUESTIONS[:3]:
        messages.append({"role": "user", "content": question})
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        block_size = llm.engine.config.block_size
        if num_computed > 0:
            assert answer.metrics.num_cached_tokens == num_computed // block_size * block_size
        messages.append({"role": "assistant", "content": answer.outputs[0].text})
        # The K/V of the last token is never computed.
        num_computed = len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) - 1


@pytest.mark.parametrize("text", TEXTS[:13])
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
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


@pytest.mark.parametrize("text", [*TEXTS, "three:\n\n1. one\n\n12  345", "x =  7"])
def test_the_tokenizer_is_that_of_the_model(real: RealOracle, text: str) -> None:
    """Each digit is a token of its own, and line breaks before a digit are not torn apart."""
    token_ids = real.encode(text)
    assert real.tokenizer.decode(token_ids) == text
    tokens = real.tokenizer.convert_ids_to_tokens(token_ids)
    for token in tokens:
        digits = [char for char in token if char in "0123456789"]
        assert len(digits) < 2
    if "\n\n" in text:
        assert "ĊĊ" in tokens


def test_the_readme_shows_the_answer() -> None:
    readme = ROOT / "README.md"
    command = "python docs/experiments/real_model.py"
    outputs = {}
    for block in blocks_of(readme):
        outputs.update(commands_of(block))
    done = run_program(command.split()[1:], ROOT, environment(NANOPAGED_CACHE=str(KERNELS)))
    assert done.returncode == 0, done.stderr
    check_output(outputs[command], done.stdout, "README.md")
