"""Greedy tokens of the tiny model, and those of transformers."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from light import Light, release, worst
from nanopaged import LLM, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL

TIE = 1e-3  # two logits as near as this may change places on another machine, in float32
HALF_TOLERANCE = 0.5  # of a log-probability in half precision, whose logits have steps of 0.06


def tokens(light: Light) -> str:
    """The tiny model in float32, in every way that this machine can run it."""
    rng, num_new = random.Random(0), light.pick(48, 24, 4)
    lengths = [1, 16, 17, 33, *light.pick([128, 300, 7, 64, 90, 500], [128, 300], [])]
    prompts = [rng.choices(range(3, 1024), k=length) for length in lengths]
    light.now("transformers")
    expected = [greedy_of_transformers(prompt, num_new) for prompt in prompts]
    modes: dict[str, dict[str, Any]] = {"torch": {"attention_backend": "torch"}}
    if light.no_kernels is None:
        modes["triton, eager"] = {"attention_backend": "triton", "enforce_eager": True}
    if light.no_graphs is None:
        modes["triton, graphs"] = {"attention_backend": "triton"}
    light.say_what_is_missing()
    params, num_equal = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True), 0
    common = {"block_size": 16, "num_blocks": 400, "max_num_seqs": 10, "max_num_batched_tokens": 128}
    common["preemption"] = "recompute"  # nothing has to be measured
    ties: list[str] = []
    light.table("attention, in float32", "prompts with transformers' tokens")
    for name, options in modes.items():
        with light.trying(name):
            llm = LLM(dtype="float32", **common, **options)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            num_wrong = 0
            for prompt, output, theirs in zip(prompts, outputs, expected, strict=True):
                if (found := first_difference(output.outputs[0].token_ids, *theirs)) is None:
                    continue
                what, gap = found
                if gap < TIE:
                    ties.append(f"{name}, a prompt of {len(prompt)}: {what}")
                else:
                    light.wrong(f"{name}, a prompt of {len(prompt)}: {what}")
                    num_wrong += 1
            light.row(name, f"{len(prompts) - num_wrong} of {len(prompts)}")
            num_equal += num_wrong == 0
        release()
    if ties:
        light.say("", "Ties, which count as equal:", "", *(f"- {tie}" for tie in ties))
    half = half_precision(light, prompts) if light.on_gpu else ""
    return f"{num_equal} of {len(modes)} ways give transformers' tokens in float32{half}"


def greedy_of_transformers(prompt: list[int], num_new: int) -> tuple[list[int], list[float]]:
    """(tokens, how much larger the logit of each is than the next largest), on the CPU in float32."""
    hf, ids = reference_model(), torch.tensor([prompt])
    out = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values  # [num_new, 2]
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


@cache
def reference_model() -> Any:
    """The tiny model in transformers."""
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()


def first_difference(actual: list[int], expected: list[int], gaps: list[float]) -> tuple[str, float] | None:
    """Where the tokens differ first, in words, and the gap of the logits there; None if they are equal."""
    for i, (ours, theirs, gap) in enumerate(zip(actual, expected, gaps, strict=True), start=1):
        if ours != theirs:
            return f"token {i} is {ours}, not {theirs}, the likeliest by {gap:.4f}", gap
    return None


def half_precision(light: Light, prompts: list[list[int]]) -> str:
    """The default on a GPU: half precision, flash attention and graphs. Log-probabilities of the prompts."""
    dtype, differences = light.args.dtype, []
    with light.trying(f"prompts in {dtype}"):
        hf, llm = reference_model(), LLM(dtype=dtype, num_blocks=400, max_num_seqs=10)
        params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            exact = hf(torch.tensor([prompt])).logits[0].detach().float().log_softmax(-1)
            for i, token_id in enumerate(prompt[1:], start=1):
                (ours,) = output.prompt_logprobs[i].values()
                differences.append(abs(float(ours) - exact[i - 1, token_id].item()))
        if not worst(differences) <= HALF_TOLERANCE:
            light.wrong(f"{dtype}: a prompt's log-probability is {worst(differences):.2f} from transformers'")
    return f"; in {dtype} log-probabilities differ by at most {worst(differences):.3f}"
