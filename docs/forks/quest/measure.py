"""The figures of README.md: attention on the pages read, and how well the tiny model then predicts a text.

With the patch applied: python docs/forks/quest/measure.py [a text file]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from nanopaged import LLM, SamplingParams
from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.quest_backend import QuestAttention, Rows

LENGTH, BLOCK, FROM = 2000, 16, 256  # tokens of a text, slots of a page, the first position that counts
ALL = LENGTH // BLOCK
PAGES = (1, 2, 4, 8, 16, 32, 64)
WAYS = ("Quest", "best", "recent", "random")


def make_llm(num_pages: int) -> LLM:
    """The tiny model in float32. Tokens from FROM on count as generated, though a text is given as prompt."""
    llm = LLM(num_pages_read=num_pages, num_blocks=130, enable_prefix_caching=False, dtype="float32")
    attention, begin_step = llm.engine.runner.attention, llm.engine.runner.attention.begin_step

    def begin_and_pretend(metadata: AttentionMetadata) -> None:
        metadata.prompt_lens = [FROM] * len(metadata.block_tables)
        begin_step(metadata)

    attention.begin_step = begin_and_pretend
    return llm


def predict(llm: LLM, text: list[int]) -> tuple[float, list[int]]:
    """Mean negative log-probability of the tokens after FROM, and the most likely token at each."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    scored = llm.generate(text, params, use_tqdm=False)[0].prompt_logprobs
    positions = range(FROM + 1, len(text))  # token FROM is predicted by the last token of the prompt
    nats = -sum(scored[i][text[i]].logprob for i in positions) / len(positions)
    return nats, [max(scored[i], key=lambda token: scored[i][token].logprob) for i in positions]


def page_masses(attention: QuestAttention, layer: int, q: Tensor, rows: Rows) -> Tensor:
    """Attention that each page gets with all pages read, shaped as `upper_bounds`: mean over a group."""
    keys = attention.cache.layer(layer)[0][rows.tables].transpose(1, 2).flatten(2, 3)
    unseen = torch.arange(keys.shape[2]) >= rows.context_lens[:, None, None, None]
    p = (q * attention.scale @ keys.mT).masked_fill(unseen, -math.inf).softmax(-1)
    return p.mean(2).unflatten(-1, (-1, BLOCK)).sum(-1)


def measure_masses(text: list[int]) -> dict[str, Tensor]:
    """Attention on the pages that each way chooses, for each number of PAGES: mean of rows, layers, heads."""
    llm = make_llm(ALL)
    attention, total, num_rows = llm.engine.runner.attention, dict.fromkeys(WAYS, 0), 0
    choose = attention.choose
    generator = torch.Generator().manual_seed(0)

    def choose_and_weigh(layer: int, q: Tensor, rows: Rows) -> Tensor:
        nonlocal num_rows
        if rows.context_lens[-1] > FROM:
            masses = page_masses(attention, layer, q, rows)
            order = torch.arange(masses.shape[-1])
            last = ((rows.context_lens - 1) // BLOCK)[:, None, None]
            scores = {
                "Quest": attention.upper_bounds(layer, q, rows.tables),
                "best": masses,
                "recent": order.expand_as(masses).float(),
                "random": torch.rand(masses.shape, generator=generator),
            }
            for way, score in scores.items():
                score = score.masked_fill(order == last, math.inf).masked_fill(order > last, -math.inf)
                read = masses.gather(2, score.argsort(-1, descending=True)).cumsum(-1)
                total[way] += torch.stack([read[..., min(n, len(order)) - 1].mean(1).sum() for n in PAGES])
            num_rows += len(masses)
        return choose(layer, q, rows)

    attention.choose = choose_and_weigh
    llm.generate(text, SamplingParams(max_tokens=1), use_tqdm=False)
    return {way: mass / num_rows for way, mass in total.items()}


if __name__ == "__main__":
    whole = LLM(num_blocks=130, dtype="float32", attention_backend="torch")
    texts = {}
    for seed in range(3):  # what the model itself writes, with full attention
        params = SamplingParams(max_tokens=LENGTH - 5, ignore_eos=True, seed=seed)
        (output,) = whole.generate("HERALD:\n", params, use_tqdm=False)
        texts[f"own {seed}"] = (output.prompt_token_ids + output.outputs[0].token_ids)[:LENGTH]
    for file in sys.argv[1:]:
        token_ids = whole.engine.tokenizer.encode(Path(file).read_text(encoding="utf-8"))
        texts |= {f"file {i}": token_ids[i * LENGTH : (i + 1) * LENGTH] for i in range(3)}
    full = {name: predict(whole, text) for name, text in texts.items()}
    print("pages", *texts, "agree", *WAYS, sep=" | ")
    weighed = [measure_masses(text) for text in texts.values()]
    for i, n in enumerate(PAGES):
        llm = make_llm(n)
        mine = {name: predict(llm, text) for name, text in texts.items()}
        pairs = [pair for name in texts for pair in zip(mine[name][1], full[name][1], strict=True)]
        agree = sum(a == b for a, b in pairs) / len(pairs)
        masses = [sum(mass[way][i] for mass in weighed) / len(weighed) for way in WAYS]
        row = [f"{mine[name][0]:.3f}" for name in texts]
        print(n, *row, f"{agree:.1%}", *(f"{mass:.1%}" for mass in masses), sep=" | ", flush=True)
    print("all", *(f"{full[name][0]:.3f}" for name in texts), sep=" | ")
