"""docs/one_file.py: its tokens are the engine's, in pools down to one request's worth."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from programs import load_file

from nanopaged import LLM, SamplingParams

FILE = Path(__file__).parents[2] / "docs" / "one_file.py"


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    return load_file(FILE)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In float32: two ways to compute in bfloat16 round differently, and may differ in the best token."""
    return LLM(dtype="float32", device="cpu", num_blocks=200)


def expected(llm: LLM, prompts: list, max_tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_its_tokens_are_the_engines(
    one_file: ModuleType, llm: LLM, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workload for each eight of --random-runs."""
    first = pytestconfig.option.first_seed
    for seed in range(first, first + pytestconfig.option.random_runs // 8):
        compare_tokens(one_file, llm, seed, monkeypatch)


def compare_tokens(one_file: ModuleType, llm: LLM, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random prompts, many of which begin alike; small pools and budgets. At the end all blocks are free."""
    rng, schedulers = random.Random(seed), []
    monkeypatch.setattr(one_file, "BLOCK_SIZE", rng.choice([1, 2, 4, 16]))
    monkeypatch.setattr(one_file, "BUDGET", rng.choice([1, 3, 20, 256]))

    class Watched(one_file.Scheduler):
        def __init__(self, num_blocks: int) -> None:
            super().__init__(num_blocks)
            schedulers.append(self)

    stem = [rng.randrange(3, 1000) for _ in range(30)]
    prompts = [
        stem[: rng.randint(0, 30)] + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 12))]
        for _ in range(rng.randint(1, 9))
    ]
    max_tokens = rng.randint(1, 12)
    longest = max(map(len, prompts)) + max_tokens - 1
    num_blocks = -(-longest // one_file.BLOCK_SIZE) + rng.choice([0, 0, 1, 5])
    with monkeypatch.context() as patch:
        patch.setattr(one_file, "Scheduler", Watched)
        got = one_file.generate(prompts, max_tokens, num_blocks)
    assert got == expected(llm, prompts, max_tokens), f"seed {seed}"
    (scheduler,) = schedulers
    pool = scheduler.pool
    assert sorted([*pool.free, *pool.cached]) == list(range(num_blocks))
    assert not any(pool.num_users)
    assert {pool.found[key]: key for key in pool.found} == pool.key_of
    assert set(pool.cached) == set(pool.key_of)


def test_a_prefix_is_computed_once(one_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of the same step share the blocks in which they begin alike."""
    computed = []
    call = one_file.Model.__call__

    def watched(self: object, batch: list) -> object:
        computed.append([request.num_scheduled for request in batch])
        return call(self, batch)

    monkeypatch.setattr(one_file.Model, "__call__", watched)
    one_file.generate([[*range(40), 50], [*range(40), 60]], max_tokens=1, num_blocks=4)
    assert computed == [[41, 41 - 32]]


def test_texts_and_mistakes(one_file: ModuleType, llm: LLM) -> None:
    texts = ["To be, or not to be", "ROMEO:\n"]
    assert one_file.generate(texts, 20) == expected(llm, texts, 20)
    assert one_file.generate([]) == []
    for prompt, num_blocks, message in (
        ([], 64, "has 0 tokens, but must have 1 to 2047"),
        ([5] * 2048, 999, "has 2048 tokens"),
        ([5] * 17, 1, "33 tokens need 2 blocks, but num_blocks is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            one_file.generate([prompt], 16, num_blocks)


def test_it_stands_alone_and_shows_itself() -> None:
    """It imports nothing of nanopaged, and its own run has preemptions and blocks that were found."""
    source = FILE.read_text(encoding="utf-8")
    assert "import nanopaged" not in source
    assert "from nanopaged" not in source
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, check=True)
    steps = [line for line in done.stdout.splitlines() if " tokens of " in line]
    assert "0 preempted" in steps[0]
    assert not steps[-1].endswith(" 0 preempted")
    assert "ROMEO:" in done.stdout
