"""Repetition, frequency and presence penalties: by transformers, and by the formula."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Oracle, random_prompts
from serving import tokens_of

from nanopaged import LLM, SamplingParams
from nanopaged.sampler import penalize


def test_repetition_penalty_is_transformers(oracle: Oracle) -> None:
    llm = LLM(oracle.folder, num_blocks=200)
    prompts = random_prompts(6, seed=3)
    for penalty in (1.3, 0.7):
        params = SamplingParams(temperature=0, repetition_penalty=penalty, max_tokens=30, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([prompt])
            expected = oracle.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
                repetition_penalty=penalty,
            )
            assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@torch.no_grad()
def greedy_with_penalties(oracle: Oracle, prompt: list[int], params: SamplingParams) -> list[int]:
    """vLLM's definitions, one token after the other, over the logits of transformers."""
    output: list[int] = []
    for _ in range(params.max_tokens):
        logits = oracle.model(torch.tensor([prompt + output])).logits[0, -1]
        for token_id in set(prompt + output):
            if logits[token_id] > 0:
                logits[token_id] /= params.repetition_penalty
            else:
                logits[token_id] *= params.repetition_penalty
        for token_id in set(output):
            logits[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
        output.append(int(logits.argmax()))
    return output


def test_penalties_follow_the_formula(qwen3: Oracle) -> None:
    """Requests with different penalties in one batch, in a pool so small that some are preempted."""
    every = [(1, 2, 0), (1, 0, 2), (1, 0.5, 1.5), (1, -0.3, 0), (1, 0, -2), (1.2, 0.5, 0.7), (1, 0, 0)]
    prompts = random_prompts(len(every), seed=4, longest=20)
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    rules = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(**rules, **dict(zip(names, each, strict=True))) for each in every]
    llm = LLM(qwen3.folder, num_blocks=16, block_size=4)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    num_changed = 0
    for prompt, its_params, output in zip(prompts, params, outputs, strict=True):
        (completion,) = output.outputs
        ids = completion.token_ids
        assert ids == greedy_with_penalties(qwen3, prompt, its_params)
        num_changed += ids != qwen3.greedy(prompt, 30, ignore_eos=True)
        model = qwen3.logprobs(prompt + ids)[len(prompt) - 1 : -1]
        expected = model.gather(1, torch.tensor(ids)[:, None])[:, 0]
        got = [logprobs[token_id] for token_id, logprobs in zip(ids, completion.logprobs, strict=True)]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=0)  # without penalties
    assert num_changed >= 4


def test_penalties_count_each_sample_alone(qwen3: Oracle) -> None:
    """Samples of one prompt repeat no token: each counts its own output, and the prompt is free."""
    llm = LLM(qwen3.folder, num_blocks=200)
    plain = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=40)
    firsts, repeated = [], []
    for params in (plain, replace(plain, presence_penalty=2, frequency_penalty=2)):
        texts = tokens_of(llm.generate([1, 2, 3], params, use_tqdm=False))
        firsts.append([text[0] for text in texts])
        repeated.append(sum(len(text) - len(set(text)) for text in texts))
    assert firsts[0] == firsts[1]
    assert repeated[0] > repeated[1]


def test_penalties_by_hand() -> None:
    """Token 0 was generated four times; token 1 stands in the prompt alone, so it is only divided."""
    where, numbers = torch.tensor([[0, 0], [0, 1]]), [[4.0, 0], [2, 2], [0.5, 0.5], [1, 1]]
    out = penalize(torch.tensor([[3.0, 3, 3]]), where, torch.tensor(numbers))
    assert out.tolist() == [[-1.5, 1.5, 3]]


@pytest.mark.parametrize("penalties", [(1.5, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, -2.0), (0.7, -1.0, 1.5)])
@torch.no_grad()
def test_draws_have_the_penalised_probabilities(qwen3: Oracle, penalties: tuple[float, float, float]) -> None:
    """The second tokens of 3,000 requests, by a chi-square test; probabilities without penalties fail it.

    If the draws are right, the statistic has the mean df and the variance 2 · df.
    """
    prompt, num, temperature = [5, 9, 5, 11], 3000, 2.0
    repetition, frequency, presence = penalties
    rules = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    rules |= {"max_tokens": 2, "ignore_eos": True, "temperature": temperature}
    llm = LLM(qwen3.folder, num_blocks=num, max_num_seqs=num)
    params = [SamplingParams(**rules, seed=seed) for seed in range(num)]
    drawn = Counter(tuple(ids) for ids in tokens_of(llm.generate([prompt] * num, params, use_tqdm=False)))
    firsts = Counter(first for first, _ in drawn.elements())
    rows = qwen3.model(torch.tensor([[*prompt, first] for first in firsts])).logits[:, -1].double()
    deviations = []
    for penalised in (True, False):
        statistic, df = 0.0, 0
        for (first, count), logits in zip(firsts.items(), rows.clone(), strict=True):
            for token_id in {*prompt, first} if penalised else ():
                x = logits[token_id] / repetition if logits[token_id] > 0 else logits[token_id] * repetition
                logits[token_id] = x - (frequency + presence) * (token_id == first)
            expected = count * (logits / temperature).softmax(-1).numpy()
            observed = np.array([drawn[first, token_id] for token_id in range(len(logits))])
            often = expected >= 5  # the other tokens are one cell
            cells = [(observed[often], expected[often]), (observed[~often].sum(), expected[~often].sum())]
            if cells[1][1] >= 5:
                statistic += sum(((o - e) ** 2 / e).sum() for o, e in cells)
                df += often.sum()  # one less than cells
        deviations.append((statistic - df) / math.sqrt(2 * df))
    assert df > 50
    assert abs(deviations[0]) < 4 < deviations[1], deviations
