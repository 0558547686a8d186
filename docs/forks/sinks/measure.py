"""The figures of README.md: blocks against length, and how well the tiny model predicts a text.

With the patch applied: python docs/forks/sinks/measure.py
"""

from __future__ import annotations

from nanopaged import LLM, SamplingParams

LENGTHS = (64, 256, 1024, 2000)
FROM = 256  # positions before it are within the longest window
VARIANTS = (None, (0, 256), (4, 252), (0, 64), (1, 63), (4, 60), (16, 48))  # sinks and window, in tokens


def make_llm(variant: tuple[int, int] | None) -> LLM:
    """The tiny model in float32."""
    sinks, window = variant or (0, None)
    return LLM(
        num_sink_tokens=sinks, window=window, num_blocks=130, enable_prefix_caching=False, dtype="float32"
    )


def blocks_used(llm: LLM, text: list[int]) -> int:
    """Blocks in use when the K/V of all its tokens is stored and one token is generated."""
    llm.engine.add_request("blocks", text, SamplingParams(max_tokens=2, ignore_eos=True))
    while llm.engine.stats().num_generated_tokens == 0:
        llm.engine.step()
    used = llm.engine.stats().num_used_blocks
    llm.engine.abort_request("blocks")
    return used


def nats(llm: LLM, text: list[int]) -> float:
    """Mean negative log-probability of the tokens from FROM on."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = llm.generate(text, params, use_tqdm=False)[0].prompt_logprobs
    return -sum(scored[i][text[i]].logprob for i in range(FROM, len(text))) / (len(text) - FROM)


if __name__ == "__main__":
    whole = make_llm(None)
    texts = {}
    for seed in range(3):  # what the model itself writes, with full attention
        params = SamplingParams(max_tokens=2000, ignore_eos=True, seed=seed)
        (output,) = whole.generate("HERALD:\n", params, use_tqdm=False)
        texts[f"own text {seed}"] = output.outputs[0].token_ids
    print("sinks + window", *(f"{n} tokens" for n in LENGTHS), *texts, sep=" | ")
    for variant in VARIANTS:
        llm = make_llm(variant)
        row = [nats(llm, text) for text in texts.values()]
        blocks = [blocks_used(make_llm(variant), texts["own text 0"][:n]) for n in LENGTHS]
        print(variant or "full", *blocks, *(f"{value:.3f}" for value in row), sep=" | ", flush=True)
