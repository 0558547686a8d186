"""docs/one_file.py: its tokens are the engine's, in pools down to one request's worth."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import ModuleType

import pytest
from programs import load_file

from nanopaged import LLM, SamplingParams

FILE = Path(__file__).parents[2] / "docs" / "one_file.py"


@pytest.fixture
def one_file() -> ModuleType:
    return load_file(FILE)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In float32: two ways to compute in bfloat16 round differently, and may differ in the best token."""
    return LLM(dtype="float32", device="cpu", num_blocks=200)


def expected(llm: LLM, prompts: list, max_tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("seed", range(8))
def test_its_tokens_are_the_engines(one_file: ModuleType, llm: LLM, seed: int) -> None:
    """Random prompts, many of which begin alike; small pools and budgets. At the end all blocks are free."""
    rng = random.Random(seed)
    one_file.BLOCK_SIZE = rng.choice([1, 2, 4, 16])
    one_file.BUDGET = rng.choice([1, 3, 20, 256])
    stem = [rng.randrange(3, 1000) for _ in range(30)]
    prompts = []
    for _ in range(rng.randint(1, 9)):
        own = [rng.randrange(3, 1000) for _ in range(rng.randint(1, 12))]
        prompts.append(stem[: rng.randint(0, 30)] + own)
    max_tokens = rng.randint(1, 12)
    longest = max(map(len, prompts)) + max_tokens - 1
    num_blocks = -(-longest // one_file.BLOCK_SIZE) + rng.choice([0, 0, 1, 5])
    pools = []
    make_pool = one_file.Pool
    one_file.Pool = lambda num: pools.append(make_pool(num)) or pools[-1]
    assert one_file.generate(prompts, max_tokens, num_blocks) == expected(llm, prompts, max_tokens)
    (pool,) = pools
    assert sorted([*pool.free, *pool.cached]) == list(range(num_blocks))
    assert not any(pool.num_users)
    assert {pool.found[key]: key for key in pool.found} == pool.key_of
    assert set(pool.cached) == set(pool.key_of)


def test_it_stands_alone_and_shows_itself(
    one_file: ModuleType, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """It imports nothing of nanopaged, and its own run has preemptions and blocks that were found."""
    assert not re.search(r"(import|from) nanopaged", FILE.read_text(encoding="utf-8"))
    texts = ["To be, or not to be", "ROMEO:\n"]
    assert one_file.generate(texts, 20) == expected(llm, texts, 20)
    one_file.main()
    printed = capsys.readouterr().out
    steps = [line for line in printed.splitlines() if " tokens of " in line]
    assert "0 preempted" in steps[0]
    assert not steps[-1].endswith(" 0 preempted")
    assert "ROMEO:" in printed
