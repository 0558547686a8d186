"""What int8 K/V costs in accuracy and speed, and what it saves: the table of the README.

python docs/forks/int8kv/measure.py [TEXT_FILE]     the text to score; else samples of the model itself
"""

import math
import statistics
import sys
import time
from pathlib import Path

import torch

from nanopaged import LLM, SamplingParams

PROMPT = "HERALD:\nThe king comes here to-night; and all the court\nAttend upon his pleasure in the hall.\n\n"
SPEAKERS = ("KING HENRY", "QUEEN MARGARET", "First Murderer", "Clown", "JULIET", "FALSTAFF")
CONFIGS = [(dtype, kv) for dtype in ("float32", "bfloat16") for kv in ("auto", "int8")]
torch.set_num_threads(1)

llms = {(dtype, kv): LLM(dtype=dtype, kv_cache_dtype=kv, num_blocks=4000) for dtype, kv in CONFIGS}
full = llms["float32", "auto"]


def token_ids() -> list[list[int]]:
    """The text in windows, or a sample of 400 tokens for each speaker."""
    if len(sys.argv) > 1:
        ids = full.get_tokenizer().encode(Path(sys.argv[1]).read_text(encoding="utf-8"))
        return [ids[i : i + 512] for i in range(0, len(ids), 512)]
    params = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
    outputs = full.generate([f"{PROMPT}{speaker}:\n" for speaker in SPEAKERS], params, use_tqdm=False)
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def logprobs(llm: LLM, texts: list[list[int]]) -> list[float]:
    """Of every token of the texts but the first."""
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    rows = [zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True) for o in outputs]
    return [row[token] for text in rows for row, token in text]


def output_rate(llm: LLM) -> float:
    """Output tokens per second of CPU time, on one core: 32 requests of 256 prompt tokens, 64 tokens each."""
    prompts = [[3 + (7 * i + j) % 1000 for j in range(256)] for i in range(32)]
    llm.engine.reset_prefix_cache()
    began = time.process_time()  # other programs do not count
    llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True, temperature=0), use_tqdm=False)
    return 32 * 64 / (time.process_time() - began)


texts = token_ids()
expected = logprobs(full, texts)
rates = [[output_rate(llm) for llm in llms.values()] for _ in range(3)]  # in turns
print(f"{len(expected)} tokens\ndtype | K/V | blocks per GiB | perplexity | mean Δ | largest Δ | tokens/s")
for (key, llm), *rate in zip(llms.items(), *rates, strict=True):
    values = logprobs(llm, texts)
    change = [abs(a - b) for a, b in zip(values, expected, strict=True)]
    blocks = (1 << 30) // llm.engine.runner.kv_cache.shape.block_bytes(16)
    figures = f"{math.exp(-statistics.mean(values)):.4f} | {statistics.mean(change):.5f} | {max(change):.3f}"
    print(f"{key[0]} | {key[1]} | {blocks:,} | {figures} | {statistics.median(rate):.0f}")
