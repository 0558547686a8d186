"""The engine against transformers: same weights, float32, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Oracle, random_prompts, serve, tokens_of

from nanopaged import LLM, SamplingParams

TOLERANCE = 1e-4


def greedy_params(max_tokens: int, **extra: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **extra)


@pytest.mark.parametrize(("block_size", "budget"), [(1, 5), (4, 1), (7, 64), (16, 2048)])
def test_greedy_tokens_in_a_mixed_batch(oracle: Oracle, block_size: int, budget: int) -> None:
    """Prompts and outputs of many lengths together give what each gives alone in transformers."""
    prompts = random_prompts(6, seed=block_size)
    lengths = [1, 3, 9, 17, 24, 30]
    options = {"block_size": block_size, "max_num_batched_tokens": budget, "num_blocks": 600}
    llm = LLM(oracle.folder, dtype="float32", **options)
    outputs = serve(llm, prompts, [greedy_params(n) for n in lengths])
    assert tokens_of(outputs) == list(map(oracle.greedy, prompts, lengths))


@pytest.mark.parametrize(
    ("spare_blocks", "prefix_caching", "preemption"),
    [
        (0, True, "recompute"),
        (0, False, "swap"),
        (3, True, "swap"),
        (3, False, "recompute"),
        (0, True, "auto"),
    ],
)
def test_greedy_tokens_in_pools_from_barely_enough(
    oracle: Oracle, spare_blocks: int, prefix_caching: bool, preemption: str
) -> None:
    """The smallest pool holds the longest request alone, so everything else is preempted again and again."""
    prompts = random_prompts(5, seed=spare_blocks, longest=40)
    max_tokens = 20
    num_blocks = -(-(max(map(len, prompts)) + max_tokens - 1) // 4) + spare_blocks
    options = {"enable_prefix_caching": prefix_caching, "preemption": preemption}
    llm = LLM(oracle.folder, dtype="float32", block_size=4, num_blocks=num_blocks, **options)
    outputs = serve(llm, prompts, greedy_params(max_tokens, ignore_eos=True))
    assert tokens_of(outputs) == [oracle.greedy(prompt, max_tokens, ignore_eos=True) for prompt in prompts]
    stats = llm.engine.stats()
    counts = {"recompute": stats.num_preemptions_recompute, "swap": stats.num_preemptions_swap}
    counts["auto"] = sum(counts.values())
    assert counts[preemption] > 0


def test_logprobs_of_output_and_prompt(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen and most likely tokens, at every position, to 1e-4; also when the prompt comes in chunks.

    Each request wants another number of them, in the same steps. Tiles of positions end within prompts.
    """
    monkeypatch.setattr("nanopaged.model_runner.LOGITS_TILE", 5)
    prompts = random_prompts(4, seed=3)
    wanted = [3, None, 0, 2]
    for budget in (7, 2048):
        llm = LLM(oracle.folder, dtype="float32", max_num_batched_tokens=budget, num_blocks=64, block_size=8)
        params = [greedy_params(12, logprobs=5, prompt_logprobs=num, ignore_eos=True) for num in wanted]
        for prompt, num, output in zip(prompts, wanted, serve(llm, prompts, params), strict=True):
            completion = output.outputs[0]
            expected = oracle.logprobs(prompt + completion.token_ids)
            if num is None:
                assert output.prompt_logprobs is None
            else:
                assert output.prompt_logprobs[0] is None
                check_logprobs(output.prompt_logprobs[1:], prompt[1:], expected, num_top=num)
            outputs_at = expected[len(prompt) - 1 :]
            check_logprobs(completion.logprobs, completion.token_ids, outputs_at, num_top=5)
            total = sum(row[t] for row, t in zip(completion.logprobs, completion.token_ids, strict=True))
            assert completion.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)


def test_no_position_of_a_prompt_is_scored_twice(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first chunk a step fails, so that the prompt is computed again from its beginning."""
    engine = LLM(qwen3.folder, dtype="float32", max_num_batched_tokens=7, num_blocks=64).engine
    prompt = list(range(3, 23))
    engine.add_request("a", prompt, greedy_params(1, prompt_logprobs=0))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (output,) = outputs
    check_logprobs(output.prompt_logprobs[1:], prompt[1:], qwen3.logprobs(prompt), num_top=0)


def check_logprobs(logprobs: list, token_ids: list[int], expected: torch.Tensor, num_top: int) -> None:
    assert len(logprobs) == len(token_ids)
    for row, token_id, reference in zip(logprobs, token_ids, expected, strict=False):
        top = reference.topk(num_top).indices.tolist()
        assert set(row) == {*top, token_id}
        for some_id, logprob in row.items():
            assert logprob == pytest.approx(reference[some_id].item(), abs=TOLERANCE)
            assert logprob.rank == (reference > reference[some_id]).sum().item() + 1


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_other_backends_give_the_same_tokens(qwen3: Oracle, backend: str) -> None:
    """The slow loop, and the kernels (interpreted, where there is no GPU)."""
    if backend == "triton":
        pytest.importorskip("triton")
    prompts = random_prompts(3, seed=5, longest=30)
    llm = LLM(qwen3.folder, dtype="float32", attention_backend=backend, block_size=4, num_blocks=64)
    outputs = serve(llm, prompts, greedy_params(6))
    assert tokens_of(outputs) == [qwen3.greedy(prompt, 6) for prompt in prompts]


@pytest.mark.slow
@torch.inference_mode()
def test_a_prompt_of_more_than_ten_thousand_tokens(tmp_path: Path) -> None:
    """In chunks, and in a pool that has just enough blocks for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16384}
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **sizes)).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.randint(97, (12000,)).tolist()
    llm = LLM(tmp_path, num_blocks=-(-12007 // 16), max_model_len=12008, enable_prefix_caching=False)
    (output,) = llm.generate([prompt], greedy_params(8, ignore_eos=True), use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=8).logits
    assert tokens == logits[0].argmax(-1).tolist()
